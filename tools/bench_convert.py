"""Converts a stock TorchRec model to compositional tables and trains it further: AUC on the test split.

::

    python tools/bench_convert.py train.tsv.gz --seeds 3 --output bench_convert.json
    OMP_NUM_THREADS=1 python tools/bench_convert.py train.tsv.gz --only product --later train.precision=fp32

The rows are split 0.8, 0.1, 0.1 in the order of time. A DLRM with TorchRec's own ``EmbeddingBagCollection`` and full
tables is trained for one epoch with ``configs/criteo_sample.yaml``. The model that ``distembed convert`` makes of it is
evaluated at once, and again after a further tenth of an epoch. The comparison is a compressed model trained for an
epoch from initial weights. ``--tenth`` chooses the rows of the tenth of an epoch:

- ``new``: the last tenth of the training rows; the stock model then trains on the first nine tenths, and each model
  sees each row once. This is the use of conversion: a model in production continues with the next rows.
- ``seen``: a tenth of the rows that the stock model was trained on. A second pass over rows makes click-through models
  worse, converted or not.

``--later`` sets other settings for the tenth of an epoch. The defaults (:data:`LATER`) were chosen by the validation
split of the first two seeds.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from bench_commands import CONFIGS, bench_parser, read_lines, told, write_output
from bench_common import evaluate_run, train_sample
from rich.console import Console
from rich.table import Table
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.base.ranks import Ranks, process_group
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.models import ModelInputs
from distembed.serving.convert.run_start import convert
from distembed.training.config import load_config

FULL = ["embedding.default.partition=naive"]
QUOTIENT_REMAINDER = "embedding.default.partition=quotient_remainder"
SCHEMES = {
    "product": [QUOTIENT_REMAINDER, "embedding.default.composition=product"],
    "sum": [QUOTIENT_REMAINDER, "embedding.default.composition=sum"],
    "concat": [QUOTIENT_REMAINDER, "embedding.default.composition=concat"],
    "hashed": ["embedding.default.partition=remainder"],
}
LATER = {
    "new": ["train.dense_optimizer.learning_rate=0.0003", "train.sparse_optimizer.learning_rate=0.03"],
    "seen": ["train.dense_optimizer.learning_rate=0.0001", "train.sparse_optimizer.learning_rate=0.01"],
}
"""Settings of the tenth of an epoch, by the kind of its rows."""
STAGES = ("full", "converted", "converted and a tenth", "from the start")


@dataclass
class Row:
    """A scheme's AUCs on the validation and the test split: for each stage, a list over seeds."""

    scheme: str
    validation: dict[str, list[float]] = field(default_factory=dict)
    test: dict[str, list[float]] = field(default_factory=dict)

    def add(self, stage: str, aucs: tuple[float, float]) -> None:
        """Adds the AUCs of a stage on the validation and the test split."""
        self.validation.setdefault(stage, []).append(aucs[0])
        self.test.setdefault(stage, []).append(aucs[1])


@dataclass(frozen=True)
class Datasets:
    """Datasets of one vocabulary.

    Attributes:
        whole: All rows, in three splits.
        before: The training rows of the stock model.
        tenth: The rows that the converted model trains on, from the first row on.
    """

    whole: Path
    before: Path
    tenth: Path


def prepare(rows: Path, folder: Path, kind: str) -> Datasets:
    """Prepares the rows for a kind of the tenth of an epoch."""
    whole = folder / "whole"
    prepare_criteo([rows], whole, CriteoOptions(min_count=2))
    if kind == "seen":
        return Datasets(whole, whole, whole)
    num_rows = Manifest.load(str(whole)).split("train").num_rows
    lines, parts = read_lines(rows, num_rows), []
    for name, own in (("before", lines[: num_rows * 9 // 10]), ("tenth", lines[num_rows * 9 // 10 :])):
        file_of_part = folder / f"{name}.tsv"
        file_of_part.write_bytes(b"".join(own))
        prepare_criteo([file_of_part], folder / name, CriteoOptions(split="none", vocabulary=whole))
        parts.append(folder / name)
    return Datasets(whole, *parts)


@contextmanager
def stock_collections() -> Iterator[None]:
    """Builds models with TorchRec's own collection within the block."""

    def make(_inputs: ModelInputs, tables: Sequence[CompositionalEmbeddingBagConfig]) -> EmbeddingBagCollection:
        configs = [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=list(table.feature_names),
            )
            for table in tables
        ]
        return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    with patch.object(ModelInputs, "_make_pooled", make):
        yield


def evaluate(run: Path, dataset: Path, ranks: Ranks) -> tuple[float, float]:
    """Returns a run's AUC on the validation split and on the test split."""
    validation, test = evaluate_run(run, dataset, ["validation", "test"], ranks)
    return validation["auc"], test["auc"]


def compare(datasets: Datasets, options: argparse.Namespace, ranks: Ranks) -> list[Row]:
    """Trains and converts with each seed."""
    rows = {scheme: Row(scheme) for scheme in SCHEMES if options.only in scheme}
    num_rows = Manifest.load(str(datasets.whole)).split("train").num_rows
    tenth = round(num_rows / load_config(CONFIGS / "criteo_sample.yaml").train.batch_size / 10)
    later_rates = LATER[options.tenth] if options.later is None else options.later
    for seed in told(range(options.seeds), "seeds"):
        with tempfile.TemporaryDirectory() as name:
            folder, own_seed = Path(name), f"train.seed={seed}"
            with stock_collections():
                full = train_sample([*FULL, own_seed], datasets.before, folder / "full", ranks)
                at_full = evaluate(full, datasets.whole, ranks)
            for scheme, row in rows.items():
                tables, start = [*SCHEMES[scheme], own_seed], folder / f"{scheme}-start"
                errors = convert(full, None, SCHEMES[scheme], start)
                settings = [*tables, f"train.max_steps={tenth}", f"train.init_from={start}", *later_rates]
                later = train_sample(settings, datasets.tenth, folder / f"{scheme}-later", ranks)
                row.add("full", at_full)
                row.add("converted", evaluate(start, datasets.whole, ranks))
                row.add("converted and a tenth", evaluate(later, datasets.whole, ranks))
                if not options.no_start:
                    alone = train_sample(tables, datasets.whole, folder / scheme, ranks)
                    row.add("from the start", evaluate(alone, datasets.whole, ranks))
                left = statistics.mean(error.variance_left for error in errors)
                last = {stage: (row.validation[stage][-1], row.test[stage][-1]) for stage in row.test}
                print(f"seed {seed}, {scheme}: variance left {left:.2%}, validation and test AUC {last}", flush=True)
    return list(rows.values())


def main() -> None:
    """Prepares the rows, trains and converts, and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("rows", type=Path, help="file of Criteo rows in the order of time, plain or gzip")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="schemes whose name contains this text")
    parser.add_argument("--tenth", choices=list(LATER), default="new", help="rows of the tenth of an epoch")
    parser.add_argument("--later", nargs="*", help="settings of the tenth of an epoch")
    parser.add_argument("--no-start", action="store_true", help="do not train models from initial weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as ranks:
        rows = compare(prepare(options.rows, Path(name), options.tenth), options, ranks)
    table = Table("tables", *[f"{stage}, test AUC" for stage in STAGES], "a tenth - from the start")
    for row in rows:
        means = {stage: statistics.mean(values) for stage, values in row.test.items()}
        gap = means["converted and a tenth"] - means.get("from the start", float("nan"))
        table.add_row(row.scheme, *[f"{means.get(stage, float('nan')):.4f}" for stage in STAGES], f"{gap:+.4f}")
    Console(width=140).print(table)
    write_output(options, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
