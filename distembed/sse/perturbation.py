"""Modules that replace ids in training mode, batch after batch, and count what they did.

They have no parameters and no buffers, so that a state dict is the same with them and without. The step of a batch is
the number of batches before it in training. The module counts them itself, so that a pipeline may prepare batches as
far ahead as it likes. After a resume :func:`set_step` says where training stands.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.errors import UserError
from distembed.sse.replacement import IdStream, Replacer
from distembed.sse.rule import SSE


class Perturbation(nn.Module):
    """Base of the modules.

    Attributes:
        step: of the next batch in training, over all epochs.

    Args:
        rank: of this process, so that ranks draw different numbers; the one in the default process group unless given.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self.step = 0
        self._rank = rank
        self._counted: list[_Counted] = []

    def extra_repr(self) -> str:
        return f"step={self.step}"

    def take_counts(self) -> dict[str, tuple[int, int]]:
        """For each table how many ids were replaced, and how many there were, since the last call."""
        return _added(count for counted in self._counted for count in counted.take())

    def _counted_replacer(self, streams: Sequence[IdStream | None], device: torch.device) -> "_Counted":
        self._counted.append(_Counted(streams, device))
        return self._counted[-1]

    def _replace(self, counted: "_Counted", ids: Int[Tensor, "*shape"], counts: Sequence[int]) -> Int[Tensor, "*shape"]:
        if torch._C._current_graph_task_id() != -1:
            raise UserError(
                "ids would be replaced within the backward pass: activation checkpointing runs a forward pass again, "
                "which would draw other ids; leave the embedding out of what is checkpointed."
            )
        if self._rank is None:
            self._rank = dist.get_rank() if dist.is_initialized() else 0
        replaced = counted.replace(ids, counts, self.step, self._rank)
        self.step += 1
        return replaced


class FeaturePerturbation(Perturbation):
    """Replaces ids of a KeyedJaggedTensor: each id by itself, in sequences and bags alike.

    Args:
        streams: of the features whose ids are replaced; others are left alone, and may be missing from a batch.
        rank: as its base's.
    """

    def __init__(self, streams: Sequence[IdStream], rank: int | None = None) -> None:
        super().__init__(rank)
        self._stream_of = {stream.feature: stream for stream in streams}
        self._of_layout: dict[tuple[str, ...], _Counted] = {}

    @property
    def replaces_ids(self) -> bool:
        """Whether any ids are ever replaced."""
        return any(stream.sse.p0 > 0 for stream in self._stream_of.values())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same object where nothing is replaced, else a copy with other ids and all else the same.

        Args:
            features: of any order of keys; ids lie in their tables.
        """
        ids = features.values()
        if not self.training or not self._stream_of or ids.is_meta:
            return features
        keys = tuple(features.keys())
        counted = self._of_layout.get(keys)
        if counted is None or counted.device != ids.device:
            streams = [self._stream_of.get(key) for key in keys]
            counted = self._of_layout[keys] = self._counted_replacer(streams, ids.device)
        counts = features.length_per_key()
        replaced = self._replace(counted, ids, counts)
        if replaced is ids:
            return features
        return KeyedJaggedTensor(
            features.keys(),
            replaced,
            weights=features.weights_or_none(),
            lengths=features.lengths_or_none(),
            offsets=features.offsets_or_none(),
            stride=features.stride(),
            length_per_key=counts,
            offset_per_key=features.offset_per_key_or_none(),
        )


class IdPerturbation(Perturbation):
    """Replaces ids of a tensor of any shape: labels that are ids (p_y in the paper), tokens of a sequence.

    ::

        targets = perturb_targets(targets)      # perturb_targets = IdPerturbation(num_items, SSE(p0=0.01))

    Args:
        num_embeddings: ids lie in ``[0, num_embeddings)``.
        sse: how they are replaced.
        name: distinguishes the random numbers of several of these.
        seed: of the random numbers.
        rank: as its base's.
    """

    def __init__(
        self, num_embeddings: int, sse: SSE, *, name: str = "ids", seed: int = 0, rank: int | None = None
    ) -> None:
        super().__init__(rank)
        self._stream = IdStream(name, name, num_embeddings, sse, seed)
        self._on_device: _Counted | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The same object where nothing is replaced, else a copy."""
        if not self.training or ids.is_meta:
            return ids
        if self._on_device is None or self._on_device.device != ids.device:
            self._on_device = self._counted_replacer([self._stream], ids.device)
        return self._replace(self._on_device, ids, [ids.numel()])


