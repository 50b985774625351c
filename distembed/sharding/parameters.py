"""The base of the sharded modules: placement of parameters, replicated weights, check of ids.

TorchRec's constructors see the units (:mod:`distembed.sharding.units`); when they make their state dict they see the
partition tables, under the names of the unsharded module.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_topology_group_world_size
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingModule
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv, ShardingEnv2D, ShardingType
from torchrec.distributed.utils import append_prefix
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.base.units import enumerate_names
from distembed.data.single_ids import has_single_ids as has_marked_ids
from distembed.embedding.batches import with_ids
from distembed.embedding.config import CompositionalEmbeddingConfig, perturbation
from distembed.embedding.ids import IdMapper
from distembed.embedding.share import TableShare
from distembed.embedding.tables import CompositionalTables, empty_weight, lookup_table_configs
from distembed.optim.replicated import BackwardUpdates, ReplicatedOptimizer, frozen_settings, fused_optimizer
from distembed.sharding.dists import release_promptly
from distembed.sharding.groups import lookup_formula
from distembed.sharding.lookup import CompositionalLookup
from distembed.sharding.placement import WITHIN_NODES, Placement, place_tables, without_memory
from distembed.sharding.share import OwnedIds, make_share
from distembed.sse import FeaturePerturbation


class ShardedParameters(ShardedEmbeddingModule[Any, Any, Any, Any]):
    """Base of the sharded modules; in their bases it comes before TorchRec's sharded module.

    Attributes:
        functions: Weights of the functions of path-based tables, the same on every rank.
        sse: Replacement of ids in training, for the tables that ask for it, by random numbers of this rank.
        widens_outputs: Whether vectors come out in float32 where ``output_dtype`` has rounded them.
    """

    sse: FeaturePerturbation
    widens_outputs: bool = False
    _optim: CombinedOptimizer
    _lookup_attribute: str  # where the unsharded module has the partition tables' weights
    _units_type: type[Any]  # the units of placement, which TorchRec's constructor sees in the place of the module

    def __init__(
        self,
        module: CompositionalTables[Any],
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        self._place_tables(module, table_name_to_parameter_sharding, env, device)
        self._require_placements()
        super().__init__(
            self._units_type(module, order_by_group(self._tables)),
            self._unit_plan,
            env,
            fused_params=fused_params,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        self._train_replicated()
        release_promptly(self._output_dists)
        self.sse = perturbation(self._tables, env.rank)
        self._order_as(module)
        if module.device.type not in ("meta", "cpu"):
            self.load_state_dict(module.state_dict())

    def _require_placements(self) -> None:
        """Raises where this kind of collection does not take a placement."""

    def _place_tables(
        self,
        module: CompositionalTables[Any],
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Decides where all parameters go; called before TorchRec's constructor."""
        if isinstance(env, ShardingEnv2D) or env.output_dtensor:
            raise UserError(
                "compositional tables are sharded over one process group, with ShardedTensors in the state dict; make "
                "the environment by ShardingEnv.from_process_group(...)."
            )
        tables = module.tables()
        for table in tables:
            if table.name not in plan:
                raise UserError(f"the plan has no table {table.name!r}, only {sorted(plan)}; plan anew for this model.")
        self._tables = tables
        if device is not None and device.type == "meta":
            plan = without_memory(plan)
        placements = place_tables(tables, plan, env.world_size)
        self._placements = {placement.table.name: placement for placement in placements}
        _require_nodes(placements, env.world_size)
        _require_kernels(placements, device)
        self._unit_plan = {name: placement.unit for name, placement in self._placements.items()}
        # registered later: TorchRec's constructor would take registered parameters for its own
        self._replicated = {
            part.name: nn.Parameter(
                empty_weight(
                    part,
                    device if device is not None else torch.device("cpu"),
                    torch.float32 if part.is_function else placement.table.dtype,
                )
            )
            for placement in self._placements.values()
            for part in placement.replicated
        }
        for table in tables:
            for part, weight in zip(table.partition_tables(), module.weights(table.name), strict=True):
                if part.name in self._replicated:
                    self._replicated[part.name].requires_grad_(weight.requires_grad)
        self._fused_params: dict[str, Mapping[str, Any]] = {}
        self._updated_in_backward: dict[str, nn.Parameter] = {}
        self._map_ids = IdMapper(tables)
        self._owned_ids: dict[str, OwnedIds] = {}
        self._input_keys: list[str] | None = None
        self._has_single_ids: bool | None = None

    def tables(self) -> list[Any]:
        """Returns the compositional tables, in order."""
        return list(self._tables)

    def share(self, table_name: str) -> TableShare:
        """Returns this rank's share of a table's ids and vectors; all ranks call it."""
        placement = self._placements[one_of("table of a collection", table_name, self._placements)]
        shards = {
            (own.part.name, own.start): weight for lookup in self._lookups for own, weight in lookup.shard_weights()
        }
        device = self._device or torch.device("cpu")
        return make_share(placement, self._env, device, shards, self._replicated, self._owned_ids)

    def _show_partition_tables(self, make_config: Callable[..., Any]) -> list[Any]:
        """Shows TorchRec's module the sharded partition tables in place of units, and returns their configs."""
        sharded = {name: plan for placement in self._placements.values() for name, plan in placement.sharded.items()}
        configs = [config for config in lookup_table_configs(make_config, self._tables) if config.name in sharded]
        self._table_names = [config.name for config in configs]
        self._table_name_to_config = {config.name: config for config in configs}
        self.module_sharding_plan = sharded
        return configs

    def _register_replicated(self) -> None:
        """Registers the replicated weights as parameters of this module, under the names of the unsharded one."""
        functions, vectors = nn.ParameterDict(), getattr(self, self._lookup_attribute)
        for placement in self._placements.values():
            for part in placement.replicated:
                if part.is_function:
                    functions[part.name] = self._replicated[part.name]
                else:
                    vectors[part.name] = nn.Module()
                    vectors[part.name].register_parameter("weight", self._replicated[part.name])
        self.functions = functions

    def _note_settings(self, infos: Iterable[EmbeddingShardingInfo], rank: int) -> None:
        """Notes FBGEMM's settings of tables, among them the optimizer, and freezes tables that nothing trains."""
        untrained = []
        for info in infos:
            name, fused_params = info.embedding_config.name, info.fused_params or {}
            placement = self._placements[name]
            is_sharded = placement.unit.sharding_type != ShardingType.DATA_PARALLEL.value
            has_trainer = _names_optimizer(fused_params) or not (is_sharded and _updates_backward(placement))
            if info.param.requires_grad and not has_trainer:
                untrained.append(name)
            if not (info.param.requires_grad and has_trainer):
                info.fused_params = frozen_settings(fused_params)
                self._placements[name] = dataclasses.replace(placement, is_frozen=True)
                for part in placement.replicated:
                    if not part.is_function:
                        self._replicated[part.name].requires_grad_(False)
            self._fused_params[name] = info.fused_params or {}
        if untrained and rank == 0:
            warnings.warn(
                f"tables without an optimizer are not trained: {enumerate_names(untrained)}. Call "
                "apply_optimizer_in_backward(torch.optim.Adagrad, collection.embedding_bags.parameters(), {'lr': 0.1}) "
                "before the model is sharded (embeddings in the place of embedding_bags for sequences), or "
                "requires_grad_(False) if they are to stay as they are.",
                stacklevel=2,
            )

    def _train_replicated(self) -> None:
        """Has replicated vectors updated by their tables' fused optimizers, within the backward pass."""
        optimizers: dict[str, tuple[str, dict[str, Any], dict[str, nn.Parameter]]] = {}
        for placement in self._placements.values():
            fused_params = self._fused_params[placement.table.name]
            for part in placement.replicated if _is_fused(placement, fused_params) else ():
                if part.is_function:
                    continue
                key = f"{self._lookup_attribute}.{part.name}.weight"
                name, settings = fused_optimizer(fused_params, part.name)
                _, _, weights = optimizers.setdefault(f"{name} {settings}", (name, settings, {}))
                weights[key] = self._updated_in_backward[part.name] = self._replicated[part.name]
        made = [ReplicatedOptimizer(name, weights, settings) for name, settings, weights in optimizers.values()]
        if made:
            BackwardUpdates(made, self._env.process_group)
            self._optim = CombinedOptimizer([*self._optim.optimizers, *made])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Looks a batch up, uncompiled in a compiled model; all ranks call it."""
        return super().forward(*inputs, **keywords)

    def _order_as(self, module: nn.Module) -> None:
        """Puts the child modules in the unsharded module's order."""
        if not hasattr(self, self._lookup_attribute):  # without a process group TorchRec registers nothing
            return
        for path in (self._lookup_attribute, ""):
            own = self.get_submodule(path)
            for name, _ in module.get_submodule(path).named_children():
                own.add_module(name, own._modules.pop(name))

    def reset_parameters(self) -> None:
        """Draws all weights again: the numbers that they began with, and that the unsharded module has."""
        if self._device is not None and self._device.type == "meta":
            return
        for lookup in self._lookups:
            assert isinstance(lookup, CompositionalLookup)
            lookup.reset_parameters()
        for placement in self._placements.values():
            for part in placement.replicated:
                part.init(self._replicated[part.name])

    def _follow_keys(self, keys: list[str], shardings: Iterable[Any]) -> None:
        """Makes the input dist, and finds its features in a batch, whose order may change between batches."""
        if keys == self._input_keys:
            return
        missing = [name for table in self._tables for name in table.feature_names if name not in keys]
        if missing:
            raise UserError(f"the batch has no feature {missing[0]!r}, only {keys}.")
        if self._input_keys is None:
            self._create_input_dist(keys)
            self._has_uninitialized_input_dist = False
        names = [name for sharding in shardings for name in sharding.feature_names()]
        self._features_order = [] if names == keys else [keys.index(name) for name in names]
        self._has_features_permute = names != keys
        self._features_order_tensor = torch.tensor(self._features_order, device=self._device, dtype=torch.int32)
        self._input_keys = keys

    def _follow_single_ids(self, features: KeyedJaggedTensor) -> None:
        """Tells the lookups whether bags have at most one id each; one unmarked batch decides for all later ones."""
        has_single_ids = has_marked_ids(features) and self._has_single_ids is not False
        if has_single_ids != self._has_single_ids:
            self._has_single_ids = has_single_ids
            for lookup in self._lookups:
                assert isinstance(lookup, CompositionalLookup)
                lookup.set_single_ids(has_single_ids)

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        """Sends composed vectors to the ranks of their rows; all ranks call it."""
        zero = self._zero_of_unused()
        return self._finish(ctx, zero, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up, composes and sends; all ranks call it."""
        zero = self._zero_of_unused()
        return self._finish(ctx, zero, super().compute_and_output_dist(ctx, input))

    def _finish(self, ctx: Any, zero: Tensor | None, embedded: Any) -> Any:
        self._require_right_mode(ctx)
        embedded.callbacks.append(partial(self._arrange, ctx, zero))
        return embedded

    def _arrange(self, ctx: Any, zero: Tensor | None, embedded: Any) -> Any:
        """Returns the unsharded module's output, from the vectors that the dists brought, plus ``zero``."""
        raise NotImplementedError

    def _perturb_ids(self, ctx: Any, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Replaces ids in training, where a table has SSE."""
        # Before the all-to-all: behind it each column shard would draw another id, and under row_wise the new id might
        # belong to another rank.
        #   ids -> check, map -> replace (once a batch) -> all-to-all -> owners of rows and columns
        ctx.is_perturbed = self.training and self.sse.replaces_ids
        return self.sse(features)

    def _widened(self, vectors: Tensor) -> Tensor:
        """Returns the dists' vectors, widened to float32 where the module's outputs are float32."""
        return vectors.float() if self.widens_outputs else vectors

    def _require_right_mode(self, ctx: Any) -> None:
        """Raises where a pipeline still holds batches from training when the model is evaluated."""
        if ctx.is_perturbed and not self.training:
            raise UserError(
                "the model is in evaluation mode, but the ids of this batch were prepared, and some of them replaced, "
                "in training mode; step the pipeline until it is empty before calling eval()."
            )

    def _zero_of_unused(self) -> Tensor | None:
        """Returns a zero that depends on the replicated weights that this rank never looks up; None without any.

        So every rank has a gradient for every replicated weight, and the averages over ranks match.
        """
        if self._env.world_size == 1 or not torch.is_grad_enabled():
            return None
        used = {name for lookup in self._lookups for name in lookup.replicated_names}
        unused = [weight.flatten()[:0].sum() for name, weight in self._replicated.items() if name not in used]
        return torch.stack(unused).sum() if unused else None

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields names of parameters that are sharded or updated in the backward pass; others are left to the model."""
        for placement in self._placements.values():
            for name in (*placement.sharded, *(part.name for part in placement.replicated)):
                if name in placement.sharded or name in self._updated_in_backward:
                    yield append_prefix(prefix, f"{self._lookup_attribute}.{name}.weight")
        for name, weight in self._replicated.items():  # frozen weights: torch's wrapper would wait for gradients
            if not weight.requires_grad:
                is_function = name in self.functions
                path = f"functions.{name}" if is_function else f"{self._lookup_attribute}.{name}.weight"
                yield append_prefix(prefix, path)


def _names_optimizer(fused_params: Mapping[str, Any]) -> bool:
    """Returns whether FBGEMM's settings name an optimizer, or the learning rate of FBGEMM's own choice."""
    return fused_params.get("optimizer") is not None or "learning_rate" in fused_params


def _is_fused(placement: Placement, fused_params: Mapping[str, Any]) -> bool:
    """Returns whether the vectors of a table are updated within the backward pass."""
    if placement.is_frozen:
        return False
    if placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value and not _names_optimizer(fused_params):
        return False
    return _updates_backward(placement)


def _updates_backward(placement: Placement) -> bool:
    """Returns whether a fused optimizer, if there is one, updates a table's vectors as they are placed."""
    if placement.table.dense_gradient:
        return False
    is_replicated = placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value
    return is_replicated or placement.unit.compute_kernel != EmbeddingComputeKernel.DENSE.value


def _require_nodes(placements: Iterable[Placement], world_size: int) -> None:
    """Raises unless rows that are divided within nodes are divided between as many ranks as a node has."""
    for placement in placements:
        if placement.unit.sharding_type not in WITHIN_NODES:
            continue
        where, ranks_per_node = f"table {placement.table.name!r}", get_topology_group_world_size(world_size)
        if placement.num_row_blocks != ranks_per_node:
            raise UserError(
                f"{where} is planned {placement.unit.sharding_type} with its rows on {placement.num_row_blocks} "
                f"rank(s), but a node has {ranks_per_node} here; plan anew, or start the ranks by "
                "torch.distributed.run, which sets LOCAL_WORLD_SIZE."
            )
        if world_size != dist.get_world_size():
            raise UserError(
                f"{where} is planned {placement.unit.sharding_type} over {world_size} of {dist.get_world_size()} "
                "ranks; TorchRec makes nodes of all ranks together only. Place it otherwise."
            )


def _require_kernels(placements: Iterable[Placement], device: torch.device | None) -> None:
    """Raises where FBGEMM has no kernel for a divided table on this device."""
    if device is not None and device.type != "cpu":
        return
    for placement in placements:
        if placement.table.data_type == "BF16" and placement.sharded:
            raise UserError(
                f"table {placement.table.name!r} has data_type BF16 and is planned {placement.unit.sharding_type}, but "
                "FBGEMM has no kernel for bfloat16 on the CPU; use FP16 or FP32, or place it data_parallel."
            )


def order_by_group(tables: Sequence[CompositionalEmbeddingConfig]) -> list[CompositionalEmbeddingConfig]:
    """Returns the tables group by group, in order of first appearance."""
    groups: dict[Any, list[CompositionalEmbeddingConfig]] = {}
    for table in tables:
        groups.setdefault(lookup_formula(table), []).append(table)
    return [table for group in groups.values() for table in group]


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the features without weights, which would be communicated and used by nothing."""
    if features.weights_or_none() is None:
        return features
    return with_ids(features, features.values(), weights=None)
