"""A dataset or a graph in which any one bit is another is refused by the name of the file, or gives what it gave.

What it gives is all that training, evaluation and planning read of it: every batch of every split, the vocabularies,
and the arrays of the graph.
"""

import hashlib
import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data import Manifest
from distembed.data.dataset.manifest import id_fingerprint
from distembed.data.dataset.row_groups import require_whole_splits, verify_dataset
from distembed.data.prepare import prepare_criteo, write_parquet
from distembed.data.reader import BatchOrder, BatchReader
from distembed.graph import Graph
from distembed.graph.csr import verify_graph
from distembed.graph.folder import array_types
from tests.data import reference
from tests.data.small_dataset import make_dataset
from tests.graph.reference import random_edges

DESCRIPTIONS = ("manifest.json", "graph.json")
"""What describes a folder: a bit that changes none of its values is without effect, such as one of 1e-05 and 1E-05."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A prepared dataset, one of files made elsewhere with lists of ids, and a graph."""
    folder = tmp_path_factory.mktemp("flips")
    (folder / "rows.tsv").write_bytes(reference.content(700, 4, malformed=0.004))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_parquet, "ROW_GROUP_ROWS", 100)
        prepare_criteo([folder / "rows.tsv"], folder / "criteo")
    make_dataset(folder / "lists", 100)
    sources, targets, weights = random_edges(50, 300, 5)
    Graph.from_edges(50, sources, targets, weights).write(folder / "graph")
    return [folder / "criteo", folder / "lists", folder / "graph"]


def contents(folder: Path) -> str:
    """Returns a checksum of all that is read of a dataset or a graph."""
    digest = hashlib.sha256()
    if (folder / "graph.json").exists():
        graph = Graph.open(folder)
        arrays = [getattr(graph, name) for name in array_types(graph.num_nodes, graph.weighted)]
        for part in (repr(graph.details), graph.fingerprint, str(graph.directed), *arrays):
            digest.update(part.encode() if isinstance(part, str) else part.data.cast("B"))
        return digest.hexdigest()
    manifest = Manifest.load(folder)
    require_whole_splits(folder, manifest.splits)
    digest.update(repr((manifest.schema, manifest.preparation, id_fingerprint(folder, manifest))).encode())
    for vocabulary in manifest.vocabularies.values():
        digest.update(repr(pq.read_table(folder / vocabulary.file).to_pydict()).encode())
    for name in manifest.splits:
        for batch in BatchReader(folder, name, BatchOrder(64, seed=1), prefetch_batches=0):
            features = batch["sparse_features"]
            for values in (features.values(), features.lengths(), batch["labels"], batch["dense_features"]):
                digest.update(values.numpy().data.cast("B"))
    return digest.hexdigest()


def problems(folder: Path) -> list[str]:
    """Returns what a check of the whole folder finds."""
    verify = verify_graph if (folder / "graph.json").exists() else verify_dataset
    try:
        return verify(folder).problems
    except UserError as error:
        return [str(error)]


def require_detected_or_without_effect(folders: list[Path], flips: int, seed: int) -> None:
    draw = random.Random(seed)
    undamaged = {folder: contents(folder) for folder in folders}
    # each kind of file as often as the other, however many there are of it
    kinds: dict[tuple[Path, str], list[Path]] = {}
    for folder in folders:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            kinds.setdefault((folder, file.parent.name if file.parent != folder else file.name), []).append(file)
    named = {name for _, name in kinds}
    assert named >= {"manifest.json", "checksums.bin", "rejected.tsv", "vocabulary", "train", "validation", "test"}
    assert named >= {"graph.json", "starts.bin", "neighbors.bin", "keep.bin", "alias.bin", "part1.parquet"}
    for number in range(flips):
        folder, kind = list(kinds)[number % len(kinds)]
        file = draw.choice(kinds[folder, kind])
        whole = file.read_bytes()
        position, bit = draw.randrange(len(whole)), draw.randrange(8)
        where = f"bit {bit} of byte {position} of {file}"
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        try:
            found = problems(folder)
            try:
                assert contents(folder) == undamaged[folder], f"{where} is another, and it is not noticed"
            except UserError as error:
                assert file.name in str(error), f"{where}: {error}"
            if file.name in DESCRIPTIONS and not found:
                assert json.loads(file.read_bytes()) == json.loads(whole), where
            else:
                assert len(found) == 1 and str(file) in found[0], f"{where}: {found}"
        finally:
            file.write_bytes(whole)
    assert {folder: contents(folder) for folder in folders} == undamaged


@pytest.mark.thorough
def test_a_bit_that_is_another_is_noticed(folders: list[Path]) -> None:
    require_detected_or_without_effect(folders, 30, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_of_many_bits_that_is_another_is_noticed(folders: list[Path], request: pytest.FixtureRequest) -> None:
    require_detected_or_without_effect(folders, request.config.getoption("--flips"), seed=1)
