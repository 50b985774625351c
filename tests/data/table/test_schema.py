"""Schemas of tables: every mistake at once, with its place and what is near it."""

import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from distembed.base.errors import UserError
from distembed.base.validation import format_yaml
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.data.table.raw_columns import TableColumns
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import load_schema, read_schema, schema_of_manifest
from tests.data import reference

FEATURES: dict[str, Any] = {"categorical": {"site": {}}}


@pytest.mark.parametrize(
    "values, words",
    [
        ({}, ["dense, categorical", "at least one"]),
        ({"categorical": {"site": {"kind": "text"}}}, ["categorical.site.kind", "'string'", "got 'text'"]),
        ({"categorical": {"site": {"min_counts": 3}}}, ["did you mean categorical.site.min_count?"]),
        ({"labeled": {"column": "click"}, **FEATURES}, ["labeled: unknown key", "did you mean label?"]),
        ({"labels": {"column": "click"}, **FEATURES}, ["labels.column", "object"]),
        ({"labels": {"a": {}, "b": {"kinds": "number"}}, **FEATURES}, ["did you mean labels.b.kind?"]),
        ({"labels": {"a": {}, "b": {}}, "label": {"column": "c"}, **FEATURES}, ["label (c) and labels (a, b)"]),
        ({"labels": {"a": {"column": "c"}}, **FEATURES}, ["write `label: {column: c, name: a}`, or name two"]),
        ({"labels": {"a": {}, "b": {"column": "site"}}, **FEATURES}, ["categorical.site", "is the label 'b'"]),
        ({"labels": {"a": {}, "site": {"column": "b"}}, **FEATURES}, ["categorical.site", "already, by labels.site"]),
        ({"labels": {"a": {}, "b": {"kind": "number", "at_least": 1.0}}, **FEATURES}, ["labels.b", "at_least"]),
        ({"label": {}, **FEATURES}, ["label.column"]),
        ({"label": {"column": "site"}, **FEATURES}, ["categorical.site", "is the label"]),
        ({"label": {"column": "c", "kind": "number", "at_least": 1.0}, **FEATURES}, ["label", "at_least"]),
        ({"time": {"column": "t", "format": "second"}, **FEATURES}, ["time", "did you mean 'seconds'?"]),
        ({"split": "time:0.8,0.1,0.1", **FEATURES}, ["split", "add `time:"]),
        ({"dense": {"site": {}}, **FEATURES}, ["categorical.site", "already, by dense.site"]),
        ({"label": {"column": "c", "name": "site"}, **FEATURES}, ["categorical.site", "already, by label.name"]),
        ({"categorical": {"": {}}}, ["at least one character"]),
        ({"categorical": {"x": {"cross": ["a"]}}}, ["categorical.x.cross", "at least 2 items"]),
        ({"categorical": {"x": {"cross": ["a", "a"]}}}, ["categorical.x", "twice"]),
        ({"categorical": {"x": {"cross": ["a", "b"], "column": "a"}}}, ["categorical.x", "no meaning beside cross"]),
        ({"categorical": {"x": {"cross": ["a", "b"], "kind": "integer"}}}, ["categorical.x", "kind string"]),
        ({"categorical": {"a": {"separator": "|"}, "x": {"cross": ["a", "b"]}}}, ["categorical.x.cross", "has lists"]),
        ({"categorical": {"x": {"kind": "log_bins", "hash_size": 10}}}, ["categorical.x", "leave hash_size out"]),
        ({"categorical": {"x": {"kind": "quantile_bins", "min_count": 2}}}, ["categorical.x", "leave min_count out"]),
        ({"categorical": {"x": {"kind": "log_bins", "is_list": True}}}, ["categorical.x", "one number a row"]),
        ({"categorical": {"item": {}, "seen": {"vocabulary": "items"}}}, ["seen.vocabulary", "did you mean 'item'?"]),
        ({"categorical": {"item": {}, "seen": {"vocabulary": "seen"}}}, ["seen.vocabulary", "the column itself"]),
        ({"categorical": {"item": {}, "seen": {"kind": "integer", "vocabulary": "item"}}}, ["give both the same"]),
        (
            {"categorical": {"a": {}, "b": {"vocabulary": "a"}, "c": {"vocabulary": "b"}}},
            ["categorical.c.vocabulary", "name 'a'"],
        ),
        (
            {"categorical": {"a": {}, "b": {"vocabulary": "a", "min_count": 2, "hash_seed": 3}}},
            ["categorical.b", "min_count, hash_seed: the settings of vocabulary 'a' apply"],
        ),
        ({"categorical": {"a": {}, "b": {"vocabulary": "a", "kind": "log_bins"}}}, ["categorical.b", "column's own"]),
        ({"categorical": {"x": {"max_length": 3}}}, ["categorical.x", "max_length is of lists"]),
        ({"dense": {"x": {"separator": " "}}}, ["dense.x", "separator is of lists of numbers"]),
        ({"dense": {"x": {"gap_to": "time"}}}, ["dense.x", "gap_to is of lists of numbers"]),
        ({"dense": {"x": {"since_first": True}}}, ["dense.x", "since_first is of lists of numbers"]),
        (
            {
                "dense": {"x": {"beside": "seen", "gap_to": "time", "since_first": True}},
                "categorical": {"seen": {"is_list": True}},
            },
            ["dense.x", "since_first and gap_to each take the place"],
        ),
        (
            {
                "dense": {"x": {"beside": "seen", "gap_to": "time", "missing": "zero"}},
                "categorical": {"seen": {"is_list": True}},
            },
            ["dense.x", "a gap of 0 is no time at all; give keep"],
        ),
        (
            {
                "dense": {"x": {"beside": "seen", "transform": "standardize"}},
                "categorical": {"seen": {"is_list": True}},
            },
            ["dense.x", "give log or none beside a list"],
        ),
        (
            {"dense": {"x": {"beside": "sen"}}, "categorical": {"seen": {"is_list": True}}},
            ["dense.x.beside", "no categorical column of lists 'sen'; did you mean 'seen'?"],
        ),
        (
            {
                "label": {"column": "click"},
                "dense": {"x": {"beside": "seen", "gap_to": "click"}},
                "categorical": {"seen": {"is_list": True}},
            },
            ["dense.x.gap_to", "'click' is the label"],
        ),
        ({"text": {"columns": ["a", "a"], "header": False}, **FEATURES}, ["text.columns", "more than once"]),
        ({"text": {"columns": ["a", "b"]}, **FEATURES}, ["text.columns", "add `header: false`"]),
        ({"text": {"separator": '"'}, **FEATURES}, ["text.quote", "separates fields"]),
        ({"text": {"separator": "é"}, **FEATURES}, ["text", "separator is 'é'", "ASCII"]),
        ({"text": {"quote": "\n"}, **FEATURES}, ["text", "quote is '\\n'", "ends no line"]),
        ({"label": {"column": "c", "at_least": math.nan}, **FEATURES}, ["label.at_least", "finite"]),
    ],
)
def test_what_does_not_go_together_is_said_with_its_place(
    values: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "schema.yaml").write_text(format_yaml(values))
    with pytest.raises(UserError) as error:
        read_schema(tmp_path / "schema.yaml")
    assert all(word in str(error.value) for word in ("1 mistake in", "schema.yaml", *words)), error.value


