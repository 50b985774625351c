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
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+([eE][+-]?\d{1,3})?|[eE][+-]\d{1,3}|)", re.ASCII)
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T]([\d:]{8})(?:\.0+|(\.\d*[1-9])0*)?(?:Z| UTC|[+-]00:?00)?", re.ASCII)


def text(how, x):  # None for a missing value; "True" is true, "10.0" and "1.0E1" are 10, 2026-01-01T00:00:00Z the day
    if isinstance(x, (list, tuple, dict)):
        raise ValueError("no single value")
    if x is None or x != x:
        return None
    if NUMBER.fullmatch(x := str(x).encode().decode()):
        x = re.sub("^-0$", "0", re.sub(r"(\.\d*?)0+$", r"\1", f"{Decimal(x):f}").removesuffix("."))
    elif time := TIME.fullmatch(x):
        x = time.expand(r"\1 \2\3").removesuffix(" 00:00:00")
    x = x.lower() if x in ("True", "TRUE", "False", "FALSE") else x
    return None if x in [text({"missing_values": []}, each) for each in how.get("missing_values", [""])] else x


def number(how, x):  # None for a missing value
    x = text(how, x)
    if x is not None and not re.fullmatch(r"true|false|[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", x.lower()):
        raise ValueError("no number")
    return x and float({"true": 1, "false": 0}.get(x.lower(), x))


def dense(how, x):
    if (x := number(how, x)) is None:
        return math.nan if how.get("missing") == "keep" else 0.0
    if torch.tensor(x).isinf():
        raise ValueError("too large")
    return math.log1p(max(x, 0)) if how.get("transform") == "log" else (x - how.get("mean", 0)) / how.get("std", 1)


def key(how, x):  # a value as the vocabulary has it; None for a missing one
    digits = re.fullmatch(r"[+-]?[0-9]+", str(x))
    if (x := text(how, x)) is None or how.get("kind", "string") == "string":
        return x
    if how["kind"] == "hexadecimal":
        return f"{int(re.fullmatch('[0-9a-fA-F]{1,8}', x)[0], 16):08x}"
    if how["kind"] == "log_bins":
        return key({"kind": "integer"}, float(math.floor(math.log(x) ** 2 if (x := number(how, x)) > 2 else x)))
    whole = int(x if digits else number(how, x))
    if not -(2**63) <= whole < 2**63 or not digits and (whole != number(how, x) or abs(whole) >= 2**53):
        raise ValueError("no integer of 64 bits")
    return str(whole)


def ids(feature, value):
    how, known = feature["change"], KNOWN.get(feature["vocabulary"])
    if how.get("kind") == "quantile_bins":
        x = torch.tensor(dense(how | {"missing": "keep"}, value))
        return [0 if x.isnan() else 1 + int((torch.tensor(how["edges"]) <= x).sum())]
    if known is None:  # ids are given; a TypeError where one is no integer
        given = (value or []) if feature["is_list"] else [value]
        return [int.__index__(each or 0) for each in given][-(how.get("max_length") or len(given)) :]
    if not feature["is_list"]:
        return [0 if (value := key(how, value)) is None else known.get(value, 1)]
    found = [known.get(x, 1) for each in entries(how, value) if (x := key(how, each)) is not None]
    return [i for i in found if i != 1 or ABOUT["task"] != "next_item"][-(how.get("max_length") or len(found)) :]


def entries(how, value):  # of a list
    if isinstance(value, (list, tuple)) or (x := text({"missing_values": []}, value)) is None:
        return value if isinstance(value, (list, tuple)) else []
    return x.split(how["separator"]) if how.get("separator") else [value]


def sequence(about, row):  # a number for each id of the list beside
    feature = next(each for each in ABOUT["features"] if each["name"] == about["beside"])
    how, (values, raw) = dict(about["change"]), (entries(x["change"], row.get(x["name"])) for x in (feature, about))
    end = number(how, row.get(how["gap_to"])) if (is_gap := how.get("gap_to") is not None) else 0
    xs = [None if (x := number(how, each)) is None or end is None else end - x if is_gap else x for each in raw]
    xs = xs if any(number(how, each) is not None for each in raw) else [None] * len(values)
    if how.get("since_first"):  # unsorted times are refused below, as too few
        xs = [x - xs[0] for x in xs] if xs == sorted(xs) else []
    how |= {"missing_values": []}  # of a gap, no number stands for a missing one
    xs = [dense(how, x) for value, x in zip(values, xs, strict=True) if ids(feature, [value])]
    return xs[-(feature["change"].get("max_length") or len(xs)) :]


def score(rows):  # such as [{"C1": "68fd1e64", "genres": ["drama", "war"], "I1": 3.0}]
    def made(make, about, name, row):
        if name not in rows[row] and (cross := about.get("change", {}).get("cross")):
            raise ValueError(f"row {row}, column {name!r} is not there: give {'|'.join(cross)} as one text, or None")
        try:
            return make(about, rows[row] if make is sequence else rows[row].get(name))
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"row {row}, column {name!r}: {rows[row].get(name)!r} is no value of its kind") from error

    def inputs(names):
        features = [feature for feature in ABOUT["features"] if feature["name"] in names]
        lists = [[made(ids, feature, feature["name"], row) for row in range(len(rows))] for feature in features]
        values = torch.tensor([id_ for feature in lists for row in feature for id_ in row], dtype=torch.int64)
        return values, torch.tensor([[len(row) for row in feature] for feature in lists])

    numbers = [[made(dense, n["change"], n["name"], row) for n in ABOUT["numbers"]] for row in range(len(rows))]
    vectors = [shard(*inputs(about["features"])) for shard, about in zip(SHARDS, ABOUT["shards"], strict=True)]
    first = [torch.cat(vectors, dim=1)] if SHARDS else inputs(ABOUT["network"]["features"])
    lists = [made(sequence, each, each["name"], row) for each in ABOUT["sequences"] for row in range(len(rows))]
    more = {"dense": numbers, "sequences": [x for own in lists for x in own]}
    return NETWORK(*first, *(torch.tensor(more[name]).float() for name in ABOUT["network"]["inputs"] if name in more))


if __name__ == "__main__":
    found, wanted = score(SAMPLE["rows"]), tuple(map(torch.tensor, SAMPLE["outputs"].values()))
    torch.testing.assert_close(found, wanted if len(wanted) > 1 else wanted[0], atol=1e-5, rtol=1e-5)
