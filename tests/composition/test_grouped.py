"""Chunks of ids with one function, in the number that a GPU makes without knowing how many are filled."""

import pytest
import torch
from torch import Tensor

from distembed.composition import grouped
from distembed.composition.grouped import Groups, evaluate_grouped, group, group_in_chunks, most_chunks
from distembed.composition.layers import PackedLayers

CASES = [
    (0, 3, "uniform"),
    (1, 1, "uniform"),
    (7, 5, "uniform"),
    (300, 4, "skewed"),
    (1000, 40, "uniform"),
    (1000, 3000, "uniform"),
    (513, 2, "last"),
]


def draw(num_ids: int, num_buckets: int, shape: str) -> Tensor:
    if shape == "last":
        return torch.full((num_ids,), num_buckets - 1)
    rows = torch.randint(0, num_buckets, (num_ids,), generator=torch.Generator().manual_seed(num_ids))
    return torch.where(torch.rand(num_ids) < 0.9, 0, rows) if shape == "skewed" else rows


def group_blindly(rows: Tensor, num_buckets: int) -> Groups:
    return group_in_chunks(rows, torch.bincount(rows, minlength=num_buckets), most_chunks(len(rows), num_buckets))


@pytest.mark.parametrize(("num_ids", "num_buckets", "shape"), CASES)
def test_there_are_chunks_enough_and_each_id_has_a_slot_of_its_bucket(
    num_ids: int, num_buckets: int, shape: str
) -> None:
    rows = draw(num_ids, num_buckets, shape)
    groups = group_blindly(rows, num_buckets)
    num_chunks, size = groups.ids.shape
    assert sum(-(-int(count) // size) for count in torch.bincount(rows, minlength=num_buckets)) <= num_chunks
    assert torch.equal(groups.ids.flatten()[groups.slot_of_id], torch.arange(num_ids))
    own = groups.is_own.flatten().nonzero().squeeze(1)
    assert torch.equal(own, groups.slot_of_id.sort().values)
    assert torch.equal(groups.buckets.repeat_interleave(size)[groups.slot_of_id], rows)


@pytest.mark.parametrize(("num_ids", "num_buckets", "shape"), CASES)
@pytest.mark.parametrize("hidden", [(), (5,)])
def test_values_and_gradients_are_those_of_the_chunks_that_are_filled(
    num_ids: int, num_buckets: int, shape: str, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, rows = PackedLayers(hidden, torch.relu), draw(num_ids, num_buckets, shape)
    values = []
    for way in (group, group_blindly):
        monkeypatch.setattr(grouped, "group", way)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(num_ids, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        functions = torch.randn(
            num_buckets, layers.num_parameters(4), generator=generator, dtype=torch.float64, requires_grad=True
        )
        outputs = evaluate_grouped(inputs, functions, rows, layers)
        upstream = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
        outputs.backward(upstream)
        values.append((outputs.detach(), inputs.grad, functions.grad))
    for known, blind in zip(*values, strict=True):
        torch.testing.assert_close(blind, known)
