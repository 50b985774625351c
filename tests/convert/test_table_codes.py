"""The codes of one table, and the choice of sizes of several, compared with NumPy and with all choices."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.composition import Concat
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_weights
from distembed.partitions import Explicit
from distembed.serving.convert.table_codes import (
    SCHEMES,
    CodePoints,
    CodeShape,
    Scheme,
    candidate_shapes,
    nearest_bits,
    quantise,
    shape_of_bits,
)
from distembed.serving.convert.table_sizes import Option, TableSizes, lower_hull, total_bytes
from distembed.serving.convert.tables import fit_table

DIM, IDS = 8, 300
COUNTS = torch.from_numpy(np.sort(np.random.default_rng(1).zipf(1.4, IDS))[::-1].copy().clip(max=10_000))
SHAPES = {
    "one": CodeShape("one", 1, 16),
    "product": CodeShape("product", 2, 16),
    "residual": CodeShape("residual", 2, 8),
}


def vectors(seed: int = 0, num_ids: int = IDS) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(num_ids, DIM)).astype(np.float32))


def points_of(*tables: torch.Tensor, min_count: int = 0) -> CodePoints:
    counts = COUNTS[: len(tables[0])]
    return CodePoints.of(tables, counts.double(), counts < min_count, torch.device("cpu"), 4)


def as_table(points: CodePoints, shape: CodeShape) -> CompositionalEmbeddingConfig:
    assignments = [own[points.point_of_id] for own in quantise(points, shape).codes]
    scheme = Explicit(len(points.point_of_id), assignments, allow_collisions=True)
    return CompositionalEmbeddingConfig("t", scheme.num_embeddings, DIM, ["f"], scheme, shape.composition)


@pytest.mark.parametrize("min_count", [0, 3, 10**6])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_distortion_is_that_of_codebooks_fitted_to_the_codes(scheme: str, min_count: int) -> None:
    full, points = vectors(), points_of(vectors(), min_count=min_count)
    coded = quantise(points, SHAPES[scheme])
    table = as_table(points, SHAPES[scheme])
    fitted = fit_table(table, full, COUNTS)
    ids = torch.arange(IDS)
    composed = table.combine.embed(fitted.weights, table.scheme.rows(ids)).double().numpy()
    weights = id_weights(table, COUNTS).double().numpy()
    found = float(weights @ np.square(full.double().numpy() - composed).sum(1))
    assert found <= coded.distortion * (1 + 1e-3) + 1e-6  # of all ids, the rare ones included
    if scheme != "residual":
        assert found == pytest.approx(coded.distortion, rel=0.02)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_of_the_table_that_is_made_of_the_codes(scheme: str) -> None:
    for tables in ([vectors()], [vectors(), vectors(1)]):
        points = points_of(*tables, min_count=2)
        counted, table = quantise(points, SHAPES[scheme]).num_bytes(points), as_table(points, SHAPES[scheme])
        assert len(tables) * table.memory_bytes <= counted <= len(tables) * table.memory_bytes + 64


def test_rare_ids_have_the_codes_of_their_mean_and_no_bits() -> None:
    points = points_of(vectors(), min_count=5)
    num_common = int((COUNTS >= 5).sum())
    assert len(points.weights) == num_common + 1 and points.num_codes == num_common + 1
    mean = np.average(vectors().double().numpy()[num_common:], axis=0, weights=COUNTS[num_common:].numpy())
    assert points.vectors[0][-1].numpy() == pytest.approx(mean, abs=1e-6)
    assert float(points.weights[-1]) == COUNTS[num_common:].sum()
    rows = as_table(points, SHAPES["product"]).scheme.rows(torch.arange(num_common, IDS))
    assert (rows == rows[:, :1]).all()


@pytest.mark.parametrize("scheme", ["one", "product"])
def test_as_many_codes_as_vectors_are_exact_to_the_bit(scheme: Scheme) -> None:
    full = vectors(0, 12)[torch.from_numpy(np.random.default_rng(2).integers(0, 12, IDS))]
    shape = CodeShape(scheme, 2 if scheme == "product" else 1, 16)
    points = points_of(full)
    assert quantise(points, shape).distortion == 0.0
    table = as_table(points, shape)
    fitted = fit_table(table, full, COUNTS)
    assert table.combine.embed(fitted.weights, table.scheme.rows(torch.arange(IDS))).equal(full)


def test_parts_are_the_columns_of_concat() -> None:
    dims = [len(columns) for columns in Concat().columns(9, 2)]
    full = torch.from_numpy(np.random.default_rng(0).normal(size=(IDS, 9)).astype(np.float32))
    coded = quantise(points_of(full), CodeShape("product", 2, 4))
    first = quantise(points_of(full[:, : dims[0]]), CodeShape("one", 1, 4))
    assert coded.codes[0].equal(first.codes[0])


@pytest.mark.parametrize(
    "scheme, bits, expected",
    [
        ("auto", 6, CodeShape("one", 1, 64)),
        ("auto", 8, CodeShape("one", 1, 256)),
        ("auto", 12, CodeShape("product", 2, 64)),
        ("product", 8, CodeShape("product", 2, 16)),
        ("product", 32, CodeShape("product", 4, 256)),
        ("residual", 16, CodeShape("residual", 2, 256)),
        ("one", 12, None),
        ("product", 7, None),
        ("product", 9, None),
        ("product", 18, CodeShape("product", 3, 64)),
        ("product", 8 * DIM + 8, None),
        ("product", 13, None),
        ("residual", 1, None),
    ],
)
def test_the_shape_of_bits(scheme: Any, bits: int, expected: CodeShape | None) -> None:
    assert shape_of_bits(scheme, bits, DIM) == expected


@pytest.mark.parametrize("scheme", ["product", "residual"])
def test_more_bits_give_no_fewer_parts_and_refused_bits_name_the_nearest(scheme: Scheme) -> None:
    shapes = [shape for bits in range(1, 65) if (shape := shape_of_bits(scheme, bits, DIM)) is not None]
    assert [shape.num_parts for shape in shapes] == sorted(shape.num_parts for shape in shapes)
    assert nearest_bits(scheme, 9, DIM) == [8, 10] and nearest_bits(scheme, 17, DIM) == [16, 18]
    assert nearest_bits("one", 12, DIM) == [9]


@pytest.mark.parametrize("scheme", ["auto", *SCHEMES])
@pytest.mark.parametrize("num_points", [1, 2, 7, 5000])
def test_candidates_reach_from_one_centroid_to_one_a_point(scheme: Any, num_points: int) -> None:
    shapes = list(candidate_shapes(scheme, 16, num_points))
    assert len(set(shapes)) == len(shapes) and {shape.scheme for shape in shapes} <= set(SCHEMES)
    sizes = {shape.num_centroids for shape in shapes}
    assert min(sizes) == 1 and max(sizes) == min(num_points, 512 if scheme in ("auto", "one") else 256)


options_of_table = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=5).map(
    lambda pairs: [Option(None, num_bytes, float(distortion)) for num_bytes, distortion in pairs]
)


@settings(max_examples=150)
@given(tables=st.lists(options_of_table, min_size=1, max_size=4), budget=st.integers(1, 120))
def test_the_chosen_sizes_keep_the_budget_and_no_choice_of_their_bytes_is_better(
    tables: list[list[Option]], budget: int
) -> None:
    sizes, smallest = TableSizes(tables), sum(min(own.num_bytes for own in options) for options in tables)
    if budget < smallest:
        with pytest.raises(UserError, match=f"smallest sizes of all tables take {smallest:,}"):
            sizes.within(budget)
        return
    within = sizes.within(budget)
    assert total_bytes(within) <= budget
    left = budget - total_bytes(within)
    for options, own in zip(tables, within, strict=True):  # no table has a better option that fits
        assert all(o.distortion >= own.distortion or o.num_bytes > own.num_bytes + left for o in options)
    for num_steps in range(sizes.num_steps + 1):
        chosen = sizes.after(num_steps)
        distortion = sum(option.distortion for option in chosen)
        best = min(
            sum(option.distortion for option in choice)
            for choice in itertools.product(*tables)
            if total_bytes(choice) <= total_bytes(chosen)
        )
        assert distortion == best  # a choice on the hull is the best of its bytes


def test_options_above_the_hull_are_left_out() -> None:
    options = [Option(None, *pair) for pair in ((1, 10.0), (2, 9.0), (3, 2.0), (4, 5.0), (5, 0.0), (6, 0.0))]
    assert [option.num_bytes for option in lower_hull(options)] == [1, 3, 5]
