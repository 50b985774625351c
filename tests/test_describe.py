"""Counts of the paper's models, without making them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distembed.config import load_config
from distembed.describe import describe, format_bytes

KAGGLE = Path(__file__).parents[1] / "configs" / "criteo_kaggle.yaml"
FORCED = ["embedding.default.partition=quotient_remainder", "embedding.default.force=true"]


@pytest.mark.parametrize(
    ("overrides", "parameters"),
    [(["embedding.default.partition=naive"], 540_677_217), (FORCED, 135_528_113)],
    ids=["full", "quotient_remainder"],
)
def test_parameters_of_the_papers_dlrm(overrides: list[str], parameters: int) -> None:
    assert describe(load_config(KAGGLE, overrides))["parameters"] == parameters


@pytest.mark.parametrize("composition", ["product", "sum", "concat"])
def test_totals_are_the_sums_of_the_parts(composition: str) -> None:
    found = describe(load_config(KAGGLE, [*FORCED, f"embedding.default.composition={composition}"]))
    tables = sum(table["parameters"] for table in found["tables"])
    assert found["embedding_parameters"] == tables
    assert found["embedding_bytes"] == 4 * tables
    assert found["parameters"] == tables + sum(layer["parameters"] for layer in found["dense"])
    if composition == "concat":
        assert tables == sum(sum(table["rows"]) * 8 for table in found["tables"])


def test_json_has_the_promised_keys() -> None:
    command = [sys.executable, "-m", "distembed", "describe", str(KAGGLE), *FORCED, "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (
        found["tables"][2].items()
        >= {
            "name": "C3",
            "scheme": "quotient_remainder",
            "composition": "product",
            "num_embeddings": 10_131_227,
            "rows": [2_532_807, 4],
            "dim": 16,
            "parameters": 40_524_976,
            "bytes": 162_099_904,
        }.items()
    )


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**41, "2.00 TiB")])
def test_bytes_are_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text
