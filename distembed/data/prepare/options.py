"""Options of a preparation: the split of the rows, memory and threads, progress and notes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from distembed.base.errors import UserError
from distembed.base.machine import usable_cores
from distembed.base.names import one_of
from distembed.base.units import format_bytes

SPLIT_NAMES = ("train", "validation", "test")
TRAIN = 0  # number of the training split among the splits of a dataset

# Exponents would allow numbers that take hours to write out.
_SHARE = re.compile(r"[0-9]{0,20}\.?[0-9]{1,20}|[0-9]{1,20}/[0-9]{1,20}", re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)

# One file without marks between its days is cut as the public DLRM cuts the Kaggle file, which has seven.
_DAYS_IN_ONE_FILE = 7

SplitKind = Literal["shares", "days", "none", "time", "column"]
_WANTED = {
    "time": "after 'time:' there must be three shares that add up to 1, such as '0.8,0.1,0.1', or the times at which "
    "validation and test begin, in rising order, such as '2014-10-28,2014-10-30' or seconds since 1970; a single time "
    "is that of the test",
    "column": "after 'column:' there must be the name of a column with the values train, validation and test, or "
    "NAME=A,B,C with the values that stand for them; of NAME=A,C there is no validation",
    "shares": "it must be three shares that add up to 1, such as '0.8,0.1,0.1' or '1/2,1/4,1/4', of which the second "
    "and the third may be 0; 'days'; 'none'; 'time:' with such shares, or with the times at which validation and test "
    "begin; 'column:' with the name of a column; or, with --vocabulary, 'validation' or 'test'",
}
"""The allowed forms of each kind of rule, for errors."""


def parse_shares(text: str, refusal: str) -> tuple[Fraction, ...]:
    """Reads shares that add up to 1, as ``0.8,0.1,0.1`` or ``1/2,1/2``; errors have the text ``refusal``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_SHARE.fullmatch(part) for part in parts):
        raise UserError(refusal)
    try:
        shares = tuple(Fraction(part) for part in parts)
    except ZeroDivisionError:
        raise UserError(refusal) from None
    if shares[0] <= 0 or sum(shares) != 1:
        raise UserError(refusal)
    return shares


