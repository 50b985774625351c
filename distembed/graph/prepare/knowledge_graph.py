"""The attributes of items in a knowledge graph, as JSON lines for ``distembed prepare graph --attribute``.

The inputs are RecBole's files: lines of a head, a relation and a tail (``.kg``), and lines of an item and its entity
(``.link``). An attribute of an item is the entity at the opposite end of one of the item's triples, for example an
actor, together with the relation and the end.
"""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distembed.base.files import write_text


def write_attributes(graph: Path, links: Path | None, output: Path) -> int:
    """Writes a line ``{"item": ITEM, "attribute": [...]}`` for each item, and returns the number of items.

    Args:
        graph: Triples; without ``links``, a JSON object (.json.gz) of the attributes by item.
        links: Items and their entities.
        output: JSON lines; the file appears whole or not at all.
    """
    if links is None:
        found: Mapping[str, Sequence[str | int]] = json.loads(gzip.decompress(graph.read_bytes()))
    else:
        found = _attributes(graph, links)
    lines = (json.dumps({"item": item, "attribute": values}) for item, values in found.items())
    write_text(output, "".join(f"{line}\n" for line in lines), make_folder=True)
    return len(found)


def _attributes(graph: Path, links: Path) -> dict[str, list[str]]:
    """Returns the attributes of each item."""
    items: dict[str, list[str]] = defaultdict(list)
    for item, entity in _rows(links):
        items[entity].append(item)
    attributes: dict[str, dict[str, None]] = defaultdict(dict)
    for head, relation, tail in _rows(graph):
        for item in items.get(head, ()):
            attributes[item][f"{relation} {tail}"] = None
        for item in items.get(tail, ()):
            attributes[item][f"{head} {relation}"] = None
    return {item: list(found) for item, found in attributes.items()}


def _rows(file: Path) -> Iterator[list[str]]:
    """Yields the rows of a tab-separated file, without its header."""
    with file.open(newline="", encoding="utf-8") as text:
        lines = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(lines)
        yield from lines
