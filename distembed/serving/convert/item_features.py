r"""Features of the ids of a table, as vectors: the codes of similar items are then equal before any is trained.

A file has a row for each raw value of the table's ids, in the column named like the table, or in ``key``::

    vectors     item   x0    x1   ...       numbers in other columns, or a list of numbers in one
    texts       item   title   brand        texts in other columns, joined by a space
    NPZ         key [n], vectors [n, dim]

Texts become vectors by latent semantic analysis (Deerwester et al., JASIS 1990): a matrix of items and words, of
``count * log(n / number of items with the word)``, whose rows have length 1, and its leading singular vectors.

Codes of these vectors by ``residual`` are the semantic ids of Rajput et al., "Recommender Systems with Generative
Retrieval" (NeurIPS 2023), with k-means in the place of an autoencoder. Trade-off: items without interactions have
codes near similar items', but items that features do not tell apart share all their rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.table.values import value_texts
from distembed.serving.convert.table_codes import CodePoints, CodeShape, quantise

_TEXT_DIM = 64
_WORD = r"[\p{L}\p{N}]+"


@dataclass(frozen=True)
class ItemFeatures:
    """The vectors of some ids of a table.

    Attributes:
        num_ids: The number of ids of the table.
        ids: The ids that have a vector, ascending.
        vectors: Their vectors.
    """

    num_ids: int
    ids: Int64[Tensor, " known"]
    vectors: Float[Tensor, "known dim"]

    @classmethod
    def read(cls, path: Path, table: str, values: pa.Array, seed: int = 0) -> ItemFeatures:
        """Reads the features of a table's ids; rows of other values are left out.

        Args:
            path: A file ``.parquet``, ``.csv`` or ``.npz``.
            table: The table's name.
            values: The raw value of each id as text, null for ids of no value.
            seed: The seed of the singular vectors of texts.

        Raises:
            UserError: The file cannot be read, has no keys or no features, has a key twice, or none of the values.
        """
        keys, features = _read_file(path, table)
        counts = keys.value_counts()
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1)).to_pylist()
        if repeated:
            raise UserError(f"--features {path} has the key {repeated[0]!r} in several rows; give each item one row.")
        rows = pc.index_in(values, value_set=keys, skip_nulls=True)
        if features.null_count:
            rows = pc.if_else(features.is_valid().take(rows), rows, pa.scalar(None, rows.type))
        ids = torch.from_numpy(np.flatnonzero(rows.is_valid().to_numpy(zero_copy_only=False)))
        if not len(ids):
            shown = ", ".join(map(repr, values.drop_null().slice(0, 3).to_pylist()))
            raise UserError(
                f"--features {path} has none of the values of {table!r}, such as {shown}; compare its keys."
            )
        known = features.take(rows.drop_null())
        vectors = _text_vectors(known, seed) if pa.types.is_string(known.type) else _numbers(known, path)
        return cls(len(values), ids, vectors)

    def codes(
        self, shape: CodeShape, weights: Float[Tensor, " ids"], seed: int, balance: float | None, device: torch.device
    ) -> list[Int64[Tensor, " ids"]]:
        """Returns the code of each id in each part; code 0 is of all ids without a vector, and of these alone.

        Args:
            shape: The scheme; code 0 is one of its codes.
            weights: A positive weight of each id.
            seed: The seed of the first centroids.
            balance: The most ids of a code, in multiples of the mean; None for no bound.
            device: The device that computes.
        """
        known = CodePoints([self.vectors.to(device)], weights[self.ids].to(device), torch.arange(len(self.ids)), 4)
        shape = dataclasses.replace(shape, num_centroids=max(1, shape.num_centroids - 1))
        codes = []
        for own in quantise(known, shape, seed, balance).codes:
            codes.append(torch.zeros(self.num_ids, dtype=torch.int64))
            codes[-1][self.ids] = own + 1
        return codes


def _read_file(path: Path, table: str) -> tuple[pa.Array, pa.Array]:
    """Returns the keys as canonical texts, and the features of each: a text, or a list of numbers; null for none."""
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                keys, vectors = pa.array(arrays["key"]), np.asarray(arrays["vectors"], np.float32)
            if vectors.ndim != 2 or len(vectors) != len(keys):
                raise ValueError(f"it has {len(keys)} keys, and vectors of shape {list(vectors.shape)}")
            flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
            return value_texts(keys), flat
        if path.suffix == ".csv":
            as_texts = pyarrow.csv.ConvertOptions(column_types={table: pa.string(), "key": pa.string()})
            read = pyarrow.csv.read_csv(path, convert_options=as_texts)
        elif path.suffix == ".parquet":
            read = pq.read_table(path)
        else:
            raise UserError(f"--features {path} ends in {path.suffix!r}; known: .parquet, .csv, .npz.")
    except (OSError, KeyError, ValueError, IndexError, pa.ArrowException) as error:
        raise UserError(
            f"--features {path} cannot be read: {error}; an .npz has the arrays key and vectors."
        ) from error
    key = next((name for name in (table, "key") if name in read.column_names), None)
    if key is None or len(read.column_names) == 1:
        raise UserError(
            f"--features {path} has the columns {', '.join(read.column_names)}; give a column {table!r} or 'key' of "
            "raw values, and columns of numbers or texts."
        )
    columns = [column.combine_chunks() for column in read.drop_columns(key).columns]
    return value_texts(read[key].combine_chunks()), _joined(columns, path, len(read))


def _joined(columns: Sequence[pa.Array], path: Path, num_rows: int) -> pa.Array:
    """Returns several columns as one of texts, or of lists of float32 numbers, null where a number is missing."""
    if all(pa.types.is_string(own.type) or pa.types.is_large_string(own.type) for own in columns):
        joined = pc.binary_join_element_wise(*[own.cast(pa.string()) for own in columns], " ", null_handling="skip")
        return pc.if_else(pc.match_substring_regex(joined, _WORD), joined, pa.scalar(None, pa.string()))
    try:
        if len(columns) == 1 and not pa.types.is_primitive(columns[0].type):
            lengths = pc.list_value_length(columns[0]).unique().drop_null().to_pylist()
            if len(lengths) == 1:
                return columns[0].cast(pa.list_(pa.float32(), lengths[0]))
            raise UserError(f"--features {path} has lists of {sorted(lengths)} numbers; give all the same length.")
        numbers = np.stack([own.cast(pa.float32()).to_numpy(zero_copy_only=False) for own in columns], axis=1)
    except (pa.ArrowException, TypeError) as error:
        kinds = ", ".join(str(own.type) for own in columns)
        raise UserError(
            f"--features {path} has columns of {kinds}; give numbers, a list of numbers, or texts."
        ) from error
    missing = pa.array(np.isnan(numbers).any(axis=1))
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), len(columns), mask=missing)


def _numbers(lists: pa.Array, path: Path) -> Float[Tensor, "rows dim"]:
    vectors = torch.from_numpy(lists.flatten().fill_null(np.nan).to_numpy().copy()).view(len(lists), -1)
    if not bool(vectors.isfinite().all()):
        raise UserError(f"--features {path} holds numbers that are not finite; leave out the rows of these items.")
    return vectors


def _text_vectors(texts: pa.Array, seed: int) -> Float[Tensor, "rows dim"]:
    """Returns the projections of texts on the leading singular vectors of their words; each text has a word."""
    words = pc.split_pattern_regex(pc.utf8_lower(texts), r"[^\p{L}\p{N}]+")
    is_word = pc.not_equal(words.flatten(), "")  # separators at an end of a text leave an empty one
    coded = words.flatten().filter(is_word).dictionary_encode()
    rows, columns = pc.list_parent_indices(words).filter(is_word).to_numpy(), coded.indices.to_numpy()
    size = (len(texts), len(coded.dictionary))
    places = torch.from_numpy(np.stack([rows, columns]))
    counts = torch.sparse_coo_tensor(places, torch.ones(len(rows)), size, check_invariants=True).coalesce()
    of_row, of_word = counts.indices()
    values = counts.values() * (len(texts) / of_word.bincount()[of_word]).log()
    lengths = torch.zeros(len(texts)).index_add_(0, of_row, values.square()).sqrt_()
    values = values / lengths.clamp(min=1e-12)[of_row]
    matrix = torch.sparse_coo_tensor(counts.indices(), values, size, check_invariants=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, singular, _ = torch.svd_lowrank(matrix, q=min(_TEXT_DIM, *size), niter=4)
    return left * singular
