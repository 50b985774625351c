"""The fused lookup on CUDA, by Triton's interpreter, against the plain computation that the one on a CPU has."""

import copy
import importlib.util
import pickle
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from distembed.base.errors import UserError
from distembed.kernels.tables import OPTIMIZERS, Formula, Storage, TablePart
from distembed.kernels.triton_backward import CHUNK, JOINED_NUMBERS
from distembed.kernels.triton_lookup import TritonLookup
from distembed.kernels.triton_tables import DeviceTables, num_lanes
from distembed.partitions.base import Digit
from tests.fused.cases import (
    BATCHES,
    Case,
    Fused,
    Side,
    Table,
    check,
    columns_of,
    draw_batch,
    more_rows_than_ids,
    rows_further_down,
)
from tests.fused.interpreter import InterpretedLookup, Run, by_stock, interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

DIMS = (4, 16, 20, 64, 256)
KINDS = ("product", "sum", "columns")
ROWS = (11, 521)
"""Numbers of rows of a table, few enough to be summed in slices and so many that ids are sorted."""
QUOTIENT_REMAINDER = Table([Digit(1, 25), Digit(25, None)], 30, 2, max_id=99)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with interpreter() as own:
        yield own


def steps(case: Case, num_steps: int = 2) -> None:
    check(case, num_steps, InterpretedLookup)


def tables_of(k: int, num_rows: int) -> list[Table]:
    """Two tables; the second has ``num_rows`` rows or some more in each partition."""
    digits = [Digit(5**j, 5) for j in range(k - 1)] + [Digit(5 ** (k - 1), None)]
    return [Table(digits, 5, 2, max_id=300), Table([Digit(3, num_rows + j) for j in range(k)], 5, max_id=2**40)]


def case_of(kind: str, k: int, optimizer: str, turn: int) -> Case:
    columns, halves = columns_of(kind, DIMS[turn % len(DIMS)], k), [turn % 3 == 0] * k
    batch = BATCHES[turn % len(BATCHES)]
    return Case(tables_of(k, ROWS[turn % 2]), columns, kind == "product", [optimizer] * k, halves, batch, seed=turn)


@pytest.mark.thorough
@pytest.mark.parametrize(("turn", "kind"), list(enumerate(KINDS)))
def test_it_equals_a_plain_computation(run: Run, turn: int, kind: str) -> None:
    for k, optimizer in zip((1, 2, 3), OPTIMIZERS, strict=True):
        run(steps, case_of(kind, k, optimizer, 3 * turn + k), 5)


@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES)
def test_it_equals_a_plain_computation_in_every_combination(run: Run, batch: str) -> None:
    for turn, (kind, k, optimizer) in enumerate(product(KINDS, (1, 2, 3), OPTIMIZERS)):
        for halves, rows in ((False, ROWS[turn % 2]), (True, ROWS[1 - turn % 2])):
            columns, tables = columns_of(kind, DIMS[(turn + halves) % len(DIMS)], k), tables_of(k, rows)
            run(steps, Case(tables, columns, kind == "product", [optimizer] * k, [halves] * k, batch, seed=turn))


