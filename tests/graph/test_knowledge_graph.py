"""Attributes of items in a knowledge graph: both ends of triples count, and the file is whole or not there."""

import gzip
import json
import resource
from pathlib import Path

import pytest

from distembed.base.errors import RunError
from tests.small_runs import call


def test_attributes_are_the_opposite_ends_of_an_items_triples(tmp_path: Path) -> None:
    (tmp_path / "films.kg").write_text("head\trelation\ttail\nf1\tactor\tann\nbob\tmade\tf2\nf1\tactor\tann\nx\ty\tz\n")
    (tmp_path / "films.link").write_text("item\tentity\n1\tf1\n2\tf2\n3\tf1\n")
    output = tmp_path / "attributes.jsonl"
    call("prepare", "attributes", tmp_path / "films.kg", tmp_path / "films.link", "--output", output)
    found = {line["item"]: line["attribute"] for line in map(json.loads, output.read_text().splitlines())}
    assert found == {"1": ["actor ann"], "2": ["bob made"], "3": ["actor ann"]}


def test_attributes_that_could_not_be_written_whole_are_not_there(tmp_path: Path) -> None:
    output, values = tmp_path / "attributes.jsonl", {str(item): [item] for item in range(1000)}
    (tmp_path / "values.json.gz").write_bytes(gzip.compress(json.dumps(values).encode()))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunError, match="could not be written"):
            call("prepare", "attributes", tmp_path / "values.json.gz", "--output", output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not output.exists()
    call("prepare", "attributes", tmp_path / "values.json.gz", "--output", output)
    assert len(output.read_text().splitlines()) == len(values)
