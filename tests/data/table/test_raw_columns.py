"""The columns that a table has to have are named where they are missing."""

import re

import pyarrow as pa
import pytest

from distembed.base.errors import UserError
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import TableSchema


def test_missing_columns_say_which_of_them_the_schema_names() -> None:
    columns = TableColumns(TableSchema.from_json({"dense": {"x": {}}}, "the schema"))
    table = pa.schema([("y", pa.int64())])
    for source, wanted, said in (
        (table, (), "no column 'x', which the schema names. It has 'y'."),
        (table, ("key",), "which the schema names ('key' is to be kept). It has 'y'."),
        (pa.schema([("x", pa.int64())]), ("key",), "no column 'key', which is to be kept. It has 'x'."),
        (pa.schema([]), (), "It has no columns."),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            columns.require(source, wanted=wanted)
