"""What happens between the passes of a fused lookup, or to one of them, changes no gradient without a word."""

import copy
import os
import pickle
import threading
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.kernels.operation import FusedLookup, in_threads
from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.partitions.base import Digit
from tests.fused.test_refusals import PLAIN, Case, build, is_fused
from tests.ranks import run_on_ranks

IDS = torch.tensor([3, 17, 3, 90, 41, 55, 0, 99, 8, 8])
OFFSETS = torch.tensor([0, 2, 5, 6, 10])
DIM, DIGITS, ROWS = 8, (Digit(1, 25), Digit(25, None)), (25, 4)


def tables(is_product: bool = True, rate: float = 0.5) -> tuple[FusedLookup, list[Storage]]:
    """Returns two features' one table of two partitions, trained by SGD, and where its rows lie."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(rows * DIM, generator=generator).requires_grad_() for rows in ROWS]
    storages = [Storage([own], "sgd", learning_rate=rate) for own in weights]
    parts = [TablePart(digit, 0, rows) for digit, rows in zip(DIGITS, ROWS, strict=True)]
    return FusedLookup(Formula([range(DIM)] * 2, is_product, True), [parts] * 2, [2], storages), storages


def test_a_graph_that_is_gone_through_twice_is_refused() -> None:
    lookup, storages = tables()
    outputs = lookup(IDS, OFFSETS, None, storages)
    outputs.sum().backward(retain_graph=True)
    before = [storage.weights[0].detach().clone() for storage in storages]
    with pytest.raises(UserError, match="a graph is retained.*kernel='fbgemm'"):
        outputs.sum().backward()
    assert all(torch.equal(own.weights[0], one) for own, one in zip(storages, before, strict=True))


@pytest.mark.parametrize("is_product", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_tables_may_be_looked_up_again_before_they_are_updated(order: tuple[int, ...], is_product: bool) -> None:
    lookup, storages = tables(is_product, rate=0.05)
    starts = [storage.weights[0].detach().clone().view(-1, DIM) for storage in storages]
    batches = [IDS, IDS.flip(0), (7 * IDS) % 100]
    weights = torch.rand(len(IDS), generator=torch.Generator().manual_seed(3)).requires_grad_()
    outputs = [lookup(ids, OFFSETS, weights, storages) for ids in batches]
    expected_weights = weights.detach().clone().requires_grad_()
    expected = [one.clone() for one in starts]
    for number in order:  # each gradient is of the rows at the start
        outputs[number].square().sum().backward()
        rows = [one.clone().requires_grad_() for one in starts]
        ids = batches[number]
        first, second = rows[0][ids % 25], rows[1][ids // 25]
        each = (first * second if is_product else first + second) * expected_weights[:, None]
        bags = torch.stack([bag.sum(0) for bag in each.tensor_split(OFFSETS[1:-1])])
        bags.square().sum().backward()
        for own, one in zip(expected, rows, strict=True):
            assert one.grad is not None
            own -= 0.05 * one.grad
    for storage, own in zip(storages, expected, strict=True):
        torch.testing.assert_close(storage.weights[0].detach().view(-1, DIM), own)
    torch.testing.assert_close(weights.grad, expected_weights.grad)


def replicated_tables() -> tuple[FusedLookup, list[Storage]]:
    """Returns the same tables, of weights that every rank has, which an optimizer updates elsewhere."""
    generator = torch.Generator().manual_seed(0)
    storages = [Storage([torch.rand(rows, DIM, generator=generator).requires_grad_()]) for rows in ROWS]
    parts = [TablePart(digit, 0, rows) for digit, rows in zip(DIGITS, ROWS, strict=True)]
    return FusedLookup(Formula([range(DIM)] * 2, True, True), [parts] * 2, [2], storages), storages


def test_each_gradient_is_of_the_weights_that_were_looked_up_though_they_change_elsewhere() -> None:
    lookup, storages = replicated_tables()
    weights = [storage.weights[0] for storage in storages]
    starts = [weight.detach().clone() for weight in weights]
    batches = [IDS, IDS.flip(0)]
    outputs = [lookup(ids, OFFSETS, None, storages) for ids in batches]
    for ids, own in zip(batches, outputs, strict=True):
        own.square().sum().backward()
        rows = [one.clone().requires_grad_() for one in starts]
        each = rows[0][ids % 25] * rows[1][ids // 25]
        torch.stack([bag.sum(0) for bag in each.tensor_split(OFFSETS[1:-1])]).square().sum().backward()
        for weight, one in zip(weights, rows, strict=True):
            torch.testing.assert_close(weight.grad, one.grad)
            with torch.no_grad():
                weight.sub_(weight.grad)
            weight.grad = None


@pytest.mark.parametrize("graph_is_retained", [False, True])
def test_weights_that_have_changed_since_they_were_looked_up_are_refused(graph_is_retained: bool) -> None:
    lookup, storages = replicated_tables()
    outputs = lookup(IDS, OFFSETS, None, storages)
    if graph_is_retained:
        outputs.sum().backward(retain_graph=True)
    with torch.no_grad():
        storages[1].weights[0].mul_(2)
    with pytest.raises(UserError, match="an optimizer steps before the backward pass.*kernel='fbgemm'"):
        outputs.sum().backward()


def test_rows_that_have_changed_are_not_kept_for_a_batch_that_waits() -> None:
    lookup, storages = replicated_tables()
    waits = lookup(IDS, OFFSETS, None, storages)
    with torch.no_grad():
        storages[0].weights[0].mul_(2)
    lookup(IDS, OFFSETS, None, storages).sum().backward()
    with pytest.raises(UserError, match="an optimizer steps before the backward pass"):
        waits.sum().backward()


def test_a_graph_may_be_gone_through_again_where_nothing_is_updated() -> None:
    lookup, storages = replicated_tables()
    outputs = lookup(IDS, OFFSETS, None, storages)
    outputs.sum().backward(retain_graph=True)
    once = [storage.weights[0].grad.clone() for storage in storages if storage.weights[0].grad is not None]
    outputs.sum().backward()
    assert len(once) == 2
    for storage, gradient in zip(storages, once, strict=True):
        torch.testing.assert_close(storage.weights[0].grad, 2 * gradient)


def test_batches_that_are_let_go_are_not_kept() -> None:
    lookup, storages = tables()
    let_go = lookup(IDS, OFFSETS, None, storages)
    waits = lookup(IDS, OFFSETS, None, storages)
    with torch.no_grad():
        evaluated = lookup(IDS, OFFSETS, None, storages)
    assert len(lookup._waiting) == 2 and not evaluated.requires_grad
    del let_go
    assert len(lookup._waiting) == 1
    waits.sum().backward()
    assert len(lookup._waiting) == 0


def test_a_lookup_is_copied_without_what_waits() -> None:
    lookup, storages = tables()
    outputs = lookup(IDS, OFFSETS, None, storages)
    for copied in (copy.deepcopy(lookup), pickle.loads(pickle.dumps(lookup))):
        assert len(copied._waiting) == 0
        assert torch.equal(copied(IDS, OFFSETS, None, storages), outputs)
    assert len(lookup._waiting) == 1


def test_ids_that_are_overwritten_are_refused() -> None:
    lookup, storages = tables()
    ids = IDS.clone()
    outputs = lookup(ids, OFFSETS, None, storages)
    ids.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_all_shares_have_ended_when_one_fails() -> None:
    ended, goes_on = threading.Event(), threading.Event()

    def share(number: int, num_shares: int) -> None:
        if number == 0:
            goes_on.set()
            raise KeyboardInterrupt
        assert goes_on.wait(60)
        threading.Event().wait(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_threads(share, 2)
    assert ended.is_set()


def test_no_more_threads_are_started_than_there_are_cores() -> None:
    shares: list[tuple[int, int]] = []
    for number in range(1, 20):
        in_threads(lambda share, num_shares: shares.append((share, num_shares)), number)
    assert sorted(shares) == sorted((share, number) for number in range(1, 20) for share in range(number))
    started = [thread for thread in threading.enumerate() if thread.name.startswith("distembed-fused")]
    assert len(started) <= (os.cpu_count() or 1)


def check_rates(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    case: Case = (PLAIN, {"lr": 0.1, "eps": 1e-2}, {}, "table_wise", "")
    found = []
    for kernel in ("fused", "fbgemm"):
        model = build(case, kernel)
        assert is_fused(model) == (kernel == "fused")
        torch.nn.init.ones_(next(iter(model.module.embeddings.parameters())))
        group = model.fused_optimizer.param_groups[0]
        for rate in (0.5, 0.05):
            outputs = model.module.embeddings(features()).values()
            group["lr"] = rate  # for the next batch
            model.fused_optimizer.zero_grad()  # which tells FBGEMM
            outputs.square().sum().backward()
        found.append(model.module.embeddings(features()).values().detach())
    torch.testing.assert_close(*found)


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([1, 63, 5, 1]), lengths=torch.tensor([1, 0, 3]))


@pytest.mark.distributed
def test_the_rate_is_that_of_the_forward_pass() -> None:
    run_on_ranks(1, check_rates)


def check_dtypes(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    case: Case = (PLAIN, {"lr": 0.1}, {}, "data_parallel", "")
    models: list[Any] = [build(case, kernel) for kernel in ("fused", "fbgemm")]
    models[1].load_state_dict(models[0].state_dict())
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        outputs = []
        for model in models:
            model.to(dtype)
            outputs.append(model.module.embeddings(features()).values())
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(*outputs)
        for own, other in zip(*[model.parameters() for model in models], strict=True):
            assert own.dtype == dtype
            torch.testing.assert_close(own, other)  # updated by the optimizer, in the backward pass


@pytest.mark.distributed
def test_weights_that_every_rank_has_are_read_in_any_dtype() -> None:
    run_on_ranks(1, check_dtypes)
