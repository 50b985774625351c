"""Ids outside of their tables: every policy, in every module, against Python's integers."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.reader import BatchOrder, BatchReader
from distembed.embedding import (
    CompositionalEmbeddingBag,
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    EmbeddingConfig,
    build_tables,
)
from distembed.embedding.ids import IdMapper
from distembed.embedding.settings import ID_POLICIES
from distembed.partitions import KeyedHash
from tests.embedding.reference import jagged

N = 50
OUTSIDE = [-1, -(2**63), N, 2**31 - 1, 2**62, 2**63 - 1]


def table(name: str = "t", features: tuple[str, ...] = ("f",), **settings: object) -> CompositionalEmbeddingBagConfig:
    return CompositionalEmbeddingBagConfig(name, N, 4, features, "quotient_remainder", **settings)  # type: ignore[arg-type]


def bag_collection(ids: Tensor, **settings: object) -> Tensor:
    batch = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int32))
    return CompositionalEmbeddingBagCollection([table(**settings)])(batch).values()


def collection(ids: Tensor, **settings: object) -> Tensor:
    batch = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int32))
    return CompositionalEmbeddingCollection([table(**settings)])(batch)["f"].values()


def one_feature(ids: Tensor, **settings: object) -> Tensor:
    return CompositionalEmbeddingBag(N, 4, seed=0, **settings)(ids.unsqueeze(1))  # type: ignore[arg-type]


MODULES = [bag_collection, collection, one_feature]
Module = Callable[..., Tensor]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("wrong", OUTSIDE)
def test_each_policy_does_what_it_says(module: Module, wrong: int) -> None:
    kinds = [torch.int64, torch.int32] if -(2**31) <= wrong < 2**31 else [torch.int64]
    for kind in kinds:
        ids = torch.tensor([3, wrong, 0, N - 1], dtype=kind)
        with pytest.raises(UserError, match=rf"table '\w+', .*position 1 is {wrong};.*between 0 and 49 .*clip_to_oov"):
            module(ids)
        for oov_id in (None, 7):
            expected = module(torch.tensor([3, 1 if oov_id is None else oov_id, 0, N - 1]))
            assert torch.equal(module(ids, id_policy="clip_to_oov", oov_id=oov_id), expected)
        expected = module(torch.tensor([3, wrong % N, 0, N - 1]))
        assert torch.equal(module(ids, id_policy="modulo"), expected)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("policy", ID_POLICIES)
def test_a_hash_takes_any_integer(module: Module, policy: str) -> None:
    ids = torch.tensor([3, -1, 2**62, -(2**63), 2**63 - 1])
    expected = module(KeyedHash(5).ids(ids, N))
    assert torch.equal(module(ids, pre_hash=KeyedHash(5), id_policy=policy), expected)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("settings", [{}, {"id_policy": "modulo"}, {"pre_hash": KeyedHash(5)}])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.complex64, torch.bool])
def test_ids_that_are_no_integers_are_refused(module: Module, settings: dict[str, object], kind: torch.dtype) -> None:
    with pytest.raises(UserError, match=rf"table '\w+', (feature 'f'|input): the ids are of {kind}, .* integers"):
        module(torch.tensor([3, 1, 0]).to(kind), **settings)


def test_the_error_names_table_feature_position_and_value() -> None:
    mapper = IdMapper([table("a", ("f", "g")), table("b", ("h",))])
    message = (
        r"table 'a', feature 'g': the id at position 2 is 50; ids lie between 0 and 49 \(num_embeddings=50\).*"
        "out-of-vocabulary.*larger.*id_policy.*modulo"
    )
    with pytest.raises(UserError, match=message):
        mapper(jagged({"f": [[1], []], "other": [[-9], []], "g": [[2, 3], [50, -1]], "h": [[99], []]}))


def test_a_batch_of_good_ids_is_handed_on_as_it_is() -> None:
    batch = jagged({"f": [[0, 49], []], "other": [[-1], [2**62]]})
    for policy in ID_POLICIES:
        assert IdMapper([table(id_policy=policy)])(batch) is batch
    empty = jagged({"f": [[], []], "other": [[], []]})
    assert IdMapper([table()])(empty) is empty


def test_a_batch_with_other_ids_is_a_new_one() -> None:
    batch = jagged({"f": [[60], [2]], "other": [[-1], []]}, {"f": [[0.5], [2.0]], "other": [[3.0], []]})
    mapped = IdMapper([table(id_policy="clip_to_oov")])(batch)
    assert batch.values().tolist() == [60, 2, -1] and mapped.values().tolist() == [1, 2, -1]
    assert mapped.keys() == batch.keys() and mapped.stride() == batch.stride()
    assert torch.equal(mapped.lengths(), batch.lengths()) and torch.equal(mapped.weights(), batch.weights())


def test_a_table_larger_than_the_type_of_its_ids() -> None:
    mapper = IdMapper([CompositionalEmbeddingBagConfig("t", 10**12, 4, ["f"], id_policy="modulo")])
    for kind in (torch.int64, torch.int32):
        batch = KeyedJaggedTensor(["f"], torch.tensor([-1, 2**31 - 1], dtype=kind), lengths=torch.tensor([1, 1]))
        assert mapper(batch).values().tolist() == [10**12 - 1, 2**31 - 1]


@pytest.mark.parametrize(
    "settings", [{}, {"id_policy": "clip_to_oov"}, {"id_policy": "modulo"}, {"pre_hash": KeyedHash(5)}]
)
def test_the_dtype_of_ids_is_that_of_the_tables(settings: dict[str, object]) -> None:
    """Whatever a batch has: ids of which type, inside or outside of the table, or none at all."""
    for narrow, other in itertools.product((torch.int32, torch.int64), repeat=2):
        mapper = IdMapper([table("a", id_dtype=narrow, **settings), table("b", ("g",), id_dtype=other)])
        assert mapper.dtype == (torch.int32 if {narrow, other} == {torch.int32} else torch.int64)
        for outside in ([3], [-1], [2**31 - 1]) if settings else ([3],):
            mapped = []
            for kind in (torch.int32, torch.int64):
                ids = torch.tensor([*outside, 0, 7], dtype=kind)
                mapped.append(mapper(KeyedJaggedTensor(["f", "g"], ids, lengths=torch.tensor([2, 1]))).values())
                assert mapped[-1].dtype == mapper.dtype
            assert mapped[0].tolist() == mapped[1].tolist()
        for kind in (torch.int32, torch.int64, torch.float32):
            empty = KeyedJaggedTensor(["f", "g"], torch.zeros(0, dtype=kind), lengths=torch.tensor([0, 0]))
            assert mapper(empty).values().dtype == mapper.dtype


def test_a_dtype_that_does_not_hold_a_tables_ids_is_refused() -> None:
    make = CompositionalEmbeddingBagConfig
    assert make("t", 2**31, 4, ["f"], "quotient_remainder", id_dtype=torch.int32).id_dtype == "int32"
    with pytest.raises(UserError, match=r"table 't': id_dtype is int32, .* up to 2147483648; use int64"):
        make("t", 2**31 + 1, 4, ["f"], "quotient_remainder", id_dtype="int32")
    with pytest.raises(UserError, match="table 't': id_dtype is 'int16', .*Known: int64, int32"):
        make("t", 9, 4, ["f"], id_dtype=torch.int16)


def test_tables_of_a_dataset_take_the_dtype_of_its_batches(dataset: Path) -> None:
    reader = BatchReader(dataset, "train", BatchOrder(8))
    features = next(iter(reader))["sparse_features"]
    assert isinstance(features, KeyedJaggedTensor)
    assert IdMapper(build_tables(reader.schema.categorical, EmbeddingConfig())).dtype == features.values().dtype
    reader.close()


def test_batches_of_other_keys_and_types_follow_each_other() -> None:
    mapper = IdMapper([table("a", ("f",)), table("b", ("g",), id_policy="modulo")])
    for kind in (torch.int32, torch.int64):
        for keys in (["f", "g"], ["g", "f"], ["g"]):
            batch = KeyedJaggedTensor(
                keys, torch.full((len(keys),), 51, dtype=kind), lengths=torch.ones(len(keys)).int()
            )
            if "f" in keys:
                with pytest.raises(UserError, match="table 'a'"):
                    mapper(batch)
            else:
                assert mapper(batch).values().tolist() == [1]


_VALUES = st.integers(-3, 10) | st.sampled_from([-(2**63), 2**62, 2**63 - 1])


@given(
    policies=st.lists(st.sampled_from(ID_POLICIES), min_size=3, max_size=3),
    sizes=st.lists(st.integers(1, 8), min_size=3, max_size=3),
    bags=st.lists(st.lists(st.lists(_VALUES, max_size=3), min_size=2, max_size=2), min_size=4, max_size=4),
)
def test_any_batch_equals_a_loop(policies: list[str], sizes: list[int], bags: list[list[list[int]]]) -> None:
    tables = [
        CompositionalEmbeddingBagConfig(f"t{i}", sizes[i], 4, [f"f{i}"], id_policy=policies[i])  # type: ignore[arg-type]
        for i in range(3)
    ]
    batch = jagged({f"f{i}": feature for i, feature in enumerate(bags)})  # f3 belongs to no table
    expected, refused = [], None
    for i, feature in enumerate(bags):
        for value in (value for bag in feature for value in bag):
            inside = i == 3 or 0 <= value < sizes[i]
            if not inside and policies[i] == "error":
                refused = refused or f"f{i}"
            replaced = (
                min(1, sizes[min(i, 2)] - 1) if i < 3 and policies[i] == "clip_to_oov" else value % sizes[min(i, 2)]
            )
            expected.append(value if inside else replaced)
    if refused:
        with pytest.raises(UserError, match=f"feature '{refused}'"):
            IdMapper(tables)(batch)
    else:
        assert IdMapper(tables)(batch).values().tolist() == expected


@pytest.mark.gpu
def test_a_gpu_maps_ids_without_waiting() -> None:
    tables = [
        table("a", ("f",)),
        table("b", ("g",), id_policy="modulo"),
        table("c", ("h",), id_policy="clip_to_oov"),
        table("d", ("i",), pre_hash=KeyedHash(5)),
    ]
    batch = jagged(
        {"f": [[3], []], "g": [[-1, 51], [7]], "h": [[2**62], [-9]], "i": [[2**62], []], "other": [[-1], []]}
    )
    expected = IdMapper(tables)(batch).values()
    on_gpu = batch.to(torch.device("cuda"))
    on_gpu.length_per_key(), on_gpu.stride()  # known to a batch that the reader made
    mapper = IdMapper(tables)
    mapper(on_gpu)  # its bounds are copied to the device once
    torch.cuda.set_sync_debug_mode("error")
    try:
        mapped = mapper(on_gpu).values()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mapped.cpu().tolist() == expected.tolist()
    assert IdMapper(tables[:1])(on_gpu) is on_gpu
