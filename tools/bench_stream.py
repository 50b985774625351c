"""Measures how many raw rows a second ``train --follow`` decodes, and trains: one JSON object and one table.

::

    python tools/bench_stream.py                      # 200,000 synthetic Criteo rows, DLRM in the size of the paper
    python tools/bench_stream.py --rows 50000 --repeats 1

Decoding is timed without a model, from the moment the rows are found. Training is timed by the run's own lines of
metrics, and leaves the first tenth of the steps out. The best of ``--repeats`` is shown. Messages, 24,000 at most, come
from the broker in librdkafka, a thread of this process: training shares the processors with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from bench_commands import CONFIGS, bench_parser, timed_command, told, write_output
from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from distembed.data.dataset.config import StreamConfig
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import synthesize_criteo
from distembed.data.prepare.table import prepare_table
from distembed.data.stream.reader import stream_schema
from distembed.data.stream.source import open_source
from distembed.data.table.encoder import RowEncoder
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema

KINDS = ("parquet", "csv", "jsonl", "kafka")
BATCH_SIZE = 2048
MOST_MESSAGES = 24_000  # librdkafka's broker keeps 5 MiB of each of a topic's four partitions
DENSE, IDS = [f"I{number}" for number in range(1, 14)], [f"C{number}" for number in range(1, 27)]
SCHEMA = {
    "label": {"column": "label"},
    "dense": {name: {"transform": "log"} for name in DENSE},
    "categorical": {name: {"kind": "hexadecimal"} for name in IDS},
}
RANKS = (1, 2)


def read_rows(path: Path) -> pa.Table:
    """Returns Criteo's rows with the names of their columns."""
    types = {"label": pa.int64(), **dict.fromkeys(DENSE, pa.int64()), **dict.fromkeys(IDS, pa.string())}
    return pyarrow.csv.read_csv(
        path,
        pyarrow.csv.ReadOptions(column_names=list(types)),
        pyarrow.csv.ParseOptions(delimiter="\t"),
        pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )


@contextmanager
def written_source(kind: str, rows: pa.Table, folder: Path) -> Iterator[str]:
    """Writes rows as a folder with one file, or as messages of four partitions; yields the source for ``--follow``."""
    place = folder / kind
    place.mkdir()
    if kind == "parquet":
        pq.write_table(rows, place / "rows.parquet", row_group_size=65_536)
    elif kind == "csv":
        pyarrow.csv.write_csv(rows, place / "rows.csv")
    else:
        lines = [
            json.dumps({name: value for name, value in row.items() if value is not None}) for row in rows.to_pylist()
        ]
        if kind == "kafka":
            producer = Producer({"test.mock.num.brokers": 1, "linger.ms": 50, "queue.buffering.max.messages": 10**7})
            for number, line in enumerate(lines):
                producer.produce("rows", line, partition=number % 4)
            producer.flush()
            (broker,) = producer.list_topics().brokers.values()
            yield f"kafka://{broker.host}:{broker.port}/rows"
            return
        (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    yield str(place)


def decode(source: str, dataset: Path, num_rows: int) -> dict[str, float]:
    """Returns the rows a second, by the clock and of a processor's time, of parsing and encoding a source's rows."""
    manifest = Manifest.load(dataset)
    schema = stream_schema(manifest)
    source_of_rows = open_source(StreamConfig(source=source), schema)
    encoder, decoded = RowEncoder(dataset, manifest, TableParser(schema).layout), 0
    started = (time.perf_counter(), time.process_time())
    while decoded < num_rows:
        pieces = source_of_rows.new_pieces()
        if not decoded:  # a file is left for a second, until it is known to be whole
            started = (time.perf_counter(), time.process_time())
        elif not pieces:
            raise SystemExit(f"{source} has {decoded} of {num_rows} rows")
        for piece in pieces:
            for found in source_of_rows.blocks(piece):
                decoded += len(encoder.encode(found[1]).records) if found is not None else 0
    seconds, processor_seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    source_of_rows.close()
    return {"decoded": decoded / seconds, "processor": decoded / processor_seconds}


def train(source: str | None, dataset: Path, num_rows: int, num_ranks: int) -> float:
    """Returns the rows a second that a run trains, of a source or else of the dataset's own training split."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    follows = ("--follow", source, "--max-rows", str(num_rows), "data.stream.poll_seconds=0.1") if source else ()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = (
            f"data.path={dataset}",
            f"train.batch_size={BATCH_SIZE}",
            "train.log_every=1",
            "data.validation=null",
        )
        timed_command(
            [sys.executable, *(launcher if num_ranks > 1 else ()), "-m", "distembed", "train"]
            + [str(CONFIGS / "criteo_sample.yaml"), *settings, "data.test=null", *follows, "--run-dir", str(run)]
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    first, last = steps[len(steps) // 10], steps[-1]
    return float((last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"]))


def measure(num_rows: int, repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    """Returns the rows a second of each kind of source."""
    dataset = folder / "dataset"
    synthesize_criteo(folder / "rows.tsv", num_rows=num_rows, seed=0)
    rows = read_rows(folder / "rows.tsv")
    pyarrow.csv.write_csv(rows, folder / "rows.csv")
    prepare_table([folder / "rows.csv"], dataset, TableSchema.from_json(SCHEMA, "the bench"))
    results = {
        "prepared": {
            f"ranks_{ranks}": max(train(None, dataset, num_rows, ranks) for _ in range(repeats)) for ranks in RANKS
        }
    }
    for kind in told(KINDS, "sources"):
        num_kept = min(num_rows, MOST_MESSAGES) if kind == "kafka" else num_rows
        with written_source(kind, rows[:num_kept], folder) as source:
            decoded = [decode(source, dataset, num_kept) for _ in range(repeats)]
            results[kind] = {name: max(one[name] for one in decoded) for name in decoded[0]}
            for ranks in RANKS:
                results[kind][f"ranks_{ranks}"] = max(train(source, dataset, num_kept, ranks) for _ in range(repeats))
    return results


def main() -> None:
    """Runs the bench."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.rows, options.repeats, Path(folder))
    columns = {
        "decoded": "decoding",
        "processor": "decoding, of a processor's second",
        "ranks_1": "training, 1 rank",
        "ranks_2": "2 ranks",
    }
    table = Table("rows a second", *columns.values())
    for kind, speeds in results.items():
        table.add_row(kind, *(f"{speeds[name]:,.0f}" if name in speeds else "" for name in columns))
    Console().print(table)
    write_output(options, results)


if __name__ == "__main__":
    main()
