"""Laws of the settings of a sweep: every combination once, under a name of its own, with settings that read back."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.base.validation import parse_yaml
from distembed.reports.comparison import _common_name
from distembed.training.config import load_config
from distembed.training.sweeps.axes import Axis, named_runs, parse_axes
from distembed.training.sweeps.train import share_of_cores


def never(settings: Sequence[str]) -> bool:
    return False


def values_of(axis: Axis) -> list[Any]:
    return [parse_yaml(override.partition("=")[2], override) for override in axis.overrides]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,1,2", [0, 1, 2]),
        ("[0, 1, 2]", [0, 1, 2]),
        ("0.1, 1e-3,-1,null,true", [0.1, 0.001, -1, None, True]),
        ("naive", ["naive"]),
        ('"a,b",c', ["a,b", "c"]),
        ("'no',\"1\"", ["no", "1"]),
        ("[512,256],[256]", [[512, 256], [256]]),
        ("[[512,256],[256]]", [[512, 256], [256]]),
        ("[[512,256]]", [[512, 256]]),
        ("{name: dcn, deep: [8, 4]}", [{"name": "dcn", "deep": [8, 4]}]),
        ("{name: dcn},{name: dlrm}", [{"name": "dcn"}, {"name": "dlrm"}]),
        ("s3://bucket/a,data/b", ["s3://bucket/a", "data/b"]),
        ("'ä \"quoted\" 😀',b", ['ä "quoted" 😀', "b"]),
    ],
)
def test_values_are_those_of_yaml(text: str, expected: list[Any]) -> None:
    (axis,) = parse_axes([f"data.path={text}"], never)
    assert axis.key == "data.path" and values_of(axis) == expected


@given(
    st.lists(st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()), min_size=2, max_size=6)
)
def test_any_values_read_back_under_names_of_their_own(values: list[Any]) -> None:
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    plain = all(character.isprintable() and ord(character) < 0xD800 for text in texts for character in text)
    if len(set(texts)) < len(texts) or not plain:
        return
    (axis,) = parse_axes([f"a.b={','.join(texts)}"], never)
    assert values_of(axis) == values
    names = [run.name for run in named_runs([axis])]
    assert len({name.lower() for name in names}) == len(values), "file systems may take no notice of capitals"
    assert all(name.startswith("b=") and "/" not in name and len(name.encode()) < 255 for name in names)


def test_every_combination_is_there_once_and_the_last_setting_varies_fastest() -> None:
    settings = ["train.seed=0,1", "data.path=x", "train.dense_optimizer.learning_rate=0.1,0.2", "train.epochs=1,2,3"]
    runs = named_runs(parse_axes(settings, never))
    expected = [
        (f"train.seed={seed}", "data.path=x", f"train.dense_optimizer.learning_rate={rate}", f"train.epochs={epochs}")
        for seed, rate, epochs in itertools.product((0, 1), (0.1, 0.2), (1, 2, 3))
    ]
    assert [run.overrides for run in runs] == expected
    assert runs[1].name == "learning_rate=0.1,epochs=2,seed=0" and runs[1].recipe == "learning_rate=0.1,epochs=2"
    assert len({run.name for run in runs}) == 12 and len({run.recipe for run in runs}) == 6
    for recipe in {run.recipe for run in runs}:
        assert _common_name([run.name for run in runs if run.recipe == recipe]) == recipe, "as reports call them"


def test_names_have_as_much_of_keys_as_tells_them_apart() -> None:
    rates = [f"train.{kind}_optimizer.learning_rate=0.1,0.2" for kind in ("dense", "sparse")]
    (first, *_) = named_runs(parse_axes(rates, never))
    assert first.name == "dense_optimizer.learning_rate=0.1,sparse_optimizer.learning_rate=0.1"
    assert [run.name for run in named_runs(parse_axes(["train.seed=3"], never))] == ["run"]
    assert [run.name for run in named_runs([])] == ["run"]
    seeds = named_runs(parse_axes(["train.seed=3,4"], never))
    assert [run.name for run in seeds] == ["seed=3", "seed=4"] and len({run.recipe for run in seeds}) == 1


def test_a_list_that_the_setting_takes_is_one_value() -> None:
    def is_valid(settings: Sequence[str]) -> bool:
        try:
            load_config(None, settings)
        except UserError:
            return False
        return True

    settings = ["model.top=[64,32]", "train.seed=[0,1]", "model.deep=[32]", "model.name=dcn,dlrm"]
    overrides = [axis.overrides for axis in parse_axes(settings[:2], is_valid)]
    assert overrides == [("model.top=[64,32]",), ("train.seed=0", "train.seed=1")]
    # whether the model has such a setting is said by one that comes later
    (deep, _) = parse_axes(settings[2:], is_valid)
    assert deep.overrides == ("model.deep=[32]",)


@pytest.mark.parametrize("num_cores", [1, 2, 7, 64])
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_workers_have_even_shares_of_the_cores(monkeypatch: pytest.MonkeyPatch, num_cores: int, workers: int) -> None:
    cores = [3 * core for core in range(num_cores)]
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(cores))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert share_of_cores(0, workers) == ()
    monkeypatch.delenv("OMP_NUM_THREADS")
    shares = [share_of_cores(index, workers) for index in range(workers)]
    assert {len(share) for share in shares} == {max(1, num_cores // workers)}
    used = [core for share in shares for core in share]
    assert set(used) <= set(cores)
    assert max(map(used.count, used)) - min(map(used.count, used)) <= (num_cores < workers)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.seed="], "train.seed= has no values"),
        (["train.seed=[]"], "has no values"),
        (["train.seed=0,1,0"], "train.seed has 0 more than once"),
        (["train.seed=0", "train.seed=1"], "train.seed is given more than once"),
        (["a=0,{"], "not YAML"),
        ([f"a{i}={','.join(map(str, range(10)))}" for i in range(5)], "100,000 runs; a sweep has 10,000 at most"),
    ],
)
def test_what_makes_no_runs_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        named_runs(parse_axes(settings, never))


def test_settings_of_a_run_are_those_that_train_takes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"train": {"batch_size": 8}}))
    axes = parse_axes(["train.seed=0,1", "model.top=[8,4],[4]", "embedding.default.partition=naive,remainder"], never)
    for run in named_runs(axes):
        config = load_config(tmp_path / "config.yaml", run.overrides)
        assert f"seed={config.train.seed}" in run.name and config.embedding.default.partition in run.name
