"""The messages of a Kafka topic, each a JSON object of a row, read by ``confluent-kafka`` from the earliest one on.

A piece is a range of offsets of a partition::

    partition 0    [0, 65536)        [65536, 70000)      a round takes the new messages of each partition,
    partition 1    [0, 65536)        [65536, 65540)      at most 65,536 messages of it
    pieces         p0  p1            p0  p1

The run's journal and checkpoints hold the offsets; the consumer belongs to no group and commits nothing. Trade-off:
each change of partition opens a new fetch, which drops messages read ahead, so that a round reads its messages in a
fixed order. It takes effect once the broker has answered the fetch before, so brokers are asked to answer soon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distembed.base.errors import RunError, TemporaryFailure, UserError
from distembed.data.dataset.config import StreamConfig
from distembed.data.prepare.table.source import TableSource
from distembed.data.prepare.table.text_rows import JsonBlock
from distembed.data.stream.source import KAFKA, Patience, Piece
from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.schema import TableSchema

try:
    import confluent_kafka
except ImportError as missing:
    raise UserError(
        f"--follow {KAFKA}... needs the package confluent-kafka ({missing}): `pip install 'distembed[kafka]'`."
    ) from missing

_MOST_MESSAGES = 65_536
_BLOCK_MESSAGES = 4096
_ANSWER_SECONDS = 5.0
_EXACT = {"enable.auto.commit": False, "auto.offset.reset": "error", "enable.partition.eof": True}
"""Settings by which each message is read once; the journal relies on them."""
_MALFORMED = b"-"
"""The line of a message without a value: an empty line would be no row, and is not counted."""
_OWN_NAMES = (*_EXACT, "bootstrap.servers", "metadata.broker.list")
_NEW_RUN = (
    "start a new run with --init-from, which reads the topic from its earliest message and trains again the rows that "
    "are still there"
)


class KafkaSource:
    """The partitions of a topic; partitions that are added later are read from their beginning."""

    def __init__(self, config: StreamConfig, schema: TableSchema) -> None:
        self._brokers, _, self._topic = config.source.removeprefix(KAFKA).partition("/")
        if not self._brokers or not self._topic or "/" in self._topic:
            raise UserError(
                f"data.stream.source (--follow) is {config.source!r}; give {KAFKA}HOST:PORT/TOPIC, of several brokers "
                f"{KAFKA}HOST:PORT,HOST:PORT/TOPIC."
            )
        self.is_pending, self.notes = False, list[str]()
        self._parser = TableSource([], schema)
        self._next: dict[int, int] = {}  # of each partition, the offset after its last piece
        self._at: tuple[int, int] | None = None  # the partition and offset that the consumer is at
        self._patience = Patience(f"the brokers {self._brokers}, topic {self._topic!r}", self.notes)
        settings = {
            "group.id": "distembed",  # demanded, and not joined
            "queued.max.messages.kbytes": 16_384,
            "fetch.wait.max.ms": 10,  # a fetch without messages delays the next partition's
            **_properties(config.kafka_properties),
            **_EXACT,
            "bootstrap.servers": self._brokers,
        }
        try:
            self._consumer = confluent_kafka.Consumer(settings, logger=None)
        except (confluent_kafka.KafkaException, ValueError, TypeError) as error:
            raise UserError(f"data.stream.kafka_properties={config.kafka_properties!r}: {_text(error)}.") from error
        try:
            self._partitions()
        except confluent_kafka.KafkaException as error:
            self.close()
            if error.args[0].code() == confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise UserError(
                    f"the brokers {self._brokers} have no topic {self._topic!r} (--follow); make it first, or see how "
                    "its name is written."
                ) from error
            raise TemporaryFailure(
                f"no broker at {self._brokers} answers within {_ANSWER_SECONDS:g} s about the topic {self._topic!r} "
                f"({_text(error)}); see whether it runs, and whether its advertised listeners can be reached from here."
            ) from error

    def restore(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if "partition" not in piece:
                raise UserError(
                    f"--resume: the run has read {dict(piece)}, which is of no topic, and data.stream.source is now "
                    f"{KAFKA}{self._brokers}/{self._topic}; give the source that the run was started with."
                )
            if (topic := piece.get("topic", self._topic)) != self._topic:
                raise UserError(
                    f"--resume: the run has read the topic {topic!r}, and data.stream.source names {self._topic!r}; "
                    "give the topic that the run was started with, or start a new run."
                )
            self._next[piece["partition"]] = piece["stop"]

    def new_pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        try:
            for partition in self._partitions():
                place = confluent_kafka.TopicPartition(self._topic, partition)
                low, high = self._consumer.get_watermark_offsets(place, timeout=_ANSWER_SECONDS, cached=False)
                start = self._next.get(partition, low)
                if start > high:
                    raise UserError(
                        f"partition {partition} of the topic {self._topic!r} ends at offset {high}, and the run has "
                        f"read until {start}: the topic was made anew; {_NEW_RUN}."
                    )
                if start < high:
                    stop = min(high, start + _MOST_MESSAGES)
                    pieces.append({"topic": self._topic, "partition": partition, "start": start, "stop": stop})
        except confluent_kafka.KafkaException as error:
            self._keep_waiting(error)
            return []
        self._note_answer()
        if not pieces and self._at is not None:
            self._at = None
            self._consumer.unassign()  # no fetches while there is nothing to read
        self._next |= {piece["partition"]: piece["stop"] for piece in pieces}
        return pieces

    def summary(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return list({piece["partition"]: piece for piece in pieces}.values())

    def blocks(self, piece: Piece, part: int = 0) -> Iterator[tuple[int, ParsedBlock] | None]:
        partition, offset, stop = piece["partition"], piece["start"], piece["stop"]
        if self._at != (partition, offset):
            self._consumer.assign([confluent_kafka.TopicPartition(self._topic, partition, offset)])
        while offset < stop:
            values = list[bytes]()
            # offsets may have gaps: of deleted messages, and of the ends of transactions
            while offset < stop and len(values) < _BLOCK_MESSAGES:
                messages = self._consumer.consume(min(stop - offset, _BLOCK_MESSAGES), timeout=1.0)
                for message in messages:
                    if _is_answer(message) and (message.partition() != partition or message.offset() < offset):
                        continue  # of an earlier fetch
                    offset = max(offset, self._offset_after(message, piece))
                    if message.error() is None and message.offset() < stop:
                        values.append(_one_line(message.value() or b"") or _MALFORMED)
                if any(_is_answer(message) for message in messages):
                    self._note_answer()
                else:
                    if not messages:
                        self._keep_waiting("no message comes")
                    break
            if not values:
                yield None
            else:
                yield 0, self._parser.parse(JsonBlock(b"\n".join(values) + b"\n", self._parser.parser.columns))
        self._at = (partition, offset) if offset == stop else None

    def describe(self, piece: Piece) -> str:
        return f"{self._topic}, partition {piece['partition']}, offsets from {piece['start']}"

    def close(self) -> None:
        self._consumer.close()

    def _partitions(self) -> list[int]:
        """Returns the numbers of the topic's partitions; a KafkaException where brokers do not list the topic."""
        topic = self._consumer.list_topics(self._topic, timeout=_ANSWER_SECONDS).topics[self._topic]
        if topic.error is not None:
            raise confluent_kafka.KafkaException(topic.error)
        return sorted(topic.partitions)

    def _offset_after(self, message: Any, piece: Piece) -> int:
        """Returns the offset after a message, or the end of the partition, which is a message too."""
        error = message.error()
        if error is None:
            return int(message.offset()) + 1
        if error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
            return int(message.offset())
        if error.code() in (
            confluent_kafka.KafkaError._AUTO_OFFSET_RESET,
            confluent_kafka.KafkaError.OFFSET_OUT_OF_RANGE,
        ):
            raise RunError(
                f"messages of {self.describe(piece)} are gone: the topic keeps them for less time than the run was "
                f"stopped; {_NEW_RUN}."
            )
        self._keep_waiting(error.str())
        return 0

    def _keep_waiting(self, error: object) -> None:
        """Notes that the brokers have not answered, which is no idle time; a TemporaryFailure after a minute."""
        self.is_pending = True
        self._patience.failed(_text(error))

    def _note_answer(self) -> None:
        self.is_pending = False
        self._patience.answered()


