"""Versions that a server takes from a folder: each answer is of one version, and misfits are refused."""

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from distembed.base.errors import UserError
from distembed.serving.model_folder.deltas import loaded_weights
from distembed.serving.model_folder.programs import load_programs
from distembed.serving.model_folder.reading import read_manifest
from distembed.serving.model_folder.versions import read_version
from distembed.serving.server import versions as serving_versions
from distembed.serving.server.app import VERSION_HEADER, make_app
from distembed.serving.server.batching import Batcher, ServerSettings
from distembed.serving.server.scoring import RowRequest
from distembed.serving.server.serve import serve
from distembed.serving.server.versions import LoadedVersion, ServedModel, VersionFollower
from tests.in_process import in_this_process as command
from tests.server.asgi import ask
from tests.server.exported_models import exported, json_rows, trained_run

NAMES = ("1-whole", "2-delta", "3-delta", "4-whole", "5-delta")
ROWS = json_rows(20, seed=5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with :data:`NAMES`: five versions of a run, three steps apart."""
    folder = tmp_path_factory.mktemp("made")
    run = trained_run(folder)
    for number, name in enumerate(NAMES):
        if number:
            steps = (f"train.max_steps={3 * (number + 1)}", "train.epochs=9")
            command("train", folder / "config.yaml", *steps, "--run-dir", run, "--resume")
        if name.endswith("whole"):
            exported(run, folder / "all" / name)
        else:
            since = folder / "all" / NAMES[number - 1]
            command("export", run, "--output", folder / "all" / name, "--delta-since", since)
    return folder / "all"


@pytest.fixture(scope="module")
def expected(made: Path) -> dict[int, list[float]]:
    """Returns the scores of each version, whose deltas are applied without a server's follower."""
    model = ServedModel(LoadedVersion.load(made / NAMES[0], 64))
    found = {1: scores(model)}
    for number, name in enumerate(NAMES[1:], 2):
        if name.endswith("whole"):
            model = ServedModel(LoadedVersion.load(made / name, 64))
        else:
            apply(model, made / name)
        found[number] = scores(model)
    assert len({tuple(each) for each in found.values()}) == 5
    return found


def apply(model: ServedModel, folder: Path) -> None:
    delta, changes = serving_versions.read_delta(folder)
    model.change(read_version(folder), delta, changes)


def scores(model: ServedModel) -> list[float]:
    (answer,) = model.score([RowRequest(ROWS)])
    return [float(score) for score in answer.outputs["prediction"]]


class Followed:
    """A model of the first version that follows a folder, and its lines in the log."""

    def __init__(self, made: Path, folder: Path) -> None:
        self.said: list[str] = []
        folder.mkdir(exist_ok=True)
        self.model = ServedModel(LoadedVersion.load(made / NAMES[0], 64))
        self.follower = VersionFollower(folder, self.model, 64, self.said.append)

    def take(self) -> int:
        self.follower.take_all()
        return self.model.version.sequence


def copy(made: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(made / name, folder / name)


def test_versions_are_taken_in_their_order(made: Path, expected: dict[int, list[float]], tmp_path: Path) -> None:
    followed = Followed(made, tmp_path)
    for number, name in enumerate(NAMES[1:], 2):
        copy(made, tmp_path, name)
        assert followed.take() == number
        assert scores(followed.model) == expected[number]
        assert followed.model.manifest.step == followed.model.version.step == 3 * number
    assert followed.model.taken == {"delta": 3, "export": 1} and followed.follower.refused == {}
    assert [line.split()[0] for line in followed.said] == ["version"] * 4
    late = Followed(made, tmp_path)  # a server that starts later
    assert late.take() == 5 and scores(late.model) == expected[5]
    assert late.model.taken == {"delta": 1, "export": 1}  # the newest whole export goes first


def test_a_gap_is_refused_until_it_is_filled(made: Path, expected: dict[int, list[float]], tmp_path: Path) -> None:
    followed = Followed(made, tmp_path)
    copy(made, tmp_path, "3-delta", "5-delta")
    assert [followed.take(), followed.take()] == [1, 1] and scores(followed.model) == expected[1]
    assert followed.follower.refused.keys() == {"3-delta", "5-delta"}
    assert len(followed.said) == 2 and "the versions 2 to 2 come first" in followed.said[0]
    copy(made, tmp_path, "2-delta")
    assert followed.take() == 3 and scores(followed.model) == expected[3]
    assert followed.follower.refused.keys() == {"5-delta"}
    copy(made, tmp_path, "4-whole")  # replaces the deltas that are missing
    assert followed.take() == 5 and scores(followed.model) == expected[5]
    assert followed.follower.refused == {}


def test_damaged_versions_are_refused_and_tried_again(
    made: Path, expected: dict[int, list[float]], tmp_path: Path
) -> None:
    followed = Followed(made, tmp_path)
    copy(made, tmp_path, "2-delta", "4-whole")
    for file in (tmp_path / "2-delta" / "rows.npz", tmp_path / "4-whole" / "network.pt2"):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] + b"?" + content[len(content) // 2 + 1 :])
    assert [followed.take(), followed.take()] == [1, 1] and scores(followed.model) == expected[1]
    assert len(followed.said) == 2 and all("is damaged" in line for line in followed.said)
    assert followed.follower.refused.keys() == {"2-delta", "4-whole"}
    shutil.rmtree(tmp_path / "2-delta")
    copy(made, tmp_path, "2-delta")
    assert followed.take() == 2 and scores(followed.model) == expected[2]


def test_a_folder_that_cannot_be_looked_into_has_a_line(made: Path, tmp_path: Path) -> None:
    followed = Followed(made, tmp_path)
    (tmp_path / "2-delta").mkdir()
    (tmp_path / "2-delta" / "delta.json").symlink_to("delta.json")  # leads to itself
    assert [followed.take(), followed.take()] == [1, 1] and len(followed.said) == 1
    assert list(followed.follower.refused) == ["2-delta"]
    shutil.rmtree(tmp_path / "2-delta")
    copy(made, tmp_path, "2-delta")
    assert followed.take() == 2 and followed.follower.refused == {}


def test_an_export_of_another_model_is_refused(made: Path, tmp_path: Path) -> None:
    followed = Followed(made, tmp_path)
    copy(made, tmp_path, "4-whole")
    file = tmp_path / "4-whole" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model": "another"}))
    assert followed.take() == 1 and "is an export of another model" in followed.follower.refused["4-whole"]


@pytest.mark.parametrize("name", ["2-delta", "4-whole"])
def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(
    name: str, made: Path, expected: dict[int, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(made, tmp_path)
    copy(made, tmp_path, name)
    read = "read_delta" if name == "2-delta" else "load_programs"
    content = getattr(serving_versions, read)

    def replacing(folder: Path, *others: object) -> Any:
        found = content(folder, *others)
        shutil.rmtree(folder)
        shutil.copytree(made / "5-delta", folder)
        return found

    with monkeypatch.context() as replaced:
        replaced.setattr(serving_versions, read, replacing)
        assert followed.take() == 1 and scores(followed.model) == expected[1]
    assert list(followed.follower.refused) == [name]
    shutil.rmtree(tmp_path / name)
    copy(made, tmp_path, name)
    assert followed.take() == int(name[0])


def test_another_version_of_the_served_number_is_listed(made: Path, tmp_path: Path) -> None:
    followed = Followed(made, tmp_path)
    copy(made, tmp_path, NAMES[0])
    assert followed.take() == 1 and followed.follower.refused == {}
    file = tmp_path / NAMES[0] / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": 4}))
    assert followed.take() == 1 and "export whole with a later number" in followed.follower.refused[NAMES[0]]


@pytest.mark.parametrize("error", [MemoryError, OSError, RuntimeError])
@pytest.mark.parametrize("name", ["read_delta", "exchange"])
def test_errors_that_may_pass_are_listed_and_tried_again(
    name: str, error: type[Exception], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(made, tmp_path)
    copy(made, tmp_path, "2-delta")
    with monkeypatch.context() as failing:

        def fail(*_: object) -> None:
            raise error("for a while")

        failing.setattr(serving_versions, name, fail)
        assert [followed.take(), followed.take()] == [1, 1]
        assert followed.follower.refused == {"2-delta": f"{error.__name__}: for a while"} and len(followed.said) == 1
    assert followed.take() == 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + serving_versions.RETRY_SECONDS)
    assert followed.take() == 2
    followed.take()
    assert followed.follower.refused == {}


def test_a_delta_that_scores_otherwise_is_put_back(made: Path, expected: dict[int, list[float]]) -> None:
    model = ServedModel(LoadedVersion.load(made / NAMES[0], 64))
    manifest = read_manifest(made / NAMES[0])
    before = {
        name: tensor.clone()
        for name, tensor in loaded_weights(load_programs(made / NAMES[0], manifest), manifest)["network.pt2"].items()
    }
    delta, changes = serving_versions.read_delta(made / "2-delta")
    changes[0].values[next(iter(changes[0].values))].add_(1)
    with pytest.raises(UserError, match="scores otherwise here"):
        model.change(read_version(made / "2-delta"), delta, changes)
    assert model.version.sequence == 1 and scores(model) == expected[1]
    assert all(tensor.equal(before[name]) for name, tensor in model.weights["network.pt2"].items())


def test_each_answer_is_of_the_version_that_it_names(
    made: Path, expected: dict[int, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients ask without a pause, with two threads that score, while versions appear."""
    monkeypatch.setattr(serving_versions, "POLL_SECONDS", 0.01)
    followed = Followed(made, tmp_path)
    app = make_app(followed.model, ServerSettings(threads=2), followed.follower)
    body = json.dumps(ROWS).encode()
    seen: dict[int, int] = {}

    async def client() -> None:
        while seen.get(5, 0) < 3:
            reply = await ask(app, body)
            sequence = int(reply.headers[VERSION_HEADER].partition("-")[0])
            assert reply.status == 200 and reply.json()["prediction"] == pytest.approx(expected[sequence], abs=1e-7)
            seen[sequence] = seen.get(sequence, 0) + 1

    async def publish() -> None:
        for number, name in enumerate(NAMES[1:], 2):
            await asyncio.to_thread(copy, made, tmp_path, name)
            while seen.get(number, 0) < 3:
                await asyncio.sleep(0.01)

    async def work() -> None:
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(asyncio.gather(publish(), *(client() for _ in range(4))), 120)
            health = (await ask(app, target="GET /healthz")).json()
            assert health == (await ask(app, target="GET /health")).json()
            assert (health["version"]["sequence"], health["version"]["step"], health["refused"]) == (5, 15, {})
            metrics = (await ask(app, target="GET /metrics")).body.decode()
            assert "distembed_version 5.0" in metrics and "distembed_taken_deltas 3.0" in metrics

    asyncio.run(work())
    assert seen.keys() == {1, 2, 3, 4, 5}


def test_a_change_waits_for_the_batches_that_are_scored_and_holds_others_back() -> None:
    order: list[str] = []
    may_end = threading.Event()

    def score(requests: Any) -> list[Any]:
        order.append("score")
        may_end.wait(10)
        order.append("scored")
        return list(requests)

    async def work() -> None:
        batcher: Any = Batcher(score, ServerSettings(threads=2), lambda _: None)
        first = asyncio.create_task(batcher.answer(RowRequest(ROWS)))
        while not order:
            await asyncio.sleep(0.001)
        change = asyncio.create_task(batcher.between_batches(lambda: order.append("changed")))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(batcher.answer(RowRequest(ROWS)))
        await asyncio.sleep(0.05)
        assert order == ["score"]
        may_end.set()
        await asyncio.gather(first, change, second)
        batcher.close()

    asyncio.run(work())
    assert order == ["score", "scored", "changed", "score", "scored"]


def test_compiled_programs_do_not_take_deltas(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--compiled runs a program with its tables within, which no delta can change"):
        serve(made / NAMES[0], "127.0.0.1", 0, ServerSettings(), print, compiled=True, deltas=tmp_path)
    with pytest.raises(UserError, match="is a delta, version 2: serve the whole export before it, with --deltas"):
        LoadedVersion.load(made / "2-delta", 64)
    with pytest.raises(UserError, match="the folder of versions .* cannot be read"):
        VersionFollower(tmp_path / "none", ServedModel(LoadedVersion.load(made / NAMES[0], 64)), 64, print)