@dataclass(frozen=True)
class SplitRule:
    """How rows are divided; rows keep the order of the input.

    ::

    0.8,0.1,0.1                    the first 80% of the rows train, the next 10% validate, the last 10% test
    days                           each input is a day (one input has seven); the last is halved into validation
                                   and test
    none, validation, test         all rows are in one split, ``none`` in training
    time:0.8,0.1,0.1               shares in the order of the time column; rows of equal times stay together
    time:2014-10-28,2014-10-30     validation begins at the first time, test at the second; or seconds since 1970
    column:NAME, column:NAME=a,b,c the column says it, by the splits' names or by these values; of two, no validation
    """

    kind: SplitKind  # ``none``: all are in one split
    names: tuple[str, ...] = SPLIT_NAMES  # of the splits that there are, in order; only the first may train
    shares: tuple[Fraction, ...] = ()  # of the splits, exact numbers that add up to 1, of ``shares`` and ``time``
    times: tuple[int, ...] = ()  # at which the splits after training begin, of ``time`` without shares
    column: str = ""  # whose values say the split, of ``column``
    values: tuple[str, ...] = ()  # of the splits in that column

    @classmethod
    def parse(cls, text: str) -> SplitRule:
        if text == "days":
            return cls("days")
        if text in ("none", *SPLIT_NAMES[1:]):
            return cls("none", (SPLIT_NAMES[TRAIN] if text == "none" else text,))
        prefix, _, argument = text.partition(":")
        kind: SplitKind = "time" if prefix == "time" else "column" if prefix == "column" else "shares"
        refusal = f"split (--split) is {text[:100]!r}: {_WANTED[kind]}"
        if kind == "column":
            column, has_values, values_text = argument.partition("=")
            values = tuple(part.strip() for part in values_text.split(",")) if has_values else SPLIT_NAMES
            if not column or "" in values or len(set(values)) != len(values) or len(values) not in (2, 3):
                raise UserError(refusal)
            return cls(kind, _split_names(len(values)), column=column, values=values)
        parts = [part.strip() for part in (argument if kind == "time" else text).split(",")]
        if kind == "shares" or len(parts) == len(SPLIT_NAMES):
            shares = parse_shares(",".join(parts), refusal)
            if len(shares) != len(SPLIT_NAMES):
                raise UserError(refusal)
            names = tuple(name for name, share in zip(SPLIT_NAMES, shares, strict=True) if share)
            return cls(kind, names, tuple(share for share in shares if share))
        times = tuple(_parse_time(part, refusal) for part in parts)
        if len(times) > 2 or list(times) != sorted(set(times)):
            raise UserError(refusal)
        return cls(kind, _split_names(len(times) + 1), times=times)

    @property
    def trains(self) -> bool:
        return self.names[TRAIN] == SPLIT_NAMES[TRAIN]

    def bounds(self, source_rows: Sequence[int]) -> tuple[int, ...]:
        """Returns the first row of each split, then the total, for rules none, shares and days, from inputs' rows."""
        total = sum(source_rows)
        if self.kind == "none":
            return 0, total
        if self.kind == "shares":
            return tuple(int(total * sum(self.shares[:count])) for count in range(len(self.shares) + 1))
        if len(source_rows) > 1:
            last_day = total - source_rows[-1]
        else:
            last_day = total * (_DAYS_IN_ONE_FILE - 1) // _DAYS_IN_ONE_FILE
        return 0, last_day, last_day + (total - last_day) // 2, total


def _split_names(count: int) -> tuple[str, ...]:
    return SPLIT_NAMES if count == len(SPLIT_NAMES) else (SPLIT_NAMES[0], SPLIT_NAMES[-1])


def _parse_time(text: str, refusal: str) -> int:
    """Parses seconds since 1970, or an ISO 8601 date or time (UTC without a zone); else a UserError ``refusal``."""
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(refusal) from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


@dataclass(frozen=True)
class ProgressUpdate:
    """How far one stage of a preparation is."""

    stage: str  # ``read``, ``vocabulary`` (but of interactions), ``write`` in this order, or a small one between them
    bytes_done: int  # of the stage's work
    bytes_total: int | None  # equals ``bytes_done`` when the stage is over; None where it is not known, as with pipes
    rows_done: int  # well-formed rows that the stage has dealt with


ProgressCallback = Callable[[ProgressUpdate], None]
NoteCallback = Callable[[str], None]  # takes one sentence about the input, for example that a header was left out


def ignore(_: object) -> None:
    """Takes a progress or a note, and does nothing."""


INTERPRETER_BYTES = 224 << 20
"""Memory of an idle process (Python, numpy, PyArrow and DuckDB: 140 MB), and memory that is kept when freed."""
LEAST_MEMORY_BYTES = INTERPRETER_BYTES + (96 << 20)  # the least that a process can work in, everything included
MOST_THREADS = 1024
ENGINES = ("threads", "ray", "spark")  # who can run the tasks (``work.py``)

