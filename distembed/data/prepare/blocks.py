"""What a preparation reads, whatever the kind of rows: parts of inputs, and blocks of parsed rows.

An input is cut into *parts*, each of which is read by itself, in any process and on any machine: a range of the bytes
of a plain text file, some row groups of a Parquet file, or the whole of what can only be read from its beginning. A
part is read as *blocks* of a bounded size. A block has the columns of its well-formed rows, and the malformed rows::

    numbers    label int8, weight float32, time int64, dense float32 ...      [num_rows] each; missing values are NaN
    ids        codes 1 0 2 1, keys [-, k1, k2]                                row i has keys[codes[i]]; 0: none
               for lists: codes of all rows end to end, and the number of values of each row

What a column is for, and how its values become numbers or ids, is said once, by the :class:`BlockLayout`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

NumberRole = Literal["label", "weight", "time", "dense", "bins"]
NumberTransform = Literal["none", "standardize", "quantile_bins"]
KeyRole = Literal["feature", "split"]
KeyKind = Literal["hexadecimal", "integer", "string"]


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers of every block.

    Attributes:
        name: Name of the dataset's column.
        role: What the numbers are for; ``bins`` makes a categorical feature of them.
        dtype: Type of the numbers in blocks: int8 for labels 0 and 1, int64 for times, float32 for all others.
        transform: What is done once all rows are known; what a number alone decides is done by the parser already.
        num_bins: Number of bins of ``quantile_bins``.
        keeps_missing: Whether missing values of a dense column stay missing; else they become 0 (after standardize:
            the mean).
    """

    name: str
    role: NumberRole
    dtype: np.dtype[Any]
    transform: NumberTransform = "none"
    num_bins: int = 0
    keeps_missing: bool = False


@dataclass(frozen=True)
class KeyColumn:
    """A column of values that get ids.

    Attributes:
        name: Name of the dataset's column.
        role: ``feature``, or ``split`` for values that say which split a row belongs to and are not written.
        kind: What a key is. ``hexadecimal``: the number, uint32. ``integer``: the number, int64. ``string``: a hash of
            64 bits of the text (:func:`distembed.data.table.text_keys.text_keys`), uint64, beside which blocks have the
            texts.
        is_list: Whether a row has any number of values.
        min_count: Values seen fewer times in the training rows share the out-of-vocabulary id.
        hash_size: Size of the table that values are hashed into; None builds a vocabulary.
        hash_seed: Seed of the hash.
        max_length: Most values of a list, as the parser has cut them; None where there is no bound.
        vocabulary: Name of the feature whose vocabulary or hash, and table, this one shares; None for its own. That
            feature is of the same kind, shares none itself, and has the same ``min_count`` and hash settings.
    """

    name: str
    role: KeyRole
    kind: KeyKind
    is_list: bool = False
    min_count: int = 1
    hash_size: int | None = None
    hash_seed: int = 0
    max_length: int | None = None
    vocabulary: str | None = None

    @property
    def key_dtype(self) -> np.dtype[Any]:
        """Type of the keys."""
        return np.dtype({"hexadecimal": np.uint32, "integer": np.int64, "string": np.uint64}[self.kind])


@dataclass(frozen=True)
class BlockLayout:
    """The columns of every block, in order.

    Attributes:
        numbers: Columns of numbers: the label, the weight and the time where there are such, dense ones, then ``bins``.
        ids: Columns of values that get ids.
        features: Names of the dataset's categorical features in order, each a column of ``ids`` or ``bins``.
    """

    numbers: tuple[NumberColumn, ...]
    ids: tuple[KeyColumn, ...]
    features: tuple[str, ...]


@dataclass(frozen=True)
class RejectedRow:
    """A malformed row.

    Attributes:
        line: Number of its line in the block, from 0; of rows that are not lines, of its row.
        reason: One of the reasons of the source.
        text: Bytes of the line.
        column: Name of the column whose value is malformed; empty where that is not known.
    """

    line: int
    reason: str
    text: bytes
    column: str = ""


