"""Answers TorchRec where it shards a model and has no sharder for a compositional collection of it.

``DistributedModelParallel`` leaves modules without a sharder to DDP, which puts all tables on every rank;
``shard_modules`` leaves them as they are, a copy on every rank. Neither says a word. Both ask a module for its children
only if they have not sharded it, which is when the collection looks at its callers. Modules around a collection, such
as feature processors, use TorchRec's sharder of its own collections by default: it asks for parameters and configs.
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
"""TorchRec's functions that walk over a model and shard its modules, by their own module."""
_SHARDED_COLLECTIONS = ("torchrec.distributed.embeddingbag", "torchrec.distributed.embedding")
"""Where TorchRec shards its own collections."""


class NeedsSharder(nn.Module):
    """A collection that several ranks shard by a sharder of its own."""

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields child modules by their names.

        Raises:
            UserError: TorchRec shards the model over several ranks and was given no sharder for this collection.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_name == _WALKING_FUNCTIONS.get(caller.f_globals.get("__name__", "")):
            _require_sharder(self, caller)
        return super().named_children()

    def _require_own_sharder(self) -> None:
        """Raises if the caller, which is a method of the collection, was called by TorchRec's sharder of its own."""
        _refuse_stock_sharder(sys._getframe(2))


class LookupModules(nn.ModuleDict):
    """The modules that hold the partitions' vectors, which TorchRec's planner asks for parameters."""

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters by their names.

        Raises:
            UserError: TorchRec's sharder of its own collections shows them to a planner.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_name == "shardable_parameters":
            _refuse_stock_sharder(caller)
        return super().named_parameters(*arguments, **keywords)


def _refuse_stock_sharder(caller: FrameType) -> None:
    """Raises if a caller of a collection is TorchRec's sharder of its own collections."""
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
    """Raises unless TorchRec was given a sharder for a module, or need not shard it.

    It need not on a single rank, without a process group (copies for inference), and within a module that is already
    wrapped in DDP or FSDP, which replicate or shard it deliberately.
    """
    given = caller.f_locals
    if "self" in given:
        envs, sharders, entry = given["self"]._env, given["self"]._sharder_map, "DistributedModelParallel"
    else:
        envs, sharders, entry = given["env"], given["sharder_map"], "shard_modules"
    world_size = max(_num_ranks(env) for env in (envs.values() if isinstance(envs, dict) else [envs]))
    if world_size == 1 or _is_wrapped(caller):
        return
    if type(module) in sharders:
        raise UserError(
            f"the plan that {entry} was given has no entry for a {type(module).__name__} of the model, all of whose "
            f"tables would be put on each of the {world_size} ranks; make the plan of this model with this sharder. "
            "To replicate the tables deliberately, plan them data_parallel."
        )
    raise UserError(
        f"{entry} has no sharder for {type(module).__name__} and would put all of its tables on each of the "
        f"{world_size} ranks; give it sharders=[{_sharder_text(module)}, ...] of distembed.sharding. To replicate the "
        "tables deliberately, plan them data_parallel with that sharder."
    )


def _sharder_text(module: nn.Module) -> str:
    """Returns the call that makes a collection's sharder; that of a subclass is a subclass too."""
    kind = "Bag" if isinstance(module, EmbeddingBagCollectionInterface) else ""
    own, name = f"CompositionalEmbedding{kind}Collection", type(module).__name__
    return f"{own}Sharder()" if name == own else f"<a subclass of {own}Sharder whose module_type is {name}>"


def _num_ranks(env: Any) -> int:
    """Returns how many ranks a sharding environment joins by a process group."""
    return 1 if env.process_group is None else int(env.process_group.size())


def _is_wrapped(caller: FrameType | None) -> bool:
    """Returns whether a module over which TorchRec walks is wrapped in DDP or FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    while caller is not None and caller.f_globals.get("__name__") in _WALKING_FUNCTIONS:
        walked = caller.f_locals.get("module", caller.f_locals.get("_model"))
        if isinstance(walked, DistributedDataParallel | FullyShardedDataParallel):
            return True
        caller = caller.f_back
    return False
