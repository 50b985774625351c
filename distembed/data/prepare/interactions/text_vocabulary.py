"""Ids of texts: the most frequent first over all rows, equal ones by the text.

As in every dataset with a vocabulary, id 0 is a missing value and id 1 an unknown one, which no row has: all users and
items are known when a dataset is prepared, also those of the test, since what is recommended is a known catalogue.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.data.dataset.manifest import Vocabulary
from distembed.data.prepare.interactions.interactions import KeyColumn
from distembed.data.prepare.vocabulary import FIRST_ID, MISSING_ID, VOCABULARY_GROUP_ROWS

_SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.string()), ("count", pa.int64())])


def write_text_vocabulary(folder: Path, name: str, column: KeyColumn) -> tuple[NDArray[np.int32], Vocabulary]:
    """Gives ids to the values of a column that occur, and writes them down.

    Args:
        folder: Dataset folder, which has a folder ``vocabulary``.
        name: Name of the column.
        column: All rows.

    Returns:
        The id of each row, and what the manifest says of the vocabulary.
    """
    counts = column.counts()
    seen = np.flatnonzero(counts)
    table = pa.table({"place": seen, "key": column.keys.take(pa.array(seen)), "count": counts[seen]})
    table = table.take(pc.sort_indices(table, [("count", "descending"), ("key", "ascending")]))
    ids = pa.array(np.arange(FIRST_ID, FIRST_ID + len(table)))
    stored = pa.table([ids, table["key"], table["count"]], schema=_SCHEMA)
    file = f"vocabulary/{name}.parquet"
    pq.write_table(stored, folder / file, compression="zstd", row_group_size=VOCABULARY_GROUP_ROWS)
    # the last place, which -1 stands for, is that of a missing value
    key_ids = np.full(len(counts) + 1, MISSING_ID, np.int32)
    key_ids[table["place"].to_numpy()] = ids.to_numpy()
    num_missing = int(np.count_nonzero(column.codes < 0))
    return key_ids[column.codes], Vocabulary(file, len(table), 0, 0, num_missing)


def num_embeddings(vocabulary: Vocabulary) -> int:
    """Returns the size of a vocabulary's table."""
    return FIRST_ID + vocabulary.num_ids
