"""Sequences with times: raw rows get the scores of prepared rows by a loaded run, a file, an exported program, HTTP."""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import distembed
from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.serving.model_folder.programs import load_programs
from distembed.serving.model_folder.reading import read_manifest, require_sample
from distembed.serving.rows.sequence_rows import SequenceRowDecoder
from tests.in_process import in_this_process as command
from tests.server.asgi import post, served, stream
from tests.server.exported_models import exported, once
from tests.serving.test_recommender_rows import rows_of, values
from tests.training.test_recommenders import write_config

BEST = 10
START = 881_250_949
"""Seconds since 1970, which float32 would round to multiples of 64."""
HSTU = {"name": "hstu", "dropout": 0.0, "num_heads": 2, "times": "at"}
GRU = {"name": "gru", "hidden": 8, "dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {"hstu": HSTU, "gru": GRU, "sasrec": {"name": "sasrec", "dropout": 0.0}}


def histories() -> dict[str, list[tuple[str, int, float]]]:
    """Returns the items of each user with their times and prices, in the order of time; gaps are seconds to weeks."""
    rng = np.random.default_rng(3)
    users = {}
    for user in range(40):
        times = START + user + np.cumsum(rng.integers(0, 2 ** rng.integers(1, 21, size=12)))
        items, prices = rng.integers(0, 25, size=12), rng.random(12).round(3)
        users[f"u{user}"] = [
            (f"i{item}", int(time), float(price)) for item, time, price in zip(items, times, prices, strict=True)
        ]
    return users


def timed_runs(factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the dataset ``sequences``, and a run of each model, named after it."""

    def make() -> Path:
        folder = factory.mktemp("timed")
        lines = ["user\titem\tat\tprice"]
        for user, own in histories().items():
            lines += [f"{user}\t{item}\t{time}\t{price}" for item, time, price in own]
        (folder / "rows.tsv").write_text("\n".join(lines) + "\n")
        columns = ("--time", "at", "--dense", "price,at")
        command("prepare", "sequences", folder / "rows.tsv", *columns, "--output", folder / "sequences")
        for name, model in MODELS.items():
            sections = {"model": model, "train": TRAIN} if name == "hstu" else {"model": model}
            config = write_config(folder / f"{name}.yaml", "softmax", {"sequences": folder / "sequences"}, **sections)
            command("train", config, "train.max_steps=4", "--run-dir", folder / name)
        return folder

    return once("timed", make)


TRAIN = {
    "batch_size": 13,
    "precision": "fp32",
    "device": "cpu",
    "dense_optimizer": {"name": "adam", "learning_rate": 0.05},
    "sparse_optimizer": {"name": "sgd", "learning_rate": 0.5},
}
"""Steps so large that times matter to the scores."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return timed_runs(tmp_path_factory)


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported model with times."""
    return exported(folder / "hstu", tmp_path_factory.mktemp("exported") / "model")


def test_rows(folder: Path) -> list[dict[str, Any]]:
    """Returns what is known of each row of the test split, as a client has it: all but the item to predict."""
    users, full = values(folder / "sequences", "user"), histories()
    known = [full[str(users[row["user"]])][:-1] for row in rows_of(folder / "sequences", "test")]
    return [
        {"item": [item for item, _, _ in own], "at": [time for _, time, _ in own], "price": [each[2] for each in own]}
        for own in known
    ]


test_rows.__test__ = False  # type: ignore[attr-defined]


def scores_of(table: pa.Table) -> np.ndarray:
    return np.stack([table[f"score_{place}"].to_numpy() for place in range(1, BEST + 1)], axis=1)


def items_of(table: pa.Table) -> list[list[str]]:
    return [list(row.values()) for row in table.select([f"item_{i}" for i in range(1, BEST + 1)]).to_pylist()]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_raw_rows_get_the_predictions_of_the_split(folder: Path, tmp_path: Path, name: str) -> None:
    """The times of raw rows are those of the file; prepared rows have the time since the first, to the bit."""
    command("predict", folder / name, "--output", tmp_path / "split.parquet")
    expected, rows = pq.read_table(tmp_path / "split.parquet"), test_rows(folder)
    model = distembed.load(folder / name)
    texts = [{key: " ".join(map(str, entries)) for key, entries in row.items()} for row in rows]
    (tmp_path / "rows.csv").write_text(
        "item,at,price\n" + "".join(f"{row['item']},{row['at']},{row['price']}\n" for row in texts)
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [model.predict(rows), model.predict(texts)]
    for file in ("rows.csv", "rows.parquet"):
        command("predict", folder / name, "--input", tmp_path / file, "--output", tmp_path / f"found-{file}.parquet")
        found.append(pq.read_table(tmp_path / f"found-{file}.parquet"))
    for table in found:
        assert items_of(table) == items_of(expected)
        np.testing.assert_array_equal(scores_of(table), scores_of(expected))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_served_rows_get_the_scores_of_the_run(folder: Path, tmp_path: Path, name: str) -> None:
    """Random rows, of which some have more items than the network sees, and an item that nobody knows."""
    run, model = distembed.load(folder / name), exported(folder / name, tmp_path / "model")
    manifest = read_manifest(model)
    reads = {"hstu": ["at"], "gru": ["at", "price"], "sasrec": []}[name]
    assert sorted(each.name for each in manifest.sequences) == reads
    assert ("sequences" in manifest.network.inputs) == bool(reads)
    assert require_sample(model, manifest, load_programs(model, manifest)) < 1e-6
    rng, rows = np.random.default_rng(4), []
    for length in (1, 2, 9, 60, 7):
        items = [f"i{item}" for item in rng.integers(0, 25, size=length)]
        times = START + np.cumsum(rng.integers(0, 2 ** rng.integers(1, 21, size=length)))
        rows.append({"item": items, "at": times.tolist(), "price": rng.random(length).tolist()})
    rows[2]["item"][3] = "nobody knows it"
    rows = [{key: own for key, own in row.items() if key == "item" or key in reads} for row in rows]
    expected, app = run.predict(rows), served(model, most_rows=3)
    reply = post(app, rows).json()
    arrow = pa.ipc.open_stream(post(app, stream(pa.Table.from_pylist(rows)), content_type=ARROW).body).read_all()
    for found in (reply, arrow.to_pydict()):
        assert found["items"] == items_of(expected)
        np.testing.assert_allclose(found["scores"], scores_of(expected), rtol=1e-6, atol=1e-6)
    if reads:
        lacking = post(app, [{"item": ["i1", "i2"]}])
        assert lacking.status == 422 and all(f"'{name}'" in lacking.json()["error"] for name in reads)
        assert "Give each row a list 'item' and lists as long of" in lacking.json()["error"]


ARROW = "application/vnd.apache.arrow.stream"


def test_times_decide_and_only_by_their_differences(folder: Path) -> None:
    run, rows = distembed.load(folder / "hstu"), test_rows(folder)[:5]
    shifted = [{**row, "at": [time - START - 10**6 for time in row["at"]]} for row in rows]  # negative ones too
    assert min(shifted[0]["at"]) < 0
    np.testing.assert_array_equal(scores_of(run.predict(shifted)), scores_of(run.predict(rows)))
    equal = [{**row, "at": [START] * len(row["at"])} for row in rows]
    assert np.abs(scores_of(run.predict(equal)) - scores_of(run.predict(rows))).max() > 1e-3
    dates = pa.table({"item": [row["item"] for row in rows], "at": [row["at"] for row in rows]})
    dates = dates.set_column(1, "at", dates["at"].cast(pa.list_(pa.timestamp("s"))))
    np.testing.assert_array_equal(scores_of(run.predict(dates)), scores_of(run.predict(rows)))


MALFORMED: dict[str, Any] = {
    "missing": None,
    "empty": [],
    "short": [5],
    "long": [5, 6, 7],
    "text": ["noon", "1 pm"],
    "no list": "noon",
    "unsorted": [7, 5],
    "null": [5, None],
    "nan": [5, float("nan")],
    "infinite": [5, float("inf")],
}


def test_malformed_times_are_named_with_the_remedy(folder: Path, model: Path) -> None:
    """A row has the same error from a loaded run and from the server, and the other rows have scores."""
    run, app, good = distembed.load(folder / "hstu"), served(model), {"item": ["i1", "i2"], "at": [5, 7]}
    for wrong in MALFORMED.values():
        rows = [good, {"item": ["i1", "i2"], "at": wrong}, good]
        with pytest.raises(UserError, match="1 of 3 rows are malformed: row 1, column 'at': ") as raised:
            run.predict(rows)
        (bad,) = post(app, rows).json()["rows"]
        assert (bad["row"], bad["field"]) == (1, "at") and bad["reason"] in str(raised.value)
        assert "give as many times as values, both sorted by time, in the unit of the prepared data" in bad["reason"]
        found = post(app, rows, "?malformed=null").json()
        assert found["items"][1] is None and found["items"][0] == found["items"][2] != None  # noqa: E711
    shown = [{"item": ["i1", "i2"], "at": wrong} for wrong in ([7, 5], [5, None], ["noon", "1 pm"])]
    reasons = [each["reason"] for each in post(app, shown).json()["rows"]]
    for text, reason in zip(("['7', '5']", "['5', None]", "['noon', '1 pm']"), reasons, strict=True):
        assert reason.startswith(text)


def test_a_dataset_without_the_record_of_its_time_is_refused(folder: Path) -> None:
    """Datasets of earlier versions do not say which list is the time; models that read none are not concerned."""
    dataset = folder / "hstu" / "dataset"
    manifest = Manifest.load(dataset)
    assert manifest.preparation["time_since_first"] == "at"
    earlier = {name: value for name, value in manifest.preparation.items() if name != "time_since_first"}
    manifest = dataclasses.replace(manifest, preparation=earlier)
    assert SequenceRowDecoder(dataset, manifest, ["item"]).decode(pa.table({"item": [["i1"]]})).is_good.all()
    with pytest.raises(UserError, match="reads at beside the items, .* does not record which list is the time: prep"):
        SequenceRowDecoder(dataset, manifest, ["item", "at"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["hstu", "sasrec"])
def test_samples_that_are_made_up_are_raw_rows_too(folder: Path, tmp_path: Path, name: str) -> None:
    """Without the dataset's rows, the sample has known items, and times in order."""
    (folder / "sequences").rename(folder / "moved")
    try:
        model = exported(folder / name, tmp_path / "model")
    finally:
        (folder / "moved").rename(folder / "sequences")
    runpy.run_path(str(model / "serving_example.py"), run_name="__main__")  # compares with sample.json
    rows = json.loads((model / "sample.json").read_text())["rows"]
    assert post(served(model), [row for row in rows if row["item"]]).status == 200


@pytest.mark.thorough
def test_the_script_of_the_folder_scores_raw_rows(folder: Path, model: Path) -> None:
    score = runpy.run_path(str(model / "serving_example.py"))["score"]
    rows = [{"item": row["item"], "at": row["at"]} for row in test_rows(folder)[:5]]
    rows[1]["item"][2] = "nobody knows it"
    with torch.inference_mode():
        _, scores = score(rows)
    np.testing.assert_allclose(scores, scores_of(distembed.load(folder / "hstu").predict(rows)), rtol=1e-6, atol=1e-6)
    for name, wrong in MALFORMED.items():
        if name != "no list":
            with pytest.raises(ValueError, match="row 0, column 'at'"):
                score([{"item": ["i1", "i2"], "at": wrong}])
