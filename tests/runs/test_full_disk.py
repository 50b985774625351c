"""A disk that is full while a run records: an error that names the place, and no traceback of any thread."""

from pathlib import Path

import pytest

from distembed.base.errors import RunError
from distembed.base.files import whole_file
from distembed.training.run_folder.folder import RunFolder


def test_metrics_that_find_no_room_end_the_run_with_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(RunError, match=f"records in {tmp_path}/run could not be written.*No space left.*are left"):
        with run.open("data: {}\n", {}, 0), open("/dev/full", "a") as full:
            run._metrics = full
            run.record("train", 1, {"loss": 0.5})
    assert "Traceback" not in capfd.readouterr().err


def test_a_file_that_finds_no_room_is_named_with_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"out could not be written \(.*No space left.*\) after 5 B; [\d,]+ MiB are left"
    ):
        with whole_file(tmp_path / "out") as temporary:
            Path(temporary).write_bytes(b"12345")
            with open("/dev/full", "wb") as full:
                full.write(b"x")
    assert not list(tmp_path.iterdir())
