"""Figures and tables of papers: the committed ones are whole, and a killed reproduction equals an undisturbed one."""

import gzip
import hashlib
import json
import os
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from distembed.base.errors import FolderInUse, RunError, UserError
from distembed.training.run_folder.lock import owned
from distembed.training.sweeps.papers import (
    PAPERS,
    Dataset,
    Item,
    list_items,
    load_dataset,
    load_item,
    prepare_dataset,
    variant_config,
)
from tests.processes import start_processes
from tests.small_runs import call, config_values
from tests.sweeps.test_sweep import run_sweep
from tests.training.test_runs import wait_for_steps

OWN = [line.name for line in list_items() if line.reason is None]
NUMBERED = {  # figures and tables, written down without the papers at hand, but for transformers4rec
    "shi2020": {*(f"figure{number}" for number in range(1, 8)), "table1"},
    "wu2019": {f"table{number}" for number in range(1, 7)},
    "transformers4rec": {"figure1", "figure2", "figure3", "table1", "table2"},
}
SETTINGS = ["train.log_every=1", "train.max_steps=30", "train.evaluate_every=10"]
VARIANTS: dict[str, Any] = {
    "full": {"settings": ["embedding.default.partition=naive"], "reported": "0.5"},
    "hash, 4": {"of": "full", "settings": ["embedding.default.partition=remainder"]},
}
ITEM: dict[str, Any] = {
    "title": "Hashed tables",
    "reported": "Nothing.",
    "dataset": "small",
    "config": "../small.yaml",
    "metrics": ["auc", "logloss"],
    "plot": {"x": "variant", "y": "auc"},
    "settings": SETTINGS,
    "variants": VARIANTS,
}