# Each thread has one block, one is being read and one waits. Parsing takes so many times a block's size.
_MEMORY_PER_BLOCK_BYTE, _MEMORY_PER_BYTE_OF_LISTS = 10, 20
_OTHER_BLOCKS = 2
_LEAST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ResourceLimits:
    """How much memory and how many threads a preparation may use; on a cluster, each of its tasks."""

    memory_limit_bytes: int = 2 << 30  # of the process, everything included; 320 MiB or more
    threads: int | None = None  # 1 to 1024; None for as many as this process has processors, and for 1 on a cluster
    work: Path | None = None  # folder for the work, where the output is a URL; the workers of a cluster share it
    engine: str = "threads"  # who runs the tasks: threads of this process, or a ``ray`` or ``spark`` cluster

    def __post_init__(self) -> None:
        one_of("engine (--engine)", self.engine, ENGINES)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise UserError(f"threads (--threads) is {self.threads}: it must be in 1 to {MOST_THREADS}")
        if self.memory_limit_bytes < LEAST_MEMORY_BYTES:
            raise UserError(
                f"memory_limit_bytes (--memory-limit) is {self.memory_limit_bytes}: at least {LEAST_MEMORY_BYTES} "
                f"({format_bytes(LEAST_MEMORY_BYTES)}) are needed, Python's own memory included"
            )

    @property
    def is_cluster(self) -> bool:
        return self.engine != "threads"

    @property
    def working_bytes(self) -> int:
        return self.memory_limit_bytes - INTERPRETER_BYTES

    @property
    def num_threads(self) -> int:
        """Number of threads that parse: as many as was asked for, else one for each core; fewer where memory is."""
        most = self.working_bytes // (_MEMORY_PER_BYTE_OF_LISTS * _LEAST_BLOCK_BYTES) - _OTHER_BLOCKS
        threads = self.threads or (1 if self.is_cluster else usable_cores())
        return min(threads, most, MOST_THREADS)

    def block_bytes(self, has_lists: bool) -> int:
        """Bytes of text in a block of rows with or without lists."""
        memory_per_byte = _MEMORY_PER_BYTE_OF_LISTS if has_lists else _MEMORY_PER_BLOCK_BYTE
        most = self.working_bytes // (memory_per_byte * (self.num_threads + _OTHER_BLOCKS))
        return min(16 << 20, max(_LEAST_BLOCK_BYTES, most))

    @property
    def num_counters(self) -> int:
        """Databases at a time in which columns are counted; each takes up to 80 MB more than its limit."""
        return max(1, min(self.num_threads, self.working_bytes // (160 << 20)))

    @property
    def counting_bytes(self) -> int:
        return self.working_bytes // (2 * self.num_counters)

    @property
    def num_writers(self) -> int:
        """Files written at a time; two row groups and Parquet's buffers take up to 128 MiB for each."""
        return max(1, min(self.num_threads, self.working_bytes // (128 << 20)))


@dataclass(frozen=True)
class PrepareOptions:
    """The options that a dataset's bytes depend on, in addition to the rows and the layout of their columns."""

    split: str = "0.8,0.1,0.1"  # how rows are divided (:class:`~distembed.data.prepare.options.SplitRule`)
    max_rejected: float = 0.01  # largest share of malformed rows that is no error; ``rejected.tsv`` lists them
    # a dataset, by folder or URL, or a run, whose ids and learnt transforms are applied; None learns new ones
    vocabulary: str | os.PathLike[str] | None = None
    grow: bool = False  # whether new values get ids after the last one of ``vocabulary``
    recorded: Mapping[str, Any] = field(default_factory=dict)  # in the manifest, before learnt parameters

    @property
    def rule(self) -> SplitRule:
        return SplitRule.parse(self.split)

    def __post_init__(self) -> None:
        if not 0 <= self.max_rejected <= 1:
            raise UserError(
                f"max_rejected (--max-rejected) is {self.max_rejected}: it is a share of the rows, between 0 and 1"
            )
        if self.grow and self.vocabulary is None:
            raise UserError("grow (--grow) is given without vocabulary (--vocabulary), the dataset or run to grow")
        if not self.rule.trains and (self.vocabulary is None or self.grow):
            remedy = "leave out --grow" if self.grow else "name a dataset or a run with vocabulary (--vocabulary)"
            raise UserError(
                f"split (--split) is {self.split!r}, so that no row trains, and ids are learnt on rows that train: "
                f"{remedy}, or give a split such as '0.8,0.1,0.1'"
            )
