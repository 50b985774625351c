"""Trains models and schemes on real Criteo rows with several seeds: parameters, AUC and logloss on the test split.

::

    python tools/bench_quality.py train.tsv.gz --seeds 5 --output bench_quality.json
    OMP_NUM_THREADS=1 python tools/bench_quality.py train.tsv.gz --seeds 3 --jobs 2 --only "^[^,]*, (full|product, 4)$"
    OMP_NUM_THREADS=1 python tools/bench_quality.py train.tsv.gz --seeds 3 --jobs 2 --only "two hashes"
    OMP_NUM_THREADS=1 python tools/bench_quality.py train.tsv.gz --seeds 3 --jobs 2 --only "mixed dimensions"
    OMP_NUM_THREADS=1 python tools/bench_quality.py train.tsv.gz --seeds 3 --jobs 2 --only "^DLRM, (full|codes.*)$"
    python tools/bench_quality.py train.tsv.gz --search 6 --only "^[^,]*, full$"

The second command trains every click model with full and with quotient-remainder tables. The fifth one compresses
trained full tables to codes. ``--search`` looks for settings by the validation split instead: trials of Optuna's TPE.

Rows are split 0.8/0.1/0.1 in time order and trained on for one epoch with ``configs/criteo_sample.yaml``. The schemes
and the soft one-hot vectors of papers are items of ``distembed reproduce``.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from bench_commands import (
    CONFIGS,
    bench_parser,
    deviation,
    kept_rows,
    mean_and_deviation,
    run_distembed,
    write_output,
)
from rich.console import Console
from rich.table import Table

_BASE = CONFIGS / "criteo_sample.yaml"
_PRODUCT = ["embedding.default.partition=quotient_remainder"]
_HASHED = ["embedding.default.partition=remainder"]
_CODES = {38: "95900B", 63: "57800B", 150: "24300B"}
"""Budget of the tables of ``distembed compress``, by how many times smaller the full tables become."""
_CLICK_MODELS = {
    "DLRM": [],
    "DCN": ["model={name: dcn}"],
    "DCN V2": [
        "model={name: dcnv2, dropout: 0.1}",
        "train.dense_optimizer.learning_rate=0.003",
        "train.dense_optimizer.weight_decay=0.00001",
    ],
    "GDCN": ["model={name: gdcn}", "train.dense_optimizer.weight_decay=0.00001"],
    "FinalMLP": ["model={name: finalmlp, dropout: 0.1}", "train.dense_optimizer.weight_decay=0.00001"],
    "DeepFM": [
        "model={name: deepfm}",
        "train.dense_optimizer.weight_decay=0.00001",
        "train.sparse_optimizer.learning_rate=0.03",
    ],
}
"""Settings of models, each the best on the validation split; the rate of DCN V2's networks was tried alone."""
_SEARCH = [
    "model.dropout=0.0,0.1,0.2",
    "train.dense_optimizer.learning_rate=0.0007,0.0015,0.003",
    "train.sparse_optimizer.learning_rate=0.03,0.06",
    "train.dense_optimizer.weight_decay=0,0.00001",
]
"""The values that a search chooses from; DLRM and DCN have no dropout."""


_TIMES_COLLISIONS = {"sum": 2, "product": 2, "concat": 1, "weighted_sum": 2.25}
"""Collisions of each of two hashes, for tables of the bytes of a hashed one: their vectors have D or D/2 numbers each,
and a weighted sum has rows of 4 numbers in addition."""


def multi_hash(composition: str, collisions: int) -> list[str]:
    """Returns the settings of two hashes whose tables have the bytes of a hashed table with these collisions."""
    settings = {
        "partition": "multi_hash",
        "composition": composition,
        "collisions": round(_TIMES_COLLISIONS[composition] * collisions),
        "num_partitions": 3 if composition == "weighted_sum" else 2,
    }
    return [f"embedding.default.{key}={value}" for key, value in settings.items()]


_MIXED: dict[str, tuple[list[int], tuple[int, int], str]] = {
    "4": ([8, 8], (5, 50), "fp32"),
    "16": ([4, 12], (12, 500), "fp32"),
    "60": ([4, 12], (60, 1000), "fp32"),
    "16, fp16": ([8, 8], (12, 150), "fp16"),
    "60, fp16": ([4, 12], (26, 600), "fp16"),
}
"""Dims of two partitions, the counts in training from which ids have rows of their own in them, and the type of their
numbers, by how many times smaller the full tables become."""


def mixed_dims(dims: list[int], data_type: str) -> list[str]:
    """Returns the settings of truncated tables, less their bounds."""
    settings = {"partition": "truncated", "composition": "concat", "dims": dims, "threshold": 0, "data_type": data_type}
    return [f"embedding.default.{key}={value}" for key, value in settings.items()]


def bounds_by_counts(dataset: Path, least_counts: Sequence[int]) -> list[str]:
    """Returns the setting of each table's bounds: missing, unknown, and the ids that occur so often in training."""
    settings = []
    for file in sorted((dataset / "vocabulary").glob("*.parquet")):
        counts = pq.read_table(file, columns=["count"])["count"].to_numpy()
        bounds = [2 + int((counts >= least).sum()) for least in least_counts]
        settings.append(f"embedding.tables.{file.stem}={{bounds: {bounds}}}")
    return settings


