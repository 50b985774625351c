"""Modules that replace ids in training mode, batch after batch, and count how many.

They have no parameters and no buffers, so that they do not change a state dict. The step of a batch is the number of
batches before it in training. The module counts batches itself, so that a pipeline may prepare batches as far ahead as
it likes. After a resume :func:`set_step` sets the number.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.sse.arrays import Array
from distembed.sse.replacement import Replacer
from distembed.sse.rule import SSE, IdStream

_NOT_COMPILED = "ids are replaced in training (SSE) by random numbers that no compiled program draws"
_MOST_AHEAD = 64
"""Number of batches whose counts are kept step by step: more than any pipeline prepares ahead."""


@dataclass(frozen=True)
class _BatchCounts:
    """The numbers of a batch's ids, of drawn ids, and of drawn ids that stayed as they were, ``[streams]``."""

    step: int
    seen: np.ndarray
    drawn: np.ndarray
    unchanged: Array | None  # on the ids' device; None for zeros

    def joined(self, later: "_BatchCounts") -> "_BatchCounts":
        """Adds up the counts of both batches, under the later batch's step."""
        counts = [count for count in (self.unchanged, later.unchanged) if count is not None]
        unchanged = counts[0] + counts[1] if len(counts) == 2 else counts[0] if counts else None
        return _BatchCounts(later.step, self.seen + later.seen, self.drawn + later.drawn, unchanged)


class Perturbation(nn.Module):
    """Base of the modules: replaces the ids of each training batch, counts steps, and counts replaced ids.

    ``step`` is the step of the next batch in training, over all epochs. With ``in_place`` set, new ids are written into
    the batch's tensor, which saves a copy if nothing reads the old ids later.

    Args:
        streams: Features whose ids are replaced.
        rank: Rank of this process, so that ranks draw different numbers; the rank in the default process group unless
            given.
    """

    _ids_may_be_outside: bool  # whether ids outside of the table may occur, and are kept

    def __init__(self, streams: Sequence[IdStream], rank: int | None = None) -> None:
        super().__init__()
        if rank is not None and (type(rank) is not int or rank < 0):
            raise UserError(f"rank is {rank!r}; give the number of this process, an integer of 0 or more, or None.")
        self.step = 0
        self.in_place = False
        self._streams = list(streams)
        self._rank = rank
        self._replacer: Replacer | None = None
        self._counts: list[_BatchCounts] = []

    def extra_repr(self) -> str:
        return f"step={self.step}"

    @property
    def replaces_ids(self) -> bool:
        """Whether any ids are ever replaced."""
        return any(stream.sse.p0 > 0 for stream in self._streams)

    def take_counts(self, until_step: int | None = None) -> dict[str, tuple[int, int]]:
        """Returns for each table the numbers of replaced ids and of all ids since the last call; waits for a GPU.

        Args:
            until_step: Counts batches of earlier steps only; batches that a pipeline has prepared for later steps are
                left for the next call. None for all.
        """
        batches = [batch for batch in self._counts if until_step is None or batch.step < until_step]
        self._counts = self._counts[len(batches) :]
        zeros = np.zeros(len(self._streams), np.int64)
        total = reduce(_BatchCounts.joined, batches, _BatchCounts(0, zeros, zeros, None))
        replaced = total.drawn
        if isinstance(total.unchanged, Tensor):
            torch.cuda.synchronize(total.unchanged.device)  # a pipeline counts on a stream of its own
            replaced = replaced - total.unchanged.cpu().numpy()
        elif total.unchanged is not None:
            replaced = replaced - total.unchanged
        counts = zip(replaced.tolist(), total.seen.tolist(), strict=True)
        return _sums_by_table((stream.table, count) for stream, count in zip(self._streams, counts, strict=True))

    def _replace(
        self, ids: Int[Tensor, "*shape"], counts: tuple[int, ...], starts: tuple[int, ...]
    ) -> Int[Tensor, "*shape"]:
        """Returns the ids of a batch after replacement, adds to the counts, and increments ``step``.

        ``counts`` and ``starts`` are each stream's number of ids and index of its first id.
        """
        rank = self._rank
        if rank is None:  # asked anew each time: a module may be copied to other processes
            rank = dist.get_rank() if dist.is_initialized() else 0
        if self._replacer is None or (self._replacer.device, self._replacer.dtype) != (ids.device, ids.dtype):
            self._replacer = Replacer(self._streams, ids.device, ids.dtype, self._ids_may_be_outside)
        result = self._replacer(ids, counts, starts, self.step, rank, self.in_place)
        self._counts.append(_BatchCounts(self.step, np.array(counts), result.num_drawn, result.num_unchanged))
        if len(self._counts) > _MOST_AHEAD:  # bounds the list if take_counts is never called
            self._counts[:2] = [self._counts[0].joined(self._counts[1])]
        self.step += 1
        return result.ids


