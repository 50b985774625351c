"""Trains every way to make tables smaller at equal bytes, and compares quality, bytes and time with full tables.

::

    OMP_NUM_THREADS=1 python tools/bench_compression.py DATA --seeds 5 --jobs 2 --output compression.jsonl
    OMP_NUM_THREADS=1 python tools/bench_compression.py DATA --only "full|codes|hash" --output compression.jsonl
    python tools/bench_compression.py DATA --seeds 0 --output compression.jsonl --page tools/compression.svg

DATA is the folder of ``criteo_kaggle_110k.tsv.gz``, of ``movielens1m_mf_train.csv.gz`` with its test file, and of
``amazon_beauty_sequences.txt.gz``. Each run adds a line to the output, and runs that have a line are not repeated, so
that an interrupted bench goes on. At the end the table of all lines is printed in Markdown.

A method has one number, such as the collisions, and the smallest number is taken at which tables have at most a half, a
quarter, ... of the full tables' bytes to train: vectors, stored rows of ids and the optimizer's states. Codes
are made of the full run of the same seed, and their bytes to serve are as much smaller than the full vectors.
"""

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bench_commands import CONFIGS, bench_parser, deviation, run_distembed
from bench_common import train_quietly
from torch import Tensor

from distembed.base.ranks import process_group
from distembed.data.dataset.manifest import Manifest
from distembed.embedding import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_occurrences
from distembed.tasks import batch_schema
from distembed.training.config import Config, load_config
from distembed.training.describe import describe

FACTORS = (2, 4, 16, 60, 200)


@dataclass(frozen=True)
class Problem:
    """A model on a dataset, and the metric by which tables are compared."""

    config: Path
    dataset: str
    metric: str
    settings: tuple[str, ...] = ()
    is_loss: bool = False  # whether a lower metric is better
    without: tuple[str, ...] = ()  # methods that cannot be used


_SAMPLE = CONFIGS / "criteo_sample.yaml"
_RECOMMENDERS = CONFIGS / "recommenders"
_DCNV2 = (
    "model={name: dcnv2, dropout: 0.1}",
    "train.dense_optimizer.learning_rate=0.003",
    "train.dense_optimizer.weight_decay=0.00001",
)
PROBLEMS = {
    "criteo dlrm": Problem(_SAMPLE, "criteo", "auc"),
    "criteo dcnv2": Problem(_SAMPLE, "criteo", "auc", _DCNV2),
    # an optimizer that trains products too
    "movielens mf": Problem(
        _RECOMMENDERS / "ml1m_mf.yaml",
        "movielens",
        "rmse",
        (
            "embedding.default.collisions=4",
            "task.regularization=0.04",
            "train.epochs=8",
            "train.sparse_optimizer={name: adagrad, learning_rate: 0.03}",
        ),
        is_loss=True,
        without=("unified, two hashes, concat",),
    ),
    "beauty sasrec": Problem(
        _RECOMMENDERS / "beauty_sasrec.yaml", "beauty", "ndcg@10_of_101", without=("unified, two hashes, concat",)
    ),
}


@dataclass(frozen=True)
class Full:
    """The full tables of a problem, and how often each of their ids occurs in training."""

    tables: Sequence[CompositionalEmbeddingConfig]
    counts: Mapping[str, Tensor]

    @property
    def dim(self) -> int:
        return self.tables[0].embedding_dim


Settings = dict[str, object]
"""Settings of a config by their dotted keys."""
Method = Callable[[int, Full], Settings]
"""Returns the settings of a number, given the full tables; a larger number means fewer bytes."""


def _default(**settings: object) -> Settings:
    """Returns settings of every table."""
    return {f"embedding.default.{key}": value for key, value in settings.items()}


def _scheme(partition: str, composition: str, **others: object) -> Method:
    """Returns a method whose number is that of collisions."""
    return lambda collisions, _: _default(partition=partition, composition=composition, collisions=collisions, **others)


