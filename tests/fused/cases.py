"""Fused lookups beside a plain computation in float64: ids mapped by Python's integers, autograd, and formulas.

A case has tables whose rows lie in one storage for each partition, as in FBGEMM's, with numbers between them that are
nobody's. Of partitions with many rows, those around the row of one id, the *centre*, are here.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distembed.kernels.operation import FusedLookup
from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.partitions.base import Digit
from tests.partitions.test_hashing import splitmix64

RATE, EPS = 0.1, 1e-2
MOST_ROWS, REACH = 5000, 40
"""How many rows a partition may have to be here as a whole, and else how many on each side of the centre's row."""
NOBODYS = 7.0
BATCHES = ("single", "ragged", "weighted", "empty_bags", "no_ids", "no_bags", "sequence")


def hashed_row(value: int, modulus: int, keys: tuple[int, int]) -> int:
    """The remainder of a hash of 63 bits, which is drawn again in the last, incomplete run of the modulus."""
    before, after = (key % 2**64 for key in keys)
    state = splitmix64((splitmix64(value % 2**64 ^ before) + after) % 2**64)
    while state >> 1 >= 2**63 - 2**63 % modulus:
        state = splitmix64(state)
    return (state >> 1) % modulus


@dataclass
class Table:
    """A table, and the ids that can be looked up in it.

    Attributes:
        digits: The rule of each partition.
        centre: An id that can be looked up.
        num_features: How many features look ids up in it.
        max_id: The largest id.
    """

    digits: Sequence[Digit]
    centre: int
    num_features: int = 1
    max_id: int = 2**62
    windows: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.centre = min(self.centre, self.max_id)
        self.windows = []
        for digit, row in zip(self.digits, self.rows(self.centre), strict=True):
            most = digit.modulus or self.max_id // digit.divisor + 1
            most = most if digit.last_row is None else min(most, digit.last_row + 1)
            first = 0 if most <= MOST_ROWS else max(0, row - REACH)
            self.windows.append((first, min(most - first, 2 * REACH) if most > MOST_ROWS else most))

    def rows(self, own_id: int) -> list[int]:
        rows = [
            hashed_row(own_id, m, keys) if keys and m else own_id // d if m is None else own_id // d % m
            for d, m, keys, _ in self.digits
        ]
        lasts = [digit.last_row for digit in self.digits]
        return [row if last is None else min(row, last) for row, last in zip(rows, lasts, strict=True)]

    def has(self, own_id: int) -> bool:
        own = zip(self.windows, self.rows(own_id), strict=True)
        return 0 <= own_id <= self.max_id and all(first <= row < first + number for (first, number), row in own)

    def draw(self, number: int, rng: random.Random) -> list[int]:
        """Ids near the centre and far from it, some of them several times."""
        steps = [1, 2, 3, *(digit.divisor for digit in self.digits), *(digit.modulus or 1 for digit in self.digits)]
        steps += [math.lcm(*(digit.divisor * (digit.modulus or 1) for digit in self.digits))]
        found = [self.centre]
        for _ in range(6 * number):
            tried = self.centre + rng.choice(steps) * rng.randint(-60, 60) + rng.choice(steps) * rng.randint(-3, 3)
            tried = rng.choice([tried, rng.randint(0, self.max_id)])
            if self.has(tried):
                found.append(tried)
        return rng.choices(found, k=number)


@dataclass
class Case:
    """What is looked up, and how.

    Attributes:
        tables: The tables.
        columns: The columns of the composed vector that each partition takes part in.
        is_product: Whether vectors are multiplied; else each is added where its columns are.
        optimizers: The optimizer of each partition; None where gradients are returned.
        halves: Whether each partition's rows are float16.
        batch: One of :data:`BATCHES`, or ``long`` for bags of more ids than kernels map at once.
        num_bags: Number of bags of a feature.
        seed: Of all that is drawn.
        eps: What is added to denominators.
        gradient_scale: Factor of the gradients that are returned.
        margin: How many columns weights whose gradients are returned have on each side of those that take part.
    """

    tables: Sequence[Table]
    columns: Sequence[range]
    is_product: bool
    optimizers: Sequence[str | None]
    halves: Sequence[bool]
    batch: str
    num_bags: int = 5
    seed: int = 0
    eps: float = EPS
    gradient_scale: int = 1
    margin: int = 0


