"""How often each key occurs, counted in bounded memory: sorted runs on disk are merged by ranges of keys.

Keys are unsigned numbers of 32 or 64 bits. Other numbers are counted as bits that are in the same order
(:func:`ordered_bits`), and texts by the keys of :mod:`distembed.data.table.text_keys`, beside which they are kept, so
that two texts with the same key are found.

Trade-off: keys and counts are written twice when they do not fit in memory, and not at all when they do, as those of
any of Criteo's features do with a few million rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distembed.data.table.text_keys import require_distinct_texts

_SIGN_64, _SIGN_32 = np.uint64(1 << 63), np.uint32(1 << 31)

_TEXT_BYTES_OF_A_KEY = 20
"""A key takes up to 80 bytes while runs are merged, and a text up to four times its own."""


@dataclass(frozen=True)
class Counts:
    """Distinct keys in ascending order, and how often each occurs; the arrays may be mapped files.

    Attributes:
        keys: Keys, uint32 or uint64.
        counts: Count of each, int64.
        texts: Text of each, for keys that are hashes of texts, as Arrow's large string.
    """

    keys: NDArray[Any]
    counts: NDArray[np.int64]
    texts: pa.Array | None = None

    @property
    def size(self) -> int:
        """What takes as much memory as so many keys without texts."""
        return len(self.keys) + (0 if self.texts is None else self.texts.nbytes // _TEXT_BYTES_OF_A_KEY)

    def rows(self, chosen: slice | NDArray[Any]) -> Counts:
        """Returns some of the keys."""
        return Counts(self.keys[chosen], self.counts[chosen], _chosen_texts(self.texts, chosen))


def _chosen_texts(texts: pa.Array | None, chosen: slice | NDArray[Any]) -> pa.Array | None:
    """Returns some of the texts, where there are texts."""
    if texts is None or isinstance(chosen, slice):
        return None if texts is None else texts[chosen]
    return texts.filter(pa.array(chosen)) if chosen.dtype == bool else texts.take(pa.array(chosen))


class KeyCounter:
    """Adds up counts of keys that come in any order.

    Args:
        folder: Existing folder for what does not fit in memory.
        max_keys: Most keys to hold in memory.
        dtype: Type of the keys, uint32 or uint64.
        column: Column that the keys are of, for the error that two texts have the same key; None for keys without
            texts.

    Attributes:
        num_dropped: Number of distinct keys that :meth:`finish` left out.
        rows_dropped: Sum of their counts.
    """

    def __init__(self, folder: Path, max_keys: int, dtype: Any = np.uint32, column: str | None = None) -> None:
        self._folder = folder
        self._limit = max_keys
        self._column = column
        self._empty = Counts(np.zeros(0, dtype), np.zeros(0, np.int64), None if column is None else _no_texts())
        self._waiting: list[Counts] = []
        self._size_waiting = 0
        self._runs: list[Counts] = []
        self._mapped: list[mmap.mmap] = []
        self.num_dropped = 0
        self.rows_dropped = 0

    def add(self, keys: NDArray[Any], counts: NDArray[np.int64], texts: pa.Array | None = None) -> None:
        """Adds to the count of each key; a key may come more than once.

        Raises:
            UserError: Two texts have the same key.
        """
        added = Counts(keys, counts, None if texts is None else texts.cast(pa.large_string()))
        self._waiting.append(added)
        self._size_waiting += added.size
        if self._size_waiting > self._limit:
            merged = self._merge(self._waiting)
            # Few distinct keys shrink when merged: only what stays large goes to disk.
            if merged.size > self._limit // 2:
                self._runs.append(self._write(merged, f"run{len(self._runs)}"))
                self._waiting, self._size_waiting = [], 0
            else:
                self._waiting, self._size_waiting = [merged], merged.size

    def finish(self, min_count: int) -> Counts:
        """Returns the keys that were counted at least ``min_count`` times, with their counts.

        Raises:
            UserError: Two texts have the same key.
        """
        parts = [*self._runs, self._merge(self._waiting)]
        if not self._runs:
            return self._drop_rare(parts[0], min_count)
        files = AppendedCounts(self._folder / "counted", self._empty)
        for low, high in _key_ranges(parts, keys_at_a_time(parts, self._limit)):
            files.append(self._drop_rare(self._merge([_between(part, low, high) for part in parts]), min_count))
            for mapped in self._mapped:  # what was merged need not stay in memory
                mapped.madvise(mmap.MADV_DONTNEED)
        self._runs, self._mapped, self._waiting = [], [], []
        return files.finish()

    def _drop_rare(self, counted: Counts, min_count: int) -> Counts:
        frequent = counted.counts >= min_count
        self.num_dropped += int(len(frequent) - frequent.sum())
        self.rows_dropped += int(counted.counts[~frequent].sum())
        return counted.rows(frequent)

    def _merge(self, parts: Sequence[Counts]) -> Counts:
        """Returns every distinct key of all parts once, with the sum of its counts.

        Raises:
            UserError: Two texts have the same key.
        """
        if not sum(len(part.keys) for part in parts):
            return self._empty
        keys, order = sort_keys(np.concatenate([part.keys for part in parts]))
        counts = np.concatenate([part.counts for part in parts])
        is_first = np.concatenate([np.ones(1, bool), keys[1:] != keys[:-1]])
        first = np.flatnonzero(is_first)
        texts = None
        if self._column is not None:
            sorted_texts = pa.concat_arrays([part.texts for part in parts]).take(pa.array(order))
            self._require_distinct(sorted_texts, ~is_first[1:])
            texts = sorted_texts.take(pa.array(first))
        return Counts(keys[first], np.add.reduceat(counts[order], first), texts)

    def _require_distinct(self, texts: pa.Array, is_same_key: NDArray[np.bool_]) -> None:
        """Makes sure that texts with the key of the text before them are that text."""
        differs = is_same_key & pc.not_equal(texts[1:], texts[:-1]).to_numpy(zero_copy_only=False)
        for place in np.flatnonzero(differs)[:1].tolist():
            require_distinct_texts(str(self._column), texts[place].as_py(), texts[place + 1].as_py())

    def _write(self, counted: Counts, name: str) -> Counts:
        files = AppendedCounts(self._folder / name, self._empty)
        files.append(counted)
        written = files.finish()
        self._mapped += files.mapped
        return written


def _no_texts() -> pa.Array:
    return pa.array([], pa.large_string())


def keys_at_a_time(parts: Sequence[Counts], max_keys: int) -> int:
    """Returns how many keys take no more memory, with their texts, than ``max_keys`` without; 1 or more."""
    size = sum(part.size for part in parts)
    return max(1, max_keys * sum(len(part.keys) for part in parts) // size) if size else max_keys


def chunks(length: int, size: int) -> Iterator[slice]:
    """Yields ``[0, length)`` in slices of this size, of which the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def ordered_bits(values: NDArray[Any]) -> NDArray[Any]:
    """Returns unsigned numbers in the order of the values, which are different for different values.

    Args:
        values: uint32 and uint64, which are returned as they are; int64; or float32 without NaN, whose two zeros are
            the same.
    """
    if values.dtype == np.int64:
        return values.view(np.uint64) ^ _SIGN_64
    if values.dtype == np.float32:
        bits = (values + np.float32(0)).view(np.uint32)
        return np.where(bits & _SIGN_32, ~bits, bits | _SIGN_32)
    return values


