"""A row has one answer, a score or the column at fault, by every path that scores it and beside any other rows."""

import json
import math
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distembed
from distembed.base.errors import UserError
from distembed.data.table.values import value_text
from distembed.serving.model_folder.programs import load_programs
from distembed.serving.model_folder.reading import read_manifest, require_sample
from distembed.serving.raw_predictions import RawInputs, ScoredPiece
from distembed.serving.requests import RawRequest
from distembed.serving.rows.decoder import batches_of
from distembed.training.trained_run import find_trained_run
from tests.server.asgi import post, served
from tests.server.exported_models import exported, trained_run

Row = dict[str, Any]
Answers = list[Any]

SCHEMA: dict[str, Any] = {
    "label": {"column": "click"},
    "dense": {"price": {"transform": "log"}, "age": {"transform": "standardize"}, "rate": {}},
    "categorical": {
        "site": {"min_count": 1},
        "number": {"kind": "integer", "min_count": 1},
        "code": {"kind": "hexadecimal", "min_count": 1},
        "magnitude": {"kind": "log_bins", "min_count": 1},
        "amount": {"kind": "quantile_bins", "num_bins": 6},
        "genres": {"separator": "|", "max_length": 3, "min_count": 1},
        "places": {"kind": "integer", "is_list": True, "min_count": 1},
        "codes": {"column": "code_list", "kind": "hexadecimal", "is_list": True, "min_count": 1},
    },
    "split": "0.8,0.1,0.1",
    "text": {"missing_values": ["", "NA", "-3"]},
}
COLUMNS = [*SCHEMA["dense"], "site", "number", "code", "magnitude", "amount", "genres", "places", "code_list"]
KNOWN = "0 1 10 7 a 1f true 1e+15 2.5 -3 inf 9223372036854775807 18446744073709551616".split()
"""Values that the vocabularies have, as far as they are of the column's kind: a score tells which was read."""
SINGLE: list[Any] = [
    *(None, True, False, 0, 1, 10, -3, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**40),
    *(0.0, -0.0, 1.0, 2.5, 10.0, 1e10, 1e15, 1e16, 1e39, -1e39, 1e300, 1e-7, 5e-324, math.nan, math.inf, -math.inf),
    *("", " 7", *"0 00 10 1f 1F a true TRUE 1e15 1e39 2.50 100 7.5 +7 7.0 nan inf".split()),
    *("NA", "x" * 30, "\ud800", "a\udfff", "é", "\0", "18446744073709551616", "9" * 30, "g|a", "|", "None"),
]
ODD: list[Any] = [*SINGLE, {}, {"a": 1}, [], [[]], [[1]], [{}], ["\ud800"], ["1|f", "a"]]


