"""Initial weights of a table, which are a function of the seed and the table's name alone.

The number of ranks, the placement of rows and columns, and the order of tables do not change a table's first weights,
so that runs on one and on many ranks start from the same model. Rows are drawn block by block, each block from a
generator of its own, so that a rank draws little more than the rows that it holds::

    weight     | block 0 | block 1 | block 2 | block 3 |
    this rank        |  rows 1.5 to 3.2  |               draws blocks 1 to 3
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float, Int64

from distembed.base.lazy import torch
from distembed.composition.base import Distribution

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS_PER_BLOCK = 2**22


@dataclass(frozen=True)
class SeededInit:
    """Fills a weight in place with random numbers that depend on seed and name; it can be TorchRec's ``init_fn``."""

    distribution: Distribution  # the distribution of the numbers
    seed: int  # the seed of the random numbers, with the name
    name: str  # the name of the partition's weight
    num_rows: int  # the number of rows of the whole weight
    dim: int  # the number of columns of the whole weight

    def __call__(self, weight: Tensor) -> Tensor:
        """Fills the whole weight and returns it."""
        return self.fill_part(weight, 0, 0)

    def fill_part(self, part: Float[Tensor, "rows columns"], first_row: int, first_column: int) -> Tensor:
        """Fills ``part`` with the values that the whole weight has from this row and column on, and returns it."""
        with torch.no_grad():
            self._fill(part, first_row, first_column)
        return part

    def take(self, rows: Int64[Tensor, " rows"], columns: slice, like: Tensor) -> Float[Tensor, "rows columns"]:
        """Returns the initial values of some rows and columns, of the device and dtype of ``like``."""
        taken = like.new_empty(len(rows), columns.stop - columns.start)
        block_rows = max(1, _NUMBERS_PER_BLOCK // self.dim)
        blocks = rows // block_rows
        for block in blocks.unique().tolist():
            start, stop = block * block_rows, min((block + 1) * block_rows, self.num_rows)
            drawn = self.fill_part(like.new_empty(stop - start, self.dim), start, 0)
            taken[blocks == block] = drawn[rows[blocks == block] - start][:, columns]
        return taken

    def _fill(self, weight_part: Float[Tensor, "rows columns"], first_row: int, first_column: int) -> None:
        """Draws every block that overlaps the rows; a block that is needed in part is drawn whole, then copied from."""
        end, columns = first_row + len(weight_part), slice(first_column, first_column + weight_part.shape[1])
        block_rows = max(1, _NUMBERS_PER_BLOCK // self.dim)
        # allocated once: freed and allocated again for every block, glibc's heap would grow by each
        scratch: Tensor | None = None
        for block in range(first_row // block_rows, -(-end // block_rows) if len(weight_part) else 0):
            start, stop = block * block_rows, min((block + 1) * block_rows, self.num_rows)
            within = weight_part[max(start, first_row) - first_row : min(stop, end) - first_row]
            generator = self._generator(block, weight_part.device)
            if within.shape == (stop - start, self.dim):  # the whole block: drawn in place
                self.distribution.fill(within, generator)
            else:
                if scratch is None:
                    scratch = weight_part.new_empty(min(block_rows, self.num_rows), self.dim)
                drawn = self.distribution.fill(scratch[: stop - start], generator)
                within.copy_(drawn[max(first_row - start, 0) :][: len(within), columns])

    def _generator(self, block: int, device: torch.device) -> torch.Generator:
        """Returns a generator whose seed is a hash of seed, weight name and block, on the weight's device."""
        suffix = f"/{block}" if block else ""
        return torch.Generator(device).manual_seed(name_key(f"{self.seed}/{self.name}{suffix}"))


def name_key(name: str) -> int:
    """Returns 63 bits that depend on a name alone: the seeds that torch's generators accept on every device."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