@pytest.mark.thorough
@pytest.mark.parametrize("optimizers", [[None, None], ["adagrad", None], [None, "row_wise_adagrad"]])
def test_partitions_without_an_optimizer_have_their_gradients_returned(run: Run, optimizers: list[str | None]) -> None:
    for kind in ("product", "sum"):
        columns = columns_of(kind, 8, 2)
        case = Case([QUOTIENT_REMAINDER], columns, kind == "product", optimizers, [False] * 2, "weighted", num_bags=9)
        run(steps, case, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("centre", [2**32, 2**53 + 1, 2**62])
def test_ids_have_64_bits(run: Run, centre: int) -> None:
    tables = [
        Table([Digit(1, 2**31 - 1), Digit(2**31 - 1, None)], centre),
        Table([Digit(1, 7), Digit(centre - 1, 5)], centre),
    ]
    run(steps, Case(tables, [range(4)] * 2, True, ["sgd"] * 2, [False] * 2, "ragged"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "optimizer", ["adagrad", *[pytest.param(own, marks=pytest.mark.slow) for own in OPTIMIZERS if own != "adagrad"]]
)
def test_runs_that_go_over_many_chunks(run: Run, optimizer: str) -> None:
    # a run has more chunks than are read at once, and rows at its sides occur once
    table = Table([Digit(1, 600), Digit(2, 600)], 0, max_id=1)
    num_bags = 3 * CHUNK * num_lanes(1024, JOINED_NUMBERS) // 2
    case = Case([table], [range(1024)] * 2, True, [optimizer] * 2, [False] * 2, "single", num_bags)
    run(steps, case, 1)


def sums_of_rows(ids: torch.Tensor, num_rows: int, gradient: torch.Tensor) -> torch.Tensor:
    """Looks ids up in a sum of a table of so many rows and one of a row, by SGD; returns what each row has lost."""
    storages = [Storage([torch.zeros(rows * 8)], "sgd", None, 1.0) for rows in (num_rows, 1)]
    parts = [TablePart(Digit(1, num_rows), 0, num_rows), TablePart(Digit(num_rows, 1), 0, 1)]
    lookup = TritonLookup(Formula([range(8)] * 2, False, True), [parts], [1], storages)
    lookup(ids, None, None, storages).backward(gradient)
    return -storages[0].weights[0].view(-1, 8)


@pytest.mark.parametrize("length", [2, CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("rows", [60, 100, 512, 600])
def test_many_short_runs_that_cross_chunks_and_slices(run: Run, length: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = (torch.randperm(min(rows * length, 2500), generator=generator) + length // 2) // length
    gradient = torch.randn(len(ids), 8, generator=generator)
    expected = torch.zeros(rows, 8, dtype=torch.float64).index_add_(0, ids % rows, gradient.double())
    torch.testing.assert_close(run(sums_of_rows, ids, rows, gradient), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_reductions_and_scans_are_those_of_the_stock_interpreter(run: Run) -> None:
    generator = torch.Generator().manual_seed(2)
    ids, gradient = torch.randint(5, (70,), generator=generator), torch.randn(70, 8, generator=generator)
    ours, stock = run(sums_of_rows, ids, 5, gradient), run(by_stock, sums_of_rows, ids, 5, gradient)
    assert torch.equal(ours, stock) and ours.count_nonzero() == ours.numel()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "batch", ["ragged", "sequence", *[pytest.param(own, marks=pytest.mark.slow) for own in ("weighted", "empty_bags")]]
)
def test_slices_of_several_features_of_a_table(run: Run, batch: str) -> None:
    # slices of 128 ids, of three features of one table, and tiles of 64
    table = Table([Digit(1, 25), Digit(25, None)], 30, 3, max_id=99)
    tables = [table, Table([Digit(1, 7), Digit(7, None)], 30, max_id=99)]
    run(steps, Case(tables, [range(16)] * 2, True, ["row_wise_adagrad"] * 2, [True] * 2, batch, num_bags=50))


@pytest.mark.thorough
def test_windows_of_rows(run: Run) -> None:
    run(steps, more_rows_than_ids("adagrad"))
    run(steps, rows_further_down("row_wise_adagrad"))


def numbers(fused: Fused) -> list[torch.Tensor]:
    """Rows and states."""
    return [one.detach() for own in fused.weights for one in own] + [one for one in fused.states if one is not None]


def ids_behind_the_last_bag() -> None:
    case = Case([QUOTIENT_REMAINDER], [range(8)] * 2, True, ["adagrad"] * 2, [False] * 2, "ragged", num_bags=9)
    batch = draw_batch(case, 0)
    ids = torch.tensor([one for own in batch.ids for bag in own for one in bag])
    offsets = torch.tensor([0] + [len(bag) for own in batch.ids for bag in own]).cumsum(0)
    sides = [Fused(case, Side(case), InterpretedLookup) for _ in range(2)]
    for fused, more in zip(sides, (0, 700), strict=True):
        outputs = fused.lookup(torch.cat([ids, torch.full((more,), 26)]), offsets, None, fused.storages)
        outputs.backward(torch.ones_like(outputs))
    for own, other in zip(numbers(sides[0]), numbers(sides[1]), strict=True):
        torch.testing.assert_close(own, other)  # sums begin elsewhere


def test_ids_behind_the_last_bag_change_no_row(run: Run) -> None:
    run(ids_behind_the_last_bag)


def bits(case: Case) -> list[torch.Tensor]:
    fused = Fused(case, Side(case), InterpretedLookup)
    batch = draw_batch(case, 0)
    outputs, returned = fused.step(batch, torch.rand(case.num_bags, 2 * 16, generator=torch.Generator().manual_seed(1)))
    return [outputs, *[one for own in returned for one in own if one is not None], *numbers(fused)]


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [25, 600])
def test_two_runs_give_the_same_bits(run: Run, rows: int) -> None:
    table = Table([Digit(1, rows), Digit(rows, None)], 30, 2, max_id=4 * rows)
    case = Case([table], [range(16)] * 2, True, ["adagrad", None], [False] * 2, "weighted", num_bags=50)
    for own, other in zip(run(bits, case), run(bits, case), strict=True):
        assert torch.equal(own, other)


def weights_that_are_no_parameters() -> None:
    case = Case([QUOTIENT_REMAINDER], [range(8)] * 2, True, ["sgd"] * 2, [False] * 2, "ragged", num_bags=9)
    sides = [Fused(case, Side(case), InterpretedLookup) for _ in range(2)]
    for weights in sides[0].weights:
        weights[0].requires_grad_(False)
    for fused in sides:
        fused.step(draw_batch(case, 0), torch.ones(9, 16))
    for own, other in zip(numbers(sides[0]), numbers(sides[1]), strict=True):
        assert torch.equal(own, other)


def test_rows_are_updated_that_are_no_parameters(run: Run) -> None:
    # as are FBGEMM's on CUDA
    run(weights_that_are_no_parameters)


def replicated_columns() -> None:
    """Rows of a range of columns, whose gradients are multiplied, and of another type."""
    digits = [Digit(1, 5), Digit(5, None)]
    whole = [torch.randn(5, 12, requires_grad=True), torch.randn(4, 8).half().requires_grad_()]
    rows = [whole[0][:, 2:10], whole[1]]
    storages = [Storage([own], gradient_scale=scale) for own, scale in zip(rows, (3, 1), strict=True)]
    parts = [[TablePart(digit, 0, number) for digit, number in zip(digits, (5, 4), strict=True)]]
    lookup = TritonLookup(Formula([range(8)] * 2, True, True), parts, [1], storages)
    ids, gradient = torch.arange(20), torch.randn(10, 8)
    outputs = lookup(ids, torch.arange(0, 21, 2), None, storages)
    outputs.backward(gradient)
    own = [one.grad for one in whole]
    for one in whole:
        one.grad = None
    expected = (whole[0][ids % 5, 2:10] * whole[1][ids // 5].float()).view(10, 2, 8).sum(1)
    torch.testing.assert_close(outputs, expected)
    expected.backward(gradient)
    assert own[0] is not None and own[1] is not None and whole[0].grad is not None and whole[1].grad is not None
    torch.testing.assert_close(own[0], 3 * whole[0].grad)
    torch.testing.assert_close(own[1], whole[1].grad, rtol=4e-3, atol=4e-3)


def test_gradients_of_ranges_of_columns_are_scaled(run: Run) -> None:
    run(replicated_columns)


def rounded(seed: int | None, number: float = 1.5, change: float = 0.3 * 2**-10, num_rows: int = 64) -> torch.Tensor:
    """What 64 equal numbers of each row become from each of which as much is taken."""
    weights = [torch.full((rows * 64,), number if rows > 1 else 1.0).half() for rows in (num_rows, 1)]
    seeds = None if seed is None else (lambda: seed)
    storages = [Storage([own], "sgd", None, 1.0, rounding_seed=seeds) for own in weights]
    parts = [[TablePart(Digit(1, num_rows), 0, num_rows), TablePart(Digit(num_rows, None), 0, 1)]]
    lookup = TritonLookup(Formula([range(64)] * 2, True, True), parts, [1], storages)
    lookup(torch.arange(num_rows), None, None, storages).backward(torch.full((num_rows, 64), change))
    return weights[0]


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [64, 520])
def test_rows_are_rounded_at_random_by_a_seed(run: Run, rows: int) -> None:
    below, step = 1.5 - 2**-10, (1.5, 0.3 * 2**-10, rows)
    assert (run(rounded, None, *step) == 1.5).all()
    first, again, other = (run(rounded, seed, *step) for seed in (1, 1, 2))
    for own in (first, other):
        assert ((own == 1.5) | (own == below)).all()
        # 4 standard deviations
        assert abs((own == below).double().mean() - 0.3) < 4 * (0.21 / len(own)) ** 0.5
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1.0, -1.0, 0.25, 3.1, 2**-14, 3 * 2**-24, 0.0])
def test_rounding_at_random_keeps_the_mean(run: Run, number: float) -> None:
    exact = float(torch.tensor(number).half())
    assert (run(rounded, 1, exact, 0.0) == exact).all()
    below = torch.nextafter(torch.tensor(exact).half(), torch.tensor(-torch.inf).half()).double()
    distance = float(exact - below)
    found = run(rounded, 2, exact, 0.25 * distance).double()
    assert ((found == exact) | (found == below)).all()
    # 4 standard deviations
    assert abs(found.mean() - (exact - 0.25 * distance)) < 4 * distance * (0.1875 / len(found)) ** 0.5


def product_of_two(optimizer: str | None) -> tuple[TritonLookup, list[Storage]]:
    storages = [Storage([torch.rand(rows, 8, requires_grad=True)], optimizer) for rows in (25, 4)]
    parts = [TablePart(digit, 0, rows) for digit, rows in zip(QUOTIENT_REMAINDER.digits, (25, 4), strict=True)]
    return TritonLookup(Formula([range(8)] * 2, True, True), [parts], [1], storages), storages


def rows_by_sums(gradients: list[float], num_rows: int, state: float, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Updates rows by Adagrad, of which four ids have rows 0, 0, 2 and 2; returns the first four rows and states."""
    storages = [
        Storage([torch.ones(rows * 4)], "adagrad", torch.full((rows * 4,), state), 0.1, eps)
        for rows in (num_rows, 2000)
    ]
    parts = [TablePart(Digit(2, num_rows), 0, num_rows), TablePart(Digit(1, None), 0, 2000)]
    lookup = TritonLookup(Formula([range(4)] * 2, True, True), [parts], [1], storages)
    ids = torch.cat([torch.tensor([0, 1, 4, 5]), torch.arange(8, 8 + num_rows)])  # as many ids as rows, and some
    vectors = lookup(ids, None, None, storages)
    vectors.backward(torch.tensor(gradients + [1.0] * num_rows)[:, None].expand(-1, 4))
    states = storages[0].states
    assert states is not None
    return storages[0].weights[0].view(-1, 4)[:4, 0], states.view(-1, 4)[:4, 0]


@pytest.mark.parametrize("rows", [9, 600])
def test_sums_of_zero_leave_rows_and_sums_that_are_no_numbers_reach_them(run: Run, rows: int) -> None:
    """By slices, and by sorted ids whose sums wait at their keys."""
    found, states = run(rows_by_sums, [1.0, -1.0, 2.0, 0.0], rows, 1.0, 1e-2)
    assert found.tolist() == pytest.approx([1, 1, 1 - 0.2 / (5**0.5 + 0.01), 1]) and states.tolist() == [1, 1, 5, 1]
    found, states = run(rows_by_sums, [1.0, -1.0, 2.0, 0.0], rows, 0.0, 0.0)
    assert found.tolist() == pytest.approx([1, 1, 0.9, 1]) and states.tolist() == [0, 0, 4, 0]
    found, _ = run(rows_by_sums, [1.0, float("nan"), 0.0, 0.0], rows, 1.0, 1e-2)
    assert found.isnan().tolist() == [True, False, False, False]


@pytest.mark.parametrize(("num_ids", "num_bags"), [(2**31, 1), (0, 2**31)])
def test_more_ids_or_bags_than_kernels_count_are_refused(num_ids: int, num_bags: int) -> None:
    lookup, _ = product_of_two("sgd")
    refusal = rf"has {num_ids} ids in {num_bags} bags, and at most 2147483647 .* smaller batches"
    with pytest.raises(UserError, match=refusal):
        lookup.find_keys(torch.empty(num_ids, device="meta"), torch.empty(num_bags + 1, device="meta"), True)


@pytest.mark.parametrize(
    ("start", "num_columns", "dtype", "expected"),
    [(6, 4, torch.float32, 2), (8, 4, torch.float32, 4), (16, 24, torch.float16, 8), (4, 8, torch.float16, 4)],
)
def test_rows_begin_at_multiples_that_divide_every_start(
    start: int, num_columns: int, dtype: torch.dtype, expected: int
) -> None:
    storage = Storage([torch.zeros(99, dtype=dtype)], "adagrad", torch.zeros(99))
    part = TablePart(Digit(1, None), 0, 2, start, 3 * start)
    tables = DeviceTables(Formula([range(num_columns)], True, True), [[part]], [1], [storage])
    assert tables.multiples == (expected,)
    assert tables.state_multiples == (min(expected, 4),)


def lookups_before_backward_passes(is_product: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Looks two batches up before either goes back; returns the rows and what was refused."""
    storages = [Storage([torch.ones(rows * 8)], "sgd", None, 1.0) for rows in (25, 4)]
    parts = [TablePart(digit, 0, rows) for digit, rows in zip(QUOTIENT_REMAINDER.digits, (25, 4), strict=True)]
    lookup, said = TritonLookup(Formula([range(8)] * 2, is_product, True), [parts], [1], storages), []
    for outputs in [lookup(torch.tensor([0, 26]), None, None, storages) for _ in range(2)]:
        try:
            outputs.sum().backward()
        except UserError as error:
            said.append(str(error))
    return [storage.weights[0].view(-1, 8)[:3, 0] for storage in storages], said


@pytest.mark.parametrize(("is_product", "left"), [(False, -1.0), (True, 0.0)])
def test_a_second_lookup_before_the_backward_pass_of_the_first(run: Run, is_product: bool, left: float) -> None:
    """Sums go back through both; gradients of the second product depend on rows that the first has updated."""
    rows, said = run(lookups_before_backward_passes, is_product)
    assert [own.tolist() for own in rows] == [[left, left, 1.0]] * 2
    assert len(said) == is_product and all("kernel='fbgemm'" in own for own in said)


@pytest.mark.parametrize("batch", ["no_ids", "no_bags"])
@pytest.mark.parametrize("num_rows", ROWS)
def test_batches_without_ids_change_no_row(run: Run, batch: str, num_rows: int) -> None:
    run(steps, Case(tables_of(2, num_rows), [range(8)] * 2, True, ["adagrad", None], [False] * 2, batch))


def numbers_of_bags_of_one(offsets: torch.Tensor | None, trains: bool) -> list[torch.Tensor | None]:
    """Outputs, and gradients where it trains."""
    torch.manual_seed(1)
    lookup, storages = product_of_two(None)
    with torch.set_grad_enabled(trains):
        outputs = lookup(torch.arange(0, 100, 3), offsets, None, storages)
    if trains:
        outputs.backward(torch.rand(34, 8))
    return [outputs.detach(), *[storage.weights[0].grad for storage in storages if trains]]


@pytest.mark.parametrize("trains", [True, False])
def test_bags_of_one_id_need_no_offsets(run: Run, trains: bool) -> None:
    both = (run(numbers_of_bags_of_one, offsets, trains) for offsets in (None, torch.arange(35)))
    for without, with_offsets in zip(*both, strict=True):
        assert torch.equal(without, with_offsets)


def refusals_of_changed_rows() -> list[str]:
    """What a second backward pass says when the first has updated rows, and a first one when an optimizer has."""
    said = []
    for optimizer in ("sgd", None):
        lookup, storages = product_of_two(optimizer)
        outputs = lookup(torch.arange(100), torch.arange(101), None, storages)
        outputs.sum().backward(retain_graph=True)
        if optimizer is None:
            with torch.no_grad():
                storages[0].weights[0].mul_(2)
        try:
            outputs.sum().backward()
        except UserError as error:
            said.append(str(error))
    return said


def test_gradients_of_rows_that_have_changed_since_are_refused(run: Run) -> None:
    said = run(refusals_of_changed_rows)
    assert len(said) == 2 and all("kernel='fbgemm'" in own for own in said)


def copies_and_outputs() -> list[torch.Tensor]:
    lookup, storages = product_of_two(None)
    batch = (torch.arange(100), torch.arange(101), None, storages)
    outputs = [lookup(*batch)]
    outputs += [own(*batch) for own in (copy.deepcopy(lookup), pickle.loads(pickle.dumps(lookup)))]
    return [own.detach() for own in outputs]


def test_a_lookup_that_was_used_is_copied(run: Run) -> None:
    own, *copied = run(copies_and_outputs)
    assert own.shape == (100, 8) and all(torch.equal(own, other) for other in copied)


def numbers_of_optimizers() -> dict[str, int]:
    from distembed.kernels import triton_update as kernels

    names = {
        "sgd": kernels.UPDATE_SGD,
        "adagrad": kernels.UPDATE_ADAGRAD,
        "row_wise_adagrad": kernels.UPDATE_ROW_WISE_ADAGRAD,
    }
    return {name: number.value for name, number in names.items()}


def test_optimizers_have_the_numbers_that_kernels_know_them_by(run: Run) -> None:
    assert run(numbers_of_optimizers) == OPTIMIZERS
