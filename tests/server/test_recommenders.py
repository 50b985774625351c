"""Models that recommend items, served: users and histories as raw values in, items as raw values out."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import distembed
from distembed.serving.model_folder.reading import read_manifest
from distembed.serving.server.app import ARROW_TYPE
from tests.server.asgi import post, served, stream
from tests.server.exported_models import exported
from tests.serving.test_recommender_rows import session_datasets, session_run, taken_items

BEST = 6


def recommended(predicted: pa.Table, most: int = BEST) -> dict[str, Any]:
    """Returns what ``predict`` recommends, as the server says it."""
    found = {}
    for output, name in (("items", "item"), ("scores", "score")):
        columns = predicted.select([f"{name}_{i}" for i in range(1, most + 1)])
        found[output] = [list(row.values()) for row in columns.to_pylist()]
    return found


def require_like(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["items"] == expected["items"]
    for own, others in zip(found["scores"], expected["scores"], strict=True):
        assert own == pytest.approx(others, rel=1e-5, abs=1e-5)


@pytest.mark.thorough
def test_users_are_answered_without_the_items_that_they_have(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = session_run(tmp_path_factory, "ranking")
    model, app = distembed.load(run), served(exported(run, tmp_path / "model", num_best=BEST), most_rows=4)
    names = {name: raw_values(tmp_path / "model", name) for name in ("user", "item")}
    taken = taken_items(session_datasets(tmp_path_factory)["ratings"])
    has = {names["user"][user]: {names["item"][item] for item in items} for user, items in taken.items()}
    users = sorted(has)[:7]
    rows: list[dict[str, Any]] = [{"user": user, "item": sorted(has[user])} for user in users]
    expected = recommended(model.predict([{"user": user} for user in users]))
    require_like(post(app, rows).json(), expected)
    reply = post(app, stream(pa.Table.from_pylist(rows)), content_type=ARROW_TYPE)
    require_like(pa.ipc.open_stream(reply.body).read_all().to_pydict(), expected)
    # without a list nothing is left out; a user that nobody knows is a bad row
    alone = post(app, [{"user": user} for user in users])
    assert any(set(own) & has[user] for own, user in zip(alone.json()["items"], users, strict=True))
    mixed = post(app, [{"user": users[0]}, {"user": "nobody", "item": []}]).json()["rows"]
    assert [(each["row"], each["field"]) for each in mixed] == [(1, "user")] and "nobody" in mixed[0]["reason"]
    everything = post(app, [{"user": users[0], "item": names["item"][2:-2]}]).json()
    assert set(everything["items"][0]) == {*names["item"][-2:], None} and everything["items"][0][2:] == [None] * 4
    assert everything["scores"][0][2:] == [None] * 4


def raw_values(model: Path, feature: str) -> list[str]:
    """Returns raw values by their ids."""
    file = next(each.vocabulary for each in read_manifest(model).features if each.name == feature)
    assert file is not None
    return ["", "", *map(json.loads, (model / file).read_text().splitlines())]
