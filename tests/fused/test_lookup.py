"""The fused lookup on a CPU against a plain computation: outputs, gradients, rows and states, over what it admits."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.kernels.operation import FusedLookup
from distembed.kernels.tables import OPTIMIZERS
from distembed.partitions.base import Digit
from tests.fused.cases import (
    BATCHES,
    Batch,
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
from tests.partitions.test_multi_hash import value_that_is_hashed_again

DIMS = (4, 8, 12, 16, 64, 100, 256)
BORDERS = (1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1)
PRIMES = (3, 7, 97, 65_537, 4_294_967_291, 4_294_967_311, 2**61 - 1)
CENTRES = (0, 1, 1000, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 10**12 + 39, 2**53 + 1, 2**62 - 1, 2**62)
QUOTIENT_REMAINDER = Table([Digit(1, 25), Digit(25, None)], 30, max_id=99)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["product", "sum", "columns"]))
    dim = draw(st.sampled_from(DIMS))
    k = draw(st.integers(1, min(3, dim // 4) if kind == "columns" else 3))
    divisors, moduli = st.sampled_from(BORDERS + PRIMES), st.sampled_from((None, 5, 10, 1000) + BORDERS + PRIMES)
    key = st.integers(-(2**63), 2**63 - 1)
    hashed = st.builds(Digit, st.just(1), st.sampled_from((1, 2, 97, 1000)), st.tuples(key, key), st.none())
    truncated = st.builds(Digit, divisors, st.just(None), st.none(), st.sampled_from((0, 1, 97, 1000)) | divisors)
    digits = st.builds(Digit, divisors, moduli, st.none(), st.none()) | hashed | truncated
    tables = draw(
        st.lists(
            st.builds(
                Table,
                st.lists(digits, min_size=k, max_size=k),
                st.sampled_from(CENTRES) | st.integers(0, 2**62),
                st.integers(1, 2),
            ),
            min_size=1,
            max_size=3,
        )
    )
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    is_returned = draw(st.lists(st.sampled_from([False, False, True]), min_size=k, max_size=k))
    halves = draw(st.lists(st.booleans(), min_size=k, max_size=k)) if draw(st.booleans()) else [False] * k
    optimizers = [None if returned else optimizer for returned in is_returned]
    batch, num_bags, seed = draw(st.sampled_from(BATCHES)), draw(st.integers(1, 40)), draw(st.integers(0, 10**6))
    case = Case(tables, columns_of(kind, dim, k), kind == "product", optimizers, halves, batch, num_bags, seed)
    case.gradient_scale, case.margin = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([0, 4, 12]))
    return case


@settings(max_examples=25)
@given(case=cases())
def test_it_equals_a_plain_computation(case: Case) -> None:
    check(case, num_steps=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000)
@given(case=cases())
def test_it_equals_a_plain_computation_in_many_cases(case: Case) -> None:
    check(case)


def grid() -> Iterator[Case]:
    """Each optimizer with each composition and number of partitions; batches, dimensions and types take turns."""
    turn = 0
    for optimizer in OPTIMIZERS:
        for kind in ("product", "sum", "columns"):
            for k in (1, 2, 3):
                tables = [
                    Table([Digit(7**j, 7) for j in range(k - 1)] + [Digit(7 ** (k - 1), None)], 5, 2, max_id=700),
                    Table([Digit(1, 11 + j) for j in range(k)], 5, max_id=2**40),
                ]
                for _ in range(2):
                    columns = columns_of(kind, [dim for dim in DIMS if dim >= 12][turn % 5], k)
                    halves = [turn % 3 == 0] * k
                    batch = BATCHES[turn % len(BATCHES)]
                    yield Case(tables, columns, kind == "product", [optimizer] * k, halves, batch, seed=turn)
                    turn += 1


def test_five_steps_equal_plain_ones_for_each_optimizer_and_composition() -> None:
    for case in grid():
        check(case)


@pytest.mark.parametrize("dim", DIMS)
def test_each_dimension_has_all_of_its_columns(dim: int) -> None:
    check(Case([QUOTIENT_REMAINDER], [range(dim)] * 2, True, ["adagrad"] * 2, [False] * 2, "ragged"))


@pytest.mark.parametrize("number", [*BORDERS, *PRIMES])
def test_rows_of_ids_at_the_borders_are_those_of_python(number: int) -> None:
    ids = {0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1}
    ids |= {number * factor + step for factor in (1, 2, 3, 2**31) for step in (-1, 0, 1)}
    for own_id in sorted(one for one in ids if one < 2**63):
        for digit in (Digit(number, 97), Digit(1, number), Digit(number, number), Digit(number, None)):
            table = Table([Digit(1, 3), digit], own_id, max_id=2**63 - 1)
            case = Case([table], [range(4)] * 2, True, ["sgd"] * 2, [False] * 2, "single", num_bags=1)
            fused, side = Fused(case, Side(case)), Side(case)
            rows = [
                row - first
                for row, (first, _) in zip((own_id % 3, *table.rows(own_id)[1:]), table.windows, strict=True)
            ]
            batch = draw_batch(case, 0)
            batch.ids = [[[own_id]]]
            expected = side.weights[0][0][rows[0]] * side.weights[1][0][rows[1]]
            torch.testing.assert_close(fused.outputs(batch)[0], expected.float())


TRUNCATED = Table([Digit(1, None, last_row=400), Digit(1, None, last_row=30)], 31, 2, max_id=900)


@pytest.mark.parametrize("batch", ["ragged", "sequence"])
@pytest.mark.parametrize("kind", ["product", "sum", "columns"])
def test_rows_that_ids_from_the_last_row_on_share(kind: str, batch: str) -> None:
    check(Case([TRUNCATED], columns_of(kind, 16, 2), kind == "product", ["adagrad"] * 2, [False] * 2, batch))


HASHED = Table([Digit(1, 97, (-5, 7)), Digit(1, 4096, (2**62, -(2**63)))], 30, 2)


@pytest.mark.parametrize("batch", ["ragged", "sequence"])
@pytest.mark.parametrize("kind", ["product", "sum", "columns"])
def test_rows_of_hashed_ids(kind: str, batch: str) -> None:
    check(Case([HASHED], columns_of(kind, 16, 2), kind == "product", ["adagrad"] * 2, [False] * 2, batch))


def test_an_id_whose_first_hash_is_in_the_incomplete_run() -> None:
    value, modulus = value_that_is_hashed_again()
    table = Table([Digit(1, 3, (1, 2)), Digit(1, modulus, (0, 0))], value, max_id=2**63 - 1)
    case = Case([table], [range(4)] * 2, True, ["sgd"] * 2, [False] * 2, "single", num_bags=1)
    fused, side = Fused(case, Side(case)), Side(case)
    batch = draw_batch(case, 0)
    batch.ids = [[[value]]]
    rows = [row - first for row, (first, _) in zip(table.rows(value), table.windows, strict=True)]
    expected = side.weights[0][0][rows[0]] * side.weights[1][0][rows[1]]
    torch.testing.assert_close(fused.outputs(batch)[0], expected.float())


@pytest.mark.parametrize("make", [more_rows_than_ids, rows_further_down])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_windows_of_rows(optimizer: str, make: Callable[[str], Case]) -> None:
    check(make(optimizer))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["product", "sum", "columns"])
@pytest.mark.parametrize("dim", [8, 48])
def test_bags_of_more_ids_than_are_mapped_at_once(kind: str, dim: int) -> None:
    table = Table([Digit(1, 400), Digit(400, None)], 50, 2, max_id=4000)
    columns = columns_of(kind, dim, 2)
    # of one step: what it rounds is added up a hundred times in bags of the next
    check(Case([table, table], columns, kind == "product", ["sgd"] * 2, [False] * 2, "long", num_bags=5), 1)


@pytest.mark.parametrize("kind", ["product", "sum", "columns"])
@pytest.mark.parametrize("optimizers", [[None, None], ["adagrad", None], [None, "row_wise_adagrad"]])
def test_partitions_without_an_optimizer_have_their_gradients_returned(kind: str, optimizers: list[str | None]) -> None:
    tables = [QUOTIENT_REMAINDER, Table([Digit(1, 40), Digit(1, 41)], 3, 2, max_id=1000)]
    columns = columns_of(kind, 16, 2)
    check(Case(tables, columns, kind == "product", optimizers, [False] * 2, "weighted", num_bags=20))


def test_without_eps_only_rows_that_occur_are_divided() -> None:
    for optimizer in ("adagrad", "row_wise_adagrad"):
        case = Case([QUOTIENT_REMAINDER], [range(8)] * 2, True, [optimizer] * 2, [False] * 2, "single", 3, eps=0.0)
        fused = Fused(case, Side(case))
        for states in fused.states:
            assert states is not None
            states.zero_()
        batch = draw_batch(case, 0)
        fused.step(batch, torch.ones(3, 8))
        for weights in fused.weights:
            assert all(one.isfinite().all() for one in weights)
    check(Case([QUOTIENT_REMAINDER], [range(8)] * 2, True, ["adagrad"] * 2, [False] * 2, "ragged", 3, eps=0.0))


def test_bags_of_one_feature_are_none_of_anothers() -> None:
    # all ids are in one feature, and there are hundreds of them
    case = Case([QUOTIENT_REMAINDER] * 3, [range(8)] * 2, True, ["adagrad"] * 2, [False] * 2, "ragged", 200)
    plain = Side(case)
    fused = Fused(case, plain)
    batch = draw_batch(case, 0)
    batch.ids[0] = batch.ids[2] = [[] for _ in range(200)]
    outputs = fused.outputs(batch)
    assert not outputs[:, :8].any() and not outputs[:, 16:].any() and outputs[:, 8:16].any()


def threaded_case(batch: str, optimizer: str, kind: str = "product") -> Case:
    tables = [
        Table([Digit(1, 25), Digit(25, None)], 30, 2, max_id=2499),
        Table([Digit(1, 400), Digit(400, None)], 30, max_id=4000),
        Table([Digit(1, 11), Digit(1, 13)], 3, max_id=142),
    ]
    columns = columns_of(kind, 16, 2)
    return Case(tables, columns, kind == "product", [optimizer, None], [True, False], batch, num_bags=300)


def all_numbers(case: Case, batches: Sequence[Batch], num_threads: int) -> list[torch.Tensor]:
    """Outputs, gradients, rows and states of a step for each batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        fused, found = Fused(case, Side(case)), []
        generator = torch.Generator().manual_seed(1)
        for batch in batches:
            with torch.no_grad():
                shape = fused.outputs(batch).shape
            outputs, returned = fused.step(batch, torch.randn(shape, generator=generator))
            found += [outputs, *(one.clone() for own in returned for one in own if one is not None)]
        weights = [one for own in fused.weights for one in own]
        return found + [one.detach() for one in (*weights, *fused.states) if one is not None]
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_threads_gives_the_same_bits(optimizer: str) -> None:
    turns = [(batch, kind) for kind in ("product", "sum", "columns") for batch in ("weighted", "sequence")]
    for batch, kind in turns[sorted(OPTIMIZERS).index(optimizer) % 2 :: 2]:
        case = threaded_case(batch, optimizer, kind)
        batches = [draw_batch(case, step) for step in range(2)]
        first = all_numbers(case, batches, 1)
        for num_threads in (2, 3, 8):
            for own, expected in zip(all_numbers(case, batches, num_threads), first, strict=True):
                assert torch.equal(own, expected)


