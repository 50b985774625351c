"""What commands are asked to write: nothing is replaced unasked, and what cannot be written is told before the work."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distembed.base.errors import RunError, UserError
from distembed.base.files import require_file, require_folder
from distembed.commands import cli
from distembed.commands.shared import console
from tests.small_runs import train_small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """The run of 4 steps, and its config beside it."""
    return train_small(tmp_path_factory.mktemp("finished"), dataset, 4)


def call(*arguments: object) -> str:
    """Runs the command in this process, which has loaded torch; returns what it says."""
    with console.capture() as said:
        code = cli.app([str(argument) for argument in arguments], standalone_mode=False)
    assert code in (None, 0)
    return said.get()


COMMANDS: dict[str, tuple[str, Callable[[Path, Path], list[Any]]]] = {
    "predict": (".csv", lambda run, output: ["predict", run, "--output", output]),
    "report": (".html", lambda run, output: ["report", run, "--output", output]),
    "materialise": (".parquet", lambda run, output: ["materialise", run, "--table", "C1", "--output", output.parent]),
    "plan report": (".html", lambda run, output: ["plan", run.parent / "config.yaml", "--report", output]),
    "plan chart": (".svg", lambda run, output: ["plan", run.parent / "config.yaml", "--report", output]),
    "plan image": (".png", lambda run, output: ["plan", run.parent / "config.yaml", "--report", output]),
    "plan output": (".json", lambda run, output: ["plan", run.parent / "config.yaml", "--output", output]),
    "plan compress": (".yaml", lambda run, output: ["plan", run.parent / "config.yaml", "--compress", output]),
}
MADE_TO_BE_LOOKED_AT = ("report", "plan report", "plan chart", "plan image")


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_replaced_only_where_that_is_asked_for(run: Path, tmp_path: Path, name: str) -> None:
    suffix, arguments = COMMANDS[name]
    output = tmp_path / f"C1{suffix}"
    output.write_bytes(b"<html>mine, made with distembed</html>")
    with pytest.raises(UserError, match="exists already; name a new file, or add --overwrite"):
        call(*arguments(run, output))
    assert output.read_bytes() == b"<html>mine, made with distembed</html>"
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    call(*arguments(run, output), "--overwrite")
    written = output.read_bytes()
    assert b"mine" not in written
    if name in MADE_TO_BE_LOOKED_AT:
        call(*arguments(run, output))
    else:
        with pytest.raises(UserError, match="exists already"):
            call(*arguments(run, output))
    assert output.read_bytes() == written


def place(folder: Path, kind: str, suffix: str) -> Path:
    """Makes a path at which nothing can be written."""
    path = folder / f"C1{suffix}"
    if kind == "loop":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "under a file":
        (folder / "file").write_text("")
        path = folder / "file" / path.name
    elif kind == "under a loop":
        (folder / "loop").symlink_to("loop")
        path = folder / "loop" / path.name
    elif kind == "long":
        path = folder / ("x" * 300) / path.name
    return path


@pytest.mark.parametrize("kind", ["loop", "folder", "pipe", "under a file", "under a loop", "long"])
@pytest.mark.parametrize("name", ["predict", "report", "materialise", "plan report", "plan output", "plan compress"])
def test_what_cannot_be_written_is_told_before_the_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    suffix, arguments = COMMANDS[name]
    output = place(tmp_path, kind, suffix)
    for work in (
        "distembed.training.inference.open_run",
        "distembed.training.materialise.load_weights",
        "distembed.reports.report.RunRecord.read",
        "distembed.reports.plan.run_plan.report_capacity",
        "distembed.reports.plan.run_plan.compress_config",
    ):
        monkeypatch.setattr(work, lambda *_: pytest.fail("the work was begun"))
    with pytest.raises((UserError, RunError), match="--(output|report|compress) .*(name|choose|give) a"):
        call(*arguments(run, output), "--overwrite")


@pytest.mark.parametrize("kind", ["loop", "pipe", "under a file", "under a loop", "long"])
def test_a_folder_that_cannot_be_made_is_told_before_the_first_step(run: Path, tmp_path: Path, kind: str) -> None:
    folder = place(tmp_path, kind, "")
    with pytest.raises(UserError, match="--run-dir .*C1 (is|cannot)"):
        call("train", run.parent / "config.yaml", "--run-dir", folder)
    with pytest.raises(UserError, match="--run-dir .*C1 (is|cannot)"):
        require_folder("--run-dir", folder)


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    require_file("--output", tmp_path / "new" / "deeper" / "file", overwrite=False)
    require_folder("--run-dir", tmp_path / "new" / "deeper")
    require_folder("--run-dir", tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    require_file("--output", tmp_path / "link", overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["predict", "report", "materialise", "plan report", "plan output", "train"])
def test_names_in_other_encodings_are_refused_as_files_of_all_kinds_cannot_have_them(
    run: Path, tmp_path: Path, name: str
) -> None:
    suffix, arguments = COMMANDS.get(
        name, ("", lambda run, out: ["train", run.parent / "config.yaml", "--run-dir", out])
    )
    output = tmp_path / "folder\udcff" / f"C1{suffix}"
    with pytest.raises(UserError, match=r"--[a-z-]+ '.*\\udcff.*' is not written in UTF-8"):
        call(*arguments(run, output))
    assert not list(tmp_path.iterdir())


def test_a_place_that_takes_no_files_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--output /proc/x.csv cannot be written: no file can be made in /proc"):
        require_file("--output", Path("/proc/x.csv"), overwrite=False)