def test_all_mistakes_are_listed() -> None:
    values = {"dense": {"a": {"transform": "logs"}, "b": {"missing": "drop"}}, "categorical": {"c": {"min_count": 0}}}
    with pytest.raises(UserError, match=r"(?s)3 mistakes in the test.*dense\.a\..*dense\.b\..*categorical\.c\."):
        TableSchema.from_json(values, "the test")
    several = {"split": "time:1", "label": {"column": "a"}, "dense": {"a": {}}}
    with pytest.raises(UserError, match=r"(?s)2 mistakes in the test:\n  dense\.a: .*\n  split: "):
        TableSchema.from_json(several, "the test")


@pytest.mark.parametrize("text", ["[1, 2]", "a: b: c", "!!python/object:os.system {}", "categorical: {a: {}, a: {}}"])
def test_what_is_no_schema_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(text)
    with pytest.raises(UserError, match="schema.yaml"):
        read_schema(tmp_path / "schema.yaml")


def test_a_criteo_datasets_schema_has_its_options(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(reference.content(60, seed=0))
    prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "made", CriteoOptions(hash_size=50, hash_seed=3, missing="keep"))
    schema = schema_of_manifest(Manifest.load(tmp_path / "made"))
    assert schema.hash_size == 50 and {each.hash_seed for each in schema.categorical.values()} == {3}
    assert {each.missing for each in schema.dense.values()} == {"keep"}
    assert list(schema.categorical) == list(load_schema("criteo").categorical)


def test_a_column_of_which_nothing_is_said_has_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("dense:\n  x:\n  y: {transform: log}\ncategorical:\n  c:\n  d: ~\n")
    long = {"dense": {"x": {}, "y": {"transform": "log"}}, "categorical": {"c": {}, "d": {}}}
    assert load_schema(str(tmp_path / "short.yaml")) == TableSchema.from_json(long, "the test")


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
