"""Run folders that are damaged, in every file and every way, under every command that reads them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.commands import cli
from distembed.commands.shared import console
from tests.small_runs import train_small


def replace(kind: str, file: Path) -> None:
    """Puts something else in a file's place."""
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "pipe":
        os.mkfifo(file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "null": lambda file: file.write_bytes(b"null"),
    "list": lambda file: file.write_bytes(b"[1]"),
    "nested": lambda file: file.write_bytes(b"[" * 100_000),
    "bytes": lambda file: file.write_bytes(bytes(range(256))),
    "other values": lambda file: file.write_bytes(
        b'{"schemes": 1, "graphs": 5, "assignments": [], "metrics": {"a": 1}}'
    ),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "folder": lambda file: replace("folder", file),
    "loop": lambda file: replace("loop", file),
    "pipe": lambda file: replace("pipe", file),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """The run of 4 steps, and its config beside it."""
    return train_small(tmp_path_factory.mktemp("finished"), dataset, 4)


QUICK = {"run.json": ["empty", "nested", "other values", "pipe"], "config.yaml": ["null", "bytes", "pipe"]} | {
    "plan.json": ["half", "nested"],
    "metrics.jsonl": ["bytes", "pipe"],
    "evaluation.json": ["list", "loop"],
}
"""A sample of the damages of each file."""
CASES = [
    pytest.param(file, damage, marks=() if damage in sample else pytest.mark.slow)
    for file, sample in QUICK.items()
    for damage in DAMAGES
]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_run_is_read_as_far_as_it_goes_or_refused_in_a_sentence(
    run: Path, tmp_path: Path, file: str, damage: str
) -> None:
    damaged, config = tmp_path / "run", run.parent / "config.yaml"
    shutil.copytree(run, damaged)
    DAMAGES[damage](damaged / file)
    commands: dict[str, list[object]] = {
        "report": ["report", damaged, "--output", tmp_path / "report.html"],
        "materialise": ["materialise", damaged, "--table", "C1", "--output", tmp_path],
        "evaluate": ["evaluate", damaged],
        "resume": ["train", config, "train.max_steps=4", "--run-dir", damaged, "--resume"],
    }
    refused = {}
    for name, arguments in commands.items():
        if (
            name != "resume"
            and file == "plan.json"
            or name in ("materialise", "evaluate")
            and file.startswith(("m", "e"))
        ):
            continue  # they do not read it
        try:
            with console.capture():
                cli.app([str(argument) for argument in arguments], standalone_mode=False)
        except UserError as error:
            refused[name] = str(error)
    assert all(str(damaged) in message and len(message) < 2000 for message in refused.values())
    must_refuse = {
        "run.json": set(commands),
        "config.yaml": set(commands) - {"report"}
        if damage not in ("missing", "folder", "loop", "pipe")
        else set(commands),
        "plan.json": set() if damage in ("missing", "loop") else {"resume"},
    }
    if (file, damage) != ("config.yaml", "half") and damage != "other values":
        assert must_refuse.get(file, set()) <= refused.keys()