def train_rows() -> list[Row]:
    def of_kind(column: str, text: str) -> Any:
        try:
            if column in ("number", "places"):
                return str(int(float(text))) if abs(float(text)) < 2**53 else "9223372036854775807"
            if column in ("magnitude", "amount"):
                return text if math.isfinite(float(text)) else "5"
            return f"{int(text, 16) % 2**32:x}" if column in ("code", "code_list") else text
        except (ValueError, OverflowError):
            return "5"

    rows = []
    for place in range(120):
        text = KNOWN[place % len(KNOWN)]
        row: Row = {name: of_kind(name, text) for name in COLUMNS[3:]}
        row |= {"places": [row["places"]], "code_list": [row["code_list"]], "click": place % 3 % 2}
        rows.append(row | {"price": place / 7, "age": float(place % 50), "rate": (place % 9 - 4) / 3})
    return rows


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A loaded model, its run, a server of it, and the ``score`` function of ``serving_example.py``."""
    folder = tmp_path_factory.mktemp("paths")
    run = trained_run(folder, SCHEMA, rows=train_rows())
    model = exported(run, folder / "model")
    example = runpy.run_path(str(model / "serving_example.py"))["score"]
    loaded, trained = distembed.load(run), find_trained_run(run, None)
    names = {"code_list": "codes"}
    return SimpleNamespace(model=loaded, run=trained, app=served(model), example=example, folder=folder, names=names)


HISTORY_SCHEMA: dict[str, Any] = {
    "label": {"column": "click"},
    "dense": {
        "price": {"missing": "keep"},
        "gaps": {"column": "times", "beside": "seen", "separator": " ", "gap_to": "at", "transform": "log"},
        "stars": {"beside": "bought", "missing": "keep"},
    },
    "categorical": {
        "item": {"kind": "integer", "min_count": 1},
        "seen": {"kind": "integer", "separator": " ", "max_length": 3, "vocabulary": "item"},
        "bought": {"kind": "integer", "is_list": True, "vocabulary": "item"},
    },
    "split": "0.8,0.1,0.1",
    "text": {"missing_values": ["", "NA", "-3"]},
}
HISTORY_ROW: Row = {
    **{"price": 2.5, "item": 3, "seen": "1 2 NA 3 4", "times": "0 10 20 30.5 40", "at": 50, "bought": [7, 1]},
    "stars": [4.5, None],
}
HISTORY_VALUES: dict[str, list[Any]] = {
    "seen": ["1 2 3 4 5", "1 2 3 NA NA", "1 2", "", None, [1, 2, 3, 4, 5], [1, None, 3, "NA", "5"], "1  2 3 4", "NA"],
    "times": ["5 4 3 2 1", "1 2", "", "NA", None, [0, 10, 20, 30, 40], [1, "2", None, 4, 5.5], "1 x 3 4 5", "a"],
    "at": [None, "NA", -100, 1e300, "much", 40.25],
    "bought": [[], None, [7], 7, "7", [None, 7], ["NA", 1], [7, "x"]],
    "stars": [[], None, [1.0], 1, "NA", [None, None], [1e39, 1], ["2", "3"], ["x", 1], [[1], 2], float("nan")],
}


DIN = {"name": "din", "attention": [8], "deep": [8], "side_soft_one_hot": {"bins": 5, "value_range": [0, 5]}}


def history_rows() -> list[Row]:
    rows = []
    for place in range(120):
        own = {"click": place % 3 % 2, "item": place % 9, "seen": " ".join(map(str, range(1, 6))), "price": place}
        rows.append({**HISTORY_ROW, **own})
    return rows


@pytest.fixture(scope="module")
def history_paths(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The same of a model of histories with numbers."""
    folder = tmp_path_factory.mktemp("histories")
    run = trained_run(folder, HISTORY_SCHEMA, rows=history_rows(), model=DIN)
    model = exported(run, folder / "model")
    example = runpy.run_path(str(model / "serving_example.py"))["score"]
    loaded, trained = distembed.load(run), find_trained_run(run, None)
    names = {"times": "gaps"}
    return SimpleNamespace(model=loaded, run=trained, app=served(model), example=example, folder=folder, names=names)


@pytest.mark.thorough
def test_histories_have_one_answer_in_every_path(history_paths: SimpleNamespace) -> None:
    require_one_answer(history_paths, [HISTORY_ROW])
    assert by_predict(history_paths, [HISTORY_ROW])[0] != by_predict(history_paths, [{**HISTORY_ROW, "at": 500}])[0]
    for name, values in HISTORY_VALUES.items():
        require_one_answer(history_paths, [{**HISTORY_ROW, name: value} for value in values])
    both = [{**HISTORY_ROW, "seen": seen, "times": "1 2"} for seen in HISTORY_VALUES["seen"]]
    require_one_answer(history_paths, both)
    both = [{**HISTORY_ROW, "bought": bought, "stars": [3.0]} for bought in HISTORY_VALUES["bought"][:-1]]
    require_one_answer(history_paths, both)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [DIN, {**DIN, "side_features": False}])
def test_rows_may_lack_the_lists_that_the_model_does_not_read(tmp_path: Path, model: dict[str, Any]) -> None:
    """``moods`` are beside a list that is no history; without side features no list of numbers is read."""
    schema = {**HISTORY_SCHEMA, "dense": {**HISTORY_SCHEMA["dense"], "moods": {"beside": "tags"}}}
    schema["categorical"] = {**HISTORY_SCHEMA["categorical"], "tags": {"is_list": True}}
    full = {**HISTORY_ROW, "tags": ["a", "b"], "moods": [0.5, 2.0]}
    rows = [{**full, **row, "moods": [place / 9, 1.0]} for place, row in enumerate(history_rows())]
    run = trained_run(tmp_path, schema, rows=rows, model=model)
    folder, loaded = exported(run, tmp_path / "model"), distembed.load(run)
    manifest = read_manifest(folder)
    unread = ["moods"] if model is DIN else ["times", "at", "stars", "moods"]
    assert [each.name for each in manifest.sequences] == (["gaps", "stars"] if model is DIN else [])
    assert require_sample(folder, manifest, load_programs(folder, manifest)) < 1e-6
    example = runpy.run_path(str(folder / "serving_example.py"))["score"]
    paths = SimpleNamespace(
        **{"model": loaded, "run": find_trained_run(run, None), "app": served(folder), "example": example},
        **{"folder": tmp_path, "names": {"times": "gaps"} if model is DIN else {}},
    )
    lacking = {name: value for name, value in full.items() if name not in unread}
    require_one_answer(paths, [lacking, {**lacking, "bought": [], "stars": [], "tags": []}])
    assert by_predict(paths, [lacking]) == by_predict(paths, [full]) != [None]
    wrong = {**full, "moods": "not a list of numbers"}
    assert by_predict(paths, [wrong]) == by_predict(paths, [full])
    labelled = [{name: value for name, value in row.items() if name not in unread} for row in rows]
    assert loaded.evaluate(labelled) == loaded.evaluate(rows)


