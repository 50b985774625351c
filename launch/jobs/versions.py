"""Records which code a job was submitted from: distembed's revision, what was changed since, and the packages."""

import subprocess
from importlib.metadata import distributions
from pathlib import Path

from distembed.base.version import __version__


def keep_versions(folder: Path) -> None:
    """Writes ``git.txt``, ``git.diff`` and ``packages.txt`` into a folder, which is made where it is missing.

    The revision is that of the code which runs, wherever the command is given. Of files that git does not know, only
    the names are written: they may be large.
    """
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    is_tracked = bool(_git("-C", str(root), "ls-files", "--", "launch/jobs/versions.py"))
    revision, unknown, diff = f"distembed {__version__}, not in a git repository\n", "", ""
    if is_tracked:
        revision = _git("-C", str(root), "rev-parse", "HEAD")
        unknown = _git("-C", str(root), "ls-files", "--others", "--exclude-standard")
        diff = _git("-C", str(root), "diff", "HEAD")
    (folder / "git.txt").write_text(revision + (f"\nnot known to git:\n{unknown}" if unknown else ""))
    (folder / "git.diff").write_text(diff)
    packages = sorted({f"{found.name}=={found.version}" for found in distributions()})
    (folder / "packages.txt").write_text("\n".join(packages) + "\n")


def _git(*arguments: str) -> str:
    """Returns what git prints; "" where it fails or is not installed."""
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return ""
    return answer.stdout if answer.returncode == 0 else ""
