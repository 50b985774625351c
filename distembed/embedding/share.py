"""The vectors of all ids of a table, each composed on one rank, for a softmax over a catalogue and for rankings.

Every id of a table is in the share of exactly one rank. A rank goes through its share chunk by chunk, so that memory
never holds all composed vectors of a table or the scores of all ids::

    ids       0 ................................ num_embeddings
    rank 0    | chunk 0 | chunk 1 | chunk 2 |
    rank 1                                  | chunk 0 | chunk 1 | chunk 2 |      in the order in which rows lie there

A chunk that is read with gradients has the rows of its partitions as leaves of a graph of its own. The rows' gradients
are added to one gradient a weight, so that no chunk makes a gradient of the table's size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.partitions import Naive


@dataclass(frozen=True)
class VectorChunk:
    """Some ids of a rank's share."""

    ids: Int64[Tensor, " ids"]
    vectors: Float[Tensor, "ids dim"]


@dataclass(frozen=True)
class ShareWeight:
    """A partition's weight, or the rows and columns of it on this rank, from which vectors of a share are composed."""

    partition: int  # number of the partition
    weight: Float[Tensor, "rows dim_j"]  # the rows that lie on this rank
    first_row: int = 0  # number of the first of these rows in the partition
    is_function: bool = False  # whether a row holds a function in place of a vector
    is_replicated: bool = False  # whether all ranks have the weight, so that its gradient is averaged over them


@dataclass(frozen=True)
class ShareColumns:
    """Columns ``[start, stop)`` of a table's vectors, and the weights from which this rank composes them."""

    start: int  # the first column
    stop: int  # the last column + 1
    # the weights of the partitions that contribute to these columns, ordered by partition
    weights: Sequence[ShareWeight]


class ShareIds:
    """The ids of a rank's share: ``[first, stop)``, or a list in ascending order."""

    def __init__(self, first: int, stop: int, listed: Int64[Tensor, " ids"] | None = None) -> None:
        self._first, self._stop, self._listed = first, max(first, stop), listed

    def __len__(self) -> int:
        return self._stop - self._first if self._listed is None else len(self._listed)

    def between(self, start: int, stop: int, device: torch.device) -> "ChunkIds":
        """Returns the share's ids number ``start`` to ``stop - 1``, or fewer at the share's end."""
        if self._listed is not None:
            return ChunkIds(self._listed[start:stop].long(), None)
        start_id, stop_id = min(self._first + start, self._stop), min(self._first + stop, self._stop)
        return ChunkIds(torch.arange(start_id, stop_id, device=device), start_id)


@dataclass(frozen=True)
class ChunkIds:
    """The ids of a chunk."""

    ids: Int64[Tensor, " ids"]  # in ascending order
    first: int | None  # the first id, where ids follow each other without gaps

    def indices_of(self, ids: Int64[Tensor, " others"]) -> tuple[Int64[Tensor, " others"], Bool[Tensor, " others"]]:
        """Returns the index of each given id in this chunk (arbitrary if absent), and whether the chunk has it."""
        last_index = len(self.ids) - 1
        if self.first is not None:
            indices = ids - self.first
            return indices.clamp(0, last_index), (indices >= 0) & (indices <= last_index)
        indices = torch.searchsorted(self.ids, ids).clamp_(max=last_index)
        return indices, self.ids[indices] == ids


@dataclass(frozen=True)
class ReadChunk:
    """A chunk of a share; if it was read with gradients, also the autograd graphs of the columns composed here."""

    chunk_ids: ChunkIds  # the ids of the chunk
    # the composed vector of each id, detached; pass their gradients to :meth:`TableShare.add_gradients`
    vectors: Float[Tensor, "ids dim"]
    # the columns that this rank composed, by range; empty without gradients
    composed: "Sequence[_ComposedRange]" = ()
    ids_by_rank: Sequence[int] = ()  # number of ids in each rank's chunk, where ranks compose columns for one another


@dataclass(frozen=True)
class _ComposedRange:
    """A range of columns of some ids' vectors, with the leaves of its autograd graph."""

    vectors: Float[Tensor, "ids columns"]
    leaves: list[Tensor]  # for each weight: its rows for the ids, in float32; functions' weights as a whole
    rows_read: "list[Int64[Tensor, ' ids'] | slice]"  # for each weight: the rows that the leaf was taken from


