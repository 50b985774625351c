"""Training on the messages of a topic: equal to the prepared rows, silent brokers, new partitions, and errors."""

import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from distembed.base.errors import RunError, TemporaryFailure, UserError
from distembed.data.dataset.config import StreamConfig
from distembed.data.stream import journal, kafka
from distembed.data.stream import source as source_module
from distembed.data.stream.journal import Journal
from distembed.data.table.schema import TableSchema
from tests.small_runs import call, distembed, metrics
from tests.training.stream_runs import (
    IDLE,
    SCHEMA,
    MockBroker,
    Row,
    draw_rows,
    follow,
    kafka_broker,
    require_equal,
    send,
    start_run,
    wait_for_steps,
)


def test_messages_of_a_topic_are_rows_too(config: Path, ordered: list[Row], trained: Path, tmp_path: Path) -> None:
    with kafka_broker() as (address, producer):
        for value in (None, b"", b" \n"):  # malformed rows
            producer.produce("clicks", value, partition=0)
        send(producer, "clicks", ordered)
        follow(config, f"kafka://{address}/clicks", tmp_path / "run")
    require_equal(tmp_path / "run", trained)
    assert metrics(tmp_path / "run", "train")[-1]["rejected_rows"] == 3


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_sigterm_saves_while_a_broker_sends_nothing(config: Path, tmp_path: Path, ranks: int) -> None:
    broker, run = MockBroker(), tmp_path / "run"
    send(broker.producer, "clicks", draw_rows(400))
    follows = ("train", config, "--follow", f"kafka://{broker.address}/clicks", *IDLE)
    distembed(*follows, "--max-rows", 128, "--run-dir", run, ranks=ranks)
    broker.refuse_fetches()
    (tmp_path / "output").touch()
    processes = start_run(ranks, config, follows[3], run)
    while "waiting: the brokers" not in (tmp_path / "output").read_text():
        assert all(process.is_alive() for process in processes), (tmp_path / "errors").read_text()
        time.sleep(0.1)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [75] * ranks
    broker.answer_fetches()
    distembed(*follows, "--run-dir", run, "--resume", ranks=ranks)
    distembed(*follows, "--run-dir", tmp_path / "whole", ranks=ranks)
    require_equal(run, tmp_path / "whole")
    assert metrics(run, "train")[-1]["samples"] == 400


@pytest.mark.thorough
def test_a_broker_that_dies_and_comes_back_costs_no_row(config: Path, tmp_path: Path) -> None:
    broker, rows = MockBroker(), draw_rows(1000)
    source = f"kafka://{broker.address}/clicks"
    broker.create("clicks")
    (process,) = start_run(1, config, source, tmp_path / "run", *IDLE[:1], "5", *IDLE[2:])
    for number in range(5):
        send(broker.producer, "clicks", rows[200 * number : 200 * (number + 1)])
        wait_for_steps(tmp_path / "run", [process], 3 * number + 1)
        broker.set_down(True)
        time.sleep(1.5)
        broker.set_down(False)
    process.join()
    assert process.exitcode == 0, (tmp_path / "errors").read_text()
    follow(config, source, tmp_path / "whole")
    require_equal(tmp_path / "run", tmp_path / "whole")
    assert metrics(tmp_path / "run", "train")[-1]["samples"] == len(rows)


