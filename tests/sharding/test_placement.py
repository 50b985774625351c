"""Where a table's parameters go, from the planner's answer, and what is refused."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import ParameterSharding, ShardMetadata

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS, Concat
from distembed.embedding import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.partitions import MixedRadix, QuotientRemainder
from distembed.sharding.placement import BY_ROWS, Placement, place_table, place_tables
from distembed.sharding.table_slice import unit_size, width

DIVIDED = sorted(set(COMPOSITIONS) - {"path_linear", "path_mlp", "weighted_sum", "tensor_train"})


def table(composition: object = "product", dim: int = 16, **settings: object) -> CompositionalEmbeddingBagConfig:
    scheme = QuotientRemainder(1000, collisions=4)
    return CompositionalEmbeddingBagConfig("t", 1000, dim, ["t"], scheme, composition, **settings)


def planned(sharding_type: str, *columns: tuple[int, int, int], kernel: str = "fused") -> ParameterSharding:
    """A plan of (rank, first column, last column) a shard; by rows, of one row a rank."""
    by_row = sharding_type in BY_ROWS
    shards = [
        ShardMetadata([rank if by_row else 0, start], [1 if by_row else 254, stop - start], f"rank:{rank}/cpu")
        for rank, start, stop in columns
    ]
    return ParameterSharding(
        sharding_type, kernel, [c[0] for c in columns], EnumerableShardingSpec(shards) if shards else None
    )


def shards(sharding: ParameterSharding) -> list[tuple[list[int], list[int]]]:
    assert isinstance(sharding.sharding_spec, EnumerableShardingSpec)
    return [(shard.shard_offsets, shard.shard_sizes) for shard in sharding.sharding_spec.shards]


@pytest.mark.parametrize("name", DIVIDED)
@settings(max_examples=30)
@given(widths=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_columns_of_all_ranks_together_are_each_partition_once(name: str, widths: list[int]) -> None:
    dim = 4 * sum(widths)
    made = CompositionalEmbeddingBagConfig("t", 60, 3 * dim, ["t"], MixedRadix(60, moduli=[3, 4, 5]), name)
    scale = width(made) // dim
    ends = [4 * scale * sum(widths[: i + 1]) for i in range(len(widths))]
    starts = [0, *ends[:-1]]
    columns_of_ranks = [(i, a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
    placement = place_table(made, planned("column_wise", *columns_of_ranks), len(widths))
    assert not placement.replicated
    for part in made.lookup_tables():
        columns = sorted((offsets[1], sizes[1]) for offsets, sizes in shards(placement.sharded[part.name]))
        assert columns[0][0] == 0
        assert all(
            start + count == following for (start, count), (following, _) in zip(columns, columns[1:], strict=False)
        )
        assert sum(columns[-1]) == part.dim
    # a range of the output needs the columns of the partitions that make it, and no others
    needed = {
        (own.partition, own.start, own.stop)
        for a, b in zip(starts, ends, strict=True)
        for own in placement.slice(a, b).partitions
    }
    held = {
        (j, offsets[1], offsets[1] + sizes[1])
        for j, part in enumerate(made.lookup_tables())
        for offsets, sizes in shards(placement.sharded[part.name])
    }
    assert needed == held


def test_a_concatenation_is_divided_between_its_partitions() -> None:
    placement = place_table(table(Concat([8, 8])), planned("column_wise", (0, 0, 8), (1, 8, 16)), 2)
    assert shards(placement.sharded["t__p0"]) == [([0, 0], [250, 8])]
    assert shards(placement.sharded["t__p1"]) == [([0, 0], [4, 8])]


def test_neighbouring_columns_of_one_rank_are_one_shard() -> None:
    placement = place_table(table(), planned("column_wise", (0, 0, 4), (0, 4, 8), (1, 8, 16)), 2)
    assert shards(placement.sharded["t__p0"]) == [([0, 0], [250, 8]), ([0, 8], [250, 8])]
    assert placement.unit.ranks == [0, 1]


RANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=7)
"""Rank and width, in fours, of one range after the other."""


def ranges(columns: int, made: list[tuple[int, int]]) -> ParameterSharding:
    """A plan of ranges of columns, which are stretched or cut to these."""
    stops = [min(columns, 4 * stop) for stop in itertools.accumulate(width for _, width in made)]
    stops[-1] = columns
    starts = [0, *stops[:-1]]
    triples = [(rank, start, stop) for (rank, _), start, stop in zip(made, starts, stops, strict=True) if start < stop]
    return planned("column_wise", *triples)


def held(placement: Placement, name: str) -> dict[int, list[tuple[int, int]]]:
    """First column and number of columns of each shard of a weight, by rank."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    sharding = placement.sharded[name]
    for rank, (offsets, sizes) in zip(sharding.ranks or [], shards(sharding), strict=True):
        by_rank.setdefault(rank, []).append((offsets[1], sizes[1]))
    return by_rank


