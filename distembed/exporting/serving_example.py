"""Scores raw rows by the exported model in this folder, with torch alone; run it to check it by sample.json."""

import json
import math
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
ABOUT, SAMPLE = (json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in ("manifest", "sample"))
FILES = {each["vocabulary"] for each in ABOUT["features"]} - {None}
KNOWN = {file: {json.loads(line): id_ for id_, line in enumerate((FOLDER / file).open("rb"), 2)} for file in FILES}
NETWORK, *SHARDS = [torch.export.load(FOLDER / p["file"]).module() for p in (ABOUT["network"], *ABOUT["shards"])]


def score(rows):  # such as [{"C1": "68fd1e64", "genres": ["drama", "war"], "I1": 3.0}]
    def number(how, x):
        if x is None:
            return math.nan if how.get("missing") == "keep" else 0.0
        return math.log1p(max(x, 0)) if how.get("transform") == "log" else (x - how.get("mean", 0)) / how.get("std", 1)

    def ids(feature, value):
        known = KNOWN.get(feature["vocabulary"])  # None where ids are given
        values = (value if feature["is_list"] else [value]) or []
        return [0 if each is None else each if known is None else known.get(str(each), 1) for each in values]

    def inputs(names):
        own = [[ids(f, row.get(f["name"])) for row in rows] for f in ABOUT["features"] if f["name"] in names]
        values = torch.tensor([id_ for feature in own for row in feature for id_ in row], dtype=torch.int64)
        return values, torch.tensor([[len(row) for row in feature] for feature in own])

    dense = [torch.tensor([[number(n["change"], row.get(n["name"])) for n in ABOUT["numbers"]] for row in rows])]
    vectors = [shard(*inputs(about["features"])) for shard, about in zip(SHARDS, ABOUT["shards"], strict=True)]
    first = [torch.cat(vectors, dim=1)] if SHARDS else inputs(ABOUT["network"]["features"])
    return NETWORK(*first, *(dense if ABOUT["numbers"] else []))


if __name__ == "__main__":
    found, wanted = score(SAMPLE["rows"]), tuple(map(torch.tensor, SAMPLE["outputs"].values()))
    torch.testing.assert_close(found, wanted if len(wanted) > 1 else wanted[0], atol=1e-5, rtol=1e-5)
