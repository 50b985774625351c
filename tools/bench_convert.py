"""Converts a stock TorchRec model into compositional ones and trains them on: AUC on the test split.

::

    python tools/bench_convert.py train.tsv.gz --seeds 3 --output bench_convert.json
    OMP_NUM_THREADS=1 python tools/bench_convert.py train.tsv.gz --only product --later train.precision=fp32

The rows are split 0.8, 0.1, 0.1 in the order of time. A DLRM with TorchRec's own ``EmbeddingBagCollection`` and full
tables is trained for one epoch with ``configs/criteo_sample.yaml``. What ``distembed convert`` makes of it is evaluated
at once, and after a tenth of an epoch that begins with it. Beside it stands the same model, trained for an epoch from
initial weights. ``--later`` gives further settings to the tenth of an epoch; those of :data:`LATER` were chosen by the
validation split of the first seed, for a network that is trained already would lose what it has at its first rate.
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
from rich.console import Console
from rich.table import Table
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.config import load_config
from distembed.convert.command import convert
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.files import write_json
from distembed.models import ModelInputs
from distembed.ranks import Ranks, process_group
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
LATER = ["train.dense_optimizer.learning_rate=0.0001", "train.sparse_optimizer.learning_rate=0.01"]
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


def compare(dataset: Path, options: argparse.Namespace, ranks: Ranks) -> list[Row]:
    """Trains and converts with each seed."""
    rows = {scheme: Row(scheme) for scheme in SCHEMES if options.only in scheme}
    num_rows = Manifest.load(str(dataset)).split("train").num_rows
    tenth = round(num_rows / load_config(CONFIG).train.batch_size / 10)
    for seed in range(options.seeds):
        common = [f"data.path={dataset}", "data.validation=null", "data.test=null", f"train.seed={seed}"]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with stock_collections():
                full = train([*FULL, *common], folder / "full", ranks)
                at_full = evaluate(full, dataset, ranks)
            for scheme, row in rows.items():
                tables = SCHEMES[scheme]
                errors = convert(full, None, tables, folder / f"{scheme}-start")
                goes_on = [f"train.max_steps={tenth}", f"train.init_from={folder / f'{scheme}-start'}"]
                later = train([*tables, *common, *goes_on, *options.later], folder / f"{scheme}-later", ranks)
                row.add("full", at_full)
                row.add("converted", evaluate(folder / f"{scheme}-start", dataset, ranks))
                row.add("converted and a tenth", evaluate(later, dataset, ranks))
                if not options.no_start:
                    alone = train([*tables, *common], folder / scheme, ranks)
                    row.add("from the start", evaluate(alone, dataset, ranks))
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
    parser.add_argument("--later", nargs="*", default=LATER, help="settings of the tenth of an epoch")
    parser.add_argument("--no-start", action="store_true", help="leave out training from initial weights")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as ranks:
        dataset = Path(name) / "criteo"
        prepare_criteo([options.rows], dataset, CriteoOptions(min_count=2))
        rows = compare(dataset, options, ranks)
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
