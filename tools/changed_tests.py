"""Prints the test files that a change affects; ``tools/test.sh --changed`` runs them.

    python tools/changed_tests.py            differences to the branch main, committed or not
    python tools/changed_tests.py HEAD~3     differences to another commit

A change affects a test file that changed, or that imports a changed module, directly or through other modules. Imports
by the command line and by ``distembed`` itself are not followed, because they import everything: a test that runs
commands in processes is affected by the modules that it names. Changes of other files (README, configs) affect the
tests that name them.
"""

import re
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
_COMMAND_LINE = "distembed.commands"


def changed_files(base: str) -> list[str]:
    """Returns the paths that differ from where the branch left ``base``, files that git does not know yet included."""
    start = _git("merge-base", "HEAD", base).strip()
    return sorted(
        {*_git("diff", "--name-only", start).splitlines(), *_git("ls-files", "-o", "--exclude-standard").splitlines()}
    )


def touched_tests(changed: list[str]) -> list[str]:
    """Returns the test files that the changed files touch."""
    graph = grimp.build_graph("distembed", cache_dir=None)
    for module in graph.modules:
        if module == "distembed" or module.startswith(_COMMAND_LINE):
            for imported in graph.find_modules_directly_imported_by(module):
                graph.remove_import(importer=module, imported=imported)
    modules = {re.sub("^launch/", "distembed/launch/", path).removesuffix(".py") for path in changed}
    modules = {name.removesuffix("/__init__").replace("/", ".") for name in modules} & graph.modules
    modules = modules.union(*(graph.find_downstream_modules(module) for module in modules))
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if any(
            str(part.relative_to(ROOT)) in changed or _names(part.read_text(encoding="utf-8"), modules, changed)
            for part in _parts(path)
        )
    ]


def _parts(path: Path, known: frozenset[Path] = frozenset()) -> set[Path]:
    """Returns a file of tests, the fixtures of its folders, and the helpers that they import, directly or not."""
    found = {path, *(folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT / "tests"))}
    found = {part for part in found if part.is_file()} - known
    for part in list(found):
        for name in re.findall(r"^from (tests[.\w]*) import (\w+)", part.read_text(encoding="utf-8"), re.MULTILINE):
            for helper in (name[0], ".".join(name)):
                file = ROOT / f"{helper.replace('.', '/')}.py"
                if file.is_file() and file not in found | known:
                    found |= _parts(file, known | found)
    return found


def _names(text: str, modules: set[str], changed: list[str]) -> bool:
    """Whether a text imports or names one of the modules, or names a changed file that is no module."""
    named = set(re.findall(r"\bdistembed[.\w]*", text))
    named |= {".".join(pair) for pair in re.findall(r"^ *from ([.\w]+) import (\w+)", text, re.MULTILINE)}
    return bool(named & modules) or any(Path(path).name in text for path in changed if not path.endswith(".py"))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print("\n".join(touched_tests(changed_files(*sys.argv[1:] or ["main"]))))
