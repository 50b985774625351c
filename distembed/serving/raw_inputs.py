"""Files, pipes and URLs of raw rows as a stream of decoded rows, every line of the input accounted for.

What comes out is in the order of the input: a piece has some lines, of which the well-formed ones are decoded and the
others are counted, and the key columns of all of them::

    line      0    1    2         3          malformed: line 2
    key       a    b    -         d          the key of what is no row is not known
    rows      0    1              2          the rows of the piece's block
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.records import RecordBlock
from distembed.data.prepare.ingest import RejectedRows
from distembed.data.prepare.table.source import TableSource
from distembed.data.prepare.table.text_rows import RawRows
from distembed.data.table.blocks import RejectedRow
from distembed.serving.row_decoder import RowDecoder, decode_rows

_BLOCK_BYTES = 4 << 20
_WHOLE = 1 << 62


@dataclass(frozen=True, eq=False)
class ScoredPiece:
    """Some lines of an input.

    Attributes:
        num_lines: Number of the lines.
        rows: The line of each well-formed row, in order.
        keys: The key columns of all lines, null for what is no row.
        block: The well-formed rows.
    """

    num_lines: int
    rows: NDArray[np.int64]
    keys: pa.Table
    block: RecordBlock


class RawInputs:
    """Reads inputs of raw rows once, on one process.

    Args:
        source: The inputs, whose raw blocks have the decoder's columns and the keys.
        decoder: What makes the dataset's columns of their rows.
        keys: Names of columns to keep as they are.
        max_rejected: Largest share of malformed rows that is no error.

    Attributes:
        keys: The names of the key columns, each once.
    """

    def __init__(
        self, source: TableSource, decoder: RowDecoder, keys: Sequence[str] = (), max_rejected: float = 0.01
    ) -> None:
        self._source, self._decoder = source, decoder
        self.keys, self._max_rejected = tuple(dict.fromkeys(keys)), max_rejected
        self._rejected: dict[str, int] = {}
        self._key_types: dict[str, pa.DataType] = {}

    @property
    def rejected(self) -> dict[str, int]:
        """Number of malformed rows by reason, once all were read."""
        return self._rejected

    def pieces(self) -> Iterator[ScoredPiece]:
        """Yields the lines of all inputs, in order.

        Raises:
            UserError: An input cannot be read, or too many rows are malformed.
        """
        source = self._source
        with tempfile.TemporaryDirectory() as folder:
            rejected = RejectedRows(
                Path(folder), source.inputs, source.reasons, self._max_rejected, source.wanted, source.hints
            )
            num_lines = 0
            for part in source.parts(_WHOLE):
                opened, lines_before = source.open(part, _BLOCK_BYTES), 0
                for raw in opened.raw_blocks():
                    piece, bad = self._piece(raw.rows(source.columns))
                    for row in bad:
                        line = opened.header_lines + lines_before + row.line + 1
                        rejected.add(part.source, line, row.reason, row.text)
                    lines_before += piece.num_lines
                    rejected.require_hope(num_lines + lines_before)
                    yield piece
                num_lines += lines_before
            rejected.close()
            self._rejected = dict(rejected.counts().by_reason)
            if num_lines:
                rejected.require_few(num_lines)

    def _piece(self, raw: RawRows) -> tuple[ScoredPiece, Sequence[RejectedRow]]:
        """Returns a block's lines, and the malformed ones."""
        decoded = decode_rows(self._decoder.decode, raw)
        places = np.full(raw.num_lines, -1, np.int64)
        places[raw.lines] = np.arange(len(raw.lines))
        index = pa.array(places, mask=places < 0)
        keys = pa.table({name: self._key(name, raw.table[name]).take(index) for name in self.keys})
        return ScoredPiece(raw.num_lines, np.flatnonzero(decoded.is_good), keys, decoded.block), decoded.rejected

    def _key(self, name: str, column: pa.ChunkedArray) -> Any:
        """Returns a key column in the type of its first values: those of JSON may differ from block to block.

        Raises:
            UserError: They are of another type.
        """
        wanted = self._key_types.setdefault(name, pa.string() if pa.types.is_null(column.type) else column.type)
        try:
            return column.cast(wanted)
        except pa.ArrowException as error:
            raise UserError(
                f"--key {name!r} has values of type {wanted}, and later ones of type {column.type} ({error}); write "
                "all of them as texts."
            ) from error
