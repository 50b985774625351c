"""What a plan counts of an update's scratch against what the kernel asks for."""

import pytest
import torch

from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.fused.operation import FusedLookup
from distembed.fused.tables import Formula, Part, Storage
from distembed.partitions import MixedRadix, QuotientRemainder
from distembed.sharding.groups.fused import FusedGroup
from distembed.sharding.groups.load import GroupLoad
from distembed.sharding.table_slice import slice_table

NUM_IDS, DIM = 40_000, 16


@pytest.mark.parametrize("num_features", [1, 26])
@pytest.mark.parametrize("scheme", [QuotientRemainder(NUM_IDS, collisions=4), MixedRadix(NUM_IDS, num_partitions=3)])
def test_a_plan_counts_the_scratch_of_all_features_of_a_table(num_features: int, scheme: QuotientRemainder) -> None:
    num_rows, names = 2048, [f"f{i}" for i in range(num_features)]
    table = CompositionalEmbeddingBagConfig("clicks", NUM_IDS, DIM, names, scheme)
    parts = table.partition_tables()
    own = slice_table(table, parts, (0, DIM), ["fused"] * len(parts))
    load = GroupLoad(
        slices=[own] * num_features,
        possible_ids=[NUM_IDS] * num_features,
        num_ids_per_feature=[float(num_rows)] * num_features,
        multi_hot=[False] * num_features,
        num_rows=num_rows,
        averages_gradients=False,
    )
    planned = FusedGroup.lookup_memory(load, "cpu").update_bytes - load.output_bytes

    storages = [Storage([torch.zeros(rows * DIM)], "sgd") for rows in scheme.num_rows]
    digits = scheme.digits()
    assert digits is not None
    placed = [Part(digit, 0, rows) for digit, rows in zip(digits, scheme.num_rows, strict=True)]
    formula = Formula([range(DIM)] * len(placed), True, True)
    lookup = FusedLookup(formula, [placed] * num_features, [num_features], storages)
    asked: list[int] = []
    update = lookup._kernels.update

    def ask(job: int, first: int, end: int, scratch: int, num_bytes: int) -> int:
        asked.append(update(job, first, end, scratch, num_bytes))
        return asked[-1]

    lookup._kernels = lookup._kernels._replace(update=ask)
    ids = torch.arange(num_rows * num_features) % NUM_IDS
    for storage in storages:
        storage.weights[0].requires_grad_()
    outputs = lookup(ids, torch.arange(len(ids) + 1), None, storages)
    outputs.sum().backward()
    assert 0.9 < planned / asked[0] < 1.1