class Variant(NamedTuple):
    """Settings of the config, and a budget of codes.

    ``least_counts`` are the counts from which ids have rows of their own in truncated tables.
    """

    settings: list[str]
    budget: str | None = None
    least_counts: Sequence[int] = ()


VARIANTS: dict[str, Variant] = (
    {
        "DLRM, full": Variant([]),
        "DLRM, full, fp32": Variant(["train.precision=fp32"]),
        "DLRM, product, 4, fp32": Variant([*_PRODUCT, "train.precision=fp32"]),
    }
    | {f"DLRM, codes, {times}": Variant([], budget=budget) for times, budget in _CODES.items()}
    | {f"{name}, full": Variant(settings) for name, settings in _CLICK_MODELS.items()}
    | {f"{name}, product, 4": Variant([*_PRODUCT, *settings]) for name, settings in _CLICK_MODELS.items()}
    | {
        f"DLRM, {name}, {collisions}": Variant([*scheme, f"embedding.default.collisions={collisions}"])
        for collisions in (4, 60)
        for name, scheme in {"hashed": _HASHED, "product": _PRODUCT}.items()
    }
    | {
        f"DLRM, two hashes, {composition}, {collisions}": Variant(multi_hash(composition, collisions))
        for collisions in (4, 60)
        for composition in _TIMES_COLLISIONS
    }
    | {
        f"DLRM, mixed dimensions, {name}": Variant(mixed_dims(dims, data_type), least_counts=least_counts)
        for name, (dims, least_counts, data_type) in _MIXED.items()
    }
)


def train(variant: str, dataset: Path, runs: Path, seed: int) -> dict[str, Any]:
    """Trains with one seed, compresses the run to codes if it has a budget, and returns its record and evaluation."""
    settings, budget, least_counts = VARIANTS[variant]
    run = runs / str(seed)
    run_settings = [f"data.path={dataset}", f"train.seed={seed}", *settings]
    if least_counts:
        run_settings += bounds_by_counts(dataset, least_counts)
    run_distembed("train", _BASE, *run_settings, "--run-dir", run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    last = [line for line in lines if line["kind"] == "train"][-1]
    record = json.loads((run / "run.json").read_text()) | json.loads((run / "evaluation.json").read_text())
    if budget is not None:
        coded = runs / f"{seed}-codes"
        run_distembed("compress", run, coded, "--budget", budget)
        record = json.loads((coded / "run.json").read_text()) | json.loads(run_distembed("evaluate", coded, "--json"))
    return record | {"samples_per_second": last["samples"] / last["seconds"]}


def search(variant: str, dataset: Path, folder: Path, trials: int) -> None:
    """Looks for settings of a variant by the validation split, and prints the command's table of runs."""
    settings = VARIANTS[variant].settings
    space = [values for values in _SEARCH if "dropout" not in values or not variant.startswith(("DLRM", "DCN,"))]
    fixed = [setting for setting in settings if setting.startswith("model=")]
    data = [f"data.path={dataset}", "data.test=null"]
    options = ["--sampler", "tpe", "--trials", str(trials), "--workers", "2", "--run-dir", str(folder)]
    command = [sys.executable, "-m", "distembed", "sweep", str(_BASE), *data, *fixed, *space, *options]
    print(variant, flush=True)
    subprocess.run(command, check=True)


def summarise(variant: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the results of one variant: means and standard deviations over seeds, and values by seed."""
    row = {"variant": variant, "seeds": len(runs), "parameters": runs[0]["parameters"]}
    row |= {key: runs[0][key] for key in ("embedding_parameters", "embedding_bytes")}
    row |= {"samples_per_second": statistics.median(run["samples_per_second"] for run in runs)}
    by_metric = {key: [run[key] for run in runs] for key in ("auc", "logloss")}
    for key, values in by_metric.items():
        row |= {key: statistics.mean(values), f"{key}_deviation": deviation(values)}
    return row | {f"{key}_of_seed": values for key, values in by_metric.items()}


def main() -> None:
    """Prepares the rows, trains every variant and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("tsv", nargs="+", help="raw Criteo files in time order")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default="", help="variants whose name matches this pattern")
    parser.add_argument("--search", type=int, metavar="TRIALS", help="look for settings instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "dataset"
        names = [name for name in VARIANTS if re.search(options.only, name)]
        run_distembed("prepare", "criteo", *options.tsv, "--output", dataset)
        if options.search is not None:
            for number, variant in enumerate(names):
                search(variant, dataset, Path(folder) / f"search-{number}", options.search)
            return
        seeds = range(options.seeds)
        measures = {
            f"{variant}, seed {seed}": partial(train, variant, dataset, Path(folder) / f"runs-{number}", seed)
            for number, variant in enumerate(names)
            for seed in seeds
        }
        runs = kept_rows(options, measures, options.jobs)
    rows = [summarise(variant, [runs[f"{variant}, seed {seed}"] for seed in seeds]) for variant in names]
    table = Table("variant", "parameters", "in tables", "bytes", "samples/s", "test AUC", "test logloss")
    for row in rows:
        metrics = map(mean_and_deviation, (row["auc_of_seed"], row["logloss_of_seed"]))
        columns = ("parameters", "embedding_parameters", "embedding_bytes", "samples_per_second")
        counts = (f"{row[key]:,.0f}" for key in columns)
        table.add_row(row["variant"], *counts, *metrics)
    Console(width=120).print(table)
    print(json.dumps(rows, indent=2))
    write_output(options, rows)


if __name__ == "__main__":
    main()
