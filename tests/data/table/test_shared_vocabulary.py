"""Columns that share a vocabulary: a value has one id in both, and the values of both are counted together."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.table.preparation import TableOptions, prepare_table
from distembed.data.table.encoder import RowEncoder
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema

LETTERS = np.array(list("abcdefghijklmnop"))


def write_rows(path: Path, num_rows: int, seed: int) -> list[tuple[str, list[str]]]:
    """Writes rows of an item, which may be missing, and a history of items, and returns them."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        item = random.choice(LETTERS[seed : seed + 8]) if random.random() < 0.8 else ""
        rows.append((str(item), random.choice(LETTERS[: 4 + 4 * seed], random.integers(0, 4)).tolist()))
    lines = [f"{number % 2},{item},{'|'.join(history)}" for number, (item, history) in enumerate(rows)]
    path.write_text("\n".join(["label,item,history", *lines, ""]))
    return rows


def schema(**settings: object) -> TableSchema:
    history = {"separator": "|", "vocabulary": "item"}
    columns = {"history": history, "item": {}}
    return TableSchema.from_json(
        {"label": {"column": "label"}, "categorical": columns, "split": "none", **settings}, "the schema"
    )


def check_rows(dataset: Path, rows: list[tuple[str, list[str]]], keys: list[str]) -> None:
    ids = {key: number for number, key in enumerate(keys, start=2)} | {"": 0}
    table = pq.read_table(dataset / "train")
    assert table["item"].to_pylist() == [ids.get(item, 1) for item, _ in rows]
    assert table["history"].to_pylist() == [[ids.get(item, 1) for item in history] for _, history in rows]


def ordered(rows: list[tuple[str, list[str]]], known: list[str], least: int) -> list[str]:
    counts = Counter(value for item, history in rows for value in (item, *history) if value)
    new = [value for value, count in counts.items() if count >= least and value not in known]
    return [*known, *sorted(new, key=lambda value: (-counts[value], value))]


def test_a_value_has_one_id_in_all_columns(tmp_path: Path) -> None:
    first, second = (write_rows(tmp_path / f"{day}.csv", 60, day) for day in (0, 1))
    manifest = prepare_table([tmp_path / "0.csv"], tmp_path / "first", schema(min_count=3))
    keys = ordered(first, [], 3)
    check_rows(tmp_path / "first", first, keys)
    history, item = manifest.schema.categorical
    assert (history.table_name, item.table_name) == ("item", "item")
    assert history.num_embeddings == item.num_embeddings == 2 + len(keys)
    entries = Manifest.load(tmp_path / "first").vocabularies
    assert entries["history"].file == entries["item"].file and entries["item"].num_ids == len(keys)
    assert entries["item"].rows_missing == sum(not item for item, _ in first)
    assert entries["history"].rows_missing == sum(not history for _, history in first)

    options = TableOptions(vocabulary=tmp_path / "first", grow=True)
    prepare_table([tmp_path / "1.csv"], tmp_path / "second", schema(min_count=3), options)
    check_rows(tmp_path / "second", second, ordered(second, keys, 3))
    own = schema().to_json()
    del own["categorical"]["history"]["vocabulary"]
    with pytest.raises(UserError, match="has the ids of 'item', and its values are to have the ids of 'history'"):
        prepare_table([tmp_path / "1.csv"], tmp_path / "own", TableSchema.from_json(own, "the schema"), options)


@pytest.mark.parametrize("hash_size", [5, 1000])
def test_hashed_columns_share_their_hash(tmp_path: Path, hash_size: int) -> None:
    rows = write_rows(tmp_path / "rows.csv", 60, 0)
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "out", schema(hash_size=hash_size))
    table = pq.read_table(tmp_path / "out" / "train")
    pairs = list(zip([item for item, _ in rows], table["item"].to_pylist(), strict=True))
    for (_, history), ids in zip(rows, table["history"].to_pylist(), strict=True):
        pairs += zip(history, ids, strict=True)
    assert len(set(pairs)) == len({value for value, _ in pairs})
    assert [feature.table for feature in manifest.schema.categorical] == ["item", None]


UNKNOWN = TableSchema.from_json(
    {
        "label": {"column": "label"},
        "categorical": {"site": {}, "rare": {}, "tags": {"separator": "|"}, "hashed": {"hash_size": 50}},
        "split": "none",
    },
    "the schema",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known")
    lines = [f"{place % 2},{'ab'[place % 2]},r{place},x|y,h{place}" for place in range(200)]
    (folder / "rows.csv").write_text("\n".join(["label,site,rare,tags,hashed", *lines, ""]))
    prepare_table([folder / "rows.csv"], folder / "out", UNKNOWN)
    return folder / "out"


@pytest.mark.parametrize(
    ("values", "num_blocks", "warned"),
    [
        ({"site": "a", "tags": "x"}, 3, []),
        ({"site": "A", "tags": "x|y"}, 3, ["site: 100 of the first 100 values"]),
        ({"site": "A", "tags": "x"}, 1, []),  # too few to say
        ({"site": None, "tags": None}, 9, []),
        ({"site": "a", "tags": "x|X|Y"}, 3, ["tags: 100 of the first 150 values"]),
    ],
)
def test_it_is_told_once(
    dataset: Path, caplog: pytest.LogCaptureFixture, values: dict[str, str], num_blocks: int, warned: list[str]
) -> None:
    """Each value of ``rare`` is there once in training, so that all are unknown there too."""
    from distembed.data.dataset.manifest import Manifest

    parser = TableParser(UNKNOWN, needs_label=False)
    encoder = RowEncoder(dataset, Manifest.load(dataset), parser.layout)
    rows = [{**values, "rare": f"new{place}", "hashed": f"new{place}"} for place in range(50)]
    for _ in range(num_blocks):
        encoder.encode(parser.parse(pa.Table.from_pylist(rows, text_schema())))
    assert [record.getMessage()[: len(text)] for record, text in zip(caplog.records, warned, strict=True)] == warned


def text_schema() -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in ("site", "rare", "tags", "hashed")])