def _is_answer(message: Any) -> bool:
    """Returns whether a broker sent a message: a row, or the end of a partition, and no error of the connection."""
    error = message.error()
    return error is None or error.code() == confluent_kafka.KafkaError._PARTITION_EOF


def _one_line(value: bytes) -> bytes:
    """Returns a JSON text as a line: between its values, ends of lines are blanks."""
    return value.replace(b"\r", b" ").replace(b"\n", b" ").strip()


def _text(error: object) -> str:
    first = error.args[0] if isinstance(error, Exception) and error.args else error
    return first.str() if isinstance(first, confluent_kafka.KafkaError) else str(first)


def _properties(path: str | None) -> dict[str, str]:
    """Returns the settings in a file of ``NAME=VALUE`` lines; lines that begin with # are comments."""
    if path is None:
        return {}
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.stream.kafka_properties {path!r} cannot be read: {error}.") from error
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    if wrong := next((name for name, equals, _ in pairs if not equals), None):
        raise UserError(f"data.stream.kafka_properties {path!r} has the line {wrong!r}; give NAME=VALUE.")
    properties = {name.strip(): value.strip() for name, _, value in pairs}
    if own := [name for name in _OWN_NAMES if name in properties]:
        raise UserError(
            f"data.stream.kafka_properties {path!r} sets {', '.join(own)}, on which reading each message once depends; "
            "leave these lines out."
        )
    return properties
