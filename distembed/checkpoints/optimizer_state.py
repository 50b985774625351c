"""Optimizer state under names that depend on the parameter and the optimizer alone, not on the plan or the kernel.

FBGEMM's fused optimizers and torch's hold the same numbers in different places. Both are told here by the parameter's
name and the state's, so that a table trained by one goes on with the other::

    adagrad                sum                                   a number for each weight
    row_wise_adagrad       sum[0:16]                             a number for each row, of these columns
    adam, adamw, lamb      exp_avg  exp_avg_sq                   a number for each weight
    amsgrad                exp_avg  exp_avg_sq  max_exp_avg_sq   a number for each weight
    partial_row_wise_*     exp_avg  exp_avg_sq[0:16]             a number for each weight, for each row

Where a table's columns are cut into slices, a row has one such number a slice: an average over the slice's columns of
what an elementwise optimizer would keep. Under another cut a new slice gets the average, over its columns, of what each
column's old slice had (:func:`blend_columns`). Where slices are merged, that is up to rounding what the merged slice
would have had with the same gradients. Where they are split it is an approximation, since the old slice no longer tells
its columns apart. Where the cut is the same, the numbers are too.

Numbers of steps are not saved parameter by parameter: :func:`set_step` sets them all to the run's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.checkpoints.shards import Box, TensorShards
from distembed.errors import UserError
from distembed.optim.states import IS_ROW_WISE

_TORCH_KINDS: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    RowWiseAdagrad: "row_wise_adagrad",
}


@dataclass(frozen=True)
class ParameterState:
    """A parameter on this rank with its optimizer.

    Attributes:
        name: of the parameter, as in the model's state dict.
        kind: of the optimizer, a key of :data:`IS_ROW_WISE`.
        states: by name, views of what is live.
    """

    name: str
    kind: str
    states: Mapping[str, TensorShards]


def optimizer_kinds(optimizer: KeyedOptimizer) -> dict[str, str]:
    """Kind of optimizer of every parameter that is trained on this rank.

    Raises:
        UserError: for an optimizer whose state has no names here.
    """
    return {name: kind for leaf in _leaves(optimizer) for name, kind in leaf.kinds()}


def optimizer_states(optimizer: KeyedOptimizer, weights: Mapping[str, TensorShards]) -> Iterator[ParameterState]:
    """States of all parameters on this rank; torch's are made where they were not yet needed.

    Args:
        optimizer: whose parameters are the model's.
        weights: the model's live ones.
    """
    for leaf in _leaves(optimizer):
        yield from leaf.states(weights)


def set_step(optimizer: KeyedOptimizer, step: int) -> None:
    """Sets the number of steps done, on which Adam's bias correction depends."""
    for leaf in _leaves(optimizer):
        leaf.set_step(step)


@dataclass(frozen=True)
class _FusedLeaf:
    """FBGEMM's optimizer of one group of tables."""

    prefix: str
    optimizer: EmbeddingFusedOptimizer

    @property
    def kind(self) -> str:
        kind: str = self.optimizer._emb_module.optimizer.value.removeprefix("exact_")
        return _known(kind, f"FBGEMM's {kind}")

    def kinds(self) -> Iterator[tuple[str, str]]:
        for name in self.optimizer.params:
            yield CombinedOptimizer.prepend_opt_key(name, self.prefix), self.kind

    def states(self, _weights: Mapping[str, TensorShards]) -> Iterator[ParameterState]:
        for name, weight in self.optimizer.params.items():
            boxes = [shard.metadata for shard in weight.local_shards()]
            live = self.optimizer.state[weight].values()
            states: dict[str, TensorShards] = {}
            for (state, is_row_wise), sharded in zip(IS_ROW_WISE[self.kind].items(), live, strict=True):
                for box, shard in zip(boxes, sharded.local_shards(), strict=True):
                    _add(states, state, is_row_wise, weight.size(), box.shard_offsets, box.shard_sizes, shard.tensor)
            yield ParameterState(CombinedOptimizer.prepend_opt_key(name, self.prefix), self.kind, states)

    def set_step(self, step: int) -> None:
        lookup = self.optimizer._emb_module
        lookup.iter.fill_(step)
        lookup.iter_cpu.fill_(step)  # what is used; copied from the other only while it is 0


