"""The law of a table's lookup: every executor gives the vectors of a loop over ids in plain Python.

An executor looks up, composes and pools a table's bags from the weights of its partitions: the unsharded modules, the
chunks of a share, a materialised file, the groups of a rank's lookup, and the groups of an exported model. What ranks
exchange around these is in ``tests/sharding``.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBag,
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
    materialise,
)
from distembed.embedding.bag import pool
from distembed.partitions import PARTITIONS
from distembed.serving.export.table_groups import ExportStorage, StoredTable, TableGroup
from distembed.sharding.groups import make_group
from distembed.sharding.table_slice import LocalTable, slice_table, width
from tests.embedding.reference import pooled, vector_of
from tests.embedding.schemes import make_partition, small_composition

NUM_IDS, DIM = 60, 8
BAGS = ([[3, 47], [], [0]], [[59], [1, 1, 2], []], [[7], [7], [58]], [[]], [])
"""Batches of bags: empty and full ones, ids that repeat, one id a bag, no bag."""
Bags = Sequence[Sequence[int]]
Weights = Sequence[Tensor]


def per_id(vectors: Tensor, bags: Bags, pooling: str, id_weights: Tensor | None) -> Tensor:
    """Pools the vectors of ids that lie bag after bag."""
    return pool(vectors, torch.tensor([len(bag) for bag in bags], dtype=torch.long), pooling, id_weights)


def batch_of(bags: Bags, id_weights: Tensor | None, feature: str = "f") -> KeyedJaggedTensor:
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.long)
    return KeyedJaggedTensor([feature], ids, id_weights, torch.tensor([len(bag) for bag in bags], dtype=torch.long))


def with_weights(module: Any, parameters: Weights, weights: Weights) -> Any:
    with torch.no_grad():
        for own, given in zip(parameters, weights, strict=True):
            own.copy_(given)
    return module


def by_bag_collection(table: Any, weights: Weights, bags: Bags, id_weights: Tensor | None) -> Tensor:
    table = replace(table, feature_names=["f", "g"])
    module = CompositionalEmbeddingBagCollection([table], is_weighted=id_weights is not None).double()
    factors = None if id_weights is None else list(id_weights.split([len(bag) for bag in bags]))
    both = KeyedJaggedTensor.concat(
        [
            batch_of(bags, id_weights),
            batch_of(bags[::-1], None if factors is None else torch.cat([id_weights[:0], *factors[::-1]]), "g"),
        ]
    )
    output = with_weights(module, module.weights("t"), weights)(both)
    assert output.keys() == [*table.vector_names("f"), *table.vector_names("g")]
    found, backwards = output.values().chunk(2, dim=1)
    assert torch.equal(found.flip(0), backwards)  # feature g has the bags of feature f, last to first
    return found


def sequences_of(table: Any, weights: Weights) -> CompositionalEmbeddingCollection:
    config = CompositionalEmbeddingConfig("t", NUM_IDS, DIM, ["f"], table.partition, table.composition)
    module = CompositionalEmbeddingCollection([config], need_indices=True).double()
    return with_weights(module, module.weights("t"), weights)


def by_sequences(table: Any, weights: Weights, bags: Bags, id_weights: Tensor | None) -> Tensor:
    outputs = sequences_of(table, weights)(batch_of(bags, None))
    assert list(outputs) == table.vector_names("f")
    for output in outputs.values():
        assert output.weights().tolist() == [i for bag in bags for i in bag]
        assert output.lengths().tolist() == [len(bag) for bag in bags]
        assert output.offsets().tolist() == [0, *accumulate(len(bag) for bag in bags)]
    return per_id(torch.cat([o.values() for o in outputs.values()], dim=1), bags, table.pooling, id_weights)


def by_bag(table: Any, weights: Weights, bags: Bags, id_weights: Tensor | None) -> Tensor:
    module = CompositionalEmbeddingBag(
        NUM_IDS, DIM, table.partition, table.composition, mode=table.pooling, dtype=torch.float64
    )
    batch = batch_of(bags, id_weights)
    return with_weights(module, module.weights, weights)(batch.values(), batch.offsets()[:-1], id_weights)


def by_share(table: Any, weights: Weights, bags: Bags, id_weights: Tensor | None) -> Tensor | None:
    if table.num_vectors > 1:
        return None
    chunks = list(sequences_of(table, weights).share("t").chunks(7))
    assert torch.equal(torch.cat([chunk.ids for chunk in chunks]), torch.arange(NUM_IDS))
    assert max(len(chunk.ids) for chunk in chunks) <= 7
    vectors = torch.cat([chunk.vectors for chunk in chunks])
    return per_id(vectors[batch_of(bags, None).values()], bags, table.pooling, id_weights)


def by_group(kernel: str, table: Any, weights: Weights, bags: Bags, id_weights: Tensor | None) -> Tensor | None:
    table = CompositionalEmbeddingBagConfig(
        "t", NUM_IDS, DIM, ["f"], table.partition, table.composition, pooling=table.pooling, kernel=kernel
    )
    if table.pooling == "mean" or not bags:  # means are taken of the sums that come back
        return None
    own = slice_table(table, (0, width(table)), [None] * len(weights))
    replicated = {part.name: nn.Parameter(own) for part, own in zip(table.partition_tables(), weights, strict=True)}
    group = make_group([LocalTable(table, own.num_columns, own.partitions)], replicated, 1, [], "cpu")
    request = group.request(batch_of(bags, id_weights))
    return group.finish(request, group.look_up(request, []))


def by_exported_group(table: Any, weights: Weights, bags: Bags, id_weights: Tensor | None) -> Tensor:
    group = TableGroup([StoredTable(table, list(weights))], ExportStorage())
    return per_id(group(batch_of(bags, None).values().unsqueeze(0), [0])[0], bags, table.pooling, id_weights)


EXECUTORS: dict[str, Callable[[Any, Weights, Bags, Tensor | None], Tensor | None]] = {
    "bag collection": by_bag_collection,
    "sequences": by_sequences,
    "bag": by_bag,
    "share": by_share,
    "groups of FBGEMM": lambda *arguments: by_group("fbgemm", *arguments),
    "groups in one pass, where they can be": lambda *arguments: by_group("auto", *arguments),
    "exported groups": by_exported_group,
}


def require_close(found: Tensor, expected: Tensor, where: str) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), msg=lambda text: f"{where}: {text}")


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_executor_gives_the_vectors_of_a_loop_over_ids(partition: str, composition: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    scheme, combine = make_partition(partition, NUM_IDS), small_composition(composition)
    table: Any = CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"], scheme, combine)
    weights = [torch.randn(part.num_rows, part.dim, generator=generator) for part in table.partition_tables()]
    exact = [vector_of(table, [own.double() for own in weights], i) for i in range(NUM_IDS)]
    poolings = (("sum", False), ("sum", True), ("mean", False), ("mean", True), ("max", False))
    for turn, (pooling, is_weighted) in enumerate(poolings):
        pooling_table = replace(table, pooling=pooling)
        # the first batch, and another one by turns: each composition has each batch in each pooling
        for bags in (BAGS[0], BAGS[1 + (turn + list(PARTITIONS).index(partition)) % 4]):
            factors = torch.randn(sum(map(len, bags)), generator=generator) if is_weighted else None
            given = iter([1.0] * sum(map(len, bags)) if factors is None else factors.tolist())
            rows = [pooled([exact[i] for i in bag], [next(given) for _ in bag], pooling, width(table)) for bag in bags]
            expected = torch.stack(rows) if rows else torch.zeros(0, width(table), dtype=torch.float64)
            for name, executor in EXECUTORS.items():
                found = executor(pooling_table, weights, bags, factors)
                if found is not None:
                    require_close(found, expected, f"{name}, pooling {pooling}, bags {bags}")
    for rows_per_chunk in (7, NUM_IDS, None):
        assert materialise(table, weights, tmp_path / "t.parquet", rows_per_chunk=rows_per_chunk) == NUM_IDS
        stored = pq.read_table(tmp_path / "t.parquet")
        assert stored["id"].to_pylist() == list(range(NUM_IDS))
        vectors = torch.cat([torch.tensor(stored[name].to_pylist()) for name in stored.column_names[1:]], dim=1)
        torch.testing.assert_close(vectors, torch.stack(exact).float())
        assert os.listdir(tmp_path) == ["t.parquet"]