def columns_by_rank(sharding: ParameterSharding) -> dict[int, set[int]]:
    by_rank: dict[int, set[int]] = {}
    for rank, (offsets, sizes) in zip(sharding.ranks or [], shards(sharding), strict=True):
        by_rank.setdefault(rank, set()).update(range(offsets[1], offsets[1] + sizes[1]))
    return by_rank


@pytest.mark.parametrize("name", DIVIDED)
@settings(max_examples=30)
@given(made=RANGES)
def test_ranges_in_any_order_stay_on_their_ranks_and_are_equally_wide_there(
    name: str, made: list[tuple[int, int]]
) -> None:
    divided = CompositionalEmbeddingBagConfig("t", 60, 48, ["t"], MixedRadix(60, moduli=[3, 4, 5]), name)
    plan = ranges(width(divided), made)
    placement = place_table(divided, plan, 4)
    assert columns_by_rank(placement.unit) == columns_by_rank(plan)
    for part in divided.lookup_tables():
        for_ranks = held(placement, part.name)
        assert all(len({columns for _, columns in own}) == 1 for own in for_ranks.values())
        all_columns = sorted(
            c for own in for_ranks.values() for first, count in own for c in range(first, first + count)
        )
        assert all_columns == list(range(part.dim))  # each once


@given(plans=st.lists(RANGES, min_size=1, max_size=3))
def test_ranges_of_sequences_are_equally_wide_in_all_tables(plans: list[list[tuple[int, int]]]) -> None:
    scheme = QuotientRemainder(60, collisions=4)
    tables = [
        CompositionalEmbeddingConfig(f"t{i}", 60, 48, [f"t{i}"], scheme, composition)
        for i, composition in zip(range(len(plans)), ["product", Concat([12, 36]), "sum"], strict=False)
    ]
    units = {made.name: ranges(48, plan) for made, plan in zip(tables, plans, strict=True)}
    placements = place_tables(tables, units, 4)
    assert len({sizes[1] for placement in placements for _, sizes in shards(placement.unit)}) == 1
    for placement in placements:
        assert columns_by_rank(placement.unit) == columns_by_rank(units[placement.table.name])
        for part in placement.parts:
            assert all(len({columns for _, columns in own}) == 1 for own in held(placement, part.name).values())


def test_ranges_are_cut_no_more_than_they_must_be() -> None:
    equal = place_table(table(dim=48), planned("column_wise", (0, 0, 16), (1, 16, 32), (0, 32, 48)), 2)
    assert [sizes[1] for _, sizes in shards(equal.unit)] == [16, 16, 16]
    wide = [(3, 0, 16), (3, 16, 32), (3, 32, 48), (3, 48, 64), (2, 64, 80), (3, 80, 96), (3, 96, 112), (2, 112, 128)]
    unequal = place_table(table(dim=128), planned("column_wise", *wide), 4)
    assert held(unequal, "t__p0") == {3: [(0, 32), (32, 32), (80, 32)], 2: [(64, 16), (112, 16)]}


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 300])
def test_row_wise_divides_the_largest_partition_and_replicates_the_others(ranks: int) -> None:
    placement = place_table(table(), planned("row_wise", *[(rank, 0, 16) for rank in range(ranks)]), ranks)
    assert placement.divided == 0
    assert [part.name for part in placement.replicated] == ["t__p1"]
    block = -(-250 // ranks)
    starts = range(0, 250, block)  # ranks beyond the rows have none
    assert shards(placement.sharded["t__p0"]) == [([start, 0], [min(block, 250 - start), 16]) for start in starts]


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 250])
@pytest.mark.parametrize("nodes", [(1,), (0, 1), (1, 0, 1, 2), (0, 0, 1, 0)])
def test_a_grid_divides_each_range_of_columns_by_rows_within_a_node(nodes: tuple[int, ...], rows: int) -> None:
    ranks_per_node, columns = 4, 16 // len(nodes)
    made = CompositionalEmbeddingBagConfig("t", 3 * rows, 16, ["t"], QuotientRemainder(3 * rows, collisions=3))
    ranges = [(4 * node + i, c * columns, (c + 1) * columns) for c, node in enumerate(nodes) for i in range(4)]
    kind = "grid_shard" if len(nodes) > 1 else "table_row_wise"
    placement = place_table(made, planned(kind, *ranges), 12)
    assert placement.num_row_blocks == ranks_per_node
    (name,) = placement.sharded
    largest = max(made.lookup_tables(), key=lambda part: part.num_rows)
    assert name == largest.name
    assert [part.name for part in placement.replicated] == [p.name for p in made.partition_tables() if p.name != name]
    # each number once, on a rank of the node that has its columns
    held = set()
    for shard in placement.sharded[name].sharding_spec.shards:
        (row, column), (num_rows, num_columns) = shard.shard_offsets, shard.shard_sizes
        assert shard.placement.rank() // ranks_per_node == nodes[column // columns]
        assert shard.placement.rank() % ranks_per_node == row // placement.rows_per_block
        block = {(row + i, column + j) for i in range(num_rows) for j in range(num_columns)}
        assert block and not block & held
        held |= block
    assert len(held) == largest.num_rows * 16