@pytest.mark.parametrize("batch", ["weighted", "sequence"])
def test_gradients_are_taken_however_they_lie_in_memory(batch: str) -> None:
    case = Case([QUOTIENT_REMAINDER] * 2, [range(8)] * 2, True, ["adagrad", None], [False] * 2, batch, num_bags=30)
    drawn = draw_batch(case, 0)
    shape = Fused(case, Side(case)).outputs(drawn).shape
    wide = torch.randn(shape[0], shape[1] + 9, generator=torch.Generator().manual_seed(0))
    columns = torch.randn(shape[1], shape[0], generator=torch.Generator().manual_seed(1)).t()
    for gradient in (wide[:, 5:-4], wide[:1, 5:-4].expand(shape), wide[0, 0].expand(shape), columns):
        sides = [Fused(case, Side(case)) for _ in range(2)]
        found = sides[0].step(drawn, gradient)
        expected = sides[1].step(drawn, gradient.clone(memory_format=torch.contiguous_format))
        assert all(torch.equal(a, b) for a, b in zip(found[1][1], expected[1][1], strict=True))
        for own, other in zip(sides[0].weights, sides[1].weights, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def test_no_gradient_is_asked_of_a_lookup_under_no_grad() -> None:
    case = Case([QUOTIENT_REMAINDER], [range(8)] * 2, True, ["sgd"] * 2, [False] * 2, "ragged")
    fused = Fused(case, Side(case))
    with torch.no_grad():
        assert not fused.outputs(draw_batch(case, 0)).requires_grad
    assert fused.outputs(draw_batch(case, 0)).requires_grad
    assert isinstance(fused.lookup, FusedLookup)
