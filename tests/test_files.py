"""Laws of files that appear whole or not at all."""

from pathlib import Path

import pytest

from distembed.errors import RunError
from distembed.files import whole_file, write_json, write_text


def test_a_folder_that_was_deleted_does_not_come_back_with_one_file(tmp_path: Path) -> None:
    file = tmp_path / "run" / "run.json"
    with pytest.raises(RunError, match="run.json could not be written"):
        write_json(file, {"status": "failed"})
    assert not file.parent.exists()
    write_text(file, "text", make_folder=True)
    assert file.read_text() == "text" and [each.name for each in file.parent.iterdir()] == ["run.json"]


def test_on_an_error_what_was_there_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(KeyError), whole_file(file) as temporary:
        Path(temporary).write_text("half")
        raise KeyError
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]
