r"""Writes the attributes of items in a knowledge graph as JSON lines, for `distembed prepare graph --attribute`.

::

    python tools/knowledge_graph_attributes.py ml-100k.kg ml-100k.link item_entities.jsonl
    distembed prepare graph item_entities.jsonl --source item --attribute attribute --unknown drop \
        --data ratings --table item -o graphs/item

The inputs are RecBole's files: lines of a head, a relation and a tail, and lines of an item and its entity. An
attribute of an item is the entity at the opposite end of one of the item's triples, for example an actor, together with
the relation and the end. A compressed JSON object of each item's attributes is written as it is, without links.
"""

import argparse
import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def rows(file: Path) -> Iterator[list[str]]:
    """Yields the rows of a tab-separated file, without its header."""
    with file.open(newline="", encoding="utf-8") as text:
        lines = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(lines)
        yield from lines


def item_attributes(graph: Path, links: Path) -> dict[str, list[str]]:
    """Returns the attributes of each item."""
    items: dict[str, list[str]] = defaultdict(list)
    for item, entity in rows(links):
        items[entity].append(item)
    attributes: dict[str, dict[str, None]] = defaultdict(dict)
    for head, relation, tail in rows(graph):
        for item in items.get(head, ()):
            attributes[item][f"{relation} {tail}"] = None
        for item in items.get(tail, ()):
            attributes[item][f"{head} {relation}"] = None
    return {item: list(found) for item, found in attributes.items()}


def write_attributes(attributes: Mapping[str, Sequence[str | int]], output: Path) -> None:
    """Writes a line ``{"item": ITEM, "attribute": [...]}`` for each item."""
    lines = (json.dumps({"item": item, "attribute": values}) for item, values in attributes.items())
    output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Writes the attributes of all items."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path, help="triples (.kg), or the attributes of each item (.json.gz)")
    parser.add_argument("links", type=Path, nargs="?", help="items and their entities (.link)")
    parser.add_argument("output", type=Path, help="JSON lines to write")
    arguments = parser.parse_args()
    if arguments.links is None:
        found: Mapping[str, Sequence[str | int]] = json.loads(gzip.decompress(arguments.graph.read_bytes()))
    else:
        found = item_attributes(arguments.graph, arguments.links)
    write_attributes(found, arguments.output)
    print(f"{arguments.output}: {sum(map(len, found.values())):,} attributes of {len(found):,} items")


if __name__ == "__main__":
    main()