def perturb_inputs(
    embedding: nn.Embedding | nn.EmbeddingBag, sse: SSE, *, name: str = "ids", seed: int = 0, rank: int | None = None
) -> IdPerturbation:
    """Replaces the ids that any embedding of torch is given, while it is in training mode.

    The padding index is never drawn and never replaced::

        perturb_inputs(model.tokens, SSE(p0=0.01))

    Args:
        embedding: gets a hook, and the module as its child ``sse``.
        sse: how ids are replaced.
        name: distinguishes the random numbers of several embeddings.
        seed: of the random numbers.
        rank: of this process; the one in the default process group unless given.

    Returns:
        The module.
    """
    if hasattr(embedding, "sse"):
        raise UserError(f"the ids of {embedding} are replaced already; call perturb_inputs once.")
    if embedding.padding_idx is not None:
        reserved = (*sse.reserved, embedding.padding_idx)
        sse = dataclasses.replace(sse, reserved=reserved, keep_reserved=True)
    perturbation = IdPerturbation(embedding.num_embeddings, sse, name=name, seed=seed, rank=rank)
    embedding.sse = perturbation
    embedding.register_forward_pre_hook(_perturb_input, with_kwargs=True)
    return perturbation


def set_step(model: nn.Module, step: int) -> None:
    """Tells all that replaces ids in a model how many batches it was trained on, after a resume.

    Args:
        model: or any module around it, such as ``DistributedModelParallel``.
        step: batches so far, over all epochs, as a run without a break would count them.

    Raises:
        UserError: for what is no integer of 0 or more.
    """
    if type(step) is not int or step < 0:
        raise UserError(f"step is {step!r}; it is the number of batches trained on so far, an integer of 0 or more.")
    for perturbation in _perturbations(model):
        perturbation.step = step


def take_counts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """For each table how many ids were replaced on this rank, and how many there were, since the last call."""
    return _added(count for module in _perturbations(model) for count in module.take_counts().items())


def _perturbations(model: nn.Module) -> Iterator[Perturbation]:
    return (module for module in model.modules() if isinstance(module, Perturbation))


def _added(counts: Iterable[tuple[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for table, (replaced, seen) in counts:
        before = total.get(table, (0, 0))
        total[table] = before[0] + replaced, before[1] + seen
    return total


def _perturb_input(
    embedding: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward hook: ids come first, or under torch's name for them."""
    perturb = embedding.get_submodule("sse")
    if args:
        return (perturb(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": perturb(kwargs["input"])}


class _Counted:
    """A replacer for one order of features, and what it has done so far."""

    def __init__(self, streams: Sequence[IdStream | None], device: torch.device) -> None:
        self.device = device
        self._tables = [None if stream is None else stream.table for stream in streams]
        self._replacer = Replacer(streams, device)
        self._start()

    def _start(self) -> None:
        self._seen = np.zeros(len(self._tables), np.int64)
        self._drawn = np.zeros(len(self._tables), np.int64)
        self._kept: Tensor | None = None

    def replace(self, ids: Int[Tensor, "*shape"], counts: Sequence[int], step: int, rank: int) -> Int[Tensor, "*shape"]:
        result = self._replacer(ids, counts, step, rank)
        self._seen += counts
        self._drawn += result.num_drawn
        if result.num_kept is not None:
            self._kept = result.num_kept if self._kept is None else self._kept + result.num_kept
        return result.ids

    def take(self) -> list[tuple[str, tuple[int, int]]]:
        replaced = self._drawn if self._kept is None else self._drawn - self._kept.cpu().numpy()
        counts = zip(self._tables, replaced.tolist(), self._seen.tolist(), strict=True)
        self._start()
        return [(table, (own, seen)) for table, own, seen in counts if table is not None]
