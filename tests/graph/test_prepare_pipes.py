"""Edges from pipes, which are read once only."""

import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from distembed.base.errors import RunError, UserError
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.graph.prepare import NodeIds, prepare_graph
from tests.data import reference
from tests.data.reference import folder_bytes
from tests.graph.edge_files import write

NODES = NodeIds(num_embeddings=1000)
EDGES = pa.table({"source": range(400), "target": range(500, 900)})


def feed(pipe: Path, content: bytes) -> threading.Thread:
    os.mkfifo(pipe)
    thread = threading.Thread(target=pipe.write_bytes, args=(content,))
    thread.start()
    return thread


def arrays(graph: Path) -> dict[str, bytes]:
    return {name: content for name, content in folder_bytes(graph).items() if name.endswith(".bin")}


@pytest.mark.parametrize(
    ("name", "named"),
    [*((name, False) for name in ("edges.csv", "edges.tsv", "edges.csv.gz", "edges.tsv.gz")), ("edges.tsv.gz", True)],
)
def test_a_pipe_gives_the_graph_of_its_content(tmp_path: Path, name: str, named: bool) -> None:
    """Whether its name says how it is read or its first bytes do."""
    file = write(tmp_path / name, EDGES)
    prepare_graph([file], tmp_path / "expected", NODES)
    (tmp_path / "pipes").mkdir()
    pipe = tmp_path / "pipes" / (name if named else "pipe")
    thread = feed(pipe, file.read_bytes())
    graph = prepare_graph([pipe], tmp_path / "out", NODES)
    thread.join()
    assert arrays(tmp_path / "out") == arrays(tmp_path / "expected")
    (source,) = graph.details["sources"]
    assert (source["name"], source["bytes"], source["num_rows"]) == ("pipe-1", file.stat().st_size, 400)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["graph.json", "neighbors.bin", "starts.bin"]


def test_an_error_names_the_pipe_and_not_its_copy(tmp_path: Path) -> None:
    thread = feed(tmp_path / "pipe", b"source,target\n1,2\n3,x\n")
    with pytest.raises(UserError, match=f"{tmp_path / 'pipe'}, row 2: target is 'x'"):
        prepare_graph([tmp_path / "pipe"], tmp_path / "out", NODES)
    thread.join()
    with pytest.raises(UserError, match="0 rows were read"):
        prepare_graph(["/dev/null"], tmp_path / "out", NODES)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_parquet_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    thread = feed(tmp_path / "pipe", write(tmp_path / "edges.parquet", EDGES).read_bytes())
    with pytest.raises(UserError, match="pipe is Parquet, which cannot be read from a pipe; name the file itself"):
        prepare_graph([tmp_path / "pipe"], tmp_path / "out", NODES)
    thread.join()


def test_a_vocabulary_that_is_not_there_any_more(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(reference.content(100, 1))
    prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "dataset", CriteoOptions(min_count=1))
    vocabulary = tmp_path / "dataset" / "vocabulary" / "C3.parquet"
    edges = write(tmp_path / "edges.csv", pa.table({"source": ["0a"], "target": ["0b"]}))
    for damage in (vocabulary.unlink, lambda: write(vocabulary, EDGES), lambda: vocabulary.write_bytes(b"PAR1")):
        damage()
        with pytest.raises(UserError, match=f"{vocabulary}.*prepare the data(set)? again"):
            prepare_graph([edges], tmp_path / "out", NodeIds(tmp_path / "dataset", "C3"))
    assert not (tmp_path / "out").exists()


def test_more_ids_than_the_disk_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "edges.csv", EDGES)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 8000})())
    with pytest.raises(RunError, match="out would not fit on its disk: at least 7.82 KiB are needed, and 7.81 KiB are"):
        prepare_graph([file], tmp_path / "out", NODES)
    assert [path.name for path in tmp_path.iterdir()] == ["edges.csv"]
