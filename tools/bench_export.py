"""Exports runs trained on real Criteo rows: scores, bytes, time to export, and rows a second of the programs.

::

    python tools/bench_export.py train.tsv.gz --seeds 5 --output bench_export.json
    python tools/bench_export.py train.tsv.gz --seeds 1 --only full

The rows are split 0.8, 0.1, 0.1 in the order of time. Each model is trained for one epoch with
``configs/criteo_sample.yaml`` and exported with its tables in each precision. AUC and logloss of the test split are
given for the trained model and for the exported program, loaded from its folder. Speed is measured for the program
alone, on one thread, on rows of the test split.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from bench_commands import CONFIGS, bench_parser, told, write_output
from bench_common import surroundings, train_quietly
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.metrics import log_loss, roc_auc_score

from distembed.base.ranks import Ranks, process_group
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.serving.export.feature_vectors import plain_inputs
from distembed.serving.model_folder.manifest import ExportManifest, Precision
from distembed.serving.model_folder.programs import Program, load_programs
from distembed.serving.whole_model import WholeModel, load_whole_model
from distembed.training.config import load_config
from distembed.training.trained_run import TrainedRun, find_trained_run

_AT_4 = ["embedding.default.partition=quotient_remainder", "embedding.default.collisions=4"]
MODELS = {
    "dlrm, full": ["embedding.default.partition=naive"],
    "dlrm, quotient-remainder at 4": _AT_4,
    "dcn, quotient-remainder at 4": ["model={name: dcn}", *_AT_4],
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
BATCH_SIZES = (1, 64)
_SECONDS = 2.0


@dataclass
class Row:
    """The results of a model in one precision: lists over seeds.

    ``seconds`` is the time to export, with the comparison of scores; ``rows_per_second`` is by batch size.
    """

    model: str
    precision: Precision
    trained_auc: list[float] = field(default_factory=list)
    auc: list[float] = field(default_factory=list)
    trained_logloss: list[float] = field(default_factory=list)
    logloss: list[float] = field(default_factory=list)
    checkpoint_bytes: list[int] = field(default_factory=list)
    program_bytes: list[int] = field(default_factory=list)
    table_bytes: list[int] = field(default_factory=list)
    folder_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rows_per_second: dict[int, list[float]] = field(default_factory=dict)

    def add(self, run: TrainedRun, folder: Path) -> None:
        """Exports a run and adds its measurements."""
        started = time.perf_counter()
        manifest = export_run(run, folder, ExportOptions(precision=self.precision))
        self.seconds.append(time.perf_counter() - started)
        whole = load_whole_model(run, torch.device("cpu"))
        self.checkpoint_bytes.append(folder_bytes(Path(whole.checkpoint)))
        self.program_bytes.append(sum(file.stat().st_size for file in folder.rglob("*.pt2")))
        self.table_bytes.append(sum(table.bytes for table in manifest.tables))
        self.folder_bytes.append(folder_bytes(folder))
        program = load_programs(folder, manifest)
        labels, trained, found = score_both(run, whole, manifest, program)
        self.trained_auc.append(float(roc_auc_score(labels, trained)))
        self.auc.append(float(roc_auc_score(labels, found)))
        self.trained_logloss.append(float(log_loss(labels, trained)))
        self.logloss.append(float(log_loss(labels, found)))
        for batch_size in BATCH_SIZES:
            self.rows_per_second.setdefault(batch_size, []).append(speed(run, manifest, program, batch_size))


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def batches(run: TrainedRun, batch_size: int) -> BatchReader:
    """Returns the test split in batches."""
    return BatchReader(run.config.data.require_path(), "test", BatchOrder(batch_size, shuffle=False))


def inputs(batch: Batch, manifest: ExportManifest) -> Sequence[torch.Tensor]:
    """Returns a batch as inputs of the program."""
    return list(plain_inputs(batch, manifest.features, takes_numbers=bool(manifest.numbers)).tensors.values())


def score_both(
    run: TrainedRun, whole: WholeModel, manifest: ExportManifest, program: Program
) -> Sequence[NDArray[np.float64]]:
    """Returns the labels of the test split, the trained model's scores, and the program's."""
    parts = []
    with torch.inference_mode():
        for batch in batches(run, 8192):
            trained = whole.task.predictions(whole.outputs(batch))["prediction"]
            parts.append([batch["labels"].numpy(), trained, program(*inputs(batch, manifest)).numpy()])
    return [np.concatenate(each).astype(np.float64) for each in zip(*parts, strict=True)]


def speed(run: TrainedRun, manifest: ExportManifest, program: Program, batch_size: int) -> float:
    """Returns the rows a second of a program at a batch size: the median of turns of up to 50 batches."""
    given = [inputs(batch, manifest) for batch, _ in zip(batches(run, batch_size), range(50), strict=False)]
    turns = []
    with torch.inference_mode():
        until = time.perf_counter() + _SECONDS
        while len(turns) < 3 or time.perf_counter() < until:
            started = time.perf_counter()
            for own in given:
                program(*own)
            turns.append(time.perf_counter() - started)
    return batch_size * len(given) / statistics.median(turns)


def measure(dataset: Path, options: argparse.Namespace, ranks: Ranks) -> list[Row]:
    """Trains and exports with each seed."""
    rows = [Row(model, precision) for model in MODELS if options.only in model for precision in PRECISIONS]
    for seed in told(range(options.seeds), "seeds"):
        with tempfile.TemporaryDirectory() as name:
            for model in dict.fromkeys(row.model for row in rows):
                folder = Path(name) / model.replace(" ", "-").replace(",", "")
                settings = [*MODELS[model], f"data.path={dataset}", f"train.seed={seed}"]
                train_quietly(load_config(CONFIGS / "criteo_sample.yaml", settings), folder, ranks)
                for row in rows:
                    if row.model == model:
                        row.add(find_trained_run(folder, None), folder.with_name(f"{folder.name}-{row.precision}"))
                        found = f"AUC {row.auc[-1]:.5f}, trained {row.trained_auc[-1]:.5f}, {row.seconds[-1]:.1f} s"
                        print(f"seed {seed}, {model}, {row.precision}: {found}", flush=True)
    return rows


def main() -> None:
    """Prepares the rows, trains and exports, and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("rows", type=Path, help="file of Criteo rows in the order of time, plain or gzip")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="models whose name contains this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as ranks:
        dataset = Path(name) / "criteo"
        prepare_criteo([options.rows], dataset, CriteoOptions(min_count=2))
        num_rows = Manifest.load(str(dataset)).split("test").num_rows
        rows = measure(dataset, options, ranks)
    headings = ["AUC", "- trained", "largest", "logloss", "- trained", "programs", "tables", "of checkpoint", "export"]
    table = Table("model", "tables", *headings, *[f"rows/s at {size}" for size in BATCH_SIZES])
    for row in rows:
        gaps = [found - wanted for found, wanted in zip(row.auc, row.trained_auc, strict=True)]
        losses = [found - wanted for found, wanted in zip(row.logloss, row.trained_logloss, strict=True)]
        share = statistics.mean(row.program_bytes) / statistics.mean(row.checkpoint_bytes)
        table.add_row(
            row.model,
            row.precision,
            f"{statistics.mean(row.auc):.5f}",
            f"{statistics.mean(gaps):+.6f}",
            f"{max(map(abs, gaps)):.6f}",
            f"{statistics.mean(row.logloss):.5f}",
            f"{statistics.mean(losses):+.6f}",
            f"{statistics.mean(row.program_bytes) / 2**20:.2f} MiB",
            f"{statistics.mean(row.table_bytes) / 2**20:.2f} MiB",
            f"{share:.1%}",
            f"{statistics.median(row.seconds):.1f} s",
            *[f"{statistics.median(row.rows_per_second[size]):,.0f}" for size in BATCH_SIZES],
        )
    Console(width=160).print(table)
    print(f"{options.seeds} seeds, {num_rows:,} rows of the test split")
    where = surroundings(torch.device("cpu"))
    write_output(options, {**where, "seeds": options.seeds, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