@pytest.mark.thorough
def test_samples_have_gaps_to_categorical_columns_and_long_hashed_histories(tmp_path: Path) -> None:
    """The times that gaps end at are a feature too; of these, some are unknown."""
    shared = {"vocabulary": "item", "kind": "integer", "is_list": True}
    features = {"item": {"kind": "integer", "hash_size": 50}, "bought": shared}
    features |= {"seen": {**shared, "separator": " ", "max_length": 3}, "at": {"kind": "integer"}}
    rows = [{**row, "at": 50 + place // 2 * (place % 5 == 0)} for place, row in enumerate(history_rows())]
    run = trained_run(tmp_path, {**HISTORY_SCHEMA, "categorical": features}, rows=rows, model=DIN)
    model = exported(run, tmp_path / "model")
    score = runpy.run_path(str(model / "serving_example.py"))["score"]
    sample = json.loads((model / "sample.json").read_text())
    np.testing.assert_allclose(score(sample["rows"]), sample["outputs"]["prediction"], atol=1e-5)
    ends = {row["at"] for row in sample["rows"]}
    assert any(end.startswith("9999") for end in ends) and len(ends) > 1
    row = sample["rows"][0]
    longer = {**row, "seen": [9, 0, *row["seen"]], "gaps": [3.5, None, *row["gaps"]]}
    assert len(row["seen"]) == 3 and score([longer]).item() == pytest.approx(score([row]).item(), abs=1e-6)


def by_predict(paths: SimpleNamespace, rows: Any) -> Answers:
    """Returns the score of each row, or None where it is refused."""
    scores = paths.model.predict(rows, malformed="null").tolist()
    return [None if math.isnan(score) else score for score in scores]


def refusals(paths: SimpleNamespace, row: Row) -> str:
    """Returns why a row is refused; nothing where it is not."""
    try:
        paths.model.predict([row])
    except UserError as error:
        return str(error).partition("row 0, column ")[2].partition(". Mend them")[0]
    return ""


def by_server(paths: SimpleNamespace, rows: list[Row]) -> Answers:
    reply = post(paths.app, rows, "?malformed=null")
    assert reply.status == 200, reply.body
    found: Answers = reply.json()["prediction"]
    return found


def refused_by_server(paths: SimpleNamespace, rows: list[Row]) -> list[str]:
    reply = post(paths.app, rows)
    found = [""] * len(rows)
    for each in reply.json().get("rows", ()):
        found[each["row"]] = f"{each['field']!r}: {each['reason']}"
    return found


def by_file(paths: SimpleNamespace, name: str, write: Callable[[Path], Any]) -> Answers:
    """Returns the scores of a file's rows, read as ``distembed predict --input`` reads them."""
    file = paths.folder / name
    write(file)
    inputs = RawRequest([str(file)], max_rejected=1.0).open(paths.run, paths.model._model.module.model)
    found: Answers = []
    for piece in _all_pieces(inputs):
        own = np.full(piece.num_lines, None, object)
        scores = [paths.model.predict(batch) for batch in batches_of(paths.model.schema, piece.block, 8192)]
        own[piece.rows] = np.concatenate([np.empty(0), *scores])
        found += own.tolist()
    return found


def _all_pieces(inputs: RawInputs) -> Iterator[ScoredPiece]:
    """Yields the pieces; that no row at all was well-formed is an error after the last one."""
    try:
        yield from inputs.pieces()
    except UserError as error:
        assert "rows" in str(error)


def by_example(paths: SimpleNamespace, row: Row) -> Any:
    feature_row = {paths.names.get(name, name): value for name, value in row.items()}
    try:
        return paths.example([feature_row]).item()
    except ValueError as error:
        return str(error)


def agree(found: Answers, wanted: Answers, rows: Sequence[Row]) -> None:
    assert len(found) == len(wanted)
    for one, other, row in zip(found, wanted, rows, strict=True):
        assert (one is None) == (other is None) and (one is None or one == pytest.approx(other, abs=2e-6)), (
            row,
            one,
            other,
        )


entries = st.one_of(st.sampled_from(SINGLE), st.integers(-(2**65), 2**65), st.floats(), st.text(max_size=3))
odd_values = st.one_of(st.sampled_from(ODD), entries, st.lists(entries, max_size=3))


@st.composite
def drawn_rows(draw: st.DrawFn) -> list[Row]:
    """Draws rows with an odd value in one column each, often of the same column."""
    columns = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=2))
    base = {name: row[name] for row in train_rows()[3:4] for name in COLUMNS}
    num_rows = draw(st.integers(1, 5))
    return [{**base, draw(st.sampled_from(columns)): draw(odd_values)} for _ in range(num_rows)]