def _tensor_train(num_cores: int) -> Method:
    """Returns a method whose ranks fall with the number."""
    own = {"partition": "mixed_radix", "num_partitions": num_cores, "composition": "tensor_train"}
    return lambda number, _: _default(rank=max(1, 64 // number), **own)


def _unified(number: int, full: Full) -> Settings:
    """Returns the settings of one table for all features; the number is that of ids for each row of a hash."""
    num_ids = sum(table.num_embeddings for table in full.tables)
    own = {"partition": "multi_hash", "num_partitions": 2, "composition": "concat"}
    store = own | {"features": [name for table in full.tables for name in table.feature_names]}
    return {"embedding.tables": json.dumps({"store": store | {"num_buckets": -(-num_ids // number)}})}


def _narrow(number: int, full: Full) -> Settings:
    """Returns full tables of a dimension that falls with the number, in steps of 4."""
    return _default(embedding_dim=max(4, full.dim - 4 * (number - 1)))


def _wider(collisions: int, full: Full) -> Settings:
    """Returns quotient-remainder products of one and a half times the dimension."""
    dim = 4 * round(full.dim * 3 / 8)
    return _default(partition="quotient_remainder", composition="product", collisions=collisions, embedding_dim=dim)


def _frequent(*shares: float, ratio: int = 1) -> Method:
    """Returns a method whose number is the count from which ids have rows of their own; others share a row.

    ``shares`` are of the full dimension, one for each partition; each further partition is for ids that are ``ratio``
    times as frequent as the ids of the one before.
    """

    def settings(number: int, full: Full) -> Settings:
        dims = [round(share * full.dim) for share in shares]
        least = [number * ratio**place for place in range(len(dims))]
        bounds = {
            table.name: {"bounds": [2 + int((full.counts[table.name][2:] >= count).sum()) for count in least]}
            for table in full.tables
        }
        own = {"partition": "truncated", "composition": "concat", "dims": dims if len(dims) > 1 else "null"}
        return _default(embedding_dim=sum(dims), **own) | {"embedding.tables": json.dumps(bounds)}

    return settings


def _half(method: Method) -> Method:
    """Returns a method with half precision, and one number of optimizer state a row."""
    half = {"embedding.default.data_type": "fp16", "train.sparse_optimizer.name": "row_wise_adagrad"}
    return lambda number, full: half | method(number, full)


METHODS: dict[str, Method] = {
    "hash": _scheme("remainder", "product"),
    "quotient-remainder, product": _scheme("quotient_remainder", "product"),
    "quotient-remainder, concat": _scheme("quotient_remainder", "concat"),
    "path, linear": _scheme("quotient_remainder", "path_linear"),
    "two hashes, sum": _scheme("multi_hash", "sum"),
    "two hashes, concat": _scheme("multi_hash", "concat"),
    "two hashes, weighted": _scheme("multi_hash", "weighted_sum", num_partitions=3),
    "unified, two hashes, concat": _unified,
    "clustered in training": lambda number, full: (
        {"train.recluster": "{every: 200, until: 400}"}
        | _scheme("clustered", "concat_sum", num_partitions=8)(number, full)
    ),
    "tensor train of 2": _tensor_train(2),
    "tensor train of 3": _tensor_train(3),
    "fewer dimensions": _narrow,
    "fp16, a state a row": _half(_narrow),
    "fp16, a state a row, quotient-remainder": _half(_scheme("quotient_remainder", "product")),
    "fp16, a state a row, quotient-remainder, half again the dimension": _half(_wider),
    "frequent ids": _frequent(1),
    "frequent ids, more dimensions for the most frequent": _frequent(0.25, 0.75, ratio=30),
    "fp16, a state a row, frequent ids": _half(_frequent(1)),
    "fp16, a state a row, frequent ids, half the dimension": _half(_frequent(0.5)),
    "fp16, a state a row, frequent ids, a quarter of it": _half(_frequent(0.25)),
}
FULL, CODES = "full", "codes"
_NUMBERS = sorted({*range(1, 40), *(round(40 * 1.08**i) for i in range(60))})
_LEAST_FILLED = 0.6
"""The share of a budget below which a method has no point there."""


def _as_overrides(settings: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in settings.items())


def _config(problem: Problem, settings: Sequence[str]) -> Config:
    return load_config(problem.config, [*problem.settings, *settings])


def training_bytes(config: Config) -> int:
    """Returns the bytes that a config's tables have in training."""
    return describe(config).size.training


def full_tables(problem: Problem, dataset: Path) -> Full:
    """Returns the full tables of a problem on its dataset."""
    config = _config(problem, [f"data.path={dataset}"])
    tables = [table.config for table in describe(config).tables]
    manifest = Manifest.load(dataset)
    return Full(tables, id_occurrences(str(dataset), manifest, batch_schema(config.task, manifest.schema), tables))


def fitted(problem: Problem, method: str, full: Full, data: str, budget: int) -> tuple[str, ...] | None:
    """Returns the settings of the first number whose tables fit the budget; None where none do, or far below it.

    Tables of up to 200 ids stay full, or of up to 20 ids where 200 leave too little for the others.
    """
    for threshold in (200, 20):
        for number in _NUMBERS:
            settings = _as_overrides(METHODS[method](number, full) | _default(threshold=threshold))
            size = training_bytes(_config(problem, [data, *settings]))
            if size <= budget:
                if size >= _LEAST_FILLED * budget:
                    return settings
                break  # of some methods, much larger numbers mean more bytes again
    return None


@dataclass(frozen=True)
class Job:
    """One run. The run of full tables is made into codes of each budget too."""

    problem: str
    method: str
    factor: int
    seed: int
    settings: tuple[str, ...]
    budgets: Mapping[int, int] = field(default_factory=dict)  # bytes by how many times smaller they are

    @property
    def name(self) -> str:
        return f"{self.problem}, {self.method}, {self.factor}, seed {self.seed}"


def run_job(job: Job, folder: Path) -> list[dict[str, Any]]:
    """Trains, and makes codes of a full run; returns the job's lines of the output."""
    torch.set_num_threads(1)
    problem = PROBLEMS[job.problem]
    settings = [f"data.path={folder / problem.dataset}", f"train.seed={job.seed}", *problem.settings, *job.settings]
    config = load_config(problem.config, settings)
    line: dict[str, Any] = {"run": job.name, "problem": job.problem, "method": job.method, "factor": job.factor}
    line |= {"seed": job.seed, "settings": job.settings}
    size = describe(config).size
    line |= {"training_bytes": size.training, "serving_bytes": size.serving}
    with tempfile.TemporaryDirectory() as runs:
        run = Path(runs) / "run"
        with process_group("cpu") as ranks:
            evaluation = train_quietly(config, run, ranks)
        assert evaluation is not None
        records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        speed = statistics.median(record["samples_per_second"] for record in records if record["kind"] == "train")
        own = {"value": evaluation[problem.metric], "step_ms": 1000 * config.train.batch_size / speed}
        if job.seed == 0:
            own["planned_ms"] = planned_ms(problem, settings)
        lines = [line | own]
        for factor, budget in job.budgets.items():
            coded = Path(runs) / str(factor)
            run_distembed("compress", run, coded, "--budget", f"{budget}B", "--data-type", "fp16")
            record = json.loads((coded / "run.json").read_text())
            value = json.loads(run_distembed("evaluate", coded, "--json"))[problem.metric]
            code_line = {"method": CODES, "factor": factor, "serving_bytes": record["embedding_bytes"], "value": value}
            lines.append(line | code_line)
    return lines


def planned_ms(problem: Problem, settings: Sequence[str]) -> float:
    """Returns the planned milliseconds of a step of 8,192 rows on each of 8 GPUs."""
    plan = run_distembed("plan", problem.config, *settings, "train.batch_size=8192", "--gpus", "8", "--json")
    return 1000 * 8 * 8192 / float(json.loads(plan)["rows_per_second"])


def prepare(dataset: str, data: Path, folder: Path) -> None:
    """Makes a problem's dataset, unless it is there."""
    if (folder / dataset).exists():
        return
    if dataset == "criteo":
        run_distembed("prepare", "criteo", data / "criteo_kaggle_110k.tsv.gz", "--output", folder / dataset)
    elif dataset == "movielens":
        files = [data / "movielens1m_mf_train.csv.gz", "--test", data / "movielens1m_mf_test.csv.gz"]
        columns = ["--no-header", "--user", "1", "--item", "2", "--rating", "3"]
        run_distembed("prepare", "ratings", *files, *columns, "--output", folder / dataset)
    else:
        lines = data / "amazon_beauty_sequences.txt.gz"
        run_distembed("prepare", "sequences", lines, "--format", "lists", "--output", folder / dataset)


def jobs_of(name: str, seeds: int, folder: Path, only: str) -> list[Job]:
    """Returns the runs of a problem whose names match: full tables, and each method at each size that it reaches."""
    problem = PROBLEMS[name]
    data = f"data.path={folder / problem.dataset}"
    full, size = full_tables(problem, folder / problem.dataset), describe(_config(problem, [data])).size

    def is_wanted(method: str, factor: int) -> bool:
        return method not in problem.without and re.search(only, f"{name}, {method}, {factor}, ") is not None

    jobs = []
    if is_wanted(FULL, 1):
        budgets = {factor: size.serving // factor for factor in FACTORS if is_wanted(CODES, factor)}
        jobs += [Job(name, FULL, 1, seed, (), budgets) for seed in range(seeds)]
    for factor, method in product(FACTORS, METHODS):
        if is_wanted(method, factor):
            settings = fitted(problem, method, full, data, size.training // factor)
            if settings is not None:
                jobs += [Job(name, method, factor, seed, settings) for seed in range(seeds)]
    return jobs


def rows_of(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each problem, method and size: means over seeds, and losses against full tables by seed."""
    full = {(line["problem"], line["seed"]): line["value"] for line in lines if line["method"] == FULL}
    rows = []

    def place(line: Mapping[str, Any]) -> tuple[int, int, str]:
        return list(PROBLEMS).index(line["problem"]), line["factor"], line["method"]

    for _, group in groupby(sorted(lines, key=place), key=place):
        runs = [run for run in group if (run["problem"], run["seed"]) in full]
        if not runs:
            continue
        row = {key: runs[0][key] for key in ("problem", "method", "factor", "training_bytes", "serving_bytes")}
        sign = 1 if PROBLEMS[row["problem"]].is_loss else -1
        losses = [sign * (run["value"] - full[run["problem"], run["seed"]]) for run in runs]
        row |= {"seeds": len(runs), "loss": statistics.mean(losses), "error": deviation(losses) / len(losses) ** 0.5}
        row |= {"value": statistics.mean(run["value"] for run in runs)}
        for key in ("step_ms", "planned_ms"):
            times = [run[key] for run in runs if key in run]
            row[key] = statistics.median(times) if times else None
        rows.append(row)
    return rows


def print_markdown(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each problem; the best method of each size is in bold."""
    for problem, group in groupby(rows, key=lambda row: row["problem"]):
        of_problem = list(group)
        print(f"\n### {problem}: {PROBLEMS[problem].metric}\n")
        print("| times smaller | method | to train | to serve | value | loss | ms a step | on 8 GPUs | seeds |")
        print("|---|---|---|---|---|---|---|---|---|")
        for factor, of_size in groupby(of_problem, key=lambda row: row["factor"]):
            at_size = sorted(of_size, key=lambda row: row["loss"])
            for row in at_size:
                name = f"**{row['method']}**" if row is at_size[0] else row["method"]
                cells = [f"{row['training_bytes']:,}", f"{row['serving_bytes']:,}", f"{row['value']:.4f}"]
                cells.append(f"{row['loss']:.4f} ± {row['error']:.4f}")
                cells += ["" if row[key] is None else f"{row[key]:.2f}" for key in ("step_ms", "planned_ms")]
                print("| " + " | ".join([str(factor), name, *cells, str(row["seeds"])]) + " |")


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the loss of quality by the size of the tables, with a panel for each problem."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "distembed", "font.size": 9}
    import matplotlib.pyplot as plt

    problems = list(dict.fromkeys(row["problem"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != FULL))
    colours = plt.get_cmap("tab20")
    figure, panels = plt.subplots(len(problems), 1, figsize=(8, 3.6 * len(problems)), squeeze=False)
    for panel, problem in zip(panels[:, 0], problems, strict=True):
        for number, method in enumerate(methods):
            own = [row for row in rows if row["problem"] == problem and row["method"] == method]
            style = {"color": colours(number % 20), "marker": "os^v"[number // 20], "markersize": 3, "linewidth": 1}
            sizes, losses, errors = ([row[key] for row in own] for key in ("factor", "loss", "error"))
            panel.errorbar(sizes, losses, errors, label=method, capsize=2, **style)
        ticks = list(map(str, FACTORS))
        panel.set(title=problem, xscale="log", ylabel=f"loss of {PROBLEMS[problem].metric}")
        panel.set_xticks(FACTORS, ticks)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[-1, 0].set_xlabel("full tables' bytes over these tables' bytes")
    panels[0, 0].legend(frameon=False, fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Prepares the data, takes all runs that are missing, and prints the tables of all runs."""
    parser = bench_parser(__doc__)
    parser.add_argument("data", type=Path, help="folder of the raw files")
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=5, help="0 for the tables of the runs at hand")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default="", help="runs whose name matches: 'criteo dlrm, hash, 4, '")
    parser.add_argument("--page", type=Path, help="SVG or PNG file to draw")
    options = parser.parse_args()
    if options.output is None:
        parser.error("give --output, the file of the runs' lines")
    with tempfile.TemporaryDirectory() as folder:
        take_missing_runs(options, Path(folder))
    rows = rows_of(read_lines(options.output))
    print_markdown(rows)
    if options.page is not None:
        draw(rows, options.page)


def read_lines(output: Path) -> list[dict[str, Any]]:
    """Returns the lines of the output; none before the first run."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def take_missing_runs(options: argparse.Namespace, folder: Path) -> None:
    """Takes the runs that have no line in the output yet, and adds their lines."""
    done = {line["run"] for line in read_lines(options.output)}
    jobs = []
    for name in options.problems if options.seeds else ():
        prepare(PROBLEMS[name].dataset, options.data, folder)
        jobs += jobs_of(name, options.seeds, folder, options.only)
    jobs = sorted((job for job in jobs if job.name not in done), key=lambda job: job.seed)
    print(f"{len(jobs)} runs to take, {len(done)} at hand", flush=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_job, job, folder) for job in jobs]):
            with options.output.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in future.result())


if __name__ == "__main__":
    main()
