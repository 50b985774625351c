"""Requests to the application in this process: rows of JSON and Arrow, and what is no request."""

import asyncio
import itertools
import json
import random
import re
import threading
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fastapi import FastAPI

from distembed import LoadedModel
from distembed.serving.model_folder.versions import Version
from distembed.serving.server.app import ARROW_TYPE, JSON_TYPE, make_app
from distembed.serving.server.batching import ServerSettings
from distembed.serving.server.scoring import RowRequest, Scores
from distembed.serving.server.versions import LoadedVersion, ServedModel
from tests.server.asgi import Reply, ask, post, stream
from tests.server.exported_models import json_rows


@pytest.fixture(scope="module")
def scorer(model: Path) -> ServedModel:
    return ServedModel(LoadedVersion.load(model, 1024))


def app_of(scorer: Any, **settings: Any) -> FastAPI:
    return make_app(scorer, ServerSettings(**settings))


@pytest.fixture(scope="module")
def app(scorer: ServedModel) -> FastAPI:
    return app_of(scorer)


def post_table(app: FastAPI, table: pa.Table | bytes, query: str = "") -> Reply:
    return post(app, table if isinstance(table, bytes) else stream(table), query, content_type=ARROW_TYPE)


def scores_of(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    if reply.headers["content-type"] == ARROW_TYPE:
        return pa.ipc.open_stream(reply.body).read_all()["prediction"].to_pylist()
    return reply.json()["prediction"]


def metrics_of(app: FastAPI) -> dict[str, float]:
    """Returns the counts as Prometheus's own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    reply = asyncio.run(ask(app, target="GET /metrics"))
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("num_rows", [0, 1, 7, 64])
def test_scores_are_those_of_predict(app: FastAPI, trained: LoadedModel, num_rows: int) -> None:
    rows = json_rows(num_rows, seed=1)
    expected = pytest.approx(trained.predict(rows).tolist(), abs=1e-6)
    columns = {name: [row[name] for row in rows] for name in json_rows(1)[0]}
    for body in ({"rows": rows}, rows, {"columns": columns}):
        assert scores_of(post(app, body)) == expected
    table = pa.Table.from_pylist(rows) if rows else pa.table({})
    assert scores_of(post_table(app, table)) == expected
    several = pa.concat_tables([table.slice(0, num_rows // 2), table.slice(num_rows // 2)])
    assert scores_of(post_table(app, several)) == expected


def test_arrow_types_mean_what_they_do_to_predict(app: FastAPI, trained: LoadedModel) -> None:
    rows = json_rows(20, seed=2)
    expected = pytest.approx(trained.predict(rows).tolist(), abs=1e-6)
    table = pa.Table.from_pylist(rows)
    changes: list[tuple[str, Any]] = [
        ("site", pa.dictionary(pa.int32(), pa.string())),
        ("site", pa.large_string()),
        ("site", pa.string_view()),
        ("site", pa.binary()),
        ("number", pa.string()),
        ("number", pa.decimal128(38, 0)),
        ("age", pa.float32()),
        ("age", pa.string()),
        ("places", pa.large_list(pa.int64())),
        ("places", pa.list_(pa.string())),
    ]
    for name, type_ in changes:
        column = table[name]
        changed = column.dictionary_encode() if pa.types.is_dictionary(type_) else column.cast(type_)
        own = table.set_column(table.column_names.index(name), name, changed)
        assert scores_of(post_table(app, own)) == expected, (name, type_)


def test_any_arrow_type_in_any_column_is_scored_or_refused(app: FastAPI) -> None:
    table = pa.Table.from_pylist(json_rows(3))
    columns: list[pa.Array] = [
        pa.nulls(3),
        *(pa.array([1, 2, None], type_) for type_ in (pa.int8(), pa.uint64(), pa.float32(), pa.float64())),
        pa.array(np.array([1, 2, np.inf], np.float16)),
        pa.array([float("nan"), float("inf"), -float("inf")]),
        *(
            pa.array([Decimal("1.5"), None, Decimal(2)], type_)
            for type_ in (pa.decimal128(20, 2), pa.decimal256(50, 2))
        ),
        *(
            pa.array([1, 2, 3], pa.int64()).cast(type_)
            for type_ in (pa.timestamp("s"), pa.duration("s"), pa.time64("us"))
        ),
        pa.array([0, 1, 2], pa.int32()).cast(pa.date32()),
        pa.array([True, False, None]),
        *(pa.array([b"a", b"\xff\xfe", None], type_) for type_ in (pa.binary(), pa.large_binary(), pa.binary_view())),
        pa.array([b"abcd", b"\xff\0ab", None], pa.binary(4)),
        pa.array(["a", "b", None]).dictionary_encode(),
        pa.array([1.5, 2.5, None]).dictionary_encode(),
        pa.array([True, False, None]).dictionary_encode(),
        pa.array([[1], [], None]),
        pa.array([["a"], ["b", None], None]),
        pa.array([["a"], ["b", None], None], pa.list_view(pa.string())),
        pa.array([[1, 2], [3, 4], None], pa.list_(pa.int64(), 2)),
        pa.array([[1.5], [2.0], None]),
        pa.array([[True], [False], None]),
        pa.array([[b"\xff"], [b"a"], None]),
        pa.array([[[1]], [[2]], None]),
        pa.array([[None], [], None], pa.list_(pa.null())),
        pa.ListArray.from_arrays([0, 1, 2, 3], pa.array(["a", "b", "a"]).dictionary_encode()),
        pa.array([{"a": 1}, None, {"a": 2}]),
        pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        pa.RunEndEncodedArray.from_arrays([1, 3], pa.array(["a", "b"])),
        pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [pa.array([1, 2, 3])]),
    ]
    statuses = set()
    names = ("price", "site", "number", "code", "places")
    for (place, name), (number, column) in itertools.product(enumerate(names), enumerate(columns)):
        own = table.set_column(table.column_names.index(name), name, column)
        reply = post_table(app, own, "?malformed=null" if (place + number) % 2 else "")
        statuses.add(reply.status)
        assert reply.status in (200, 422), (name, column.type, reply.body)
        if reply.status == 422:
            assert name in reply.json()["error"] or any(name in row["field"] for row in reply.json()["rows"])
    assert statuses == {200, 422}


def test_what_is_no_stream_of_arrow_is_refused(app: FastAPI) -> None:
    whole = stream(pa.Table.from_pylist(json_rows(50)))
    assert post_table(app, b"").status == 400
    rng = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4, 40])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        assert post_table(app, bytes(damaged)).status in (200, 400, 413, 422)
    assert scores_of(post_table(app, whole))
    assert "no stream of Arrow" in post(app, {"rows": []}, content_type=ARROW_TYPE).json()["error"]


def test_more_rows_of_arrow_than_a_request_may_have_are_refused(app: FastAPI) -> None:
    nothing = pa.table({"site": pa.nulls(10**8)})  # which takes not a byte
    long = pa.table({"site": pa.DictionaryArray.from_arrays(np.zeros(70_000, np.int32), ["x"])})
    for much in (nothing, long):
        reply = post_table(app, much)
        assert reply.status == 413 and "rows" in reply.json()["error"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b'{"rows": [{"a": nan}]}', "no JSON"),
        (b'{"rows": [{"a": "\xff"}]}', "no JSON"),
        (b"\xef\xbb\xbf[]", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"a":' * 100_000, "no JSON"),
        (b"null", "give {"),
        (b"17", "give {"),
        (b'"rows"', "give {"),
        (b"{}", "give {"),
        (b'{"rows": {"a": 1}}', "give {"),
        (b'{"rows": null}', "give {"),
        (b"[1]", "row 0 is 1 "),
        (b'{"rows": [{}, [' + b"[" * 900 + b"]" * 900 + b"]]}", "row 1 is "),
        (b'{"rows": ["' + b"x" * 100_000 + b'"]}', "row 0 is 'xxx"),
        (b'{"columns": {"a": [1], "b": [1, 2]}}', "column 'b' has 2 values"),
        (b'{"columns": {"a": 1}}', "column 'a' is 1 and no list"),
        (b'{"columns": {"a": "text"}}', "column 'a' is 'text'"),
        (b'{"columns": [1]}', "give {"),
    ],
)
def test_what_has_no_rows_is_refused(app: FastAPI, body: bytes, text: str) -> None:
    reply = post(app, body)
    assert reply.status == 400 and text in reply.json()["error"] and len(reply.body) < 500


def test_of_a_key_that_is_there_twice_the_last_counts(app: FastAPI) -> None:
    (row,) = json_rows(1)
    twice = f'[{{"price": "no number", {json.dumps(row)[1:]}]'.encode()
    assert scores_of(post(app, twice)) == scores_of(post(app, [row]))


def test_bad_rows_are_named_or_null(app: FastAPI) -> None:
    rows = json_rows(4)
    bad = [rows[0], {**rows[1], "price": "much"}, {**rows[2], "code": "xyz", "site": {"a": 1}}, rows[3]]
    reply = post(app, bad)
    assert reply.status == 422
    assert [(each["row"], each["field"]) for each in reply.json()["rows"]] == [(1, "price"), (2, "site")]
    assert "'much'" in reply.json()["rows"][0]["reason"] and "malformed=null" in reply.json()["error"]
    scores = scores_of(post(app, bad, "?malformed=null"))
    good = scores_of(post(app, rows))
    assert scores[1] is None and scores[2] is None
    assert [scores[0], scores[3]] == pytest.approx([good[0], good[3]], abs=1e-6)
    table = pa.Table.from_pylist([{**row, "price": str(row["price"])} for row in rows])
    table = table.set_column(table.column_names.index("price"), "price", pa.array(["1", "much", None, "2"]))
    assert post_table(app, table).json()["rows"][0]["field"] == "price"
    assert [score is None for score in scores_of(post_table(app, table, "?malformed=null"))] == [
        False,
        True,
        False,
        False,
    ]
    many = post(app, [{**rows[0], "price": "much"}] * 1000)
    assert len(many.json()["rows"]) == 100 and many.json()["error"].startswith("1000 rows")


def test_all_rows_may_be_bad(app: FastAPI) -> None:
    rows = [{**row, "number": "x"} for row in json_rows(3)]
    assert scores_of(post(app, rows, "?malformed=null")) == [None] * 3
    assert scores_of(post_table(app, pa.Table.from_pylist(rows), "?malformed=null")) == [None] * 3


def test_headers_that_are_not_understood_are_refused(app: FastAPI) -> None:
    rows = json_rows(1)
    assert post(app, rows, content_type="application/x-www-form-urlencoded").status == 415
    assert post(app, rows, content_type="text/csv").status == 415
    assert post(app, rows, content_type="application/json; charset=utf-8").status == 200
    assert post(app, rows, content_type="APPLICATION/JSON").status == 200
    assert post(app, rows, content_encoding="gzip").status == 415
    assert post(app, rows, "?malformed=maybe").status == 400
    assert post(app, rows, content_length="99999999").status == 413


def test_other_paths_and_methods_are_refused_in_json(app: FastAPI) -> None:
    for target, status in (("GET /predict", 405), ("POST /", 404), ("GET /docs", 404), ("GET /openapi.json", 404)):
        reply = asyncio.run(ask(app, target=target))
        assert reply.status == status and "error" in reply.json(), target


def test_a_body_may_come_in_pieces_and_not_be_too_large(scorer: ServedModel) -> None:
    body = json.dumps(json_rows(2)).encode()
    app = app_of(scorer, most_body_bytes=len(body), most_rows=2)
    assert asyncio.run(ask(app, [body[place : place + 1] for place in range(len(body))])).status == 200
    assert asyncio.run(ask(app, [body, b"", b" "])).status == 413
    assert post(app, body + b" ").status == 413
    for values in ([{}] * 3, {"columns": {"a": [1] * 3}}):
        reply = post(app, values)
        assert reply.status == 413 and "3 rows" in reply.json()["error"]
    assert post(app, body).status == 200  # nothing is held of the others


class Held:
    """Scores nothing until it is told to, and counts what it is given."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.batches: list[int] = []

    def score(self, requests: Sequence[RowRequest]) -> list[Scores]:
        self.batches.append(len(requests))
        assert self.go.wait(30)
        return [Scores({"prediction": np.arange(len(request.rows), dtype=np.float32)}) for request in requests]


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0.001)


