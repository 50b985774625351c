"""Laws of files that appear whole or not at all."""

import errno
import shutil
from pathlib import Path

import pytest

from distembed.base.errors import RunError, UserError
from distembed.base.files import full_disk_explained, read_folder_json, read_json, whole_file, write_json, write_text


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


def test_a_folder_that_is_deleted_while_a_file_is_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    file = tmp_path / "run" / "run.json"
    with pytest.raises(RunError, match="run.json could not be written.*; choose another folder"), whole_file(file):
        shutil.rmtree(file.parent)
    with pytest.raises(KeyError), whole_file(file):
        shutil.rmtree(file.parent)
        raise KeyError
    assert not file.parent.exists()


@pytest.mark.parametrize(
    ("error", "max_file_size", "explained"),
    [
        (OSError(errno.ENOSPC, "full"), False, True),
        (OSError(errno.EDQUOT, "quota"), False, True),
        (OSError("[Errno 28] No space left on device"), False, True),
        (OSError(errno.EFBIG, "large"), True, True),
        (OSError(errno.EFBIG, "large"), False, False),
        (OSError(errno.EIO, "broken"), True, False),
        (RunError("explained already: No space left"), False, False),
    ],
)
def test_what_the_system_refuses_to_write_is_explained_and_other_errors_stay(
    error: Exception, max_file_size: bool, explained: bool
) -> None:
    with (
        pytest.raises(RunError if explained else type(error)) as caught,
        full_disk_explained(lambda refused: f"in our words: {refused}", max_file_size=max_file_size),
    ):
        raise error
    assert str(caught.value) == (f"in our words: {error}" if explained else str(error))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "value.json cannot be read: .*No such file.*; write it again."),
        (b"", "value.json cannot be read: it is not valid JSON .*; write it again."),
        (b"\xff{", "value.json cannot be read: it is not valid JSON"),
        (b"[" * 200_000, "value.json cannot be read: it is not valid JSON"),
    ],
)
def test_json_that_cannot_be_read_is_refused_with_the_remedy(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "value.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_json(file, "write it again")


def test_a_folder_without_its_description_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "thing.json"
    with pytest.raises(UserError, match="the thing folder .*folder does not exist; make one."):
        read_folder_json(file, "thing", "make one")
    file.parent.mkdir()
    with pytest.raises(UserError, match="folder is no thing: it has no thing.json; make one."):
        read_folder_json(file, "thing", "make one")
    write_json(file, {"a": [1]})
    assert read_folder_json(file, "thing", "make one") == {"a": [1]}