@pytest.mark.thorough
def test_a_broker_that_stays_silent_ends_a_run_after_a_checkpoint(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MockBroker()
    send(broker.producer, "clicks", draw_rows(400))
    source = f"kafka://{broker.address}/clicks"
    monkeypatch.setattr(source_module, "GONE_SECONDS", 5.0)
    threading.Timer(4.0, broker.set_down, [True]).start()
    with pytest.raises(TemporaryFailure, match=rf"{broker.address}, topic 'clicks': no answer for 5 s .*--resume"):
        call("train", config, "--follow", source, "train.checkpoint_every=0", "--run-dir", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000006-interrupted"]
    broker.set_down(False)
    follow(config, source, tmp_path / "run", "--resume")
    follow(config, source, tmp_path / "whole")
    require_equal(tmp_path / "run", tmp_path / "whole")


class Repeating:
    """A consumer that returns each message twice, and the messages of the call before once more."""

    def __init__(self, consumer: Any) -> None:
        self._consumer, self._before = consumer, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def consume(self, num_messages: int, timeout: float) -> list[Any]:
        before, self._before = self._before, self._consumer.consume(num_messages, timeout)
        return [*before, *(message for message in self._before for _ in range(2))]


def test_a_message_that_comes_again_is_no_row_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "_BLOCK_MESSAGES", 7)
    broker = MockBroker()
    broker.create("clicks", 2)
    for partition in range(2):
        send(broker.producer, "clicks", draw_rows(20 + partition), partition)
    source = kafka.KafkaSource(
        StreamConfig(source=f"kafka://{broker.address}/clicks"), TableSchema.from_json(SCHEMA, "test")
    )
    source._consumer = Repeating(source._consumer)
    blocks = [[found[1] for found in source.blocks(piece) if found is not None] for piece in source.new_pieces()]
    assert [sum(block.num_rows for block in of_piece) for of_piece in blocks] == [20, 21]
    source.close()


def test_a_partition_that_is_added_is_read_from_its_beginning(tmp_path: Path) -> None:
    broker, rows = MockBroker(), draw_rows(30)

    def create(num_partitions: int) -> None:
        broker.create("clicks", num_partitions)
        producer = Producer({"bootstrap.servers": broker.address})  # which asks anew for the partitions
        for partition in range(num_partitions):
            send(producer, "clicks", rows[10 * partition : 10 * (partition + 1)], partition)

    create(2)
    source = kafka.KafkaSource(
        StreamConfig(source=f"kafka://{broker.address}/clicks"), TableSchema.from_json(SCHEMA, "test")
    )
    assert [(piece["partition"], piece["start"], piece["stop"]) for piece in source.new_pieces()] == [
        (0, 0, 10),
        (1, 0, 10),
    ]
    broker.delete("clicks")
    create(3)  # the mock broker has no other way to add a partition
    (piece,) = source.new_pieces()
    assert piece == {"topic": "clicks", "partition": 2, "start": 0, "stop": 10}
    blocks = [found[1] for found in source.blocks(piece) if found is not None]
    assert sum(block.num_rows for block in blocks) == 10
    source.close()


@pytest.mark.thorough
def test_a_journal_drops_what_no_checkpoint_needs(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_PIECES_BETWEEN_DROPS", 7)
    monkeypatch.setattr(kafka, "_MOST_MESSAGES", 20)
    broker, rows, run = MockBroker(), draw_rows(1200), tmp_path / "run"
    broker.create("clicks", 3)
    for partition, (start, stop) in enumerate(((0, 700), (700, 1100), (1100, 1200))):
        send(broker.producer, "clicks", rows[start:stop], partition)
    source = f"kafka://{broker.address}/clicks"
    follow(config, source, tmp_path / "whole", "--max-rows", "640", "train.checkpoint_every=0")
    assert len(Journal(tmp_path / "whole").summary) == 0  # without a checkpoint all pieces are needed
    follow(config, source, tmp_path / "whole", "--resume")
    follow(config, source, run, "--max-rows", "640")
    left = Journal(run)
    assert left.first > 0 and {piece["partition"] for piece in left.summary} == {0, 1, 2}
    newest = max((run / "checkpoints").iterdir())
    shutil.rmtree(newest)  # the one before it needs its pieces too
    follow(config, source, run, "--resume")
    require_equal(run, tmp_path / "whole")
    assert metrics(run, "train")[-1]["samples"] == len(rows)
    for checkpoint in (run / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match=r"stream.jsonl lists the pieces \d+ to \d+ .* is in piece 1; put back"):
        follow(config, source, run, "--resume")


def test_a_resumed_run_needs_its_journal_and_its_topic(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with kafka_broker() as (address, producer):
        for topic in ("clicks", "views"):
            send(producer, topic, draw_rows(200))
        follow(config, f"kafka://{address}/clicks", run, "--max-rows", "64")
        with pytest.raises(UserError, match="has read the topic 'clicks', and data.stream.source names 'views'"):
            follow(config, f"kafka://{address}/views", run, "--max-rows", "128", "--resume")
        (run / "stream.jsonl").unlink()
        with pytest.raises(UserError, match=r"stream.jsonl lists the pieces 1 to 0 .* is in piece 1; put back the run"):
            follow(config, f"kafka://{address}/clicks", run, "--max-rows", "128", "--resume")


def test_errors_of_a_topic_say_what_to_do(config: Path, tmp_path: Path) -> None:
    with kafka_broker() as (address, producer):
        producer.list_topics("empty", timeout=10)
        for name in ("auto.offset.reset", "bootstrap.servers"):
            (tmp_path / "kafka").write_text(f"client.id=us\n{name}=latest\n")
            properties = f"data.stream.kafka_properties={json.dumps(str(tmp_path / 'kafka'))}"
            with pytest.raises(UserError, match=f"sets {name}, on which"):
                follow(config, f"kafka://{address}/empty", tmp_path / "run", properties)
        for topic, error in (("a/b", "give kafka://HOST"), ("missing", "have no topic"), ("empty", "no row came")):
            with pytest.raises(UserError, match=error):
                follow(config, f"kafka://{address}/{topic}", tmp_path / f"run-{topic[:1]}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (1, silent.getsockname()[1]):
            with pytest.raises(RunError, match=rf"no broker at 127.0.0.1:{port} answers .*clicks.*see whether it runs"):
                follow(config, f"kafka://127.0.0.1:{port}/clicks", tmp_path / "run")
