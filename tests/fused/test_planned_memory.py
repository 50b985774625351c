"""What a plan counts of an update's scratch against what the kernel asks for."""

from collections.abc import Iterator

import pytest
import torch

from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.kernels.operation import FusedLookup
from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.kernels.triton_backward import PartitionSizes, update_bytes
from distembed.kernels.triton_tables import DeviceTables, key_type
from distembed.partitions import MixedRadix, QuotientRemainder
from distembed.sharding.groups.fused import FusedGroup
from distembed.sharding.groups.load import GroupLoad
from distembed.sharding.table_slice import slice_table

NUM_IDS, DIM, NUM_ROWS = 40_000, 16, 2048


@pytest.fixture(params=[1, 2, 8])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def load_of(
    scheme: QuotientRemainder | MixedRadix,
    features_of_tables: list[int],
    ranges: list[tuple[int, int]],
    composition: str = "product",
    num_threads: int = 1,
    num_row_blocks: int = 1,
) -> GroupLoad:
    """One id a row of each feature, looked up in each range of the columns of a table."""
    slices = []
    for i, num_features in enumerate(features_of_tables):
        features = [f"f{i}_{j}" for j in range(num_features)]
        table = CompositionalEmbeddingBagConfig(f"t{i}", NUM_IDS, DIM, features, scheme, composition)
        for columns in ranges:
            slices += [slice_table(table, columns, ["fused"] * len(scheme.num_rows))] * num_features
    return GroupLoad(
        slices=slices,
        possible_ids=[NUM_IDS] * len(slices),
        num_ids_per_feature=[float(NUM_ROWS)] * len(slices),
        multi_hot=[False] * len(slices),
        num_rows=NUM_ROWS,
        averages_gradients=False,
        num_threads=num_threads,
        num_row_blocks=num_row_blocks,
    )


@pytest.mark.parametrize("num_ranges", [1, 2])
@pytest.mark.parametrize("features_of_tables", [[1], [26], [1, 3, 2, 2]])
@pytest.mark.parametrize("scheme", [QuotientRemainder(NUM_IDS, collisions=4), MixedRadix(NUM_IDS, num_partitions=3)])
def test_a_plan_counts_the_scratch_of_the_tables_that_are_updated_at_once(
    features_of_tables: list[int], scheme: QuotientRemainder | MixedRadix, num_ranges: int, num_threads: int
) -> None:
    """Ranges of a table's columns that one rank has are tables of their own there."""
    dim = DIM // num_ranges
    ranges = [(start, start + dim) for start in range(0, DIM, dim)]
    load = load_of(scheme, features_of_tables, ranges, num_threads=num_threads)
    planned = FusedGroup.lookup_memory(load, "cpu").update_bytes - load.output_bytes

    asked = _scratch_of_threads(scheme, [count for count in features_of_tables for _ in range(num_ranges)], dim)
    assert len(asked) == min(num_threads, len(features_of_tables) * num_ranges)
    assert 0.9 < planned / sum(asked) < 1.1


@pytest.mark.parametrize(
    ("composition", "ranges"),
    [("product", [(0, 16)]), ("product", [(0, 8), (8, 16)]), ("concat", [(0, 8)]), ("concat", [(8, 16)])],
)
@pytest.mark.parametrize("num_row_blocks", [1, 32])
def test_a_plan_counts_the_rows_of_each_range_of_columns_on_a_gpu(
    composition: str, ranges: list[tuple[int, int]], num_row_blocks: int
) -> None:
    """A range of a concatenation's columns may have some partitions alone; a block of few rows is summed in slices."""
    scheme, features_of_tables = QuotientRemainder(NUM_IDS, collisions=4), [1, 3]
    load = load_of(scheme, features_of_tables, ranges, composition, num_row_blocks=num_row_blocks)
    planned = FusedGroup.lookup_memory(load, "cuda").update_bytes - load.output_bytes

    digits = scheme.digits()
    assert digits is not None
    own = load.slices[0].partitions
    num_rows = [-(-scheme.num_rows[each.partition] // num_row_blocks) for each in own]
    parts_of_feature = [TablePart(digits[each.partition], 0, n) for each, n in zip(own, num_rows, strict=True)]
    storages = [Storage([torch.zeros(n, each.num_columns)], "sgd") for each, n in zip(own, num_rows, strict=True)]
    formula = Formula([range(each.num_columns) for each in own], composition == "product", True)
    features = [count for count in features_of_tables for _ in ranges]
    tables = DeviceTables(formula, [parts_of_feature] * sum(features), features, storages)
    num_ids, num_keys = NUM_ROWS * sum(features), tables.num_keys
    held = num_ids * (4 + sum(key_type(number).itemsize for number in num_keys))
    sizes = [
        PartitionSizes(*both, each.num_columns) for *both, each in zip(num_keys, tables.most_rows, own, strict=True)
    ]
    assert planned == held + update_bytes(num_ids, sum(features), sizes)


def _scratch_of_threads(scheme: QuotientRemainder | MixedRadix, features_of_tables: list[int], dim: int) -> list[int]:
    """Returns how many bytes the kernel asks for in each thread, of tables that are all of one shape."""
    digits, num_features = scheme.digits(), sum(features_of_tables)
    assert digits is not None
    weights = [torch.zeros(len(features_of_tables) * rows * dim, requires_grad=True) for rows in scheme.num_rows]
    parts = [
        [TablePart(digit, 0, rows, table * rows * dim) for digit, rows in zip(digits, scheme.num_rows, strict=True)]
        for table, count in enumerate(features_of_tables)
        for _ in range(count)
    ]
    storages = [Storage([weight], "sgd") for weight in weights]
    lookup = FusedLookup(Formula([range(dim)] * len(digits), True, True), parts, features_of_tables, storages)
    asked: list[int] = []
    update = lookup._kernels.update

    def ask(job: int, tables: int, num_tables: int, scratch: int, num_bytes: int) -> int:
        needed = update(job, tables, num_tables, scratch, num_bytes)
        if scratch == 0:
            asked.append(needed)
        return needed

    lookup._kernels = lookup._kernels._replace(update=ask)
    ids = torch.arange(NUM_ROWS * num_features) % NUM_IDS
    lookup(ids, torch.arange(len(ids) + 1), None, storages).sum().backward()
    return asked
