"""No code asks for the version of a member of the trio to do one thing or another, but for the one module that may."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "tests/versions.py",  # the differences between the trios, each with its reason
    "distembed/reports/doctor/trio.py",  # which Pythons a trio is tested on
}
MEMBERS = {"torch", "torchrec", "fbgemm_gpu", "fbgemm-gpu", "fbgemm-gpu-cpu", "tensordict"}


def sources() -> dict[str, str]:
    paths = [path for name in ("distembed", "launch", "tests", "tools") for path in (ROOT / name).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def is_version(node: ast.AST) -> bool:
    """Whether an expression is the version of a member of the trio, or of Python."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        return (node.attr in ("__version__", "torch_version") and owner in MEMBERS) or (
            (owner, node.attr)
            in {("sys", "version_info"), ("torch", "torch_version"), ("torch.version", "__version__")}
        )
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "version":
        return any(isinstance(each, ast.Constant) and each.value in MEMBERS for each in node.args)
    return False


def asked_in(text: str) -> Iterator[str]:
    """Comparisons and conditions that have such a version in them, and names that are given to one."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            parts: list[ast.AST] = [node.test]
        elif isinstance(node, ast.Compare):
            parts = [node]
        elif isinstance(node, ast.Assign):
            if is_version(node.value):
                yield ast.unparse(node)
            continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = [node.func.value]  # a method of the text, such as startswith or split
        else:
            continue
        if any(is_version(inner) for part in parts for inner in ast.walk(part)):
            yield ast.unparse(node)


@pytest.mark.thorough
def test_only_one_module_asks_which_versions_are_installed() -> None:
    asked = {name: found for name, text in sources().items() if (found := list(asked_in(text)))}
    assert "tests/versions.py" in asked
    assert {name: found for name, found in asked.items() if name not in ALLOWED} == {}


@pytest.mark.parametrize(
    "text",
    [
        "if torch.__version__ >= '2.13': pass",
        "new = torch.__version__.split('.')[1] == '13'",
        "import torchrec\nNEW = torchrec.__version__",
        "x = 1 if importlib.metadata.version('torchrec') > '1.6' else 2",
        "if version('fbgemm-gpu-cpu').startswith('1.6'): pass",
        "while sys.version_info < (3, 12): pass",
    ],
)
def test_asking_is_found(text: str) -> None:
    assert list(asked_in(text))


@pytest.mark.parametrize("text", ["print(torch.__version__)", "f(versions={'torch': torch.__version__})"])
def test_telling_a_version_is_not_asking(text: str) -> None:
    assert not list(asked_in(text))
