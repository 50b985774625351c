"""Measures a loaded run: loading against reading its file, and predictions of 1 to 1,000 rows.

The bench first trains two runs of a DLRM of the paper's size on synthetic Criteo rows. The run that is loaded has full
tables of a gigabyte on hashed ids. The run that predicts raw rows has vocabularies and quotient-remainder tables. All
files are in the page cache when they are read::

    python tools/bench_load.py --output bench_load.json
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_commands import bench_parser, run_distembed, write_output
from bench_common import surroundings

import distembed
from distembed import LoadedModel
from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE

DIM, NUM_FEATURES = 16, 26
CONFIG = f"""
model: {{name: dlrm, bottom: [512, 256, 64], top: [512, 256]}}
embedding:
  default: {{partition: PARTITION, collisions: 4, composition: product, embedding_dim: {DIM}, threshold: 200}}
train: {{batch_size: 512, max_steps: 1, sparse_optimizer: {{name: sgd}}, dense_optimizer: {{name: sgd}}}}
data: {{validation: null, test: null}}
"""


def make_run(folder: Path, name: str, partition: str, *options: str) -> Path:
    """Prepares the folder's rows with these options, and trains a step."""
    config = folder / f"{name}.yaml"
    config.write_text(CONFIG.replace("PARTITION", partition))
    run_distembed("prepare", "criteo", folder / "rows.tsv", "--output", folder / name, *options)
    run_distembed("train", config, f"data.path={folder / name}", "--run-dir", folder / f"run_{name}")
    return folder / f"run_{name}"


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """Returns the median of the seconds of some calls, after one call to warm up."""
    work()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_loading(run: Path, rounds: int) -> dict[str, Any]:
    """Returns the seconds of loading a run and of reading its file, in turns."""
    (file,) = (run / "checkpoints").glob("step-*/*.blocks")
    reading: list[float] = []
    loading: list[float] = []
    for _ in range(rounds):
        reading.append(median_seconds(lambda: file.open("rb").read(), 1))
        loading.append(median_seconds(lambda: distembed.load(run, device="cpu"), 1))
    read, load = statistics.median(reading), statistics.median(loading)
    return {"bytes": file.stat().st_size, "read_seconds": read, "load_seconds": load, "ratio": load / read}


def measure_predictions(run: Path, rows: list[dict[str, str | None]], rounds: int) -> dict[str, float]:
    """Returns the milliseconds of the first prediction, which reads the vocabularies, and of later ones."""
    model: LoadedModel = distembed.load(run, device="cpu")
    started = time.perf_counter()
    model.predict(rows)
    first = time.perf_counter() - started
    counts = [count for count in (1, 10, 100, 1000) if count <= len(rows)]
    found = {f"{count}_rows": 1e3 * median_seconds(lambda n=count: model.predict(rows[:n]), rounds) for count in counts}  # type: ignore[misc]
    return {"first": 1e3 * first, **found}


def read_rows(path: Path, count: int) -> list[dict[str, str | None]]:
    """Returns the first rows of a Criteo file, without labels, as dictionaries."""
    names = (*CRITEO_DENSE, *CRITEO_CATEGORICAL)
    with path.open() as file:
        lines = [next(file).rstrip("\n").split("\t")[1:] for _ in range(count)]
    return [{name: value or None for name, value in zip(names, line, strict=True)} for line in lines]


def main() -> None:
    """Makes the runs, measures, and prints the figures."""
    parser = bench_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the runs; a temporary folder unless given")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the tables that are loaded")
    parser.add_argument("--rows", type=int, default=20_000, help="number of synthetic rows")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        run_distembed("synthesize", folder / "rows.tsv", "--rows", arguments.rows)
        hash_size = int(arguments.gigabytes * 1e9 / (4 * DIM * NUM_FEATURES))
        large = make_run(folder, "large", "naive", "--hash-size", str(hash_size))
        small = make_run(folder, "small", "quotient_remainder", "--min-count", "1")
        found = {
            "loading": measure_loading(large, arguments.rounds),
            "milliseconds": measure_predictions(small, read_rows(folder / "rows.tsv", 1000), 20 * arguments.rounds),
        }
    loading = found["loading"]
    print(
        f"loading {loading['bytes'] / 1e9:.2f} GB: {loading['load_seconds']:.3f} s; reading the file: "
        f"{loading['read_seconds']:.3f} s; ratio {loading['ratio']:.2f}"
    )
    for name, milliseconds in found["milliseconds"].items():
        print(f"{name.replace('_', ' ')}: {milliseconds:.2f} ms")
    write_output(arguments, {**surroundings(torch.device("cpu")), **found})


if __name__ == "__main__":
    main()