def test_a_full_queue_is_said_with_when_to_come_again() -> None:
    async def work() -> None:
        held = Held()
        app = app_of(held, most_waiting=2)
        first = asyncio.create_task(ask(app, b"[{}]"))
        await settled()
        others = [asyncio.create_task(ask(app, b"[{}]")) for _ in range(2)]
        await settled()
        refused = await ask(app, b"[{}]")
        assert (
            refused.status == 429 and refused.headers["retry-after"] == "1" and "2 requests" in refused.json()["error"]
        )
        held.go.set()
        assert [each.status for each in await asyncio.gather(first, *others)] == [200] * 3
        assert held.batches == [1, 2]
        assert (await ask(app, b"[{}]")).status == 200

    asyncio.run(work())


def test_a_request_that_waits_too_long_is_given_up_and_left_out() -> None:
    async def work() -> None:
        held = Held()
        app = app_of(held, timeout_seconds=0.2)
        first, second = asyncio.create_task(ask(app, b"[{}]")), asyncio.create_task(ask(app, b"[{}]"))
        replies = [await first, await second]
        assert [reply.status for reply in replies] == [503] * 2 and replies[0].headers["retry-after"] == "1"
        held.go.set()
        assert (await ask(app, b"[{}]")).status == 200
        assert sum(held.batches) <= 3  # the second one only where it came with the first

    asyncio.run(work())