@dataclass(frozen=True)
class IdColumn:
    """Values of one column: row i has ``keys[codes[i]]``; code 0 is a missing value, and ``keys[0]`` is not used.

    Attributes:
        codes: Code of each value, of the smallest unsigned type that holds them.
        keys: Distinct keys of the block.
        texts: Text of each key, for keys that are hashes, as Arrow's string; ``texts[0]`` is empty.
        lengths: Number of values of each row, int32, for lists; None where each row has one.
    """

    codes: NDArray[Any]
    keys: NDArray[Any]
    texts: pa.Array | None = None
    lengths: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class ParsedBlock:
    """The well-formed rows of a block by column, and the others.

    Attributes:
        num_lines: Number of lines of the block, malformed ones included.
        num_rows: Number of well-formed rows.
        numbers: Columns of numbers, in the order of the layout.
        ids: Columns of values that get ids, in the order of the layout.
        rejected: The malformed rows, in order.
    """

    num_lines: int
    num_rows: int
    numbers: tuple[NDArray[Any], ...]
    ids: tuple[IdColumn, ...]
    rejected: tuple[RejectedRow, ...] = ()


def code_dtype(num_keys: int) -> np.dtype[Any]:
    """Returns the smallest unsigned type for codes below ``num_keys``."""
    return np.min_scalar_type(max(num_keys - 1, 0))


@dataclass(frozen=True)
class RawInput:
    """A file, a pipe or a URL that has rows.

    Attributes:
        name: Its name in the dataset (:func:`distembed.data.prepare.table.inputs.input_names`).
        place: Where it is, for errors and notes.
        num_bytes: Its size, compressed where it is; None where that is not known before it is read.
        is_compressed: Whether it takes fewer bytes than its rows do as text.
        version: A text that changes when what is at a URL changes; empty where it is not known, and for files.
    """

    name: str
    place: str
    num_bytes: int | None
    is_compressed: bool = False
    version: str = ""


@dataclass(frozen=True)
class Part:
    """A piece of an input that is read by itself.

    Attributes:
        source: Number of the input among all, from 0.
        start: First byte, or first row group; 0 for a whole input.
        stop: Byte or row group after the last one; None for the end of the input.
    """

    source: int
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole input."""
        return self.start == 0 and self.stop is None


class OpenPart(Protocol):
    """A part that is being read.

    Attributes:
        bytes_read: Number of bytes of the input read so far, compressed where it is.
        header_lines: Number of lines before the first row; of a part that does not begin its input, 0. Known once the
            first block is there.
        sha256: SHA-256 of the whole input, once all blocks of a part that is whole were read; None for other parts.
    """

    @property
    def bytes_read(self) -> int: ...

    @property
    def header_lines(self) -> int: ...

    @property
    def sha256(self) -> str | None: ...

    def raw_blocks(self) -> Generator[Any, None, None]:
        """Yields what :meth:`RowSource.parse` parses, about a block's size at a time, in order.

        Raises:
            UserError: The input cannot be read, or is damaged.
        """

    def notes(self) -> list[str]:
        """Returns what a user should know of the part besides its rows, a sentence each, once all blocks were read."""


class RowSource(Protocol):
    """One kind of rows, and the inputs that hold them; it can be pickled.

    Attributes:
        inputs: The inputs in order.
        layout: The columns of every block.
        reasons: Why a row can be malformed, in the order of the manifest.
        wanted: What a well-formed row is, in a sentence, for errors.
        hints: What may be at fault, in a sentence, where most malformed rows are so by a reason.
    """

    inputs: list[RawInput]
    layout: BlockLayout
    reasons: tuple[str, ...]
    wanted: str
    hints: Mapping[str, str]

    def parts(self, part_bytes: int) -> list[Part]:
        """Returns the parts of all inputs, in order; each plain input is cut into parts of about so many bytes.

        They depend on the inputs and on ``part_bytes`` alone.
        """

    def checksum(self, source: int) -> str:
        """Returns the SHA-256 of an input that is cut into several parts, given its number.

        Raises:
            UserError: The input cannot be read.
        """

    def open(self, part: Part, block_bytes: int) -> OpenPart:
        """Begins to read a part, in blocks of about so many bytes of text."""

    def parse(self, raw: Any) -> ParsedBlock:
        """Parses a raw block, in any thread; what is wrong with a row makes it a rejected row, never an error."""
