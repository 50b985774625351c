"""Converts a stock TorchRec model into compositional ones and trains them on: AUC on the test split.

::

    python tools/bench_convert.py train.tsv.gz --seeds 3 --output bench_convert.json
    OMP_NUM_THREADS=1 python tools/bench_convert.py train.tsv.gz --only product --later train.precision=fp32

The rows are split 0.8, 0.1, 0.1 in the order of time. A DLRM with TorchRec's own ``EmbeddingBagCollection`` and full
tables is trained for one epoch with ``configs/criteo_sample.yaml``. What ``distembed convert`` makes of it is evaluated
at once, and after a tenth of an epoch that begins with it. Beside it stands the same model, trained for an epoch from
initial weights. The tenth of an epoch is of one of two kinds (``--tenth``):

- ``new``: the last tenth of the training rows, of which the stock model had the first nine tenths: all models have seen
  each row once. This is what converting is for: a model that is in use goes on with the next rows.
- ``seen``: a tenth of the rows that the stock model was trained on, all of which it has seen. A second pass over rows
  makes click-through models worse, converted or not.

``--later`` gives further settings to the tenth of an epoch; those of :data:`LATER` were chosen by the validation split
of the first two seeds.
"""

import argparse
import gzip
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.base.files import write_json
from distembed.base.ranks import Ranks, process_group
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.models import ModelInputs
from distembed.serving.convert.command import convert
from distembed.training.config import load_config
from distembed.training.inference import evaluate_split, load_training_state
from distembed.training.run import train_run
from distembed.training.start import RunOptions

CONFIG = Path(__file__).parents[1] / "configs" / "criteo_sample.yaml"
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
"""Settings of a tenth of an epoch of each kind."""
STAGES = ("full", "converted", "converted and a tenth", "from the start")


@dataclass
class Row:
    """A scheme's AUC at each stage, a value a seed.

    Attributes:
        scheme: The scheme's name.
        validation: AUC on the validation split, by stage.
        test: AUC on the test split, by stage.
    """

    scheme: str
    validation: dict[str, list[float]] = field(default_factory=dict)
    test: dict[str, list[float]] = field(default_factory=dict)

    def add(self, stage: str, aucs: tuple[float, float]) -> None:
        """Adds what :func:`evaluate` returned for a stage."""
        self.validation.setdefault(stage, []).append(aucs[0])
        self.test.setdefault(stage, []).append(aucs[1])


@dataclass(frozen=True)
class Datasets:
    """The rows that models are trained and evaluated on; ids mean the same in all of them.

    Attributes:
        whole: All rows, in three splits.
        before: The rows that the stock model is trained on.
        tenth: The rows that the converted one is trained on, from the first on.
    """

    whole: Path
    before: Path
    tenth: Path


def prepare(rows: Path, folder: Path, kind: str) -> Datasets:
    """Prepares the rows for a tenth of an epoch of a kind."""
    whole = folder / "whole"
    prepare_criteo([rows], whole, CriteoOptions(min_count=2))
    if kind == "seen":
        return Datasets(whole, whole, whole)
    num_rows = Manifest.load(str(whole)).split("train").num_rows
    opener = gzip.open if rows.suffix == ".gz" else open
    with opener(rows, "rb") as file:
        lines = list(islice(file, num_rows))
    parts = []
    for name, own in (("before", lines[: num_rows * 9 // 10]), ("tenth", lines[num_rows * 9 // 10 :])):
        file_of_part = folder / f"{name}.tsv"
        file_of_part.write_bytes(b"".join(own))
        prepare_criteo([file_of_part], folder / name, CriteoOptions(split="none", vocabulary=whole))
        parts.append(folder / name)
    return Datasets(whole, *parts)


@contextmanager
def stock_collections() -> Iterator[None]:
    """Has models made with TorchRec's own collection within the block."""

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


def train(settings: Sequence[str], run: Path, ranks: Ranks) -> Path:
    """Trains a config; returns the run's folder."""
    train_run(load_config(CONFIG, list(settings)), RunOptions(run), ranks, None, lambda _: None)
    return run


def evaluate(run: Path, dataset: Path, ranks: Ranks) -> tuple[float, float]:
    """Returns a run's AUC on the validation split and on the test split."""
    state, _ = load_training_state(run, str(dataset), load_config(run / "config.yaml"), ranks)
    validation, test = (evaluate_split(state, str(dataset), split, ranks)["auc"] for split in ("validation", "test"))
    return validation, test


def compare(datasets: Datasets, options: argparse.Namespace, ranks: Ranks) -> list[Row]:
    """Trains and converts with each seed."""
    rows = {scheme: Row(scheme) for scheme in SCHEMES if options.only in scheme}
    num_rows = Manifest.load(str(datasets.whole)).split("train").num_rows
    tenth = round(num_rows / load_config(CONFIG).train.batch_size / 10)
    later_rates = LATER[options.tenth] if options.later is None else options.later

    def own_settings(dataset: Path, seed: int) -> list[str]:
        return [f"data.path={dataset}", "data.validation=null", "data.test=null", f"train.seed={seed}"]

    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with stock_collections():
                full = train([*FULL, *own_settings(datasets.before, seed)], folder / "full", ranks)
                at_full = evaluate(full, datasets.whole, ranks)
            for scheme, row in rows.items():
                tables = SCHEMES[scheme]
                errors = convert(full, None, tables, folder / f"{scheme}-start")
                goes_on = [f"train.max_steps={tenth}", f"train.init_from={folder / f'{scheme}-start'}", *later_rates]
                later = train(
                    [*tables, *own_settings(datasets.tenth, seed), *goes_on], folder / f"{scheme}-later", ranks
                )
                row.add("full", at_full)
                row.add("converted", evaluate(folder / f"{scheme}-start", datasets.whole, ranks))
                row.add("converted and a tenth", evaluate(later, datasets.whole, ranks))
                if not options.no_start:
                    alone = train([*tables, *own_settings(datasets.whole, seed)], folder / scheme, ranks)
                    row.add("from the start", evaluate(alone, datasets.whole, ranks))
                left = statistics.mean(error.variance_left for error in errors)
                last = {stage: (row.validation[stage][-1], row.test[stage][-1]) for stage in row.test}
                print(f"seed {seed}, {scheme}: variance left {left:.2%}, validation and test AUC {last}", flush=True)
    return list(rows.values())


def main() -> None:
    """Prepares the rows, trains and converts, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of Criteo rows in the order of time, plain or gzip")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="schemes whose name holds this text")
    parser.add_argument("--tenth", choices=list(LATER), default="new", help="which rows the tenth of an epoch has")
    parser.add_argument("--later", nargs="*", help="settings of the tenth of an epoch")
    parser.add_argument("--no-start", action="store_true", help="leave out training from initial weights")
    parser.add_argument("--output", type=Path, help="JSON file to write")
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
    if options.output is not None:
        write_json(options.output, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
