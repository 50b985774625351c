"""The base of the sharded modules: placement of parameters, replicated weights, check of ids.

TorchRec's constructors see *units*, one parameter for each table (:mod:`distembed.sharding.units`). When they make
their state dict they see the partition tables, under the names of the unsharded module.
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
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
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
from distembed.embedding.partition_state import HasPartitionState
from distembed.embedding.share import TableShare
from distembed.embedding.tables import CompositionalTables, empty_weight, lookup_table_configs
from distembed.optim.replicated import BackwardUpdates, ReplicatedOptimizer, frozen_settings, fused_optimizer
from distembed.sharding.dists import release_promptly
from distembed.sharding.groups import lookup_formula
from distembed.sharding.lookup import CompositionalLookup, sharded_lookups
from distembed.sharding.managed_ids import ShardedManagedFeatures
from distembed.sharding.placement import WITHIN_NODES, Placement, place_tables, without_memory
from distembed.sharding.share import OwnedIds, make_share
from distembed.sse import FeaturePerturbation


class ShardedParameters(HasPartitionState, ShardedEmbeddingModule[Any, Any, Any, Any]):
    """Base of the sharded modules; in their bases it comes before TorchRec's sharded module.

    Attributes:
        functions: Weights of the functions of path-based tables, replicated on every rank.
        sse: Module that replaces ids in training, for tables with a rule; its random numbers depend on the rank.
        widens_outputs: Whether outputs are converted to float32 after ``output_dtype`` has rounded the sent vectors.
        max_gradient: The limit of :func:`limit_gradients`; None for no limit.
    """

    sse: FeaturePerturbation
    widens_outputs: bool = False
    max_gradient: float | None = None
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
        """Raises a UserError for a placement that this kind of collection does not support; bags support all."""

    def _place_tables(
        self,
        module: CompositionalTables[Any],
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Sets this module's placements, unit plan and empty replicated weights, before TorchRec's constructor.

        Raises a UserError for a two-dimensional or DTensor environment, a table that the plan lacks, or a plan that
        does not fit the tables, the ranks, the nodes or the device.
        """
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
        for table in tables:
            if table.managed is not None:
                table.managed.place(env.rank, env.world_size)
        self._map_ids = IdMapper(tables, partial(ShardedManagedFeatures, group=env.process_group))
        self._owned_ids: dict[str, OwnedIds] = {}
        self._input_keys: list[str] | None = None
        self._has_single_ids: bool | None = None

    def tables(self) -> list[Any]:
        return list(self._tables)

    def partition_state_changed(self) -> None:
        super().partition_state_changed()
        self._owned_ids.clear()

    def share(self, table_name: str) -> TableShare:
        """Returns the ids whose vectors this rank composes, with the weights for them; all ranks call it."""
        placement = self._placements[one_of("table of a collection", table_name, self._placements)]
        shards = {
            (part_slice.part.name, part_slice.start): weight
            for lookup in self._lookups
            for part_slice, weight in lookup.shard_weights()
        }
        device = self._device or torch.device("cpu")
        return make_share(placement, self._env, device, shards, self._replicated, self._owned_ids)

    def _show_partition_tables(self, make_config: Callable[..., Any]) -> list[Any]:
        """Replaces the units in TorchRec's attributes by the sharded partition tables, and returns their configs."""
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
        """Stores each table's FBGEMM settings (optimizer included), and freezes tables that no optimizer updates.

        A sharded table with a fused kernel is updated by FBGEMM alone: without an optimizer it is frozen, in ``infos``
        too, and rank 0 warns if its vectors require gradients. Dense and replicated weights are left to the user.
        """
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
        """Makes the backward pass update replicated vectors, by torch's form of their tables' fused optimizers."""
        optimizers: dict[str, tuple[str, dict[str, Any], dict[str, nn.Parameter]]] = {}
        for placement in self._placements.values():
            fused_params = self._fused_params[placement.table.name]
            for part in placement.replicated if _is_fused(placement, fused_params) else ():
                if part.is_function:
                    continue
                key = f"{self._lookup_attribute}.{part.name}.weight"
                # weights with equal optimizer and settings share one optimizer
                name, settings = fused_optimizer(fused_params, part.name)
                _, _, weights = optimizers.setdefault(f"{name} {settings}", (name, settings, {}))
                weights[key] = self._updated_in_backward[part.name] = self._replicated[part.name]
        replicated = [ReplicatedOptimizer(name, weights, settings) for name, settings, weights in optimizers.values()]
        if replicated:
            BackwardUpdates(replicated, self._env.process_group)
            self._optim = CombinedOptimizer([*self._optim.optimizers, *replicated])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Looks a batch up, uncompiled in a compiled model; all ranks call it."""
        return super().forward(*inputs, **keywords)

    def _order_as(self, module: nn.Module) -> None:
        """Reorders child modules as in ``module``, so that parameters and state dict have the unsharded order."""
        if not hasattr(self, self._lookup_attribute):  # without a process group TorchRec registers nothing
            return
        for path in (self._lookup_attribute, ""):
            parent = self.get_submodule(path)
            for name, _ in module.get_submodule(path).named_children():
                parent.add_module(name, parent._modules.pop(name))

    def reset_parameters(self) -> None:
        """Fills all weights with their initial values, which equal the unsharded module's; no-op on the meta device."""
        if self._device is not None and self._device.type == "meta":
            return
        for lookup in self._lookups:
            assert isinstance(lookup, CompositionalLookup)
            lookup.reset_parameters()
        for placement in self._placements.values():
            for part in placement.replicated:
                part.init(self._replicated[part.name])

    def _follow_keys(self, keys: list[str], shardings: Iterable[Any]) -> None:
        """Finds the dists' features in a batch's keys, refusing missing ones; the first call makes the dists."""
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
        """Tells the lookups whether all bags have at most one id: True until the first batch without that mark."""
        has_single_ids = has_marked_ids(features) and self._has_single_ids is not False
        if has_single_ids != self._has_single_ids:
            self._has_single_ids = has_single_ids
            for lookup in self._lookups:
                assert isinstance(lookup, CompositionalLookup)
                lookup.set_single_ids(has_single_ids)

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        """Sends composed vectors to the ranks whose batches they belong to; all ranks call it."""
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
        """Returns the unsharded module's output from the received vectors; adds ``zero`` (:meth:`_zero_of_unused`)."""
        raise NotImplementedError

    def _perturb_ids(self, ctx: Any, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Replaces ids in training mode, for tables with SSE; ``ctx.is_perturbed`` keeps whether it may have."""
        # Before the all-to-all: after it each column shard would draw another id, and under row_wise the new id might
        # belong to another rank.
        #   ids -> check, map -> replace (once a batch) -> all-to-all -> owners of rows and columns
        ctx.is_perturbed = self.training and self.sse.replaces_ids
        return self.sse(features)

    def _widened(self, vectors: Tensor) -> Tensor:
        """Returns the dists' vectors, widened to float32 where the module's outputs are float32."""
        return vectors.float() if self.widens_outputs else vectors

    def _limit(self, vectors: Tensor, columns: Sequence[slice]) -> None:
        """Cuts gradients of some columns of output vectors to ``max_gradient``, before they are sent to the rows."""
        if self.max_gradient is None or not vectors.requires_grad or not columns:
            return
        # a rank's own loss has gradients that are as many times as large as their mean over the ranks
        limit = self.max_gradient * self._env.world_size

        def cut(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()  # other nodes of the graph may read it
            for some in columns:
                gradient[:, some].clamp_(-limit, limit)
            return gradient

        vectors.register_hook(cut)

    def _require_right_mode(self, ctx: Any) -> None:
        """Raises if a batch whose ids were replaced in training mode is looked up in evaluation mode."""
        if ctx.is_perturbed and not self.training:
            raise UserError(
                "the model is in evaluation mode, but the ids of this batch were prepared, and some of them replaced, "
                "in training mode; step the pipeline until it is empty before calling eval()."
            )

    def _zero_of_unused(self) -> Tensor | None:
        """Returns a zero that depends on the replicated weights that this rank never looks up; None without any.

        Every rank then has a gradient for every replicated weight, and all ranks join its all-reduce.
        """
        if self._env.world_size == 1 or not torch.is_grad_enabled():
            return None
        used = {name for lookup in self._lookups for name in lookup.replicated_names}
        unused = [weight.flatten()[:0].sum() for name, weight in self._replicated.items() if name not in used]
        return torch.stack(unused).sum() if unused else None

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields parameters that DDP must ignore: sharded ones, ones updated in the backward pass, and frozen ones."""
        for placement in self._placements.values():
            for name in (*placement.sharded, *(part.name for part in placement.replicated)):
                if name in placement.sharded or name in self._updated_in_backward:
                    yield append_prefix(prefix, f"{self._lookup_attribute}.{name}.weight")
        for name, weight in self._replicated.items():  # frozen weights: torch's wrapper would wait for gradients
            if not weight.requires_grad:
                is_function = name in self.functions
                path = f"functions.{name}" if is_function else f"{self._lookup_attribute}.{name}.weight"
                yield append_prefix(prefix, path)


def limit_gradients(model: nn.Module, max_gradient: float) -> None:
    """Cuts each number g of the gradients of composed vectors to ``min(max(g, -max_gradient), max_gradient)``.

    A composed vector is one of a bag, or of an id of a sequence, as the collection returns it. This is FBGEMM's
    ``gradient_clipping`` of a full table, which cuts the gradient of each pooled vector before it goes to the rows of
    the bag: a row of several bags gets the sum. Numbers are cut one by one, and not rows by their norm: a rank may have
    some columns of a row only, and FBGEMM adds up a row's gradient where it updates the row. Where gradients enter the
    collection, all storages agree: FBGEMM's tables, fused kernels, and replicated weights, sharded in any way.

    Gradients of path functions and of ids' weights follow from the limited ones. Tables with ``dense_gradient`` get
    gradients outside of lookups too: :class:`~distembed.optim.optimizers.Optimizers` cuts the numbers of their rows'
    gradients, before the dense optimizer's step.

    Args:
        model: A sharded model, in which the mean of the ranks' losses is trained.
        max_gradient: The limit; it holds for gradients of that mean.

    Raises:
        UserError: The model has a sharded collection of TorchRec's own.
    """
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, ShardedParameters):
            module.max_gradient = max_gradient
        elif isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            raise UserError(
                f"train.sparse_optimizer.max_gradient is {max_gradient}, but {path} is TorchRec's own "
                f"{type(module).__name__}, which does not know it; take a collection of distembed.embedding, or leave "
                "max_gradient out."
            )


