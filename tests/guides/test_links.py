"""Each link of each guide leads to a file of the repository, and to a heading of it."""

import re
from pathlib import Path

import pytest

from tests.guides.test_commands import GUIDES, ROOT

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(guide: Path) -> set[str]:
    """Returns the anchors of a guide's headings: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", guide.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(guide: Path) -> None:
    for name, anchor in LINK.findall(guide.read_text()):
        target = guide.parent / name if name else guide
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"
