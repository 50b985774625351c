"""Programs of exported models against the trained model's own forward, over every scheme and composition."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import COMPOSITIONS
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.models import DCN, DLRM, Model
from distembed.partitions import PARTITIONS, Explicit, KeyedHash, Partition
from distembed.serving.export.feature_vectors import plain_inputs
from distembed.serving.export.parity import made_up_batch
from distembed.serving.export.programs import save_program
from distembed.serving.export.score_program import ScoredModel
from distembed.serving.export.table_groups import ExportStorage, Materialise
from distembed.serving.model_folder.manifest import Precision
from distembed.serving.model_folder.programs import Program, load_program
from distembed.tasks import ClickTask

SIZE, DIM = 60, 4
POOLINGS = ("sum", "mean", "max")
DENSE = ("I1", "I2")


def partition(name: str, size: int) -> Partition:
    if name == "explicit":
        order = np.random.default_rng(size).permutation(size)
        return Explicit(size, assignments=[order % 8, order // 8])
    return PARTITIONS[name](size)


def tables(composition: str) -> list[CompositionalEmbeddingBagConfig]:
    """Returns two tables of each scheme, lists of each pooling, and tables of each way to treat ids."""
    combine = COMPOSITIONS[composition]()
    found = []
    for name in PARTITIONS:
        for size in (SIZE, SIZE + 7):
            own = partition(name, size)
            found.append(CompositionalEmbeddingBagConfig(f"{name}_{size}", size, DIM, [f"{name}_{size}"], own, combine))
    for pooling in POOLINGS:
        own = partition("quotient_remainder", SIZE)
        found.append(CompositionalEmbeddingBagConfig(pooling, SIZE, DIM, [pooling], own, combine, pooling=pooling))
    for policy in ("clip_to_oov", "modulo"):
        own = partition("quotient_remainder", SIZE)
        found.append(CompositionalEmbeddingBagConfig(policy, SIZE, DIM, [policy], own, combine, id_policy=policy))
    own = partition("quotient_remainder", SIZE)
    hashed = CompositionalEmbeddingBagConfig("hash", SIZE, DIM, ["hash"], own, combine, pre_hash=KeyedHash(3))
    return [*found, hashed]


def schema(configs: Sequence[CompositionalEmbeddingBagConfig]) -> Schema:
    features = [
        CategoricalFeature(
            table.name, table.num_embeddings, table.name in POOLINGS, 1.5 if table.name in POOLINGS else 1
        )
        for table in configs
    ]
    return Schema("label", DENSE, tuple(features))


def click_model(name: str, configs: Sequence[CompositionalEmbeddingBagConfig]) -> Model:
    torch.manual_seed(0)
    collection = CompositionalEmbeddingBagCollection(configs)
    for parameter in collection.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    keys = [key for table in configs for key in table.vector_names(table.name)]
    if name == "dlrm":
        return DLRM(collection, keys, DIM, len(DENSE), [8], [8]).eval()
    return DCN(collection, keys, DIM, len(DENSE), [8], 2).eval()


def scored(model: Model) -> ScoredModel:
    return ScoredModel.of(model, ClickTask(), schema(model.embeddings.tables()))


def saved_program(model: ScoredModel, storage: ExportStorage, folder: Path) -> Program:
    """Returns the program as a file gives it."""
    inputs = model.inputs(made_up_batch(schema(model.tables), 5))
    save_program(model.whole_program(storage), inputs, folder / "network.pt2")
    return load_program(folder / "network.pt2")


def trained_scores(model: Model, batch: object) -> Tensor:
    with torch.no_grad():
        return torch.sigmoid(model(batch["dense_features"], batch["sparse_features"]))  # type: ignore[index]


def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """Returns a weight as its stored numbers are read again, by NumPy."""
    numbers = weight.numpy()
    if precision == "fp16":
        return torch.from_numpy(numbers.astype(np.float16).astype(np.float32))
    low, high = numbers.min(1, keepdims=True), numbers.max(1, keepdims=True)
    step = np.where(high > low, (high - low) / np.float32(255), np.float32(1))
    return torch.from_numpy(np.rint((numbers - low) / step).astype(np.float32) * step + low)


def round_tables(model: Model, precision: Precision) -> None:
    """Rounds the weights that hold vectors; functions stay as they are."""
    if precision != "fp32":
        for bag in model.embeddings.embedding_bags.values():
            bag.weight.data = rounded(bag.weight.data, precision)


PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")


@pytest.mark.thorough
@pytest.mark.parametrize("materialise", ["never", "always"])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_program_scores_as_the_model_with_rounded_tables(composition: str, materialise: Materialise) -> None:
    for name, precision in (("dcn", "fp32"),) if materialise == "always" else (("dlrm", own) for own in PRECISIONS):
        model = click_model(name, tables(composition))
        exported = scored(model)
        program = exported.whole_program(ExportStorage(precision, materialise))
        round_tables(model, precision)
        require_equal_scores(program, model, exported)


@pytest.mark.thorough
def test_a_saved_program_scores_so_too(tmp_path: Path) -> None:
    """One size of each scheme, for following the operations of more tables takes seconds."""
    require_saved("dcn", [own for own in tables("path_linear") if not own.name.endswith("_67")], "int8", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("name", ["dlrm", "dcn"])
def test_each_saved_program_scores_so_too(name: str, composition: str, precision: Precision, tmp_path: Path) -> None:
    require_saved(name, tables(composition), precision, tmp_path)


def require_saved(
    name: str, configs: Sequence[CompositionalEmbeddingBagConfig], precision: Precision, folder: Path
) -> None:
    model = click_model(name, configs)
    exported = scored(model)
    program = saved_program(exported, ExportStorage(precision, "never"), folder)
    round_tables(model, precision)
    require_equal_scores(program, model, exported)


@torch.no_grad()
def require_equal_scores(program: Program, model: Model, exported: ScoredModel) -> None:
    for num_rows in (0, 1, 2, 33):
        batch = made_up_batch(schema(exported.tables), num_rows, seed=num_rows)
        found = program(*exported.inputs(batch).tensors.values())
        # float32 sums over 20 features and their pairs
        torch.testing.assert_close(found, trained_scores(model, batch), atol=2e-6, rtol=0)


@pytest.mark.parametrize("materialise", ["never", "always"])
def test_ids_outside_of_a_table_never_read_outside_of_it(materialise: Materialise) -> None:
    model = click_model("dlrm", tables("product"))
    exported = scored(model)
    program = exported.whole_program(ExportStorage("fp32", materialise))
    batch = made_up_batch(schema(exported.tables), 64)
    inputs = dict(exported.inputs(batch).tensors)
    wild = torch.randint(-(2**63), 2**63 - 1, inputs["values"].shape)
    mapped = torch.where((wild >= 0) & (wild < SIZE), wild, 1)  # each table's own unknown id
    pieces = list(mapped.split(inputs["lengths"].sum(1).tolist()))
    for place, feature in enumerate(exported.features):
        own = wild.split(inputs["lengths"].sum(1).tolist())[place]
        if feature.name == "modulo":
            pieces[place] = own % SIZE
        if feature.name == "hash":
            pieces[place] = own  # hashed by the trained model too
    ids = KeyedJaggedTensor(batch["sparse_features"].keys(), torch.cat(pieces), lengths=inputs["lengths"].flatten())
    batch.fields["sparse_features"] = ids
    with torch.no_grad():
        found = program(wild, inputs["lengths"], inputs["dense"])
    torch.testing.assert_close(found, trained_scores(model, batch), atol=1e-6, rtol=0)


FEW = {"quotient_remainder_60", "chinese_remainder_60", "mean", "max"}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "is_whole"), [pytest.param("dlrm", True, marks=pytest.mark.slow), ("dcn", False)])
def test_shards_and_their_network_score_as_the_whole(name: str, is_whole: bool, tmp_path: Path) -> None:
    configs = [table for table in tables("feature") if "_60" in table.name or table.name in POOLINGS]
    model = click_model(name, [table for table in configs if is_whole or table.name in FEW])
    exported = scored(model)
    names = [table.name for table in exported.tables]
    batch = made_up_batch(schema(exported.tables), 9)
    network, shards = exported.sharded_programs([names[::2], names[1::2]], ExportStorage())
    vectors = []
    for number, shard in enumerate(shards):
        save_program(
            shard,
            plain_inputs(made_up_batch(schema(exported.tables), 5), shard.features, False),
            tmp_path / str(number),
        )
        own = plain_inputs(batch, shard.features, False).tensors
        vectors.append(load_program(tmp_path / str(number))(*own.values()))
    with torch.no_grad():
        found = network(torch.cat(vectors, dim=1), batch["dense_features"])
    torch.testing.assert_close(found, trained_scores(model, batch), atol=1e-6, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("num_features", [1, 2])
def test_without_lists_there_is_one_lookup_a_partition_for_all_tables(num_features: int, tmp_path: Path) -> None:
    configs = [table for table in tables("product") if table.name.startswith("quotient_remainder")][:num_features]
    model = click_model("dlrm", configs)
    exported = scored(model)
    program = saved_program(exported, ExportStorage("fp32", "never"), tmp_path)
    require_equal_scores(program, model, exported)
    with zipfile.ZipFile(tmp_path / "network.pt2") as archive:
        (graph,) = (archive.read(name) for name in archive.namelist() if name.endswith("models/model.json"))
    assert graph.count(b'"torch.ops.aten.embedding.default"') == len(configs[0].scheme.num_rows)


@pytest.mark.thorough
def test_lengths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    exported = scored(click_model("dlrm", [table for table in tables("sum") if table.name in ("sum", "naive_60")]))
    program = saved_program(exported, ExportStorage(), tmp_path)
    values, lengths, dense = exported.inputs(made_up_batch(schema(exported.tables), 4)).tensors.values()
    longer = lengths.clone()
    longer[0, 0] = 2
    with pytest.raises(RuntimeError, match="a feature with one id a row has rows with another number"):
        program(values, longer, dense)
    with pytest.raises(RuntimeError, match="lengths say another number of ids than values has"):
        program(torch.cat([values, values[:1]]), lengths, dense)
    with pytest.raises(ValueError, match=r"different numbers of rows: \{'lengths': 4, 'dense': 1\}"):
        program(values, lengths, dense[:1])