def test_a_client_that_goes_is_left_out() -> None:
    async def work() -> None:
        held = Held()
        app = app_of(held)
        gone = asyncio.Event()
        first = asyncio.create_task(ask(app, b"[{}]"))
        await settled()
        second = asyncio.create_task(ask(app, b"[{}]", gone=gone))
        third = asyncio.create_task(ask(app, b"[{}]"))
        await settled()
        gone.set()
        assert (await second).status == 499
        held.go.set()
        assert [(await each).status for each in (first, third)] == [200, 200]
        assert held.batches == [1, 1]

    asyncio.run(work())


def test_a_client_that_goes_before_its_body_is_whole_is_no_fault(scorer: ServedModel) -> None:
    app = app_of(scorer)

    async def work() -> int:
        gone = asyncio.Event()
        gone.set()
        return (await ask(app, [b"[{}", b"]"], gone=gone, is_whole=False)).status

    assert asyncio.run(work()) == 499
    assert metrics_of(app)["distembed_requests_total 499"] == 1


def test_a_body_that_does_not_come_is_not_waited_for(scorer: ServedModel) -> None:
    app = app_of(scorer, timeout_seconds=0.05)
    reply = asyncio.run(ask(app, b"[{}", is_whole=False))
    assert reply.status == 408 and reply.headers["connection"] == "close"


