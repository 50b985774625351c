"""Raises errors where TorchRec would shard or quantise a model without knowing compositional collections.

``DistributedModelParallel`` and ``shard_modules`` put all tables of a module without a sharder on every rank, and
``quantize_embeddings`` leaves it in float32. The collection is not told, so it looks at the callers of its methods:
both sharding functions ask for its children, TorchRec's own sharders for parameters and configs, and quantising sets
``qconfig``.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from distembed.base.errors import UserError

_WALKING_FUNCTIONS = {
    "torchrec.distributed.model_parallel": "_shard_modules_impl",
    "torchrec.distributed.shard": "_replace",
}
"""TorchRec's functions that visit all modules of a model and shard them, by their own module."""
_SHARDED_COLLECTIONS = ("torchrec.distributed.embeddingbag", "torchrec.distributed.embedding")
"""Where TorchRec shards its own collections."""


class KnowsTorchRec(nn.Module):
    """Base of collections: raises a UserError where TorchRec would silently replicate it or leave it unquantised."""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields child modules by name; raises if TorchRec's sharding is calling and has no sharder for this module."""
        caller = sys._getframe(1)
        if caller.f_code.co_name == _WALKING_FUNCTIONS.get(caller.f_globals.get("__name__", "")):
            _require_sharder(self, caller)
        return super().named_children()

    def _require_own_sharder(self) -> None:
        """Raises if the method that calls this was called by TorchRec's sharder of its own collections."""
        _refuse_stock_sharder(sys._getframe(2))  # frame 1 is the method, frame 2 its caller

    @property
    def qconfig(self) -> Any:
        """The dtypes of weights and outputs that ``torch.ao.quantization`` has set, or None."""
        try:
            return self.__dict__["_qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        # quantize_embeddings sets None for types that it does not know; other callers set None deliberately
        if value is None and _is_quantizing_embeddings():
            raise UserError(
                f"TorchRec's functions that quantise know its own collections, and would leave {type(self).__name__} "
                "in its dtype. Give quantize_inference_model "
                "quantization_mapping=distembed.serving.quantization.QUANTIZATION_MAPPING, or quantize_embeddings "
                "additional_qconfig_spec_keys=list(distembed.serving.quantization.MODULE_MAPPING) and "
                "additional_mapping=distembed.serving.quantization.MODULE_MAPPING."
            )
        self.__dict__["_qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["_qconfig"]


class LookupModules(nn.ModuleDict):
    """The modules that hold the partitions' vectors; TorchRec's planner asks it for parameters."""

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters by name; raises if TorchRec's sharder of its own collections asks for them."""
        caller = sys._getframe(1)
        if caller.f_code.co_name == "shardable_parameters":
            _refuse_stock_sharder(caller)
        return super().named_parameters(*arguments, **keywords)


def _refuse_stock_sharder(caller: FrameType) -> None:
    if caller.f_globals.get("__name__") not in _SHARDED_COLLECTIONS:
        return
    kind = "Bag" if caller.f_globals["__name__"].endswith("bag") else ""
    processed = (
        "FeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder=CompositionalEmbeddingBagCollectionSharder())"
    )
    raise UserError(
        f"TorchRec's Embedding{kind}CollectionSharder was given a compositional collection. Put the sharder that takes "
        f"it, or the module around it, into sharders=: CompositionalEmbedding{kind}CollectionSharder(), "
        f"CompositionalManagedCollisionEmbedding{kind}CollectionSharder()" + (f", {processed}." if kind else ".")
    )


def _require_sharder(module: nn.Module, caller: FrameType) -> None:
    """Raises unless there is one rank or a DDP or FSDP wrapper: TorchRec visits children only of unsharded modules.

    The sharders are read from the local variables of TorchRec's function; the error says if only the plan lacks it.
    """
    variables = caller.f_locals
    if "self" in variables:
        envs, sharders, entry = variables["self"]._env, variables["self"]._sharder_map, "DistributedModelParallel"
    else:
        envs, sharders, entry = variables["env"], variables["sharder_map"], "shard_modules"
    groups = [env.process_group for env in (envs.values() if isinstance(envs, dict) else [envs])]
    world_size = max(1 if group is None else group.size() for group in groups)
    if world_size == 1 or _is_wrapped(caller):
        return
    if type(module) in sharders:
        raise UserError(
            f"the plan that {entry} was given has no entry for a {type(module).__name__} of the model, all of whose "
            f"tables would be put on each of the {world_size} ranks; make the plan of this model with this sharder. "
            "To replicate the tables deliberately, plan them data_parallel."
        )
    name, bag = type(module).__name__, "Bag" if isinstance(module, EmbeddingBagCollectionInterface) else ""
    ours = f"CompositionalEmbedding{bag}Collection"
    sharder = f"{ours}Sharder()" if name == ours else f"<a subclass of {ours}Sharder whose module_type is {name}>"
    raise UserError(
        f"{entry} has no sharder for {name} and would put all of its tables on each of the {world_size} ranks; give it "
        f"sharders=[{sharder}, ...] of distembed.sharding. To replicate the tables deliberately, plan them "
        "data_parallel with that sharder."
    )


def _is_wrapped(caller: FrameType | None) -> bool:
    """Returns whether TorchRec came to the visited module through a DDP or FSDP wrapper, by its recursive calls."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    while caller is not None and caller.f_globals.get("__name__") in _WALKING_FUNCTIONS:
        walked = caller.f_locals.get("module", caller.f_locals.get("_model"))
        if isinstance(walked, DistributedDataParallel | FullyShardedDataParallel):
            return True
        caller = caller.f_back
    return False


def _is_quantizing_embeddings() -> bool:
    inference = sys.modules.get("torchrec.inference.modules")
    frame: FrameType | None = None if inference is None else sys._getframe()
    while frame is not None:
        if frame.f_code is inference.quantize_embeddings.__code__:  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False