def write_papers(folder: Path, dataset: Path, **changes: Any) -> Path:
    """A folder of one paper with one item, of the small dataset."""
    (folder / "own").mkdir(parents=True)
    texts = {
        "datasets.yaml": {"small": {"files": {}, "source": "", "commands": []}},
        "own/paper.yaml": {"title": "Own", "url": "", "not_run": {"table2": "no data"}},
        "own/table1.yaml": ITEM | changes,
    }
    for name, values in texts.items():
        (folder / name).write_text(yaml.safe_dump(values, sort_keys=False))
    (folder / "small.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    return folder


@pytest.fixture
def papers(tmp_path: Path, dataset: Path) -> Path:
    return write_papers(tmp_path / "papers", dataset)


def reproduce(papers: Path, runs: Path, dataset: Path, *options: object) -> list[object]:
    """The arguments of the command, with the small dataset as the prepared one."""
    (runs / "datasets" / "small").mkdir(parents=True, exist_ok=True)
    if not (runs / "datasets" / "small" / "data").exists():
        (runs / "datasets" / "small" / "data").symlink_to(dataset)
    return ["reproduce", "own/table1", "--papers", papers, "--run-dir", runs, *options]


@pytest.mark.parametrize("name", OWN)
def test_every_variant_of_a_committed_item_is_a_valid_config(name: str, tmp_path: Path) -> None:
    item = load_item(name)
    load_dataset(item.dataset)
    configs = [variant_config(item, PAPERS / f"{name}.yaml", variant, tmp_path, 0) for variant in item.variants]
    texts = [config.to_yaml() for config in configs]
    assert len(set(texts)) == len(texts), "two variants are one"
    assert {config.data.path for config in configs} <= {str(tmp_path / name) for name in ("data", "kept", "timed")}


def test_each_numbered_figure_and_table_is_listed() -> None:
    listed: dict[str, set[str]] = {}
    for line in list_items():
        paper, name = line.name.split("/")
        for kind, first, last in re.findall(r"(figure|table)s?(\d+)(?:-(\d+))?", name):
            numbers = range(int(first), int(last or first) + 1)
            listed.setdefault(paper, set()).update(f"{kind}{number}" for number in numbers)
    assert {paper: listed[paper] & expected for paper, expected in NUMBERED.items()} == NUMBERED
    text = (PAPERS / "README.md").read_text()
    assert [name for name in OWN if f"`{name}`" not in text] == []


@pytest.mark.thorough
def test_a_killed_reproduction_equals_an_undisturbed_one(papers: Path, dataset: Path, tmp_path: Path) -> None:
    arguments = reproduce(papers, tmp_path / "killed", dataset, "--seeds", 2)
    own = tmp_path / "killed" / "own" / "table1"
    (process,) = start_processes(1, run_sweep, arguments, tmp_path).processes
    wait_for_steps(own / "hash-4,seed=0", process, 5)  # the second of four runs
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    kept = (own / "full,seed=0" / "evaluation.json").stat().st_mtime_ns
    call(*arguments)
    assert (own / "full,seed=0" / "evaluation.json").stat().st_mtime_ns == kept

    call(*reproduce(papers, tmp_path / "whole", dataset, "--seeds", 2))
    for name in ("results.json", "table.md", "plot.svg"):
        assert (own / name).read_text() == (tmp_path / "whole" / "own" / "table1" / name).read_text()


@pytest.mark.thorough
def test_a_reproduction_ends_with_a_table_and_a_plot(papers: Path, dataset: Path, tmp_path: Path) -> None:
    said = call(*reproduce(papers, tmp_path / "runs", dataset, "--seeds", 2))
    own = tmp_path / "runs" / "own" / "table1"
    header, _, *rows = [line.strip("| \n").split(" | ") for line in (own / "table.md").read_text().splitlines()]
    assert header[:4] == ["variant", "seeds", "parameters", "in tables"] and header[-1] == "paper"
    for row, (name, stem) in zip(rows, [("full", "full"), ("hash, 4", "hash-4")], strict=True):
        evaluations = [json.loads((own / f"{stem},seed={seed}" / "evaluation.json").read_text()) for seed in (0, 1)]
        values = [evaluation["auc"] for evaluation in evaluations]
        assert row[0] == name and row[1] == "2"
        assert row[4] == f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" and row[4] in said
    for x in ("variant", "parameters", "rows"):  # finished runs are drawn again, and not trained
        (papers / "own" / "table1.yaml").write_text(
            yaml.safe_dump(ITEM | {"plot": {"x": x, "y": "logloss"}}, sort_keys=False)
        )
        assert "training " not in call(*reproduce(papers, tmp_path / "runs", dataset, "--seeds", 2))
        drawn = (own / "plot.svg").read_text()
        assert all(f">{name}<" in drawn for name in VARIANTS) and "logloss<" in drawn
    more = call(*reproduce(papers, tmp_path / "runs", dataset, "--seeds", 3))
    assert more.count("training ") == 2
    whole = (own / "table.md").read_text()
    call(*reproduce(papers, tmp_path / "runs", dataset, "--seeds", 1))
    assert (own / "table.md").read_text() == whole, "fewer seeds take none out of the table"

    run_file = own / "full,seed=1" / "run.json"
    run_file.write_text(json.dumps(json.loads(run_file.read_text()) | {"id_fingerprint": "of other rows"}))
    with pytest.raises(RunError, match="the runs of 'full' were trained on different datasets"):
        call(*reproduce(papers, tmp_path / "runs", dataset, "--seeds", 3))
    with owned(own), pytest.raises(FolderInUse):  # the report fails too, and does not hide the cause
        call(*reproduce(papers, tmp_path / "runs", dataset, "--seeds", 4))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("own/table3", {}, "NAME is 'own/table3', which is not known"),
        ("own/table2", {}, "own/table2 is not run here: no data"),
        ("own/table1", {"plot": {"x": "rows", "y": "loss"}}, "plot.y is 'loss'; give one of auc, logloss"),
        ("own/table1", {"metric": "auc"}, "metric: unknown key; did you mean metrics?"),
        ("own/table1", {"variants": {"a": {"of": "b"}}}, "variants.a.of is 'b', which is not known"),
        ("own/table1", {"variants": {"a": {"of": "b"}, "b": {"of": "a"}}}, "extend one another in a circle"),
    ],
)
def test_wrong_items_are_explained(
    tmp_path: Path, dataset: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    papers = write_papers(tmp_path / "papers", dataset, **changes)
    with pytest.raises(UserError, match=re.escape(message)):
        load_item(name, papers)


@pytest.fixture
def ratings(tmp_path: Path) -> Dataset:
    """A dataset of raw/ratings.csv.gz, with a checksum that is not the file's."""
    commands = [
        "prepare ratings {raw}/ratings.csv.gz --output {dataset}/data",
        *(
            f"prepare graph --co-occurrence --data {{dataset}}/data --table {table} --max-neighbors 2 "
            f"--output {{dataset}}/{table}"
            for table in ("user", "item")
        ),
    ]
    values = {"files": {"ratings.csv.gz": "0" * 64}, "source": "It is at example.org.", "commands": commands}
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump({"ratings": values}))
    (tmp_path / "raw").mkdir()
    return load_dataset("ratings", tmp_path)


def write_ratings(raw: Path, modulus: int = 5) -> str:
    """Writes ratings.csv.gz, and returns its SHA-256."""
    lines = [f"{user},{item},{1 + (user + item) % modulus}\n" for user in range(9) for item in range(9)]
    text = ("user,item,rating\n" + "".join(lines)).encode()
    (raw / "ratings.csv.gz").write_bytes(gzip.compress(text))
    return hashlib.sha256(text).hexdigest()


