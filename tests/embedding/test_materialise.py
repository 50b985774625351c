"""Composed vectors in a Parquet file against the module's own, and what is left when it goes wrong."""

import os
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from distembed.base.errors import RunError, UserError
from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig, materialise
from distembed.partitions import KeyedHash, Remainder
from tests.embedding.reference import jagged

N = 50


def make(**settings: object) -> tuple[CompositionalEmbeddingConfig, CompositionalEmbeddingCollection]:
    config = CompositionalEmbeddingConfig("t", N, 6, ["f"], **{"partition": "quotient_remainder", **settings})  # type: ignore[arg-type]
    return config, CompositionalEmbeddingCollection([config])


def forward(collection: CompositionalEmbeddingCollection, ids: list[int]) -> torch.Tensor:
    outputs = collection(jagged({"f": [ids]})).values()
    return torch.cat([output.values() for output in outputs], dim=1).detach()


def vectors(path: Path) -> torch.Tensor:
    table = pq.read_table(path)
    return torch.cat([torch.tensor(table[name].to_pylist()) for name in table.column_names[1:]], dim=1)


def test_the_file_says_what_it_holds(tmp_path: Path) -> None:
    for composition, columns in (("product", ["vector"]), ("feature", ["vector__p0", "vector__p1"])):
        config, collection = make(composition=composition)
        materialise(config, collection.weights("t"), tmp_path / "t.parquet")
        schema = pq.read_schema(tmp_path / "t.parquet")
        assert schema.names == ["id", *columns]
        assert schema.field("id").type == pa.int64()
        assert all(schema.field(name).type == pa.list_(pa.float32(), 6) for name in columns)
        assert schema.metadata == {
            b"distembed.table": b"t",
            b"distembed.num_embeddings": b"50",
            b"distembed.partition": config.scheme.description.encode(),
            b"distembed.composition": composition.encode(),
            b"distembed.embedding_dim": b"6",
        }


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 100])
def test_given_ids_come_in_their_order(rows_per_chunk: int, tmp_path: Path) -> None:
    config, collection = make()
    ids = [49, 3, 3, 0, 47]
    for given in (ids, iter(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32), tuple(ids)):
        assert materialise(config, collection.weights("t"), tmp_path / "t.parquet", given, rows_per_chunk) == 5
        assert pq.read_table(tmp_path / "t.parquet")["id"].to_pylist() == ids
        torch.testing.assert_close(vectors(tmp_path / "t.parquet"), forward(collection, ids))


def test_given_ids_go_through_the_policy_and_the_hash(tmp_path: Path) -> None:
    ids = [-1, 2**62, 50, 7]
    for settings in ({"id_policy": "modulo"}, {"id_policy": "clip_to_oov", "oov_id": 3}, {"pre_hash": KeyedHash(1)}):
        config, collection = make(**settings)
        materialise(config, collection.weights("t"), tmp_path / "t.parquet", ids)
        assert pq.read_table(tmp_path / "t.parquet")["id"].to_pylist() == ids
        torch.testing.assert_close(vectors(tmp_path / "t.parquet"), forward(collection, ids))


def test_an_id_outside_of_the_table_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    config, collection = make()
    with pytest.raises(UserError, match="position 3 is 50"):
        materialise(config, collection.weights("t"), tmp_path / "t.parquet", [1, 2, 3, 50], rows_per_chunk=2)
    assert os.listdir(tmp_path) == []


def test_no_ids_make_a_file_of_no_rows(tmp_path: Path) -> None:
    config, collection = make()
    for none in ([], torch.tensor([], dtype=torch.long)):
        assert materialise(config, collection.weights("t"), tmp_path / "t.parquet", none) == 0
        assert pq.read_table(tmp_path / "t.parquet").num_rows == 0


def test_all_ids_of_a_table_that_hashes_are_refused(tmp_path: Path) -> None:
    config, collection = make(pre_hash=KeyedHash(1))
    with pytest.raises(UserError, match="hashes its ids .* give ids"):
        materialise(config, collection.weights("t"), tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1.0]), "torch.float32"),
        (torch.tensor([1j]), "torch.complex64"),
        (torch.tensor([[1]]), r"\(1, 1\)"),
        ([1, None], "None"),
        ([1, 2.5], "2.5"),
        ([1, 2**63], str(2**63)),
        ([True], "True"),
    ],
)
def test_ids_that_are_none_are_named(ids: object, message: str, tmp_path: Path) -> None:
    config, collection = make()
    with pytest.raises(UserError, match=message):
        materialise(config, collection.weights("t"), tmp_path / "t.parquet", ids)  # type: ignore[arg-type]


def test_weights_of_another_table_are_refused(tmp_path: Path) -> None:
    config, collection = make()
    with pytest.raises(UserError, match="the order of its partitions"):
        materialise(config, collection.weights("t")[:1], tmp_path / "t.parquet")


@pytest.mark.thorough
def test_a_full_disk_leaves_no_file_and_memory_is_bounded(tmp_path: Path) -> None:
    # all ids of this table would be terabytes; no file may grow beyond 1 MB, as if the disk were full then
    config = CompositionalEmbeddingConfig("t", 10**11, 6, ["f"], Remainder(10**11, num_buckets=10))
    weights = CompositionalEmbeddingCollection([config]).weights("t")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, hard))
    try:
        with pytest.raises(RunError, match="t.parquet could not be written .* MiB are left"):
            materialise(config, weights, tmp_path / "t.parquet", rows_per_chunk=10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    config, collection = make()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        materialise(config, collection.weights("t"), tmp_path / "file" / "t.parquet")
