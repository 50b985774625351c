"""Counts the docstrings that stand on a pronoun where a noun belongs: "what", "those", "such", "of which".

    python tools/english.py                     the number, and whether it exceeds the limit
    python tools/english.py distembed/data      each docstring of these files and folders, with its line

A reader of "returns what they have in common" has to find out the things that share something. Name them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 26
WORDS = re.compile(r"\b(what|those|such|whatever|thereby|of which)\b", re.IGNORECASE)
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"]*\"")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the first line and the text of each docstring, also below assignments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for child in getattr(node, "body", None) or [] if isinstance(node, _DOCUMENTED) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                if isinstance(child.value.value, str):
                    yield child.lineno, child.value.value


def found(paths: list[Path]) -> list[str]:
    """Returns a line for each docstring with one of the words; quoted texts and code do not count."""
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    lines = []
    for file in files:
        for number, text in docstrings(file):
            words = WORDS.findall(_CODE.sub("", text))
            if words:
                lines.append(f"{file}:{number}: {', '.join(sorted({word.lower() for word in words}))}")
    return lines


def main() -> int:
    """Prints the docstrings of the given paths, or checks the number in the whole package."""
    given = [Path(argument) for argument in sys.argv[1:]]
    lines = found(given or [ROOT / "distembed", ROOT / "launch"])
    if given:
        print("\n".join(lines))
    print(f"{len(lines)} docstrings with one of: what, those, such, whatever, thereby, of which (at most {LIMIT})")
    return int(not given and len(lines) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
