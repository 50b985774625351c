"""Trains DLRM on real Criteo rows for several epochs and probabilities of replacing ids: test logloss by epoch.

::

    python tools/bench_overfitting.py train.tsv.gz --seeds 5 --output bench.json --plot tools/overfitting.svg
    OMP_NUM_THREADS=1 python tools/bench_overfitting.py train.tsv.gz --jobs 2 --only full --p0 0 0.01

Rows are split 0.8/0.1/0.1 in time order. Each model is trained for three epochs and for one epoch, with
``configs/criteo_sample.yaml`` or a config of compressed tables in ``configs/criteo_sample/``. Learning rates decay over
the whole run.
"""

import dataclasses
import itertools
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench_commands import CONFIGS, bench_parser, mean_and_deviation, run_distembed, write_output
from rich.console import Console
from rich.table import Table

MODELS = {
    "full": CONFIGS / "criteo_sample.yaml",
    "product, 4 collisions": CONFIGS / "criteo_sample" / "product_4.yaml",
}
EPOCHS = 3
PROBABILITIES = [0.0, 0.005, 0.01, 0.02, 0.05, 0.1]


@dataclasses.dataclass(frozen=True)
class Row:
    """The test logloss and AUC of one model at one probability, by seed.

    ``logloss`` and ``auc`` have a list over seeds for each epoch of the long runs.
    """

    model: str
    p0: float
    logloss: list[list[float]]
    auc: list[list[float]]
    logloss_of_one_epoch: list[float]
    auc_of_one_epoch: list[float]


def evaluations(run: Path) -> list[tuple[float, float]]:
    """Returns logloss and AUC on the test split at the end of each epoch."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: (line["logloss"], line["auc"]) for line in lines if line["kind"] == "eval"}
    return [by_step[step] for step in sorted(by_step)]


def train(job: tuple[str, float, int], dataset: Path, folder: Path) -> list[list[tuple[float, float]]]:
    """Trains for three epochs and for one epoch, and returns the evaluations of both runs."""
    model, p0, seed = job
    found = []
    for epochs in (EPOCHS, 1):
        run = folder / f"{list(MODELS).index(model)}-{p0}-{seed}-{epochs}"
        settings = [f"data.path={dataset}", "data.validation=test", f"train.seed={seed}", f"train.epochs={epochs}"]
        run_distembed("train", MODELS[model], *settings, f"sse.default.p0={p0}", "--run-dir", run)
        found.append(evaluations(run))
    return found


def summarise(model: str, p0: float, seeds: list[list[list[tuple[float, float]]]]) -> Row:
    """Returns the evaluations of all seeds' runs, regrouped by epoch."""
    long, short = ([seed[i] for seed in seeds] for i in (0, 1))
    by_epoch = [[[seed[epoch][i] for seed in long] for epoch in range(EPOCHS)] for i in (0, 1)]
    return Row(model, p0, *by_epoch, *([seed[0][i] for seed in short] for i in (0, 1)))


def draw(rows: list[Row], path: Path) -> None:
    """Draws test logloss by epoch, with a panel for each model and a line for each probability."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "distembed", "font.size": 9}
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(4.2 * len(models), 3.2), sharey=True, squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        own = [row for row in rows if row.model == model]
        for row, colour in zip(own, plt.get_cmap("viridis_r")([0.1 + 0.18 * i for i in range(len(own))]), strict=True):
            means = [statistics.mean(values) for values in row.logloss]
            deviations = [statistics.pstdev(values) for values in row.logloss]
            style = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.2, "capsize": 2}
            panel.errorbar(range(1, EPOCHS + 1), means, deviations, label=f"$p_0$ = {row.p0:g}", **style)
        panel.set(title=f"DLRM, {model}", xlabel="epoch", xticks=range(1, EPOCHS + 1))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("test logloss")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Prepares the rows, trains every variant, prints a table and draws the plot."""
    parser = bench_parser(__doc__)
    parser.add_argument("tsv", nargs="+", help="raw Criteo files in time order")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--p0", type=float, nargs="+", default=PROBABILITIES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default="", help="models whose name contains this text")
    parser.add_argument("--plot", type=Path, help="SVG or PNG file to write")
    options = parser.parse_args()
    models = [name for name in MODELS if options.only in name]
    variants = list(itertools.product(models, options.p0))
    jobs = [(model, p0, seed) for model, p0 in variants for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "dataset"
        run_distembed("prepare", "criteo", *options.tsv, "--output", dataset)
        with ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(partial(train, dataset=dataset, folder=Path(folder)), jobs))
    by_variant = [found[i : i + options.seeds] for i in range(0, len(found), options.seeds)]
    rows = [summarise(*variant, seeds) for variant, seeds in zip(variants, by_variant, strict=True)]
    epochs = [f"epoch {epoch}" for epoch in range(1, EPOCHS + 1)]
    table = Table("tables", "p0", *epochs, "one epoch alone", title="test logloss")
    for row in rows:
        cells = map(mean_and_deviation, [*row.logloss, row.logloss_of_one_epoch])
        table.add_row(row.model, f"{row.p0:g}", *cells)
    Console(width=140).print(table)
    write_output(options, [dataclasses.asdict(row) for row in rows])
    if options.plot is not None:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
