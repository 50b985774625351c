"""Configs, overrides and JSON files from whoever made them: nothing is executed, waited for or grown."""

import os
from pathlib import Path

import pytest

from distembed.base import validation
from distembed.base.errors import UserError
from distembed.base.files import read_json
from distembed.base.validation import MAX_BYTES, parse_yaml
from distembed.training.config import load_config

LEVELS = 5000
ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10))
BOMBS = {
    ALIASES: "more than 1,000 values",
    MERGES: "more than 1,000 values",
    "a: &a [*a]": "refers to a value that contains it",
    "train: {seed: &a {b: *a}}": "refers to a value that contains it",
    "[" * LEVELS: "more than 50 levels",
    "{a: " * LEVELS: "more than 50 levels",
    "- " * LEVELS + "1": "more than 50 levels",
    "\n".join(" " * level + "a:" for level in range(500)): "more than 50 levels",
    "a: [" + "1," * 1000 + "]": "more than 1,000 values",
    "train: {seed: 0x" + "f" * 100_000 + "}": "a number has 100,002 characters; give one of at most 1,000",
    "train: {seed: 0x" + "f" * 900 + "}": "train.seed: the number has 3600 bits",
    "train: {seed: " + "1:" * 60_000 + "1}": "train.seed: ",
    "train: {seed: 1" + ":1" * 60_000 + ".5}": "train.seed: ",
    "train: {seed: " + "9" * 5_000 + "}": "a number has 5,000 characters",
    "train: {seed: 1" + "_" * 200_000 + ".}": "a number has 200,002 characters",
    "train: {seed: 2024-01-01" + " " * 200_000 + "x}": "train.seed: ",
    "train: {seed: 0b_}": "a value that cannot be read",
    "train: {seed: 2024-13-45}": "a value that cannot be read",
    "train: {seed: 9223372036854775808}": "train.seed: the number has 64 bits",
    'train: {checkpoint_dir: "a\\0b"}': "train.checkpoint_dir: 'a\\x00b' has the character '\\x00'",
    'train: {checkpoint_dir: "\\ud800"}': "train.checkpoint_dir: '\\ud800' has the character '\\ud800'",
    'embedding: {tables: {"\\udcff": {}}}': "the key '\\udcff'",
}


@pytest.mark.parametrize("text", BOMBS, ids=range(len(BOMBS)))
def test_what_would_grow_or_cannot_be_kept_is_refused(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_VALUES", 1000)  # of 100,000, which take seconds to read
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert BOMBS[text] in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("value", ["[" * LEVELS, "{a: " * LEVELS, "&a [*a]", "0x" + "f" * 9999, "9" * 9999, "x" * 9999])
def test_overrides_are_refused_as_files_are(value: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(None, [f"train.seed={value}"])
    assert "train.seed" in str(error.value) and len(str(error.value)) < 1000


def test_more_overrides_than_a_file_may_hold_are_refused() -> None:
    overrides = [f"train.checkpoint_dir={'x' * (MAX_BYTES // 4)}"] * 4
    with pytest.raises(UserError, match="the overrides have more than 262,144 characters; write such settings into a"):
        load_config(None, overrides)


def test_where_a_number_is_that_cannot_be_read_is_said() -> None:
    for number in ("9" * 5000, "0b_", "2024-13-45"):
        with pytest.raises(UserError, match="line 2, column 12"):
            parse_yaml(f"train:\n    seed:  {number}", "it")


def test_numbers_are_read_as_people_mean_them() -> None:
    text = "[1:30, 1:30.5, 1e-3, 1E5, 1.5e3, .5, 1_000, 0x1f, 0b11, 017, -7, +1.5, 0, 9.]"
    numbers = [0.001, 1e5, 1500.0, 0.5, 1000, 31, 3, 15, -7, 1.5, 0, 9.0]
    assert parse_yaml(text, "it") == ["1:30", "1:30.5", *numbers]
    assert [type(value) for value in parse_yaml("[1e5, 1_0, .inf]", "it")] == [float, int, float]


def test_an_override_within_thousands_of_sections_is_refused() -> None:
    with pytest.raises(UserError, match="within 5000 sections"):
        load_config(None, [".".join(["a"] * LEVELS) + "=1"])


TAGS = [
    "!!python/object/apply:os.system ['touch {canary}']",
    "!!python/object/new:os.system ['touch {canary}']",
    "!!python/object/apply:subprocess.check_call [['touch', '{canary}']]",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/object:object {{}}",
    "!!binary eA==",
    "!!set {{a}}",
    "!!int foo",
    "!!timestamp foo",
    "!mine x",
]


@pytest.mark.parametrize("tag", TAGS, ids=range(len(TAGS)))
def test_tags_are_refused_and_nothing_is_executed(tmp_path: Path, tag: str) -> None:
    canary, path = tmp_path / "canary", tmp_path / "c.yaml"
    path.write_text(f"train:\n  seed: {tag.format(canary=canary)}\n")
    with pytest.raises(UserError, match="it has the tag"):
        load_config(path)
    with pytest.raises(UserError, match="it has the tag"):
        load_config(None, [f"train.seed={tag.format(canary=canary)}"])
    assert not canary.exists()


def make_place(folder: Path, kind: str) -> str:
    place = folder / kind
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "loop":
        place.symlink_to(kind)
    elif kind == "folder":
        place.mkdir()
    elif kind == "latin":
        place.write_bytes(b"a: \xff")
    elif kind == "large":
        place.write_bytes(b"# " + b"x" * MAX_BYTES)
    return {"zero": "/dev/zero", "nul": '"a\\0b"', "surrogate": '"\\ud800"'}.get(kind, kind)


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "latin", "large", "zero", "nul", "surrogate"])
def test_what_is_no_file_of_text_can_neither_be_read_nor_extended(tmp_path: Path, kind: str) -> None:
    place = make_place(tmp_path, kind)
    (tmp_path / "c.yaml").write_text(f"extends: {place}")
    with pytest.raises(UserError, match="cannot be read|extends: "):
        load_config(tmp_path / "c.yaml")
    if kind not in ("nul", "surrogate"):
        with pytest.raises(UserError, match="cannot be read"):
            load_config(tmp_path / place)
        with pytest.raises(UserError, match="cannot be read.*; mend it"):
            read_json(tmp_path / place, "mend it")


def test_files_extend_one_another_to_a_limit(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml")
    (tmp_path / "20.yaml").write_text("train: {seed: 5}")
    assert load_config(tmp_path / "1.yaml").train.seed == 5
    with pytest.raises(UserError, match="20 files extend one another"):
        load_config(tmp_path / "0.yaml")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5_000, '"\ud800', ""])
def test_json_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, errors="surrogatepass")
    with pytest.raises(UserError, match="not valid JSON.*; mend it"):
        read_json(tmp_path / "a.json", "mend it")


def test_aliases_within_the_limit_stand_for_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {bottom: &sizes [8, 4], top: *sizes}\ntrain: &t {seed: 3}\n")
    config = load_config(tmp_path / "c.yaml")
    assert config.model.bottom == config.model.top == [8, 4] and config.train.seed == 3  # type: ignore[attr-defined]
