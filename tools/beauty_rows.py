"""Turns sequences of items into rows of a user, an item, and the user's items before it, for two towers.

    python tools/beauty_rows.py SEQUENCES.txt.gz ROWS.csv

A line of the input is a user and the user's items in the order of time. A user's last item is for test, the item before
for validation; users with fewer than three items are in training only. Rows for test and validation whose item no
training row has are left out: no model can know the item.
"""

import gzip
import sys
from pathlib import Path

MOST_HISTORY = 20


def main(sequences: Path, output: Path) -> None:
    """Writes a row for each item of each user."""
    rows = []
    with gzip.open(sequences, "rt") as lines:
        for line in lines:
            user, *items = line.split()
            for place, item in enumerate(items):
                after = len(items) - 1 - place
                split = "train" if len(items) < 3 or after > 1 else ("test", "validation")[after]
                history = "|".join(items[max(0, place - MOST_HISTORY) : place])
                rows.append((user, item, history, split))
    known = {item for _, item, _, split in rows if split == "train"}
    kept = [",".join(row) for row in rows if row[1] in known]
    output.write_text("\n".join(["user,item,history,split", *kept]) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