def test_data_parallel_replicates_everything() -> None:
    placement = place_table(table("path_mlp"), planned("data_parallel"), 2)
    assert [part.name for part in placement.replicated] == ["t__p0", "t__p1"]


def test_the_unit_has_as_many_numbers_as_are_looked_up() -> None:
    assert unit_size(table()) == (254, 16)
    assert unit_size(table(Concat([12, 4]))) == (189, 16)  # 250 * 12 + 4 * 4 = 3016 numbers
    assert unit_size(table("feature")) == (127, 32)
    assert unit_size(table("path_linear")) == (250, 16)


SCHEMES = {
    "quotient-remainder": (QuotientRemainder(1000, collisions=4), "product", {1}),
    "a remainder that is not small": (QuotientRemainder(1000, collisions=20), "product", set()),
    "equal": (MixedRadix(1000, moduli=[10, 10, 10]), "product", set()),
    "two large and a small one": (MixedRadix(1000, moduli=[16, 2, 32]), "sum", {1}),
    "small ones, as many as there is room for": (MixedRadix(1000, moduli=[4, 3, 4, 21]), "sum", {1}),
    "rows times columns": (QuotientRemainder(1000, collisions=25), Concat([32, 4]), {1}),
    "one": ("naive", "sum", set()),
}
"""Scheme, composition, and the partitions that take less than a fifth of the largest one's bytes."""


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kernel", ["fused", "dense", "fused_uvm", "fused_uvm_caching"])
def test_small_partitions_of_tables_in_host_memory_stay_on_the_device(kernel: str, name: str) -> None:
    scheme, composition, small = SCHEMES[name]
    hosted = CompositionalEmbeddingBagConfig("t", 1000, 36, ["t"], scheme, composition)
    placement = place_table(hosted, planned("column_wise", (0, 0, 12), (1, 12, 36), kernel=kernel), 2)
    assert placement.unit.compute_kernel == kernel
    expected = {
        part.name: "fused" if "uvm" in kernel and j in small else kernel for j, part in enumerate(placement.parts)
    }
    assert {part: sharding.compute_kernel for part, sharding in placement.sharded.items()} == expected
    for start, stop in ((0, 12), (12, 36)):
        own = placement.slice(start, stop)
        assert all(part.kernel == expected[part.part.name] for part in own.partitions)


@pytest.mark.parametrize(
    "made, sharding, message",
    [
        (table(), planned("virtual", (0, 0, 16)), "'t' is planned virtual; .* table_wise, column_wise"),
        (
            table(),
            planned("table_row_wise", (1, 0, 16), (0, 0, 16)),
            r"on ranks \[\[1, 0\]\], but each range of columns",
        ),
        (table(), planned("grid_shard", (0, 0, 8), (0, 8, 12)), "has 16 columns, but the plan gives the ranks"),
        (table(pooling="max"), planned("table_row_wise", (0, 0, 16)), "pooling max and is planned table_row_wise"),
        (table("path_mlp"), planned("grid_shard", (0, 0, 8), (1, 8, 16)), r"\[0, 8\) are planned apart.*path_mlp"),
        (table(), planned("grid_shard", (0, 0, 6), (1, 6, 16)), "'t__p0' have 6 numbers on a rank; FBGEMM"),
        (table(), planned("table_wise", (0, 0, 16), kernel="key_value"), "compute kernel key_value; .* fused, dense"),
        (table("path_mlp"), planned("column_wise", (0, 0, 8), (1, 8, 16)), r"\[0, 8\) are planned apart.*path_mlp"),
        (table(pooling="max"), planned("row_wise", (0, 0, 16), (1, 0, 16)), "pooling max and is planned row_wise"),
        (table(), planned("column_wise", (0, 0, 6), (1, 6, 16)), "'t__p0' have 6 numbers on a rank; FBGEMM"),
        (table(Concat([10, 6])), planned("table_wise", (0, 0, 16)), "'t__p0' have 10 numbers"),
        (table(), planned("column_wise", (0, 0, 8)), r"has 16 columns, but the plan gives the ranks \[\[0, 8\]\]"),
        (table(), planned("row_wise", (0, 0, 16)), r"row_wise on ranks \[0\], but there are 2 ranks"),
        (table(), planned("table_wise", (2, 0, 16)), r"table_wise on ranks \[2\], but there are 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    made: CompositionalEmbeddingBagConfig, sharding: ParameterSharding, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        place_table(made, sharding, 2)
