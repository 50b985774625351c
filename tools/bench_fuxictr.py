r"""Compares click models with FuxiCTR's on the same Criteo rows, split and epoch: AUC, logloss and samples a second.

FuxiCTR runs in a separate environment, whose Python is ``--peer``; its models are in a checkout of its repository, not
in its wheel::

    python -m venv /tmp/fuxictr
    /tmp/fuxictr/bin/pip install torch==2.13.0 fuxictr==2.3.10
    git clone https://github.com/reczoo/FuxiCTR /tmp/fuxictr/source
    python tools/bench_fuxictr.py train.tsv.gz --peer /tmp/fuxictr/bin/python --zoo /tmp/fuxictr/source/model_zoo

Both train one epoch of the first 0.8 of the rows in batches of 128, with vectors of 16 numbers for values that occur
twice, and layers of equal sizes; FuxiCTR's DLRM has buckets in the place of numbers, so no bottom network. distembed
has the settings of ``tools/bench_quality.py``, FuxiCTR its templates' Adam at 0.001, or with ``--search`` the rate
with which seed 0 has the best AUC on the validation rows. The two take turns, seed by seed. Samples a second are of the
training steps with the reading of batches, on all cores.
"""

import json
import re
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench_commands import bench_parser, deviation, mean_and_deviation, median_ratio, run_distembed, write_output
from bench_quality import train
from rich.console import Console
from rich.table import Table

_PEER = Path(__file__).parent / "peers" / "fuxictr_click.py"
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DLRM": (
        "DLRM/DLRM",
        {"bottom_mlp_units": [512, 256, 64], "top_mlp_units": [512, 256]},
    ),
    "DCN": ("DCN/DCN_torch/DCN", {"dnn_hidden_units": [512, 256, 64], "num_cross_layers": 6}),
    "DCN V2": ("DCNv2/DCNv2", {"parallel_dnn_hidden_units": [512, 256], "num_cross_layers": 3, "net_dropout": 0.1}),
    "GDCN": ("GDCN/GDCNP", {"dnn_hidden_units": [512, 256], "num_cross_layers": 3}),
    "FinalMLP": (
        "FinalMLP/FinalMLP",
        {
            "mlp1_hidden_units": [512, 256],
            "mlp2_hidden_units": [512, 256],
            "mlp1_dropout": 0.1,
            "mlp2_dropout": 0.1,
            "fs_hidden_units": [64],
            "num_heads": 8,
        },
    ),
    "DeepFM": ("DeepFM/DeepFM_torch/DeepFM", {"hidden_units": [512, 256]}),
}
"""A model of FuxiCTR and its settings, for each of distembed's."""
_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
"""FuxiCTR's learning rates that ``--search`` tries."""


def train_peer(command: list[str], seed: int) -> dict[str, Any]:
    """Trains FuxiCTR's model with one seed, and returns its figures."""
    done = subprocess.run([*command, "--seed", str(seed)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"auc": figures["AUC"]}


def search(command: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns FuxiCTR's settings with the learning rate that has the best AUC on the validation rows."""
    auc_of = {}
    for rate in _RATES:
        trial = json.dumps(settings | {"learning_rate": rate})
        auc_of[rate] = train_peer([*command, "--settings", trial], 0)["valid"]["AUC"]
        print(f"learning_rate {rate:g}: validation AUC {auc_of[rate]:.4f}", flush=True)
    return settings | {"learning_rate": max(auc_of, key=auc_of.__getitem__)}


def main() -> None:
    """Trains each model of both with each seed in turn, and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("tsv", help="raw Criteo rows in time order")
    parser.add_argument("--peer", required=True, help="Python of an environment with fuxictr")
    parser.add_argument("--zoo", required=True, help="folder model_zoo of FuxiCTR's repository")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="models whose name matches this pattern")
    parser.add_argument("--search", action="store_true", help="search FuxiCTR's learning rate first")
    options = parser.parse_args()
    table = Table("model", "parameters", "AUC", "logloss", "samples/s", "times", title="distembed, then FuxiCTR")
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_distembed("prepare", "criteo", options.tsv, "--output", (dataset := folder / "dataset"))
        for title, (model, settings) in _MODELS.items():
            if not re.search(options.only, title):
                continue
            command = [
                options.peer,
                str(_PEER),
                options.tsv,
                "--zoo",
                options.zoo,
                "--model",
                model,
                "--min-count",
                "2",
            ]
            if options.search:
                print(title, flush=True)
                settings = search(command, settings)
            command += ["--settings", json.dumps(settings)]
            ours, theirs = [], []
            for seed in range(options.seeds):
                ours.append(train(f"{title}, full", dataset, folder / title, seed))
                theirs.append(train_peer(command, seed))
            speeds = [[run["samples_per_second"] for run in runs] for runs in (ours, theirs)]
            times = median_ratio(*speeds)
            for runs, speed in zip((ours, theirs), speeds, strict=True):
                figures = [mean_and_deviation([run[key] for run in runs]) for key in ("auc", "logloss")]
                size = f"{runs[0]['parameters']:,}"
                table.add_row(title, size, *figures, f"{statistics.median(speed):,.0f}", f"{times:.2f}")
            by_seed = [[run["auc"] for run in runs] for runs in (ours, theirs)]
            error = (sum(deviation(values) ** 2 for values in by_seed) / options.seeds) ** 0.5
            results.append(
                {"model": title, "times": times, "auc": by_seed, "error": error, "speeds": speeds, "peer": settings}
            )
            print(json.dumps(results[-1]), flush=True)
    Console(width=120).print(table)
    write_output(options, results)


if __name__ == "__main__":
    main()