class TableShare:
    """The ids of a table whose vectors this rank gets, each id on exactly one rank, and the weights to compose them.

    Attributes:
        table: The table.
        group: The process group over which the ids are shared; None for this process alone.
        columns: The ranges of columns that this rank composes.

    Args:
        table: The table.
        ids: The ids of this rank.
        most_ids: Number of ids in the largest share of any rank, so that all ranks read equally many chunks.
        columns: The ranges of columns that this rank composes; none if it has no weights.
        device: Device of the weights.
        group: The process group over which the ids are shared; None for this process alone.
    """

    def __init__(
        self,
        table: CompositionalEmbeddingConfig,
        ids: ShareIds,
        most_ids: int,
        columns: Sequence[ShareColumns],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require_one_vector(table)
        self.table, self.group, self.columns = table, group, columns
        self._ids, self._most_ids, self._device = ids, most_ids, device

    @property
    def world_size(self) -> int:
        """The number of ranks that share the table."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def weights(self) -> list[ShareWeight]:
        """The weights that this rank composes from, range after range."""
        return [weight for columns in self.columns for weight in columns.weights]

    def num_chunks(self, most_ids: int) -> int:
        """Returns the number of chunks of up to ``most_ids`` ids, the same on all ranks."""
        if most_ids < 1:
            raise UserError(f"most_ids of a chunk is {most_ids}; it must be 1 or more.")
        return -(-self._most_ids // most_ids)

    def chunks(self, most_ids: int) -> Iterator[VectorChunk]:
        """Yields this rank's ids and detached vectors; all ranks call it and get equally many chunks."""
        with torch.no_grad():
            for number in range(self.num_chunks(most_ids)):
                chunk = self.read(number, most_ids)
                yield VectorChunk(chunk.chunk_ids.ids, chunk.vectors)

    def read(self, number: int, most_ids: int, with_gradients: bool = False) -> ReadChunk:
        """Returns chunk ``number`` of up to ``most_ids`` ids, perhaps empty at the end; all ranks call it."""
        chunk_ids = self._ids.between(number * most_ids, (number + 1) * most_ids, self._device)
        parts = self._compose(chunk_ids, with_gradients)
        # where rows are few, a rank may have none, and no weights
        vectors = parts[0].vectors.detach() if parts else torch.empty(0, self.table.embedding_dim, device=self._device)
        return ReadChunk(chunk_ids, vectors, parts if with_gradients else ())

    def add_gradients(
        self, chunk: ReadChunk, gradients: Float[Tensor, "ids dim"], totals: Sequence[Float[Tensor, "rows dim_j"]]
    ) -> None:
        """Propagates gradients of a chunk's vectors to the weights' rows, and adds them to ``totals``.

        ``totals`` has a gradient of each of :attr:`weights`, in order. The chunk was read with gradients. All ranks
        call it.
        """
        self._add(chunk.composed, [gradients] if chunk.composed else [], totals)

    def _compose(self, chunk_ids: ChunkIds, with_gradients: bool) -> "list[_ComposedRange]":
        """Composes this rank's columns of the ids' vectors, each range in an autograd graph of its own."""
        # in a full table, consecutive ids have consecutive rows: a slice of the weight in place of an index
        ids, first = chunk_ids.ids, chunk_ids.first
        is_slice = first is not None and isinstance(self.table.scheme, Naive)
        rows = None if is_slice else self.table.scheme.rows(ids)
        composed = []
        for columns in self.columns:
            weights = [share.weight for share in columns.weights]
            places = [_weight_rows(share, rows, first or 0, len(ids)) for share in columns.weights]
            leaves = [weight.detach()[place].float() for weight, place in zip(weights, places, strict=True)]
            if with_gradients:
                leaves = [leaf.requires_grad_() for leaf in leaves]
            with torch.set_grad_enabled(with_gradients):
                composed.append(_ComposedRange(self._vectors(leaves, columns, rows), leaves, places))
        return composed

    def _vectors(self, leaves: list[Tensor], columns: ShareColumns, rows: Int64[Tensor, "k ids"] | None) -> Tensor:
        if not any(weight.is_function for weight in columns.weights):
            return self.table.combine.compose(leaves)
        assert rows is not None
        in_leaves = rows.clone()  # leaf 0 has a row for each id, in order; leaves of functions are whole
        in_leaves[0] = torch.arange(rows.shape[1], device=rows.device)
        return self.table.combine.embed(leaves, in_leaves)

    @staticmethod
    def _add(composed_parts: Sequence[_ComposedRange], gradients: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
        """Adds the gradients of each part's leaves, from the gradients of its vectors, to the totals."""
        remaining = iter(totals)
        for composed, gradient in zip(composed_parts, gradients, strict=True):
            leaf_gradients = torch.autograd.grad(composed.vectors, composed.leaves, gradient)
            for leaf_gradient, rows, total in zip(leaf_gradients, composed.rows_read, remaining, strict=False):
                if isinstance(rows, slice):
                    total[rows].add_(leaf_gradient)
                else:
                    total.index_add_(0, rows, leaf_gradient)


def _weight_rows(weight: ShareWeight, rows: Tensor | None, first: int, num_ids: int) -> "Tensor | slice":
    """Returns the rows of a weight that ids need, all of a function's; without ``rows``, they go from ``first`` on."""
    if weight.is_function:
        return slice(None)
    if rows is None:
        return slice(first - weight.first_row, first - weight.first_row + num_ids)
    return rows[weight.partition] - weight.first_row


def require_one_vector(table: CompositionalEmbeddingConfig) -> None:
    """Raises a UserError for a table with several vectors for each id: scores need one."""
    if table.num_vectors > 1:
        raise UserError(
            f"table {table.name!r} has composition {table.combine.name!r}, with {table.num_vectors} vectors an id, and "
            "users and items are scored by one each; use product, sum, concat or a path."
        )
