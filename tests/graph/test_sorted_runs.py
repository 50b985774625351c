"""Sorting records in bounded memory, against Python's sort, with limits so small that everything goes to disk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distembed.graph.prepare.sorted_runs import SortedRuns, record_bytes


@given(
    st.lists(st.tuples(st.sampled_from([-(2**63), -5, 0, 1, 2, 7, 2**63 - 1]), st.integers(0, 9)), max_size=60),
    st.integers(1, 30),
    st.booleans(),
)
def test_records_come_sorted_in_the_order_they_were_given(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, int]], limit: int, with_payload: bool
) -> None:
    dtypes = (np.int64, np.int32) if with_payload else (np.int64,)
    size = record_bytes(dtypes) * limit
    runs = SortedRuns(tmp_path_factory.mktemp("runs"), dtypes, size)
    for start in range(0, len(records), 7):
        columns = zip(*records[start : start + 7], strict=True)
        runs.add(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=False)))
    parts = list(runs.merged())
    keys = [part[0].tolist() for part in parts]
    assert sum(keys, []) == sorted(key for key, _ in records)
    assert all(before[-1] < after[0] for before, after in zip(keys[:-1], keys[1:], strict=True))
    assert all(len(part) <= limit or len(set(part)) == 1 for part in keys)
    if with_payload:
        given_order = [payload for _, payload in sorted(records, key=lambda record: record[0])]
        assert sum((part[1].tolist() for part in parts), []) == given_order
