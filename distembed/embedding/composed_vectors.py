"""Writes the composed vectors of a table to a Parquet file, for serving without partitions.

::

    id: int64      vector: fixed_size_list<float32>[embedding_dim]
    0              [0.013, -0.004, ...]
    1              [-0.021, 0.010, ...]

With feature generation there is a column for each partition's vector, ``vector__p<j>``, in the place of ``vector``.
Ids are streamed, so that only the table's own weights and a few chunks of composed vectors are in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.base.errors import UserError
from distembed.base.files import whole_file
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.ids import map_ids
from distembed.partitions.base import require_positive

_CHUNK_BYTES = 16 << 20


def materialise(
    table: CompositionalEmbeddingConfig,
    weights: Sequence[Tensor],
    output: Path | str,
    ids: Tensor | Iterable[int] | None = None,
    rows_per_chunk: int | None = None,
    feature: str | None = None,
) -> int:
    """Writes the composed vectors of ids, in their order; the file appears whole or not at all.

    Args:
        table: The table.
        weights: The weight of each partition, in their order.
        output: The file to write; one that exists is replaced.
        ids: Raw ids, to which the table's hash and policy apply as in training; all ids of the table unless given.
        rows_per_chunk: How many vectors are composed and written at once, as a row group; 16 MiB of them unless given.
        feature: The feature of a unified table that has the ids; None for ids of the table itself.

    Returns:
        The number of rows that were written.

    Raises:
        UserError: The weights have other shapes, an id lies outside of the table whose policy is ``error``, or no ids
            are given for a table that hashes them.
        RunError: The file cannot be written.
    """
    output = Path(output)
    _require_shapes(table, weights)
    if ids is None and table.pre_hash is not None:
        raise UserError(
            f"table {table.name!r} hashes its ids (pre_hash), so that any int64 is one and there is no list of all; "
            "give ids."
        )
    schema = _arrow_schema(table)
    width = table.num_vectors * table.embedding_dim
    if rows_per_chunk is None:
        rows_per_chunk = max(1, _CHUNK_BYTES // (4 * width))
    require_positive("rows_per_chunk", rows_per_chunk, "It is the number of vectors held at once.")
    num_rows = 0
    with whole_file(output) as temporary, _writer(temporary, schema) as writer:
        for chunk, vectors in composed_chunks(table, weights, ids, rows_per_chunk, feature):
            writer.write_table(_arrow_table(chunk, vectors, schema), row_group_size=rows_per_chunk)
            num_rows += len(chunk)
    return num_rows


@torch.no_grad()
def composed_chunks(
    table: CompositionalEmbeddingConfig,
    weights: Sequence[Tensor],
    ids: Tensor | Iterable[int] | None,
    rows_per_chunk: int,
    feature: str | None = None,
) -> Iterator[tuple[Int64[Tensor, " ids"], Float[Tensor, "ids width"]]]:
    """Yields chunks of ids with their composed vectors in float32 on the CPU; arguments as for :func:`materialise`.

    Ids are yielded raw, before the table's hash or policy; a UserError refuses ids as there.
    """
    position = 0
    for chunk in _chunks(table.ids_of(feature).num_ids, ids, rows_per_chunk):
        mapped = map_ids(table, chunk.to(weights[0].device), "ids", position, feature)
        yield chunk, table.combine.embed(weights, table.scheme.rows(mapped)).float().cpu()
        position += len(chunk)


def _require_shapes(table: CompositionalEmbeddingConfig, weights: Sequence[Tensor]) -> None:
    """Raises a :class:`UserError` unless the weights have the shapes of the table's partitions."""
    expected = [(part.num_rows, part.dim) for part in table.partition_tables()]
    shapes = [tuple(weight.shape) for weight in weights]
    if shapes != expected:
        raise UserError(
            f"table {table.name!r}: the weights have the shapes {shapes}, but its partitions {expected}; give the "
            "weights of this table, in the order of its partitions."
        )


def _arrow_schema(table: CompositionalEmbeddingConfig) -> pa.Schema:
    """Returns the columns of the file, with a description of the table as metadata."""
    kind = pa.list_(pa.float32(), table.embedding_dim)
    described = {
        "table": table.name,
        "num_embeddings": str(table.num_embeddings),
        "partition": table.scheme.description,
        "composition": table.combine.name,
        "embedding_dim": str(table.embedding_dim),
    }
    return pa.schema(
        [("id", pa.int64()), *[(name, kind) for name in table.vector_names("vector")]],
        metadata={f"distembed.{key}": value for key, value in described.items()},
    )


def _chunks(num_ids: int, ids: Tensor | Iterable[int] | None, rows_per_chunk: int) -> Iterator[Int64[Tensor, " ids"]]:
    """Yields the ids as int64 on the CPU, ``rows_per_chunk`` at a time; refuses ids that int64 cannot hold."""
    if ids is None:
        for start in range(0, num_ids, rows_per_chunk):
            yield torch.arange(start, min(start + rows_per_chunk, num_ids))
    elif isinstance(ids, Tensor):
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise UserError(f"ids is a tensor of {ids.dtype} with the shape {tuple(ids.shape)}; give one row of int64.")
        yield from (chunk.cpu().long() for chunk in ids.split(rows_per_chunk) if len(chunk))
    else:
        iterator = iter(ids)
        while batch := list(islice(iterator, rows_per_chunk)):
            values = np.array(batch)
            if values.dtype != np.int64:
                for value in batch:
                    _require_int64(value)
                values = np.array(batch, dtype=np.int64)
            yield torch.from_numpy(values)


def _require_int64(value: object) -> None:
    """Raises a :class:`UserError` unless a value is an integer that int64 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(2**63) <= int(value) < 2**63:
        raise UserError(f"ids holds {value!r}; give integers that int64 can hold.")


def _arrow_table(ids: Int64[Tensor, " ids"], vectors: Float[Tensor, "ids width"], schema: pa.Schema) -> pa.Table:
    """Returns ids and their vectors as columns of the file."""
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(vector.contiguous().view(-1).numpy()), field.type.list_size)
        for vector, field in zip(vectors.split(schema.field(1).type.list_size, dim=1), list(schema)[1:], strict=True)
    ]
    return pa.table([pa.array(ids.numpy()), *columns], schema=schema)


def _writer(path: str, schema: pa.Schema) -> pq.ParquetWriter:
    """Opens the file for writing."""
    # as the datasets: byte-stream-split with zstd is three quarters of the size of plain pages (measured)
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        use_byte_stream_split=["id", *[f"{name}.list.element" for name in schema.names[1:]]],
        write_statistics=["id"],
    )
