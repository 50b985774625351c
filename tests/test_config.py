"""Configs: every mistake at once, and exact dumps."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from distembed.base.errors import UserError
from distembed.base.validation import format_yaml, parse_yaml
from distembed.models import DCNConfig
from distembed.training.config import Config, load_config
from distembed.training.train_config import TrainConfig

ROOT = Path(__file__).parents[1]
COMMITTED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if "papers" not in path.parts)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: p.stem)
def test_committed_configs_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_there_are_committed_configs() -> None:
    assert COMMITTED


def test_dump_and_reload_is_exact(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "train.dense_optimizer.learning_rate=1e-3",
            "embedding.tables.C3.collisions=60",
            "model.name=dcn",
            "data.path=x",
        ],
    )
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "c.yaml") == config
    assert config.train.dense_optimizer.learning_rate == 0.001


def test_all_mistakes_are_listed_with_their_paths() -> None:
    with pytest.raises(UserError) as error:
        load_config(
            None,
            [
                "train.batchsize=3",
                "train.epochs=two",
                "train.seed=-1",
                "embedding.default.partition=quotientremainder",
                "embedding.tables.C3.colisions=4",
                "modle.x=3",
                "model.bottm=[3]",
            ],
        )
    text = str(error.value)
    assert text.startswith("7 mistakes")
    for part in (
        "train.batchsize: unknown key; did you mean train.batch_size?",
        "train.epochs: Input should be a valid integer; got 'two' (str)",
        "train.seed: Input should be greater than or equal to 0; got -1 (int)",
        "embedding.default.partition is 'quotientremainder'",
        "Did you mean 'quotient_remainder'?",
        "embedding.tables.C3.colisions: unknown key; did you mean embedding.tables.C3.collisions?",
        "modle: unknown key; did you mean model?",
        "model.bottm: unknown key; did you mean model.bottom?",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("x", "not of the form"),
        ("=3", "not of the form"),
        ("train=null", "train: Input should be an object"),
        ("train.epochs.x=3", "train.epochs"),
        ("train.epochs=true", "got True"),
        ("train.epochs=1.5", "train.epochs"),
        ("train.dense_optimizer.learning_rate=.nan", "finite"),
        ("train.dense_optimizer.learning_rate=0", "greater than 0"),
        (
            "train.dense_optimizer.name=adagrda",
            "train.dense_optimizer.name is 'adagrda', which is not known. Did you mean 'adagrad'?",
        ),
        ("model.name=dlm", "'dlm' is not a model; known: dlrm, dcn"),
        ("model=3", "model: Input should be an object"),
        ("data.path=[", "is not YAML"),
    ],
)
def test_wrong_overrides_are_explained(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(None, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "holds a list"),
        ("train: {seed: 1, seed: 2}", "the key 'seed' is given twice"),
        ("train: {epochs: 1}\ntrain: {seed: 2}", "the key 'train' is given twice"),
        ("? [1, 2]\n: 3", "is no name"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert message in str(error.value)


def test_anchors_and_merges_are_understood(tmp_path: Path) -> None:
    text = "x: &x {learning_rate: 0.5}\ntrain: {dense_optimizer: {<<: *x, name: sgd}}"
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match="1 mistake.*\n  x: unknown key"):
        load_config(tmp_path / "c.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("")
    assert load_config(tmp_path / "c.yaml") == Config()


def test_a_config_extends_another_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "base.yaml").write_text("model: {name: dlrm, top: [8]}\ntrain: {seed: 3, epochs: 5}\n")
    (tmp_path / "middle.yaml").write_text("extends: base.yaml\ntrain: {epochs: 2}\n")
    (tmp_path / "deeper" / "leaf.yaml").write_text("extends: ../middle.yaml\nembedding: {default: {collisions: 60}}\n")
    config = load_config(tmp_path / "deeper" / "leaf.yaml", ["train.seed=4"])
    assert (config.train.seed, config.train.epochs, config.embedding.default.collisions) == (4, 2, 60)
    assert config.model == load_config(tmp_path / "base.yaml").model


def test_a_section_of_another_name_replaces_the_whole(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {name: dlrm, top: [8]}\n")
    (tmp_path / "dcn.yaml").write_text("extends: base.yaml\nmodel: {name: dcn}\n")
    assert load_config(tmp_path / "dcn.yaml").model.name == "dcn"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: a.yaml", "break the circle"),
        ("extends: other.yaml", "break the circle"),
        ("extends: [a.yaml]", r"extends is \['a.yaml'\]; give the path"),
        ("extends: missing.yaml", "missing.yaml cannot be read"),
    ],
)
def test_what_cannot_be_extended_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("extends: a.yaml")
    with pytest.raises(UserError, match=message):
        load_config(tmp_path / "a.yaml")


def test_a_section_of_another_kind_is_no_model() -> None:
    with pytest.raises(ValidationError, match="model"):
        Config(model=TrainConfig())  # type: ignore[arg-type]
    assert Config(model=DCNConfig()).model == DCNConfig()


@pytest.mark.parametrize(
    "text", ["1e3", "1.5", "1:30", "0x1f", "007", "null", "yes", ".inf", "2024-01-01", "-", "~", ""]
)
def test_texts_that_look_like_something_else_are_read_back(text: str) -> None:
    for value in ({"path": text}, {"path": [text, 1e-05, 1000.0, 3, None, True]}):
        assert parse_yaml(format_yaml(value), "it") == value


def test_a_model_that_does_not_fit_its_task_is_refused_by_name() -> None:
    with pytest.raises(
        UserError,
        match=r"model.name is 'mf' and task.name is 'click'.* takes the models dlrm, dcn.* for the tasks rating",
    ):
        load_config(None, ["model.name=mf"])
    with pytest.raises(UserError, match=r"model.name is 'dlrm' and task.name is 'rating'.* takes the models mf"):
        load_config(None, ["task.name=rating"])
    assert load_config(None, ["model.name=mf", "task.name=rating"]).model.name == "mf"
