"""What shows that something was executed which was only to be read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Canary:
    """Makes a file where it is unpickled."""

    file: Path

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)