def round_at_random(model: nn.Module, seed: Callable[[], int]) -> None:
    """Has a CPU round updated float16 rows up or down at random, so that their mean is the exact value.

    Rounded to the nearest, a row never moves by updates below half the distance of two float16 numbers. The numbers
    drawn depend on the seed, the partition's name, the row and the column alone: layouts and threads do not matter.

    Args:
        model: A sharded model on a CPU; on CUDA FBGEMM's ``stochastic_rounding`` decides.
        seed: Returns the seed of the coming update, a number in [1, 2^63).

    Raises:
        UserError: A float16 table is not looked up in one pass, or torch trains rows of it that every rank has.
    """
    for lookup in sharded_lookups(model):
        for group in getattr(lookup, "_groups", ()):
            group.round_at_random(seed)


def forget_copies(model: nn.Module) -> None:
    """Drops all copies of a model's weights and rows of ids, which were overwritten in place between two steps."""
    for lookup in sharded_lookups(model):
        lookup.purge()  # rows, in the device's cache, of tables in host memory
    for module in model.modules():
        if isinstance(module, HasPartitionState):
            module.partition_state_changed()


def _names_optimizer(fused_params: Mapping[str, Any]) -> bool:
    """Returns whether FBGEMM's settings have an optimizer, or a learning rate (for FBGEMM's default, SGD)."""
    return fused_params.get("optimizer") is not None or "learning_rate" in fused_params


