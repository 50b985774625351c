"""Trains each scheme on real Criteo rows with several seeds: parameters, AUC and logloss on the test split.

::

    python tools/bench_quality.py train.tsv.gz --seeds 5 --output bench_quality.json
    OMP_NUM_THREADS=1 python tools/bench_quality.py train.tsv.gz --seeds 5 --jobs 2 --only collisions

Rows are split 0.8/0.1/0.1 in time order and trained on for one epoch with ``configs/criteo_sample.yaml``, or with the
configs in ``configs/criteo_sample/``, one a scheme.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CONFIGS = Path(__file__).parents[1] / "configs"
_BASE = CONFIGS / "criteo_sample.yaml"
_PRODUCT = CONFIGS / "criteo_sample" / "product_4.yaml"
_SCHEMES = {
    "hashed": "hash",
    "feature generation": "feature",
    "concatenation": "concat",
    "sum": "add",
    "product": "product",
    "path, linear": "path_linear",
    "path, MLP 64": "path_mlp",
}
VARIANTS: dict[str, tuple[Path, list[str]]] = {
    "DLRM, full": (_BASE, []),
    "DLRM, full, fp32": (_BASE, ["train.precision=fp32"]),
    "DLRM, product, 4, fp32": (_PRODUCT, ["train.precision=fp32"]),
    "DCN, full": (_BASE, ["model={name: dcn}"]),
    "DCN, product, 4": (_PRODUCT, ["model={name: dcn}"]),
} | {
    f"DLRM, {name}, {collisions} collisions": (CONFIGS / "criteo_sample" / f"{stem}_{collisions}.yaml", [])
    for collisions in (4, 60)
    for name, stem in _SCHEMES.items()
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


def train(variant: str, dataset: Path, runs: Path, seed: int) -> dict[str, Any]:
    """One run's evaluation and sizes."""
    config, overrides = VARIANTS[variant]
    run = runs / str(seed)
    settings = [f"data.path={dataset}", f"train.seed={seed}", *overrides]
    distembed("train", str(config), *settings, "--run-dir", str(run))
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
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default="", help="variants whose name holds this text")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "dataset"
        distembed("prepare", "criteo", *options.tsv, "--output", str(dataset))
        with ThreadPoolExecutor(options.jobs) as pool:
            for number, variant in enumerate(name for name in VARIANTS if options.only in name):
                of_seed = partial(train, variant, dataset, Path(folder) / f"runs-{number}")
                runs = list(pool.map(of_seed, range(options.seeds)))
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
