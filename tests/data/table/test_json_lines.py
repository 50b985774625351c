"""A value of JSON lines has one verdict and one key, whatever types the lines before it have."""

from typing import Any

import pytest

from distembed.data.prepare.table.raw_rows import parsed_block
from distembed.data.prepare.table.text_rows import JsonBlock
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema
from tests.data.table import reference

TOKENS = (
    *("null", "true", "false", "0", "-0", "10", "1.0", "-0.0", "2.5", "1e15", "1e39", "1e400", "NaN", "Infinity"),
    *("9007199254740993", "9223372036854775808", "12345678901234567890", "-9223372036854775809", "9" * 400),
    *('""', '"10"', '"1f"', '"true"', '"1e15"', '"a|b"', '"\\ud800"', '"\\u00e9"', "{}", "[]", "[[1]]", '["a", 1]'),
    *("[1]", "[1.5]", "[12345678901234567890]", "[NaN]", '["a|b"]', "[true, null]"),
)
BEFORE = ("null", "1.5", "1", "true", '"a"', "[1.5]", '["a"]', "NaN")
COLUMNS: dict[str, dict[str, Any]] = {
    "dense": {"dense": {"v": {}}},
    "label": {"label": {"column": "v", "kind": "number"}, "categorical": {"c": {}}},
    "time": {"time": {"column": "v"}, "categorical": {"c": {}}},
    **{kind: {"categorical": {"v": {"kind": kind}}} for kind in ("string", "integer", "hexadecimal", "log_bins")},
    "texts": {"categorical": {"v": {"separator": "|"}}},
    "integers": {"categorical": {"v": {"kind": "integer", "is_list": True}}},
}


@pytest.mark.parametrize("values", COLUMNS.values(), ids=COLUMNS)
def test_a_value_does_not_depend_on_the_lines_before_it(values: dict[str, Any]) -> None:
    parser = TableParser(TableSchema.from_json(values, "the test"))

    def answer(tokens: list[str]) -> str:
        """Returns the reason for which the last of some lines is refused, or its row."""
        text = "".join(f'{{"c": "x", "v": {token}}}\n' for token in tokens).encode()
        block = parsed_block(JsonBlock(text, parser.columns).rows(parser.columns.names, parser.columns.numbers), parser)
        refused = {row.line: row.reason for row in block.rejected}
        row = refused.get(len(tokens) - 1) or str(reference.rows_of(parser, block)[-1])
        return row.replace(": -0.0", ": 0.0")  # equal numbers

    found = {token: answer([token]) for token in TOKENS}
    assert len(set(found.values())) > 3
    for before in BEFORE:
        for token in TOKENS:
            assert answer([*[before] * 21, token]) == found[token], (before, token)
    for token in TOKENS:
        assert answer([*TOKENS, token]) == found[token], token