def test_the_outputs_that_an_item_reads_are_made_once(ratings: Dataset, tmp_path: Path) -> None:
    raw, folder, said = tmp_path / "raw", tmp_path / "prepared", list[str]()
    with pytest.raises(UserError, match=re.escape("has no ratings.csv.gz. It is at example.org.")):
        prepare_dataset(ratings, {"data"}, raw, folder, said.append)
    checksum = write_ratings(raw)
    graphs = ITEM | {"settings": ["sse.tables.item.graph={dataset}/item"]}
    outputs = TypeAdapter(Item).validate_json(json.dumps(graphs)).outputs()
    for _ in range(2):
        found = prepare_dataset(ratings, outputs, raw, folder, said.append, any_data=True)
        assert found == {"ratings.csv.gz": checksum}
    made = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert made == {"data", "item", "raw.json"} and len(said) == 2
    shutil.rmtree(raw)
    assert prepare_dataset(ratings, outputs, raw, folder, said.append, any_data=True) == found


def test_other_raw_files_are_refused(ratings: Dataset, tmp_path: Path) -> None:
    raw, folder = tmp_path / "raw", tmp_path / "prepared"
    checksum = write_ratings(raw)
    wrong = f"ratings.csv.gz has the SHA-256 {checksum}, and the file of the tables in configs/papers has {'0' * 64}"
    for is_prepared in (False, True):
        assert (folder / "data").exists() == is_prepared
        with pytest.raises(UserError, match=f"{wrong}.*Or add --any-data"):
            prepare_dataset(ratings, {"data"}, raw, folder, print)
        prepare_dataset(ratings, {"data"}, raw, folder, print, any_data=True)
    write_ratings(raw, 4)
    with pytest.raises(UserError, match="was made of other files"):
        prepare_dataset(ratings, {"item"}, raw, folder, print, any_data=True)


def test_a_second_reproduction_waits_for_the_dataset(ratings: Dataset, tmp_path: Path) -> None:
    raw, folder, said = tmp_path / "raw", tmp_path / "prepared", list[str]()
    write_ratings(raw)
    with ThreadPoolExecutor(2) as pool:
        prepare = partial(prepare_dataset, ratings, {"data"}, raw, folder, said.append, any_data=True)
        list(pool.map(lambda _: prepare(), range(2)))
    assert len([line for line in said if line.startswith("distembed prepare")]) == 1


@pytest.mark.thorough
def test_a_preparation_ends_with_a_killed_reproduction(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    script = f"""
from pathlib import Path
from distembed.training.sweeps.papers import Dataset, prepare_dataset
folder = Path({str(tmp_path)!r})
dataset = Dataset({{}}, "", ["prepare ratings {{raw}}/pipe.csv --output {{dataset}}/data"])
prepare_dataset(dataset, {{"data"}}, folder, folder / "prepared", print)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        writer = os.open(pipe, os.O_WRONLY)  # waits until the command reads
        process.kill()
    poll = select.poll()
    poll.register(writer, 0)
    assert [event for _, event in poll.poll(60_000)] == [select.POLLERR], "a process still reads"
    os.close(writer)


def test_without_optuna_no_dataset_is_prepared(papers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "distembed.training.sweeps.train", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"reproduce .*need optuna.*distembed\[sweep\]"):
        call("reproduce", "own/table1", "--papers", papers, "--run-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def write_example(folder: Path) -> Path:
    """The item that the guide shows, in a folder of its own."""
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (PAPERS / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (folder / "papers" / "mine").mkdir(parents=True)
    (folder / "papers" / "mine" / "sizes.yaml").write_text(example)
    (folder / "papers" / "mine" / "paper.yaml").write_text("{title: Mine, url: none}")
    return folder / "papers"


def test_the_item_of_the_guide_is_valid(tmp_path: Path) -> None:
    papers = write_example(tmp_path)
    item = load_item("mine/sizes", papers)
    assert load_dataset(item.dataset, papers) == load_dataset(item.dataset)
    configs = [variant_config(item, papers / "mine" / "sizes.yaml", name, tmp_path, 0) for name in item.variants]
    assert [config.embedding.default.collisions for config in configs[1:]] == [4, 60]


@pytest.mark.slow
def test_the_item_of_the_guide_runs(criteo_sample: Path, tmp_path: Path) -> None:
    papers, runs = write_example(tmp_path), tmp_path / "runs"
    options = ["--papers", papers, "--data", criteo_sample.parent, "--run-dir", runs, "--seeds", 1]
    call("reproduce", "mine/sizes", *options)
    rows = json.loads((runs / "mine" / "sizes" / "results.json").read_text())["variants"]
    full, hashed, smallest = ((row["parameters_in_tables"], row["auc"][0]) for row in rows)
    assert full[0] > hashed[0] > smallest[0] and full[1] > smallest[1] > 0.74


def test_the_command_lists_all_and_asks_for_a_name() -> None:
    listed = call("reproduce", "--list")
    assert all(f"{name}  {load_item(name).title}" in listed for name in OWN)
    own = {line.split()[0] for line in listed.splitlines() if line.endswith("(not of the paper)")}
    assert own == {name for name in OWN if not re.search(r"/(figure|table|section)\d", name)}
    with pytest.raises(UserError, match="--list"):
        call("reproduce")
