"""Commands and refusals that need no model answer without loading torch, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema

HEAVY = ("torch", "torchrec", "fbgemm_gpu")
PROGRAM = f"""
import contextlib, io, json, sys
from distembed.commands.cli import main
for line in json.load(sys.stdin):
    before, output, errors = set(sys.modules), *(io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    sys.argv[1:] = line.split()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    loaded = [name for name in {HEAVY} if name in sys.modules and name not in before]
    errors.seek(0)
    print(json.dumps([code, errors.read(), loaded]), file=sys.__stdout__, flush=True)
"""

Answer = tuple[int, str, list[str]]

ANSWERED = [
    "--help",
    "--version",
    "train --help",
    "launch --help",
    "prepare criteo --help",
    "describe config.yaml",
    "describe config.yaml --json embedding.default.composition=concat embedding.default.partition=mixed_radix",
    "describe schema.yaml embedding.default.partition=chinese_remainder model.name=dcn",
    "synthesize rows.tsv --rows 50",
    "prepare criteo few.tsv --output made",
    "prepare table --help",
    "prepare table few.tsv --output tabled --schema criteo",
    "prepare schema taken.csv --output guessed.yaml",
    "prepare graph edges.csv --output graph --num-embeddings 10",
    "prepare ratings taken.csv --output ratings --split last-one --min-rating 2 --seed 3",
    "prepare ratings taken.csv --output likes --implicit --test tested.csv --dense day --overwrite",
    "prepare ratings taken.csv --output numbered --no-header --time 4 --max-rejected 0.5",
    "prepare sequences taken.csv --output sequences --rating rating --min-rating 2 --windows all --dense day",
    "prepare graph --co-occurrence --data sequences --table item --within 1 --max-neighbors 1 --output taken",
    "report run",
    "status launched",
    "check dataset",
    "check run",
    "data stats dataset",
    "data stats dataset --output statistics.html --memory-limit 1KB",
    "sweep config.yaml train.seed=0,1 model.top=[8],[4] --run-dir swept --dry-run",
]
"""Command lines that end with 0."""

REFUSED = [
    "describe nowhere.yaml",
    "plan config.yaml --calibrate device.json",
    "plan --calibrate device",
    "plan --calibrate config.yaml",
    "plan config.yaml --gpu nowhere.json",
    "describe config.yaml data.path=nowhere",
    "describe config.yaml embedding.default.partition=quotient",
    "describe config.yaml train.sparse_optimizer.name=adamw",
    "describe config.yaml model.name=towers",
    "describe config.yaml task.name=order",
    "prepare criteo nowhere.tsv --output made",
    "prepare criteo few.tsv --output run",
    "prepare criteo few.tsv --output made --split 0.5",
    "prepare table few.tsv --output new --schema critio",
    "prepare table nowhere.csv --output new --schema avazu",
    "prepare table taken.csv --output new --schema avazu",
    "prepare table few.tsv --output new --schema config.yaml",
    "prepare schema nowhere.csv",
    "prepare schema taken.csv --output taken.csv",
    "prepare graph nowhere.csv --output graph --num-embeddings 10",
    "prepare graph edges.csv --output new --num-embeddings 10 --co-occurrence",
    "prepare ratings taken.csv --output new --implicit --rating rating",
    "prepare ratings taken.csv --output new --dense rating",
    "prepare ratings taken.csv --output new --split last-one --test tested.csv",
    "prepare sequences taken.csv --output new --split random:1/2,1/2",
    "prepare sequences taken.csv --output new --memory-limit 1KB",
    "report dataset",
    "status dataset",
    "report run --output config.yaml",
    "check nowhere",
    "logs launched",
    "cancel launched",
    "resume dataset",
    "launch nowhere.yaml",
    "launch config.yaml --detach",
    "launch config.yaml --scheduler slurrm",
    "launch config.yaml --run-dir run",
    "launch config.yaml --run-dir new train.init_from=nowhere",
    "train nowhere.yaml",
    "train config.yaml train.batch_size=0",
    "train config.yaml train.batchsize=64",
    "train config.yaml data.path=nowhere",
    "train schema.yaml",
    "train config.yaml --resume",
    "train config.yaml --run-dir new --resume",
    "train config.yaml --run-dir run",
    "train config.yaml --run-dir config.yaml",
    "train config.yaml --run-dir dataset",
    "train config.yaml --run-dir run --resume train.batch_size=7",
    "train config.yaml --init-from nowhere",
    "train config.yaml --init-from run",
    "train config.yaml train.keep_best=true data.validation=null",
    "train config.yaml --plan nowhere.json",
    "train config.yaml --plan run/run.json",
    "train config.yaml sse.default.p0=0.1 sse.default.graph=nowhere",
    "sweep nowhere.yaml train.seed=0,1",
    "sweep config.yaml train.seed=0,-1 --run-dir swept",
    "sweep config.yaml train.seed=0,1 --run-dir dataset",
    "sweep config.yaml train.seed=0,1 --run-dir swept --baseline seed=2",
    "check schema.yaml",
    "data stats nowhere",
    "data stats dataset --output config.yaml",
    "data stats dataset --memory-limit much",
    "evaluate nowhere",
    "evaluate run",
    "evaluate run --data nowhere",
    "evaluate run --split autumn",
    "evaluate run --checkpoint best",
    "predict run --output predictions.txt",
    "predict run --output predictions.csv",
    "materialise run --output config.yaml",
    "materialise run --output vectors --ids config.yaml",
    "materialise run --output vectors",
    "plan config.yaml --gpu h100",
    "plan config.yaml --memory much",
    "plan config.yaml data.path=nowhere",
    "plan config.yaml --output run/run.json",
    "plan config.yaml --report plan.txt",
    "plan",
    "plan config.yaml --batch-size 64",
    "plan config.yaml --model models:make --batch-size 64",
    "plan --model models:make",
    "plan --model models --batch-size 64",
    "plan --model nowhere:make --batch-size 64",
    "plan --model models:mak --batch-size 64",
    "plan --model models:make --batch-size 64 train.epochs=2",
    "plan --model models:make --batch-size 64 plan.reserve=2",
    "plan --model models:make --batch-size 64 --ids-per-row item",
    "plan config.yaml --rows 5 --price nan",
    "plan --model models:make --batch-size 64 --sparse-optimizer adamw",
    "plan --model models:make --batch-size 64 --example models:batch",
    "plan --model models:make --batch-size 64 --compress less.yaml",
    "plan --model models:make --batch-size 64 --output run/run.json",
]
"""Command lines that end with 2."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, configs, a run that has no checkpoint, a launched job, and raw files."""
    folder = tmp_path_factory.mktemp("quick")
    ids = {name: np.arange(20, dtype=np.int32) % 10 for name in ("C1", "C2")}
    for split in ("train", "validation", "test"):
        (folder / "dataset" / split).mkdir(parents=True)
        columns = {"label": np.arange(20, dtype=np.int8) % 2, "I1": np.ones(20, np.float32), **ids}
        pq.write_table(pa.table(columns), folder / "dataset" / split / "part-0.parquet")
    schema = Schema("label", ("I1",), (CategoricalFeature("C1", 10), CategoricalFeature("C2", 10)))
    files = {split: [f"{split}/part-0.parquet"] for split in ("train", "validation", "test")}
    create_manifest(folder / "dataset", schema, files)
    config = {"data": {"path": str(folder / "dataset")}, "train": {"batch_size": 4}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "schema.yaml").write_text("data: {schema: criteo_kaggle}\n")
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run" / "run.json").write_text(json.dumps({"name": "run", "status": "finished"}))
    (folder / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 0.5, "samples": 4}\n')
    (folder / "launched" / "launch").mkdir(parents=True)
    submission = {"handle": "local_cwd://session/job", "time": "2024-01-01T00:00:00+00:00", "j": "1x1"}
    job: dict[str, Any] = {"run_dir": str(folder / "launched"), "scheduler": "local_cwd", "j": "1x1"}
    (folder / "launched" / "launch" / "job.json").write_text(json.dumps({**job, "submissions": [submission]}))
    rows = [[str(number % 2), *[str(number)] * 13, *[f"{number // 2 % 2:08x}"] * 26] for number in range(20)]
    (folder / "few.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    (folder / "models.py").write_text("def make():\n    raise AssertionError('it was called')\n")
    (folder / "edges.csv").write_text("source,target\n1,2\n3,4\n")
    taken = [f"{user},{item},{item % 5},{item + user / 2}\n" for user in range(4) for item in range(user, 9)]
    (folder / "taken.csv").write_text("user,item,rating,day\n" + "".join(taken))
    (folder / "tested.csv").write_text("user,item,rating,day\n0,11,1,1\n")
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Answer]:
    """The exit code of each command line, what it says of errors, and what it was the first to load."""
    lines = [*ANSWERED, *REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(lines), capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("line", ANSWERED)
def test_what_needs_no_model_is_answered_without_torch(line: str, answers: dict[str, Answer]) -> None:
    code, error, loaded = answers[line]
    assert (code, error, loaded) == (0, "", [])


@pytest.mark.parametrize("line", REFUSED)
def test_what_can_be_seen_without_a_model_is_refused_without_torch(line: str, answers: dict[str, Answer]) -> None:
    code, error, loaded = answers[line]
    assert (code, loaded) == (2, []) and error.startswith("error: ")
