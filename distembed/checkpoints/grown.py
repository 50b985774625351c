"""Reads the checkpoint of a model into a model whose tables have more rows, on any number of ranks and under any plan.

Known rows come from the checkpoint, with their optimizer states; the rows after them keep their first values::

    saved     | 0 1 2 3 4 5 6 |                         each rank reads the rows of its own shards
    rank 0    | 0 1 2 3 4 |                             that the checkpoint has, and no others
    rank 1                | 5 6 + + + |
"""

from collections.abc import Mapping
from functools import partial

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives
from distembed.base.units import enumerate_lines
from distembed.checkpoints.blocks import dtype_name, read_blocks
from distembed.checkpoints.checkpoint import forget_caches, on_every_rank
from distembed.checkpoints.content import all_optimizer_names, describe_tables, live_states, live_weights
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.embedding.tables import CompositionalTables
from distembed.optim.live_state import LocalShard, set_step_count

_MOST_SHOWN = 10


def load_grown(
    checkpoint: str, before: nn.Module, model: nn.Module, optimizer: KeyedOptimizer, collectives: Collectives
) -> int:
    """Reads weights and optimizer states of known rows, and everything else, into the live model; all ranks call it.

    Args:
        checkpoint: Local path or URL of a checkpoint that is whole.
        before: A model of the saved sizes; its numbers are not read, so that it may be on the meta device.
        model: The live model, whose tables may have more rows than ``before``.
        optimizer: The optimizer of its parameters.
        collectives: The ranks.

    Returns:
        The number of steps that the optimizer's states have gathered.

    Raises:
        UserError: The checkpoint is not of ``before``, or of other optimizers, or the live model differs from it in
            more than rows of tables; nothing is overwritten then. Or the checkpoint cannot be reached.
        DamagedCheckpoint: It is damaged; some of the live weights may be overwritten.
    """
    weights = live_weights(model)
    optimizers = all_optimizer_names(optimizer, collectives)

    def read_description() -> SavedCheckpoint:
        saved = SavedCheckpoint.read(checkpoint)
        if problem := _problem(saved, before, weights, optimizers):
            raise UserError(problem)
        return saved

    saved = on_every_rank(collectives, read_description)
    num_rows = {name: next(iter(saved.tensors[f"model.{name}"].size), 0) for name in weights}
    to_read = {f"model.{name}": _known_rows(shards, num_rows[name]) for name, shards in weights.items()}
    states = {}
    for name, shards in live_states(optimizer, weights).items():
        parameter = name.rpartition(".")[0]
        is_by_row = shards.size[:1] == weights[parameter].size[:1]
        states[name] = _known_rows(shards, num_rows[parameter]) if is_by_row else shards
    to_read |= saved.states_to_read(states)
    on_every_rank(collectives, partial(read_blocks, checkpoint, saved.tensors, to_read))
    forget_caches(model)
    set_step_count(optimizer, saved.optimizer_steps)
    return saved.optimizer_steps


def _problem(
    saved: SavedCheckpoint, before: nn.Module, weights: Mapping[str, TensorShards], optimizers: Mapping[str, str]
) -> str | None:
    """Returns why a checkpoint cannot be read into the live model; None where it can."""
    old = live_weights(before)
    if differences := saved.differences(old, describe_tables(before), optimizers):
        return differences
    may_grow = {
        f"{path}.{name}".lstrip(".")
        for path, module in before.named_modules()
        if isinstance(module, CompositionalTables)
        for name, _ in module.named_parameters()
    }
    lines = [
        f"{name}: {_size(old.get(name))} before, {_size(weights.get(name))} now"
        for name in sorted(old.keys() | weights.keys())
        if name not in old
        or name not in weights
        or _kind(old[name], name in may_grow) != _kind(weights[name], name in may_grow)
    ]
    if not lines:
        return None
    return (
        f"the model differs from the model of {saved.path} in more than the rows of tables:"
        f"{enumerate_lines(lines, _MOST_SHOWN)}\nUse the model section and the columns that it was trained with."
    )


def _kind(shards: TensorShards, may_grow: bool) -> tuple[object, ...]:
    """Returns the type and size that a tensor must keep: all of the size, or all but its rows."""
    return shards.dtype, shards.size[1 if may_grow else 0 :]


def _size(shards: TensorShards | None) -> str:
    return "absent" if shards is None else f"{tuple(shards.size)} {dtype_name(shards.dtype)}"


def _known_rows(live: TensorShards, num_rows: int) -> TensorShards:
    """Returns the parts of live shards that lie within the first ``num_rows`` rows; a scalar is returned as it is."""
    if not live.size or live.size[0] == num_rows:
        return live
    known = [
        LocalShard(shard.offsets, shard.tensor[: num_rows - shard.offsets[0]])
        for shard in live.shards
        if shard.offsets[0] < num_rows
    ]
    return TensorShards((num_rows, *live.size[1:]), live.dtype, known, live.replicated)
