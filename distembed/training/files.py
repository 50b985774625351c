"""Small files, written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes a text file by renaming a finished temporary one into its place."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON whole or not at all; NaN becomes null."""
    write_text(path, json.dumps(finite(value), indent=2) + "\n")


def finite(value: Any) -> Any:
    """The same with every float that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not (value - value == 0):
        return None
    return value