@dataclass(frozen=True)
class _TorchLeaf:
    """One of torch's optimizers, or TorchRec's in the same form."""

    prefix: str
    optimizer: KeyedOptimizerWrapper

    @property
    def kind(self) -> str:
        inner = self.optimizer._optimizer
        kind = _TORCH_KINDS.get(type(inner), "")
        if kind == "adam" and inner.defaults["amsgrad"]:
            kind = "amsgrad"
        if (kind == "sgd" and inner.defaults["momentum"]) or (kind == "adamw" and inner.defaults["amsgrad"]):
            kind = ""
        return _known(kind, repr(inner).splitlines()[0].rstrip(" ("))

    def kinds(self) -> Iterator[tuple[str, str]]:
        for name in self.optimizer.params:
            yield CombinedOptimizer.prepend_opt_key(name, self.prefix), self.kind

    def states(self, weights: Mapping[str, TensorShards]) -> Iterator[ParameterState]:
        group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        for key, parameter in self.optimizer.params.items():
            name = CombinedOptimizer.prepend_opt_key(key, self.prefix)
            live = self.optimizer.state[parameter]
            if not live:
                _make_state(live, parameter, self.kind, group_of[parameter])
            states: dict[str, TensorShards] = {}
            for state, is_row_wise in IS_ROW_WISE[self.kind].items():
                for box in weights[name].boxes:
                    # shards of one table are views of one parameter, one behind the other
                    start = (box.tensor.data_ptr() - parameter.data_ptr()) // parameter.itemsize
                    unit = box.tensor.shape[1] if is_row_wise else 1
                    count = box.tensor.numel() // unit
                    values = live[state].view(-1)[start // unit : start // unit + count]
                    shape = (count,) if is_row_wise else box.tensor.shape
                    place = (weights[name].size(), box.offsets, box.tensor.shape)
                    _add(states, state, is_row_wise, *place, values.view(shape), weights[name].replicated)
            yield ParameterState(name, self.kind, states)

    def set_step(self, step: int) -> None:
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)


def _leaves(optimizer: KeyedOptimizer, prefix: str = "") -> Iterator[_FusedLeaf | _TorchLeaf]:
    if isinstance(optimizer, CombinedOptimizer):
        for name, inner in optimizer.optimizers:
            yield from _leaves(inner, CombinedOptimizer.prepend_opt_key(name, prefix))
    elif isinstance(optimizer, OptimizerWrapper):
        yield from _leaves(optimizer._optimizer, prefix)
    elif isinstance(optimizer, EmbeddingFusedOptimizer):
        yield _FusedLeaf(prefix, optimizer)
    elif isinstance(optimizer, KeyedOptimizerWrapper):
        yield _TorchLeaf(prefix, optimizer)
    else:
        _known("", type(optimizer).__name__)


def _known(kind: str, described: str) -> str:
    if kind not in IS_ROW_WISE:
        raise UserError(
            f"{described} is an optimizer whose state a checkpoint has no names for; known: {', '.join(IS_ROW_WISE)}, "
            "fused by FBGEMM or in a KeyedOptimizerWrapper."
        )
    return kind


def _make_state(live: dict[str, Any], parameter: Tensor, kind: str, group: Mapping[str, Any]) -> None:
    """What torch makes at the first step; a step with gradients of zero would make it too, but change weights."""
    if not IS_ROW_WISE[kind]:
        return
    on_device = group.get("fused") or group.get("capturable")
    live["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    for state in IS_ROW_WISE[kind]:
        live[state] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _add(
    states: dict[str, TensorShards],
    state: str,
    is_row_wise: bool,
    size: torch.Size,
    offsets: Iterable[int],
    sizes: Iterable[int],
    values: Tensor,
    replicated: bool = False,
) -> None:
    """Puts one box's values under the state's name."""
    offsets, sizes = tuple(offsets), tuple(sizes)
    if is_row_wise:
        state = name_of_columns(state, offsets[1], offsets[1] + sizes[1])
        offsets, size, values = offsets[:1], size[:1], values.view(-1)
    before = states[state].boxes if state in states else []
    states[state] = TensorShards(size, values.dtype, [*before, Box(offsets, values.detach())], replicated)


def name_of_columns(state: str, start: int, stop: int) -> str:
    """Name of a state that has one number a row, of the columns from ``start`` to ``stop``."""
    return f"{state}[{start}:{stop}]"


def columns_of_name(name: str) -> tuple[str, int, int] | None:
    """State and columns of such a name; None where it has no columns."""
    found = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def blend_columns(name: str, live: TensorShards, saved_names: Iterable[str]) -> dict[str, TensorShards]:
    """Where to read a state from that has one number a row: itself, or every saved slice that shares columns with it.

    In the second case ``live`` is set to 0, and each saved slice is to be added by its share of the columns.

    Args:
        name: of the live state.
        live: its boxes.
        saved_names: all states of the same parameter in the checkpoint.

    Returns:
        Boxes to fill, by saved name.
    """
    saved_names = list(saved_names)
    columns = columns_of_name(name)
    if columns is None or name in saved_names:
        return {name: live}
    state, start, stop = columns
    read = {}
    for saved_name in saved_names:
        saved = columns_of_name(saved_name)
        if saved is None or saved[0] != state:
            continue
        shared = min(stop, saved[2]) - max(start, saved[1])
        if shared > 0:
            share = shared / (stop - start)
            shares = [Box(box.offsets, box.tensor, share) for box in live.boxes]
            read[saved_name] = TensorShards(live.size(), live.dtype, shares)
    for box in live.boxes:
        box.tensor.zero_()
    return read
