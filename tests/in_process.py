"""The ``distembed`` command in the process of the test, which loads what all commands need once."""

import io
import os
import subprocess
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from unittest import mock

import pytest

from distembed.commands.cli import main


def in_this_process(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Does what ``python -m distembed`` does and checks the exit code; output and errors are text."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["distembed", *map(str, arguments)]))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(redirect_stderr(errors))
        ended = stack.enter_context(pytest.raises(SystemExit))
        main()
    said, told = (stream.buffer.getvalue().decode() for stream in (output, errors))  # type: ignore[attr-defined]
    assert ended.value.code == code, f"exit code {ended.value.code}\n{said}\n{told}"
    return subprocess.CompletedProcess(arguments, code, said, told)