def columns_of(kind: str, dim: int, k: int) -> list[range]:
    """Columns of ``k`` partitions; in the kind ``columns`` side by side, of unequal numbers."""
    if kind != "columns":
        return [range(dim)] * k
    ends = [max(dim // 4, k) * (j + 1) // k * 4 for j in range(k)]
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def more_rows_than_ids(optimizer: str) -> Case:
    """More rows than ids in every partition."""
    table = Table([Digit(1, 4000), Digit(3, 3000), Digit(5, 2000)], 50, max_id=10**9)
    return Case([table, table], [range(8)] * 3, True, [optimizer] * 3, [False] * 3, "ragged", num_bags=20)


def rows_further_down(optimizer: str) -> Case:
    """Rows that begin further down, as one rank's rows of a table that is divided by rows."""
    table = Table([Digit(1, 10**6), Digit(10**6, None)], 7 * 10**6 + 456_789, max_id=10**8)
    assert table.windows[0][0] == 456_789 - 40 and table.windows[1] == (0, 101)
    return Case([table], [range(12)] * 2, True, [optimizer] * 2, [False] * 2, "ragged", num_bags=20)


@dataclass
class Batch:
    """Ids of all features, and where the bags of each feature begin and end within them."""

    ids: list[list[list[int]]]
    weights: list[list[list[float]]]


class Side:
    """Rows of all tables, and the optimizers' states: of each partition and table a tensor of its own, in float64."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        self.weights: list[list[Tensor]] = []
        self.states: list[list[Tensor]] = []
        for j, own in enumerate(case.columns):
            shapes = [(table.windows[j][1], len(own)) for table in case.tables]
            drawn = [torch.randn(shape, generator=generator) for shape in shapes]
            self.weights.append([(one.half() if case.halves[j] else one).double() for one in drawn])
            per_row = case.optimizers[j] == "row_wise_adagrad"
            self.states.append([torch.rand(s[:1] if per_row else s, generator=generator).double() for s in shapes])


def draw_batch(case: Case, step: int) -> Batch:
    rng = random.Random(1000 * case.seed + step)
    num_bags = 0 if case.batch == "no_bags" else case.num_bags
    batch = Batch([], [])
    for table in case.tables:
        for _ in range(table.num_features):
            if case.batch == "single":
                sizes = [1] * num_bags
            elif case.batch == "no_ids":
                sizes = [0] * num_bags
            elif case.batch == "empty_bags":
                sizes = [rng.choice([0, 0, 1, 3]) for _ in range(num_bags)]
            elif case.batch == "long":
                sizes = [rng.randint(0, 200) for _ in range(num_bags)]
            elif case.batch == "sequence":
                sizes = [1] * rng.randint(0, 2 * num_bags)
            else:
                sizes = [rng.randint(0, 4) for _ in range(num_bags)]
            batch.ids.append([table.draw(size, rng) for size in sizes])
            batch.weights.append([[rng.uniform(-1, 2) for _ in range(size)] for size in sizes])
    return batch


def plain_outputs(case: Case, weights: Sequence[Sequence[Tensor]], batch: Batch) -> Tensor:
    """Composes one id after the other."""
    width = max(own.stop for own in case.columns)
    features, feature = [], 0
    for number, table in enumerate(case.tables):
        for _ in range(table.num_features):
            vectors = []
            for ids, factors in zip(batch.ids[feature], batch.weights[feature], strict=True):
                pooled = torch.zeros(width, dtype=torch.float64)
                for own_id, factor in zip(ids, factors, strict=True):
                    rows = zip(table.rows(own_id), table.windows, strict=True)
                    found = [weights[j][number][row - first] for j, (row, (first, _)) in enumerate(rows)]
                    composed = _compose(case, found, width)
                    pooled = pooled + (factor if case.batch == "weighted" else 1.0) * composed
                vectors.append(pooled)
            features.append(torch.stack(vectors) if vectors else torch.zeros(0, width, dtype=torch.float64))
            feature += 1
    return torch.cat(features, dim=0 if case.batch == "sequence" else 1)


def _compose(case: Case, vectors: Sequence[Tensor], width: int) -> Tensor:
    if case.is_product:
        composed = torch.ones(width, dtype=torch.float64)
        for vector in vectors:
            composed = composed * vector
        return composed
    return sum(
        (
            torch.nn.functional.pad(vector, (own.start, width - own.stop))
            for own, vector in zip(case.columns, vectors, strict=True)
        ),
        torch.zeros(width, dtype=torch.float64),
    )


def plain_step(case: Case, side: Side, batch: Batch, gradient: Tensor) -> tuple[Tensor, list[list[Tensor] | None]]:
    """Returns the outputs, and the gradients of partitions without an optimizer; updates the others' rows."""
    weights = [[one.clone().requires_grad_() for one in own] for own in side.weights]
    outputs = plain_outputs(case, weights, batch)
    if outputs.requires_grad:
        outputs.backward(gradient.double())
    returned: list[list[Tensor] | None] = []
    occurring = _occurring(case, batch)
    for j, optimizer in enumerate(case.optimizers):
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights[j]]
        returned.append(gradients if optimizer is None else None)
        for number, own in enumerate(gradients):
            if optimizer is not None and occurring[j][number]:
                rows = torch.tensor(sorted(occurring[j][number]))
                _update(optimizer, side.weights[j][number], side.states[j][number], rows, own[rows], case.eps)
                if case.halves[j]:
                    side.weights[j][number] = side.weights[j][number].half().double()
    return outputs.detach(), returned


def _occurring(case: Case, batch: Batch) -> list[list[set[int]]]:
    """The rows that any id of the batch has, of each partition and table."""
    found: list[list[set[int]]] = [[set() for _ in case.tables] for _ in case.columns]
    tables = [(number, table) for number, table in enumerate(case.tables) for _ in range(table.num_features)]
    for (number, table), bags in zip(tables, batch.ids, strict=True):
        for own_id in (one for bag in bags for one in bag):
            for j, (row, (first, _)) in enumerate(zip(table.rows(own_id), table.windows, strict=True)):
                found[j][number].add(row - first)
    return found


def _update(optimizer: str, weight: Tensor, state: Tensor, rows: Tensor, gradient: Tensor, eps: float) -> None:
    if optimizer == "sgd":
        weight[rows] -= RATE * gradient
    elif optimizer == "adagrad":
        state[rows] += gradient.square()
        weight[rows] -= RATE * gradient / (state[rows].sqrt() + eps)
    else:
        state[rows] += gradient.square().mean(dim=1)
        weight[rows] -= RATE * gradient / (state[rows].sqrt() + eps).unsqueeze(1)


class Fused:
    """The same rows and states in storages, and the fused lookup of them.

    Args:
        case: The case.
        side: What rows and states start from.
        lookup: Makes the lookup from what :class:`FusedLookup` takes.
    """

    def __init__(self, case: Case, side: Side, lookup: Callable[..., Any] = FusedLookup) -> None:
        self.case = case
        self.weights = [
            [one.to(torch.float16 if half else torch.float32).requires_grad_() for one in tensors]
            for own, columns, half, optimizer in zip(
                side.weights, case.columns, case.halves, case.optimizers, strict=True
            )
            for tensors in [self._whole(own) if optimizer is None else [_storage(own, 3 * len(columns))]]
        ]
        self.states = [
            None if optimizer in (None, "sgd") else _storage(own, 3).float()
            for own, optimizer in zip(side.states, case.optimizers, strict=True)
        ]
        self.storages = [
            Storage(
                [self._taken(one) for one in weights] if optimizer is None else weights,
                optimizer,
                states,
                RATE,
                case.eps,
                case.gradient_scale,
            )
            for weights, optimizer, states in zip(self.weights, case.optimizers, self.states, strict=True)
        ]
        parts = []
        for number, table in enumerate(case.tables):
            own_parts = []
            for j, (digit, (first, rows)) in enumerate(zip(table.digits, table.windows, strict=True)):
                weight_start = 0
                if case.optimizers[j] is not None:
                    weight_start = _start(side.weights[j], number, 3 * len(case.columns[j]))
                own_parts.append(TablePart(digit, first, rows, weight_start, _start(side.states[j], number, 3)))
            parts += [own_parts] * table.num_features
        self.lookup = lookup(
            Formula(case.columns, case.is_product, case.batch != "sequence"),
            parts,
            [table.num_features for table in case.tables],
            self.storages,
        )

    def _whole(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Weights with the columns that take no part."""
        return [torch.nn.functional.pad(one, (self.case.margin, self.case.margin), value=NOBODYS) for one in tensors]

    def _taken(self, weight: Tensor) -> Tensor:
        return weight[:, self.case.margin : weight.shape[1] - self.case.margin] if self.case.margin else weight

    def outputs(self, batch: Batch) -> Tensor:
        bags = [bag for own in batch.ids for bag in own]
        ids = torch.tensor([one for bag in bags for one in bag], dtype=torch.int64)
        offsets = torch.tensor([0] + [len(bag) for bag in bags]).cumsum(0)
        weights = None
        if self.case.batch == "weighted":
            weights = torch.tensor([one for own in batch.weights for bag in own for one in bag])
        counts = [sum(map(len, own)) for own in batch.ids] if self.case.batch == "sequence" else None
        return self.lookup(ids, offsets, weights, self.storages, counts)

    def step(self, batch: Batch, gradient: Tensor) -> tuple[Tensor, list[list[Tensor | None]]]:
        """Returns the outputs, and the gradients of every partition's weights."""
        for weights in self.weights:
            for one in weights:
                one.grad = None
        outputs = self.outputs(batch)
        outputs.backward(gradient)
        return outputs.detach(), [[one.grad for one in weights] for weights in self.weights]


def gap(number: int, gap_numbers: int) -> int:
    """How many numbers that are nobody's lie before a table's."""
    return gap_numbers * (number + 1)


def _storage(tensors: Sequence[Tensor], gap_numbers: int) -> Tensor:
    """All tables' numbers, with some of nobody's before each and behind the last."""
    pieces = []
    for number, tensor in enumerate(tensors):
        pieces += [torch.full((gap(number, gap_numbers),), NOBODYS).double(), tensor.flatten()]
    return torch.cat([*pieces, torch.full((gap_numbers,), NOBODYS).double()])


def _start(tensors: Sequence[Tensor], number: int, gap_numbers: int) -> int:
    before = sum(tensor.numel() for tensor in tensors[:number])
    return before + sum(gap(other, gap_numbers) for other in range(number + 1))


def check(case: Case, num_steps: int = 5, lookup: Callable[..., Any] = FusedLookup) -> None:
    """Fused and plain steps give the same outputs, gradients, rows and states; nothing else is written."""
    plain = Side(case)
    fused = Fused(case, plain, lookup)
    first = [[one.detach().clone() for one in weights] for weights in fused.weights]
    touched: list[list[set[int]]] = [[set() for _ in case.tables] for _ in case.columns]
    close: dict[str, float] = {"rtol": 4e-3, "atol": 4e-3} if any(case.halves) else {"rtol": 2e-4, "atol": 2e-5}
    for step in range(num_steps):
        batch = draw_batch(case, step)
        generator = torch.Generator().manual_seed(1000 * case.seed + step)
        gradient = torch.randn(plain_outputs(case, plain.weights, batch).shape, generator=generator)
        expected, expected_returned = plain_step(case, plain, batch, gradient)
        outputs, returned = fused.step(batch, gradient)
        torch.testing.assert_close(outputs, expected.float(), **close)
        for j, own in enumerate(expected_returned):
            if own is None:
                assert returned[j] == [None]
                continue
            for gradient_of_table, weight, one in zip(own, fused.weights[j], returned[j], strict=True):
                scaled = torch.nn.functional.pad(gradient_of_table * case.gradient_scale, (case.margin, case.margin))
                torch.testing.assert_close(one, scaled.to(weight.dtype), **close)
        for all_rows, new in zip(touched, _occurring(case, batch), strict=True):
            for rows, new_rows in zip(all_rows, new, strict=True):
                rows |= new_rows
    for j, all_weights in enumerate(fused.weights):
        if case.optimizers[j] is None:
            assert all(torch.equal(one, was) for one, was in zip(all_weights, first[j], strict=True))
            continue
        (weights,) = all_weights
        expected = _storage(plain.weights[j], 3 * len(case.columns[j]))
        torch.testing.assert_close(weights.detach().float(), expected.float(), **close)
        if fused.states[j] is not None:
            torch.testing.assert_close(fused.states[j], _storage(plain.states[j], 3).float(), **close)
        marks = [torch.zeros_like(one) for one in plain.weights[j]]
        for mark, rows in zip(marks, touched[j], strict=True):
            mark[sorted(rows)] = 1
        others = _storage(marks, 3 * len(case.columns[j])) != 1
        assert torch.equal(weights.detach()[others], first[j][0][others]), "a row that does not occur was written"