class FeaturePerturbation(Perturbation):
    """Replaces ids of a KeyedJaggedTensor independently of each other, in bags and sequences alike.

    Features without a stream stay as they are. A batch may lack features, and have them in any order: random numbers
    depend on seed, table, feature, step, rank and an id's position within the feature.
    """

    _ids_may_be_outside = False

    def __init__(self, streams: Sequence[IdStream], rank: int | None = None) -> None:
        super().__init__(streams, rank)
        self._keys: list[str] = []
        self._key_indices: list[int | None] = []

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with replaced ids, as one step; the batch itself in evaluation mode or without streams."""
        if not self.training or not self._streams or features.values().is_meta:
            return features
        return self._replace_in_batch(features)

    @torch.compiler.disable(reason=_NOT_COMPILED)  # type: ignore[untyped-decorator]
    def _replace_in_batch(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        ids = features.values()
        self._follow_keys(features.keys())
        lengths, offsets = features.length_per_key(), features.offset_per_key()
        counts = tuple([0 if key is None else lengths[key] for key in self._key_indices])
        starts = tuple([0 if key is None else offsets[key] for key in self._key_indices])
        replaced = self._replace(ids, counts, starts)
        if replaced.data_ptr() == ids.data_ptr():  # no id was drawn, or the new ids are in the batch's own memory
            return features
        return KeyedJaggedTensor(
            features.keys(),
            replaced,
            weights=features.weights_or_none(),
            lengths=features.lengths_or_none(),
            offsets=features.offsets_or_none(),
            length_per_key=lengths,
            offset_per_key=offsets,
            inverse_indices=features.inverse_indices_or_none(),
            **(
                {"stride_per_key_per_rank": features.stride_per_key_per_rank()}
                if features.variable_stride_per_key()
                else {"stride": features.stride()}
            ),
        )

    def _follow_keys(self, keys: list[str]) -> None:
        """Finds the place of each stream's feature among a batch's keys."""
        if keys != self._keys:
            index_of_key = {key: index for index, key in enumerate(keys)}
            self._keys, self._key_indices = keys, [index_of_key.get(stream.feature) for stream in self._streams]


class IdPerturbation(Perturbation):
    """Replaces ids of a tensor of any shape: labels that are ids (p_y in the paper), or tokens of a sequence.

    Numbers outside of ``[0, num_embeddings)``, like the -100 that a loss ignores, stay as they are::

        perturb_targets = IdPerturbation(num_items, SSE(p0=0.01), "targets")
        loss = cross_entropy(scores, perturb_targets(targets))

    Args:
        num_embeddings: Number of ids, which lie in ``[0, num_embeddings)``.
        sse: Rule by which the ids are replaced.
        name: Name of the ids; another name or seed gives other random numbers.
        seed: Seed of the random numbers.
        rank: Rank of this process; the one in the default process group unless given.
    """

    _ids_may_be_outside = True

    def __init__(self, num_embeddings: int, sse: SSE, name: str, *, seed: int = 0, rank: int | None = None) -> None:
        super().__init__([IdStream(name, name, num_embeddings, sse, seed)], rank)

    @torch.compiler.disable(reason=_NOT_COMPILED)  # type: ignore[untyped-decorator]
    def forward(self, ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Returns a copy with replaced ids, as one step; the same object in evaluation mode or where no id is drawn.

        Raises a UserError within a backward pass (:func:`require_forward_pass`).
        """
        if not self.training or ids.is_meta:
            return ids
        if self.replaces_ids:
            require_forward_pass()
        return self._replace(ids, (ids.numel(),), (0,))