@pytest.mark.thorough
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(rows=drawn_rows())
def test_all_paths_give_a_row_one_answer(paths: SimpleNamespace, rows: list[Row]) -> None:
    require_one_answer(paths, rows)


@pytest.mark.slow
def test_each_odd_value_has_one_answer_in_each_column(paths: SimpleNamespace) -> None:
    base = {name: row[name] for row in train_rows()[3:4] for name in COLUMNS}
    for name in COLUMNS:
        require_one_answer(paths, [{**base, name: value} for value in ODD])


@pytest.mark.thorough
@pytest.mark.parametrize("column", ["magnitude", "amount"])
def test_numbers_have_their_bins_in_every_path(paths: SimpleNamespace, column: str) -> None:
    base = {name: row[name] for row in train_rows()[3:4] for name in COLUMNS}
    values = [-2.5, 0, True, 2, 2.5, 7.5, 100, "1e15", 1e300, 1e39, -1e39, None, "NA", "x", [1]]
    require_one_answer(paths, [{**base, column: value} for value in values])


def require_one_answer(paths: SimpleNamespace, rows: list[Row]) -> None:
    alone = [by_predict(paths, [row])[0] for row in rows]
    reasons = [refusals(paths, row) for row in rows]
    assert [not reason for reason in reasons] == [answer is not None for answer in alone]
    agree(by_predict(paths, rows), alone, rows)
    agree(by_predict(paths, {name: [row[name] for row in rows] for name in rows[0]}), alone, rows)
    agree(by_server(paths, rows), alone, rows)
    assert refused_by_server(paths, rows) == reasons
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    agree(by_file(paths, "rows.jsonl", lambda file: file.write_text(lines)), alone, rows)
    for row, answer, reason in zip(rows, alone, reasons, strict=True):
        own = by_example(paths, row)
        if answer is None:
            named = reason.partition(":")[0]
            for name, feature in paths.names.items():
                named = named.replace(name, feature)
            assert isinstance(own, str) and f"column {named}" in own, (row, own)
        else:
            agree([own], [answer], [row])
            texts = {name: value if isinstance(value, list) else value_text(value) for name, value in row.items()}
            agree(by_predict(paths, [texts]), [answer], [row])
        columns = {name: typed(value) for name, value in row.items()}
        if None not in columns.values():
            by_arrow(paths, pa.table(columns), row, answer)


def by_arrow(paths: SimpleNamespace, table: pa.Table, row: Row, answer: Any) -> None:
    """Makes sure that a row has its answer in columns with types, in memory and in a Parquet file."""
    try:
        found = by_predict(paths, table)
    except UserError as error:  # the type of a column, such as that of an object, is refused
        assert answer is None and "its type is" in str(error), row
        return
    agree(found, [answer], [row])
    agree(by_file(paths, "rows.parquet", lambda file: pq.write_table(table, file)), [answer], [row])


def typed(value: Any) -> pa.Array | None:
    """Returns a column of one value as Arrow types it; None where it has no type."""
    try:
        return pa.array([value])
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        return None


def test_pandas_columns_have_the_answers_of_their_rows(paths: SimpleNamespace) -> None:
    pandas = pytest.importorskip("pandas")
    base = {name: row[name] for row in train_rows()[3:4] for name in COLUMNS}
    for name in COLUMNS:
        rows = [{**base, name: value} for value in ODD]
        agree(by_predict(paths, pandas.DataFrame(rows)), by_predict(paths, rows), rows)
