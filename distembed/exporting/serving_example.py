"""Scores raw rows by the exported model in this folder, with torch alone; run it to check it by sample.json."""

import json
import math
import re
from decimal import Decimal
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
ABOUT, SAMPLE = (json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in ("manifest", "sample"))
FILES = {each["vocabulary"] for each in ABOUT["features"]} - {None}
KNOWN = {file: {json.loads(line): id_ for id_, line in enumerate((FOLDER / file).open("rb"), 2)} for file in FILES}
NETWORK, *SHARDS = [torch.export.load(FOLDER / p["file"]).module() for p in (ABOUT["network"], *ABOUT["shards"])]


def text(how, x):  # None for a missing value; True is "true", 2.0 is "2", and 1e15 is "1e+15"
    if isinstance(x, float) and math.isfinite(x):
        exact = Decimal(repr(x)).normalize()
        x = f"{exact:f}" if -7 < exact.adjusted() < 10 else f"{exact:e}"
    if isinstance(x, (list, tuple, dict)):
        raise ValueError("no single value")
    x = str(x).lower() if isinstance(x, bool) else None if x is None or x != x else str(x)
    return None if x is None or x in how.get("missing_values", [""]) else x.encode().decode()


def number(how, x):  # None for a missing value
    if (x := text(how, x)) is None:
        return None
    x = {"true": "1", "false": "0"}.get(x.lower(), x)
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", x):
        raise ValueError("no number")
    return float(x)


def dense(how, x):
    if (x := number(how, x)) is None:
        return math.nan if how.get("missing") == "keep" else 0.0
    if torch.tensor(x).isinf():
        raise ValueError("too large")
    return math.log1p(max(x, 0)) if how.get("transform") == "log" else (x - how.get("mean", 0)) / how.get("std", 1)


def key(how, x):  # a value as the vocabulary has it; None for a missing one
    if (x := text(how, x)) is None or how.get("kind", "string") == "string":
        return x
    if how["kind"] == "hexadecimal":
        return f"{int(re.fullmatch('[0-9a-fA-F]{1,8}', x)[0], 16):08x}"
    if how["kind"] == "log_bins":
        return key({"kind": "integer"}, float(math.floor(math.log(x) ** 2 if (x := number(how, x)) > 2 else x)))
    digits = re.fullmatch(r"([+-]?[0-9]+)(\.0*)?", x)
    whole = int(digits[1]) if digits else int(number(how, x))
    if not -(2**63) <= whole < 2**63 or not digits and (whole != number(how, x) or abs(whole) >= 2**53):
        raise ValueError("no integer of 64 bits")
    return str(whole)


def ids(feature, value):
    how, known = feature["change"], KNOWN.get(feature["vocabulary"])
    if how.get("kind") == "quantile_bins":
        x = torch.tensor(dense(how | {"missing": "keep"}, value))
        return [0 if x.isnan() else 1 + int((torch.tensor(how["edges"]) <= x).sum())]
    if known is None:  # ids are given; a TypeError where one is no integer
        return [int.__index__(each or 0) for each in ((value or []) if feature["is_list"] else [value])]
    if not feature["is_list"]:
        return [0 if (own := key(how, value)) is None else known.get(own, 1)]
    if not isinstance(value, (list, tuple)):
        value = text(how, value)
        value = value.split(how["separator"]) if value and how.get("separator") else [value]
    own = [found for found in (key(how, each) for each in value) if found is not None]
    return [known.get(each, 1) for each in own][-(how.get("max_length") or len(own)) :]


def score(rows):  # such as [{"C1": "68fd1e64", "genres": ["drama", "war"], "I1": 3.0}]
    def made(make, about, name, row):
        if name not in rows[row] and (cross := about.get("change", {}).get("cross")):
            raise ValueError(f"row {row}, column {name!r} is not there: give {'|'.join(cross)} as one text, or None")
        try:
            return make(about, rows[row].get(name))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"row {row}, column {name!r}: {rows[row].get(name)!r} is no value of its kind") from error

    def inputs(names):
        features = [feature for feature in ABOUT["features"] if feature["name"] in names]
        own = [[made(ids, feature, feature["name"], row) for row in range(len(rows))] for feature in features]
        values = torch.tensor([id_ for feature in own for row in feature for id_ in row], dtype=torch.int64)
        return values, torch.tensor([[len(row) for row in feature] for feature in own])

    numbers = [[made(dense, n["change"], n["name"], row) for n in ABOUT["numbers"]] for row in range(len(rows))]
    vectors = [shard(*inputs(about["features"])) for shard, about in zip(SHARDS, ABOUT["shards"], strict=True)]
    first = [torch.cat(vectors, dim=1)] if SHARDS else inputs(ABOUT["network"]["features"])
    return NETWORK(*first, *([torch.tensor(numbers)] if ABOUT["numbers"] else []))


if __name__ == "__main__":
    found, wanted = score(SAMPLE["rows"]), tuple(map(torch.tensor, SAMPLE["outputs"].values()))
    torch.testing.assert_close(found, wanted if len(wanted) > 1 else wanted[0], atol=1e-5, rtol=1e-5)