@torch.compiler.disable(reason=_NOT_COMPILED)  # type: ignore[untyped-decorator]
def require_forward_pass() -> None:
    """Raises a UserError in a backward pass, in which activation checkpointing would run forward again with new ids."""
    if torch._C._current_graph_task_id() != -1:
        raise UserError(
            "ids would be replaced within the backward pass: activation checkpointing runs a forward pass again, "
            "which would draw other ids; leave the embedding out of the checkpointed part."
        )


def perturb_inputs(
    embedding: nn.Embedding | nn.EmbeddingBag, sse: SSE, name: str, *, seed: int = 0, rank: int | None = None
) -> IdPerturbation:
    """Makes one of torch's embeddings replace its input ids in training mode, by a forward pre-hook.

    A padding index becomes a reserved id that is never drawn. If there is one, no reserved id is ever replaced::

        perturb_inputs(model.tokens, SSE(p0=0.01), "tokens")

    Args:
        embedding: Embedding that gets a hook, and the module as its child ``sse``.
        sse: Rule by which ids are replaced.
        name: Name of the ids; another name or seed gives other random numbers.
        seed: Seed of the random numbers.
        rank: Rank of this process; the one in the default process group unless given.

    Returns:
        The module that replaces the ids.

    Raises:
        UserError: The embedding's ids are replaced already.
    """
    if hasattr(embedding, "sse"):
        raise UserError(f"the ids of {embedding} are replaced already; call perturb_inputs once.")
    if embedding.padding_idx is not None:
        reserved = (*sse.reserved, embedding.padding_idx)
        sse = dataclasses.replace(sse, reserved=reserved, keep_reserved=True)
    perturbation = IdPerturbation(embedding.num_embeddings, sse, name, seed=seed, rank=rank)
    embedding.sse = perturbation
    embedding.register_forward_pre_hook(_perturb_input, with_kwargs=True)
    return perturbation


def set_step(model: nn.Module, step: int) -> None:
    """Sets the step of every module in a model that replaces ids, after a resume.

    Args:
        model: The model, or any module around it, like ``DistributedModelParallel``.
        step: Number of batches trained on so far, over all epochs, as a run without a break would count them.

    Raises:
        UserError: The step is no integer of 0 or more.
    """
    if type(step) is not int or step < 0:
        raise UserError(f"step is {step!r}; it is the number of batches trained on so far, an integer of 0 or more.")
    for perturbation in _perturbations(model):
        perturbation.step = step


def take_counts(model: nn.Module, until_step: int | None = None) -> dict[str, tuple[int, int]]:
    """Returns for each table how many ids were replaced on this rank, and how many there were, since the last call.

    Args:
        model: The model, or any module around it.
        until_step: As for :meth:`Perturbation.take_counts`.
    """
    return _sums_by_table(count for module in _perturbations(model) for count in module.take_counts(until_step).items())


def _perturbations(model: nn.Module) -> Iterator[Perturbation]:
    return (module for module in model.modules() if isinstance(module, Perturbation))


def _sums_by_table(counts: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Returns the sums of both counts over the entries of each table."""
    total: dict[str, tuple[int, int]] = {}
    for table, (replaced, num_ids) in counts:
        before = total.get(table, (0, 0))
        total[table] = before[0] + replaced, before[1] + num_ids
    return total


def _perturb_input(
    embedding: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces the ids of a call, its first argument or ``input``, by the child ``sse``; a forward pre-hook."""
    perturb = embedding.get_submodule("sse")
    if args:
        return (perturb(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": perturb(kwargs["input"])}