def from_ordered_bits(bits: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the values of a type that :func:`ordered_bits` made numbers of."""
    if dtype == np.int64:
        return (bits ^ _SIGN_64).view(np.int64)
    if dtype == np.float32:
        return np.where(bits & _SIGN_32, bits ^ _SIGN_32, ~bits).view(np.float32)
    return bits


def sort_keys(keys: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Returns unsigned keys in ascending order, and where each was; equal keys of 32 bits stay in order."""
    if keys.dtype != np.uint32:
        order = np.argsort(keys)
        return keys[order], order
    # key and place sorted as one number: faster than argsort
    packed = keys.astype(np.uint64) << np.uint64(32) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    return (packed >> np.uint64(32)).astype(np.uint32), (packed & np.uint64(2**32 - 1)).astype(np.int64)


def create_mapped(path: Path, dtype: type[Any], length: int) -> NDArray[Any]:
    """Returns a new array in a file, which the system may put out of memory."""
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "w+", shape=(length,)) if length else np.zeros(0, dtype)


class AppendedCounts:
    """Files of keys, counts and texts that grow and are mapped in the end.

    Args:
        path: What the files' names begin with.
        empty: Counts without keys, of the types that are appended.

    Attributes:
        mapped: The files, once they are mapped.
    """

    def __init__(self, path: Path, empty: Counts) -> None:
        self._path, self._empty = path, empty
        self._length = self._text_bytes = 0
        self.mapped: list[mmap.mmap] = []

    def append(self, counted: Counts) -> None:
        if not len(counted.keys):
            return
        if not self._length and counted.texts is not None:
            self._append("offsets", np.zeros(1, np.int64))
        self._append("keys", counted.keys)
        self._append("counts", counted.counts)
        self._length += len(counted.keys)
        if counted.texts is not None:
            offsets, texts = text_buffers(counted.texts)
            self._append("offsets", offsets[1:] + self._text_bytes)  # where each text ends
            self._append("texts", texts)
            self._text_bytes += len(texts)

    def finish(self) -> Counts:
        if not self._length:
            return self._empty
        keys, counts = self._map("keys", self._empty.keys.dtype), self._map("counts", np.dtype(np.int64))
        if self._empty.texts is None:
            return Counts(keys, counts)
        offsets, texts = self._map("offsets", np.dtype(np.int64)), self._map("texts", np.dtype(np.uint8))
        return Counts(keys, counts, texts_from_buffers(offsets, texts))

    def _append(self, suffix: str, values: NDArray[Any]) -> None:
        with open(self._path.with_suffix(f".{suffix}"), "ab") as file:
            file.write(np.ascontiguousarray(values).data)

    def _map(self, suffix: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        path = self._path.with_suffix(f".{suffix}")
        if not path.stat().st_size:  # as of empty texts
            return np.zeros(0, dtype)
        with path.open("rb") as file:
            self.mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return np.frombuffer(self.mapped[-1], dtype)


def text_buffers(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Returns where each text of a large string array begins, and where the last one ends, and the bytes of all."""
    if not len(texts):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = np.frombuffer(data or b"", np.uint8)[places[0] : places[-1]]
    return places - places[0], content


def texts_from_buffers(offsets: NDArray[np.int64], texts: NDArray[np.uint8]) -> pa.Array:
    """Returns the large string array of what :func:`text_buffers` returned, without a copy."""
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(texts))


def _between(part: Counts, low: int, high: int) -> Counts:
    """Returns the part's keys in ``[low, high]``, with their counts."""
    return part.rows(slice(_rank(part.keys, low), _rank(part.keys, high + 1)))


def _rank(keys: NDArray[Any], key: int) -> int:
    """Returns how many of the ascending keys are below ``key``."""
    return len(keys) if key > np.iinfo(keys.dtype).max else int(np.searchsorted(keys, keys.dtype.type(key)))


def _key_ranges(parts: Sequence[Counts], max_keys: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of keys, both ends included, that cover all; each has at most ``max_keys`` entries, or one key."""
    last = int(np.iinfo(parts[0].keys.dtype).max)
    low = 0
    while low <= last:
        before = sum(_rank(part.keys, low) for part in parts)
        smallest, largest = low, last
        while smallest < largest:
            middle = (smallest + largest + 1) // 2
            if sum(_rank(part.keys, middle + 1) for part in parts) - before <= max_keys:
                smallest = middle
            else:
                largest = middle - 1
        yield low, smallest
        low = smallest + 1
