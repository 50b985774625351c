"""Optimizer state under names that depend on the parameter and the optimizer alone, not on the plan or the kernel.

FBGEMM's fused optimizers and torch's hold the same numbers in different places (:mod:`distembed.optim.live_state`). A
checkpoint names both by the parameter and the state, so that one resumes a table that the other trained::

    adagrad                sum                                   a number for each weight
    row_wise_adagrad       sum[0:16]                             a number for each row, of these columns
    adam, adamw, lamb      exp_avg  exp_avg_sq                   a number for each weight
    amsgrad                exp_avg  exp_avg_sq  max_exp_avg_sq   a number for each weight
    partial_row_wise_*     exp_avg  exp_avg_sq[0:16]             a number for each weight, for each row

The rule holds for optimizers that are added to ``distembed.optim.OPTIMIZERS`` too; a state that has one number for a
parameter is named without columns, and has the size ``[1]``.

Where a table's columns are cut into slices, ``row_wise_adagrad`` has one number for each row of a slice: the average
over the slice's columns of the numbers that an elementwise optimizer would keep. Under another cut a new slice gets the
average over its columns, each column with the number of its old slice (:func:`blend_columns`). Where slices are merged,
this equals, up to rounding, the number that the merged slice would have had with the same gradients. Where slices are
split it is an approximation, since the old slice does not keep its columns apart.

Numbers of steps are not saved parameter by parameter: loading sets them all to the run's.
"""

import re
from collections.abc import Iterable

from distembed.checkpoints.shards import AddedShard, TensorShards
from distembed.optim.kinds import OPTIMIZERS, NumberPer
from distembed.optim.live_state import LocalShard, ParameterState


def named_states(parameter: ParameterState, weight: TensorShards) -> dict[str, TensorShards]:
    """Returns the states of one parameter on this rank, by their names in a checkpoint; ``weight`` gives its size."""
    # shards of one state are gathered under one name; a state of the whole parameter is equal on all shards
    states: dict[str, TensorShards] = {}
    for state, per in OPTIMIZERS[parameter.optimizer].states.items():
        for shard, values in zip(parameter.shards, parameter.values[state], strict=True):
            name, size, offsets = state, weight.size, shard.offsets
            if per is NumberPer.ROW:
                name = name_with_columns(state, offsets[1], offsets[1] + shard.tensor.shape[1])
                size, offsets = size[:1], offsets[:1]
            elif per is NumberPer.PARAMETER:
                size, offsets = values.size(), (0,)
            before = states[name].shards if name in states and per is not NumberPer.PARAMETER else []
            states[name] = TensorShards(
                size, values.dtype, [*before, LocalShard(offsets, values.detach())], weight.replicated
            )
    return states


def name_with_columns(state: str, start: int, stop: int) -> str:
    """Returns the name of a state with one number for each row of the columns from ``start`` to ``stop``."""
    return f"{state}[{start}:{stop}]"


def whole_states(saved_names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Returns the saved states whose sum, each times a share, is a state of all columns, by that state's name.

    A state without columns, or of all of them, is itself; slices of a state average as in :func:`blend_columns`::

        sum[0:8]  =  1/2 sum[0:4] + 1/2 sum[4:8]
    """
    ranges = {name: _columns_in_name(name) for name in saved_names}
    whole: dict[str, dict[str, float]] = {}
    for name, found in ranges.items():
        if found is None:
            whole[name] = {name: 1.0}
            continue
        state, start, stop = found
        dim = max(own[2] for own in ranges.values() if own is not None and own[0] == state)
        whole.setdefault(name_with_columns(state, 0, dim), {})[name] = (stop - start) / dim
    return whole


def _columns_in_name(name: str) -> tuple[str, int, int] | None:
    """Parses ``sum[0:16]`` into ("sum", 0, 16); None for a name without columns."""
    matched = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", name)
    return None if matched is None else (matched[1], int(matched[2]), int(matched[3]))


def blend_columns(name: str, live: TensorShards, saved_names: Iterable[str]) -> dict[str, TensorShards]:
    """Prepares the blend of a live state from saved ones: returns the shards to fill, by the saved state to read.

    A state that was saved under the same name, or whose name has no column range, is read as it is. Otherwise this
    function sets ``live`` to 0, and the reader adds each overlapping slice, times its share of the live columns::

        saved   sum[0:4]   sum[4:8]
        live    sum[0:6]            = 4/6 sum[0:4] + 2/6 sum[4:8]

    ``saved_names`` are the names of all states of the parameter in the checkpoint. The slices of a
    state cover all columns, so some overlap the live ones; of an index without the state, the live one stays 0.
    """
    saved_names = list(saved_names)
    column_range = _columns_in_name(name)
    if column_range is None or name in saved_names:
        return {name: live}
    state, start, stop = column_range
    to_read = {}
    for saved_name in saved_names:
        saved_range = _columns_in_name(saved_name)
        if saved_range is None or saved_range[0] != state:
            continue
        _, saved_start, saved_stop = saved_range
        num_shared = min(stop, saved_stop) - max(start, saved_start)
        if num_shared > 0:
            column_share = num_shared / (stop - start)
            shards = [AddedShard(shard.offsets, shard.tensor, column_share) for shard in live.shards]
            to_read[saved_name] = TensorShards(live.size, live.dtype, shards)
    for shard in live.shards:
        shard.tensor.zero_()
    return to_read