class Faulty:
    """Fails for rows that say so."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.version, self.since, self.taken = Version(Path(), 1, "", 0), 0.0, {"delta": 0, "export": 0}

    def score(self, requests: Sequence[RowRequest]) -> list[Scores]:
        self.batches.append(len(requests))
        if any("fail" in row for request in requests for row in request.rows):
            raise RuntimeError("a fault of ours")
        return [Scores({"prediction": np.arange(len(request.rows), dtype=np.float32)}) for request in requests]


def test_a_fault_of_ours_fails_one_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> list[Reply]:
        faulty = Faulty()
        app = app_of(faulty, wait_seconds=0.05)
        bodies = [b"[{}]", b'[{"fail": 1}]', b"[{}, {}]"]
        replies = await asyncio.gather(*(ask(app, body) for body in bodies))
        assert faulty.batches == [3, 1, 1, 1]
        assert (await ask(app, b"[{}]")).status == 200
        return [*replies, await ask(app, target="GET /metrics")]

    first, failed, second, metrics = asyncio.run(work())
    assert first.json() == {"prediction": [0.0]} and second.json() == {"prediction": [0.0, 1.0]}
    assert failed.status == 500 and failed.headers["content-type"] == JSON_TYPE and "error" in failed.json()
    assert "a fault of ours" not in failed.body.decode() and "a fault of ours" in caplog.text
    assert b'distembed_requests_total{status="500"} 1.0' in metrics.body


def test_metrics_count_requests_and_rows(scorer: ServedModel) -> None:
    app = app_of(scorer)
    rows = json_rows(5)
    bad = [*rows, {**rows[0], "price": "much"}]
    for body, query in ((rows, ""), (bad, ""), (bad, "?malformed=null"), ([], ""), ({}, "")):
        post(app, body, query)
    found = metrics_of(app)
    assert found["distembed_requests_total 200"] == 3
    assert found["distembed_requests_total 422"] == found["distembed_requests_total 400"] == 1
    assert found["distembed_rows_total"] == 10 and found["distembed_bad_rows_total"] == 2
    assert found["distembed_request_seconds_count"] == 5
    assert found["distembed_batch_rows_sum"] == 17 and found["distembed_batch_rows_count"] == 4
    assert found["distembed_waiting_requests"] == 0
    assert found["process_resident_memory_bytes"] > 1 << 20
    buckets = [name for name in found if re.match("distembed_request_seconds_bucket", name)]
    assert found[next(name for name in buckets if name.endswith("+Inf"))] == 5


def test_the_model_says_what_it_is(app: FastAPI, model: Path) -> None:
    found = asyncio.run(ask(app, target="GET /model")).json()
    written = json.loads((model / "manifest.json").read_text())
    assert found.pop("checksums") == {} and written.pop("checksums")
    assert found == written
    for path in ("/healthz", "/readyz"):
        assert asyncio.run(ask(app, target=f"GET {path}")).json()["status"] == "ok"


def test_requests_that_are_scored_together_have_the_scores_that_they_have_alone(scorer: ServedModel) -> None:
    parts = [json_rows(size, seed=size) for size in (1, 3, 8, 2, 40, 5)]
    app = app_of(scorer, wait_seconds=0.05, most_batch_rows=50)

    async def work() -> list[Reply]:
        bodies = [json.dumps(rows).encode() for rows in parts]
        bodies[3] = json.dumps([{**row, "price": "much"} for row in parts[3]]).encode()
        return list(await asyncio.gather(*(ask(app, body) for body in bodies)))

    replies = asyncio.run(work())
    assert [reply.status for reply in replies] == [200, 200, 200, 422, 200, 200]
    for rows, reply in zip(parts, replies, strict=True):
        if reply.status == 200:
            assert scores_of(reply) == pytest.approx(scores_of(post(app, rows)), abs=1e-6)
    assert metrics_of(app)["distembed_batch_rows_sum"] == sum(map(len, parts)) * 2 - 2
