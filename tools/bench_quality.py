"""Trains each scheme on real Criteo rows with several seeds: parameters, AUC and logloss on the test split.

::

    python tools/bench_quality.py train.tsv.gz --seeds 3 --output bench_quality.json

Rows are split 0.8/0.1/0.1 in time order and trained on for one epoch with ``configs/criteo_sample.yaml``.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CONFIG = Path(__file__).parents[1] / "configs" / "criteo_sample.yaml"
_QUOTIENT_REMAINDER = ["embedding.default.partition=quotient_remainder", "embedding.default.collisions=4"]
VARIANTS: dict[str, list[str]] = {
    "DLRM, full": [],
    "DLRM, full, fp32": ["train.precision=fp32"],
    "DLRM, hashed, 4 collisions": ["embedding.default.partition=remainder", "embedding.default.collisions=4"],
    "DLRM, quotient-remainder product, 4": _QUOTIENT_REMAINDER,
    "DLRM, quotient-remainder product, 4, fp32": [*_QUOTIENT_REMAINDER, "train.precision=fp32"],
    "DLRM, quotient-remainder sum, 4": [*_QUOTIENT_REMAINDER, "embedding.default.composition=sum"],
    "DLRM, quotient-remainder concat, 4": [*_QUOTIENT_REMAINDER, "embedding.default.composition=concat"],
    "DCN, full": ["model={name: dcn}"],
    "DCN, quotient-remainder product, 4": ["model={name: dcn}", *_QUOTIENT_REMAINDER],
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant: means and standard deviations over seeds, on the test split."""

    variant: str
    seeds: int
    parameters: int
    embedding_parameters: int
    auc: float
    auc_deviation: float
    logloss: float
    logloss_deviation: float
    auc_of_seed: list[float]
    logloss_of_seed: list[float]


def distembed(*arguments: str) -> None:
    """Runs the command; its output is shown only where it fails."""
    done = subprocess.run([sys.executable, "-m", "distembed", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"distembed {' '.join(arguments)}\n{done.stdout}{done.stderr}")


def train(dataset: Path, run: Path, overrides: list[str], seed: int) -> dict[str, Any]:
    """One run's evaluation and sizes."""
    settings = [f"data.path={dataset}", f"train.seed={seed}", *overrides]
    distembed("train", str(CONFIG), *settings, "--run-dir", str(run))
    return {**json.loads((run / "run.json").read_text()), **json.loads((run / "evaluation.json").read_text())}


def summarise(variant: str, runs: list[dict[str, Any]]) -> Row:
    """Means over seeds."""
    aucs, loglosses = ([run[key] for run in runs] for key in ("auc", "logloss"))
    return Row(
        variant=variant,
        seeds=len(runs),
        parameters=runs[0]["parameters"],
        embedding_parameters=runs[0]["embedding_parameters"],
        auc=statistics.mean(aucs),
        auc_deviation=statistics.stdev(aucs) if len(aucs) > 1 else 0.0,
        logloss=statistics.mean(loglosses),
        logloss_deviation=statistics.stdev(loglosses) if len(loglosses) > 1 else 0.0,
        auc_of_seed=aucs,
        logloss_of_seed=loglosses,
    )


def main() -> None:
    """Prepares, trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tsv", nargs="+", help="raw Criteo files in time order")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="variants whose name holds this text")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "dataset"
        distembed("prepare", "criteo", *options.tsv, "--output", str(dataset))
        for number, (variant, overrides) in enumerate(VARIANTS.items()):
            if options.only in variant:
                run_dirs = [Path(folder) / f"run-{number}-{seed}" for seed in range(options.seeds)]
                runs = [train(dataset, run, overrides, seed) for seed, run in enumerate(run_dirs)]
                rows.append(summarise(variant, runs))
    table = Table("variant", "parameters", "in tables", "test AUC", "test logloss")
    for row in rows:
        table.add_row(
            row.variant,
            f"{row.parameters:,}",
            f"{row.embedding_parameters:,}",
            f"{row.auc:.4f} ± {row.auc_deviation:.4f}",
            f"{row.logloss:.4f} ± {row.logloss_deviation:.4f}",
        )
    Console(width=120).print(table)
    result = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
    print(result)
    if options.output is not None:
        options.output.write_text(result + "\n")


if __name__ == "__main__":
    main()
