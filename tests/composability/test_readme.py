"""The table in README.md: each row has a test that exists, and few rows refuse."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
MOST_REFUSALS = 4


def table_rows() -> list[list[str]]:
    """Returns the cells of each row: operation, stock, ours, test."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]
    return [cells for cells in rows if cells[0] != "operation" and set("".join(cells)) != {"-"}]


def named_tests(cell: str) -> list[tuple[Path, str]]:
    """Returns the file and the function of each `file.py::test_name` in a cell."""
    named = re.findall(r"([\w/]+\.py)::(\w+)", cell)
    return [
        (next((p for p in (FOLDER / file, ROOT / file) if p.exists()), FOLDER / file), name) for file, name in named
    ]


def defined_functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("cells", table_rows(), ids=lambda cells: cells[0])
def test_each_row_names_tests_that_exist(cells: list[str]) -> None:
    assert len(cells) == 4 and all(cells), f"a row has four cells: {cells}"
    tests = named_tests(cells[3])
    assert tests, f"no file.py::test_name in {cells[3]!r}"
    for file, name in tests:
        assert file.exists(), f"{file} does not exist"
        assert name in defined_functions(file), f"{file.name} has no {name}"


def test_each_operation_stands_once_and_at_most_four_are_refused() -> None:
    rows = table_rows()
    operations = [cells[0] for cells in rows]
    assert len(set(operations)) == len(operations)
    refused = [cells[0] for cells in rows if cells[2].startswith("**refuses**")]
    assert len(refused) <= MOST_REFUSALS, refused