def _is_fused(placement: Placement, fused_params: Mapping[str, Any]) -> bool:
    """Returns whether a fused optimizer updates the table's vectors within the backward pass."""
    if placement.is_frozen:
        return False
    if placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value and not _names_optimizer(fused_params):
        return False
    return _updates_backward(placement)


def _updates_backward(placement: Placement) -> bool:
    """Returns whether the table's kernel allows a fused optimizer; a dense kernel leaves vectors to torch's."""
    if placement.table.dense_gradient:
        return False
    is_replicated = placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value
    return is_replicated or placement.unit.compute_kernel != EmbeddingComputeKernel.DENSE.value


def _require_nodes(placements: Iterable[Placement], world_size: int) -> None:
    """Raises for ``table_row_wise`` or ``grid_shard`` planned for nodes of another size, or over some ranks only."""
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
    """Raises for sharded BF16 tables on a CPU, where FBGEMM has no kernel for them."""
    if device is not None and device.type != "cpu":
        return
    for placement in placements:
        if placement.table.data_type == "BF16" and placement.sharded:
            raise UserError(
                f"table {placement.table.name!r} has data_type BF16 and is planned {placement.unit.sharding_type}, but "
                "FBGEMM has no kernel for bfloat16 on the CPU; use FP16 or FP32, or place it data_parallel."
            )


def order_by_group(tables: Sequence[CompositionalEmbeddingConfig]) -> list[CompositionalEmbeddingConfig]:
    """Returns the tables sorted by first use of their lookup formula: lookups group only neighbouring tables."""
    groups: dict[Any, list[CompositionalEmbeddingConfig]] = {}
    for table in tables:
        groups.setdefault(lookup_formula(table), []).append(table)
    return [table for group in groups.values() for table in group]


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Drops a batch's weights, which the all-to-all would send although no lookup reads them."""
    if features.weights_or_none() is None:
        return features
    return with_ids(features, features.values(), weights=None)
