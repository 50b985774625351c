"""Copies of a checkpoint's tensors on the host, through page-locked buffers, with a GPU that copies when it has to.

What stands for the GPU does nothing that is asked of it without waiting until somebody waits for it: whoever reads a
buffer too early, or fills it again before it is read, gets other numbers.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distembed.checkpoints import content, host_copies
from distembed.checkpoints.content import CheckpointContent
from distembed.checkpoints.shards import TensorShards

BUFFER_BYTES = 256
SHAPES = [(), (1,), (3, 5), (64,), (65,), (7, 50), (0, 4), (2, 3, 4), (1000,)]
DTYPES = [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool]


class LazyGpu:
    """Runs copies when an event behind them is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.locked: list[int] = []
        self.waits: list[int] = []
        """Copies that were queued behind each wait."""
        gpu, stock = self, Tensor.copy_

        class Event:
            def record(self) -> None:
                self.end = len(gpu.queue)

            def synchronize(self) -> None:
                gpu.waits.append(len(gpu.queue) - self.end)
                for run in gpu.queue[gpu.done : self.end]:
                    run()
                gpu.done = max(gpu.done, self.end)

        def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if non_blocking:
                assert target.shape == source.shape and target.dtype == source.dtype
                self.queue.append(lambda: stock(target, source))
                return target
            return stock(target, source)

        def page_locked(num_bytes: int) -> Tensor:
            self.locked.append(num_bytes)
            return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

        monkeypatch.setattr(Tensor, "copy_", copy)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(host_copies, "page_locked", page_locked)
        monkeypatch.setattr(host_copies, "is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(host_copies, "BUFFER_BYTES", BUFFER_BYTES)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def test_copies_are_the_tensors_in_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [drawn(*case, seed=i) for i, case in enumerate(itertools.product(SHAPES, DTYPES))]
    tensors += [drawn((6, 8), torch.float32, 99).t(), drawn((9, 40), torch.float32, 98)[:, 3:17]]
    expected = [tensor.clone() for tensor in tensors]
    gpu = LazyGpu(monkeypatch)
    copies = host_copies.host_copies(tensors)
    monkeypatch.undo()
    for copy, tensor, wanted in zip(copies, tensors, expected, strict=True):
        assert copy.dtype == wanted.dtype and torch.equal(copy, wanted)
        assert copy.is_contiguous() and (not copy.numel() or copy.data_ptr() != tensor.data_ptr())
    assert sum(gpu.locked) <= 2 * BUFFER_BYTES
    # buffers are filled before they are waited for, and while one is moved the GPU fills the other
    assert len(gpu.waits) <= 2 * sum(tensor.nbytes for tensor in tensors) / BUFFER_BYTES + 2
    assert all(gpu.waits[:-1])


def test_little_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LazyGpu(monkeypatch)
    (copy,) = host_copies.host_copies([torch.arange(5)])
    assert copy.tolist() == [0, 1, 2, 3, 4] and sum(gpu.locked) <= 2 * 64
    assert host_copies.host_copies([]) == []


def test_what_is_on_the_host_is_copied_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("memory is page-locked")

    monkeypatch.setattr(host_copies, "page_locked", refuse)
    tensor = torch.arange(6.0).view(2, 3).requires_grad_()
    (copy,) = host_copies.host_copies([tensor])
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr() and not copy.requires_grad


def test_a_checkpoint_is_copied_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    stock = host_copies.host_copies
    monkeypatch.setattr(content, "host_copies", lambda tensors: given.append(len(tensors)) or stock(tensors))
    weights = {f"w{i}": torch.full((i + 1, 3), float(i)) for i in range(4)}
    tensors = {f"model.{name}": TensorShards.from_value(own) for name, own in weights.items()}
    tensors["ranks.sum.0"] = TensorShards.from_value(torch.tensor(5))
    live = CheckpointContent("step", tensors, {})
    copied = live.copied_to_host()
    assert given == [5]
    for name, own in tensors.items():
        copy = copied.tensors[name]
        assert copy.size == own.size and copy.replicated == own.replicated
        for before, after in zip(own.shards, copy.shards, strict=True):
            assert before.offsets == after.offsets and torch.equal(before.tensor, after.tensor)
            assert before.tensor.data_ptr() != after.tensor.data_ptr()
