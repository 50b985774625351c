"""Criteo rows prepared one line at a time in plain Python: what the fast code is compared with."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DIGITS = set(b"0123456789")
HEX = set(b"0123456789abcdefABCDEF")
HEADER = "\t".join(["label", *[f"I{i}" for i in range(1, 14)], *[f"C{i}" for i in range(1, 27)]]).encode()


@dataclass(frozen=True)
class Row:
    """A well-formed row, whose missing integers are NaN."""

    label: int
    dense: tuple[float, ...]
    keys: tuple[int | None, ...]


def parse(line: bytes) -> Row | str:
    """Returns the row, or the reason why it is malformed."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != 40:
        return "columns"
    if fields[0] not in (b"0", b"1"):
        return "label"
    dense = []
    for field in fields[1:14]:
        digits = field[1:] if field.startswith(b"-") else field
        if field and (not digits or not set(digits) <= DIGITS or not -(2**63) <= int(field) < 2**63):
            return "dense"
        dense.append(math.log1p(max(int(field), 0)) if field else math.nan)
    for field in fields[14:]:
        if len(field) > 8 or not set(field) <= HEX:
            return "id"
    return Row(int(fields[0]), tuple(dense), tuple(int(field, 16) if field else None for field in fields[14:]))


def lines_of(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def vocabularies(train: Sequence[Row], min_count: int) -> list[dict[int, int]]:
    """Returns the id of each key, for each feature: 2 and up, the most frequent first, equal ones by key."""
    result = []
    for feature in range(26):
        counts = Counter(row.keys[feature] for row in train if row.keys[feature] is not None)
        kept = [key for key, count in counts.items() if count >= min_count]
        kept.sort(key=lambda key: (-counts[key], key))
        result.append({key: number for number, key in enumerate(kept, start=2)})
    return result


def ids(row: Row, vocabulary: Sequence[dict[int, int]]) -> tuple[int, ...]:
    return tuple(0 if key is None else table.get(key, 1) for key, table in zip(row.keys, vocabulary, strict=True))


def good_line(rng: random.Random) -> bytes:
    """Returns a well-formed row: skewed ids, some missing values, some negative or huge integers."""
    dense = [rng.choice(["", "-2", str(int(rng.expovariate(0.01))), str(rng.randrange(2**40))]) for _ in range(13)]
    keys = ["" if rng.random() < 0.1 else f"{int(rng.paretovariate(0.7)) * 2654435761 % 2**32:08x}" for _ in range(26)]
    return "\t".join([rng.choice("01"), *dense, *keys]).encode()


def malformed_line(rng: random.Random) -> bytes:
    """Returns a row that is malformed in one of many ways."""
    fields = good_line(rng).split(b"\t")
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice([b"", b"0", b"\t".join(fields[:-1]), b"\t".join([*fields, b""]), b"\xff\xfe"])
    if kind == 1:
        fields[0] = rng.choice([b"", b"2", b"-1", b"01", b" 1", b"x"])
    if kind in (2, 5):
        fields[rng.randrange(1, 14)] = rng.choice(
            [b"1.5", b"x", b" 3", b"0x1f", b"+4", b"-", b"9" * 19, b"1\r2", b"1e3"]
        )
    if kind in (3, 5):
        bad_ids = [b"xyz", b"123456789", b" 1234567", b"0x12", b"-1234567", b"\xe9\xe9", b'"0000000"', b"123\x00"]
        fields[rng.randrange(14, 40)] = rng.choice(bad_ids)
    if kind == 4:
        fields[0], fields[5], fields[20] = b"?", b"?", b"?"
    return b"\t".join(fields)


def short_ids_line(rng: random.Random) -> bytes:
    """Returns a well-formed row whose ids have 1 to 8 digits, of either case."""
    fields = good_line(rng).split(b"\t")
    fields[14:] = [b"%x" % rng.randrange(16 ** rng.randrange(1, 9)) for _ in range(26)]
    return b"\t".join(field.upper() if rng.random() < 0.3 else field for field in fields)


def content(num_rows: int, seed: int, *, malformed: float = 0.0, short: float = 0.0, newline: bytes = b"\n") -> bytes:
    rng = random.Random(seed)
    lines = []
    for _ in range(num_rows):
        draw = rng.random()
        make = malformed_line if draw < malformed else short_ids_line if draw < malformed + short else good_line
        lines.append(make(rng))
    return newline.join([*lines, b""])


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Returns the contents of every file in a folder, by its path there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
