"""Batches on their way to a GPU: pinned where they are made, and what is constant is not copied again."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.reader import BatchOrder, BatchReader, Decoding
from distembed.data.reader.batch import Batch, unit_bags
from distembed.data.single_ids import has_single_ids, mark_single_ids
from distembed.training.pipeline import prepared_batch
from tests.cuda.pretend import CUDA, pretend_cuda
from tests.data.small_dataset import SCHEMA, SINGLE, make_dataset

ROWS = 6


def batch(bags: str) -> Batch:
    lengths = {"single": [1] * 2 * ROWS, "missing": [1, 0] * ROWS, "ragged": [2, 0] * ROWS}[bags]
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(sum(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=ROWS,
        length_per_key=[sum(lengths[:ROWS]), sum(lengths[ROWS:])],
    )
    if bags != "ragged":
        mark_single_ids(features)
    return Batch({"sparse_features": features, "dense": torch.zeros(ROWS, 3)}, ROWS)


def ids_of(moved: Batch) -> KeyedJaggedTensor:
    features = moved["sparse_features"]
    assert isinstance(features, KeyedJaggedTensor)
    return features


def test_lengths_and_offsets_of_single_ids_are_made_on_the_device_once() -> None:
    unit_bags.cache_clear()
    copies: list[str] = []

    def note(origin: str) -> bool:
        copies.append(origin)
        return True

    try:
        with pretend_cuda(note) as watch, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda device=None: _Finished())
            first = ids_of(batch("single").to(CUDA, non_blocking=True))
            watch.reset()
            copies.clear()
            second = ids_of(batch("single").to(CUDA, non_blocking=True))
            assert second.lengths() is first.lengths() and second.offsets() is first.offsets()
            assert second.values().device == second.lengths().device == CUDA
            assert len(copies) == 2  # ids and dense numbers
            assert second.length_per_key() == [ROWS, ROWS]
            assert has_single_ids(second)
    finally:
        unit_bags.cache_clear()


class _Finished:
    def synchronize(self) -> None:
        """Has nothing to wait for."""


@pytest.mark.parametrize("bags", ["missing", "ragged"])
def test_other_lengths_are_copied_and_numbers_of_ids_stay_on_the_host(bags: str) -> None:
    given = ids_of(batch(bags))
    with pretend_cuda():
        moved = ids_of(batch(bags).to(CUDA, non_blocking=True))
        assert moved.lengths().device == CUDA
        assert moved.lengths() is not given.lengths()
        assert moved.length_per_key() == given.length_per_key()  # which would wait if it had to be found
        assert has_single_ids(moved) == (bags == "missing")


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([1, 2], "a bag of the batch has 2 ids"), ([1, 0, 1], "3 values, and lengths of 2 ids; cut values=3 to 2")],
)
def test_a_mark_that_is_not_true_is_refused(lengths: list[int], message: str) -> None:
    features = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor(lengths))
    with pytest.raises(UserError, match=message):
        mark_single_ids(features)


@pytest.mark.parametrize("multi_hot", [False, True])
def test_the_reader_pins_batches_in_its_own_thread(
    multi_hot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_dataset(tmp_path / "data", 30, schema=SCHEMA if multi_hot else SINGLE)
    pinned: list[tuple[int, str]] = []

    def pin(tensor: Tensor, *device: Any) -> Tensor:
        pinned.append((tensor.data_ptr(), threading.current_thread().name))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    made = list(BatchReader(folder, "all", BatchOrder(4, seed=0), decoding=Decoding(pins=True)))
    assert made and {name for _, name in pinned} == {"distembed-prefetch_0"}
    memory = {address for address, _ in pinned}
    for each in made:
        assert ids_of(each).values().data_ptr() in memory
        lengths = ids_of(each).lengths().view(len(ids_of(each).keys()), -1)
        assert ids_of(each)._length_per_key == lengths.sum(1).tolist()
        assert has_single_ids(ids_of(each)) == (not multi_hot)


class AddsNumbers:
    """A task that adds a field on the host, and one that is on the GPU."""

    def prepare_batch(self, batch: Batch, position: object) -> Batch:
        fields = {**batch.fields, "numbers": torch.ones(ROWS), "drawn": torch.zeros(ROWS, device=CUDA)}
        return Batch(fields, batch.global_batch_size)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_task_adds_on_the_host_is_pinned_too(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task: Any = AddsNumbers()
    with pretend_cuda():
        pinned: list[Tensor] = []

        def pin(tensor: Tensor, *given: Any) -> Tensor:
            assert tensor.device.type == "cpu", "only memory of the host can be page-locked"
            pinned.append(tensor)
            return tensor

        monkeypatch.setattr(Tensor, "pin_memory", pin)
        prepared = prepared_batch(task, batch("ragged"), None, torch.device(device))
        names = {name for name, own in prepared.fields.items() if any(own is tensor for tensor in pinned)}
        if device == "cpu":
            assert not pinned
        else:
            assert names == {"numbers", "dense"}
            features = ids_of(prepared)
            assert {id(features.values()), id(features.lengths())} <= {id(tensor) for tensor in pinned}
