"""The ids of a dataset, applied to other rows and grown by them, against a computation that goes row by row."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.commands import cli
from distembed.commands.shared import console, errors
from distembed.data.dataset.kept import has_same_ids, require_grown_from
from distembed.data.dataset.manifest import Manifest, Vocabulary, id_fingerprint
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare import CriteoOptions, PrepareOptions, prepare_criteo, prepare_rows
from distembed.data.prepare.pipeline import describe_dataset
from distembed.data.table.blocks import BlockLayout, KeyColumn, NumberColumn
from distembed.reports.statistics.dataset import dataset_statistics
from tests.data import any_rows, reference
from tests.data.any_rows import FLOAT32, LAYOUT, PythonRows, Row, random_rows, read_split, read_vocabulary
from tests.data.flaky_files import flaky_files
from tests.data.reference import folder_bytes
from tests.data.test_mirror import upload_dataset

KEYS = {column.name: column for column in LAYOUT.ids if column.role == "feature"}
FIRST, SECOND, THIRD = (random_rows(count, seed) for count, seed in ((120, 1), (90, 2), (150, 3)))


def prepare(
    rows: list[Row], output: Path, known: Path | str | None = None, grow: bool = False, split: str = "none"
) -> Manifest:
    return prepare_rows(PythonRows(LAYOUT, [rows]), output, PrepareOptions(split, vocabulary=known, grow=grow))


@pytest.fixture(scope="module")
def first_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of the first rows."""
    folder = tmp_path_factory.mktemp("known") / "first"
    prepare(FIRST, folder)
    return folder


def counts(rows: list[Row], column: KeyColumn) -> Counter:
    return Counter(value for row in rows for value in any_rows.values_of(row, column) if value is not None)


def check_ids(dataset: Path, rows: list[Row], values: dict[str, list]) -> None:
    for row, got in zip(rows, read_split(dataset, "train"), strict=True):
        for name, column in KEYS.items():
            assert got[name] == any_rows.ids(row, column, values[name]), name


def test_ids_are_applied(tmp_path: Path, first_day: Path) -> None:
    manifest = prepare(SECOND, tmp_path / "second", first_day)
    values = {name: any_rows.vocabulary(FIRST, column) for name, column in KEYS.items()}
    check_ids(tmp_path / "second", SECOND, values)
    first = Manifest.load(first_day)
    assert manifest.schema == first.schema and manifest.preparation["learnt"] == first.preparation["learnt"]
    ids = id_fingerprint(first_day, first)
    assert id_fingerprint(tmp_path / "second", manifest) == ids == manifest.preparation["base"]["id_fingerprint"]
    for name, column in KEYS.items():
        unseen = {value: count for value, count in counts(SECOND, column).items() if value not in values[name]}
        entry = manifest.vocabularies[name]
        assert (entry.num_dropped, entry.rows_dropped) == (len(unseen), sum(unseen.values()))
    # applied to its own rows, all is as it was
    prepare(FIRST, tmp_path / "again", first_day)
    before, after = folder_bytes(first_day), folder_bytes(tmp_path / "again")
    assert all(before[name] == after[name] for name in before if name != "manifest.json") and len(before) == len(after)


def test_ids_grow_behind_the_known_ones(tmp_path: Path) -> None:
    days = {"first": FIRST, "second": SECOND, "third": THIRD}
    values: dict[str, list] = {name: [] for name in KEYS}
    totals: dict[str, Counter] = {name: Counter() for name in KEYS}
    known: Path | None = None
    for day, rows in days.items():
        manifest = prepare(rows, tmp_path / day, known, grow=known is not None)
        known = tmp_path / day
        for name, column in KEYS.items():
            values[name] = any_rows.vocabulary(rows, column, values[name])
            here = counts(rows, column)
            dropped = {value: count for value, count in here.items() if value not in values[name]}
            totals[name] += Counter({value: here[value] for value in values[name]})
            assert read_vocabulary(known, name) == [
                (place, value, totals[name][value]) for place, value in enumerate(values[name], start=2)
            ]
            entry = manifest.vocabularies[name]
            assert (entry.num_ids, entry.num_dropped, entry.rows_dropped) == (
                len(values[name]),
                len(dropped),
                sum(dropped.values()),
            )
        check_ids(known, rows, values)
    third, first = (Manifest.load(tmp_path / name).preparation["learnt"] for name in ("third", "first"))
    assert third == first


@pytest.mark.parametrize("grow", [False, True])
def test_values_out_of_vocabulary_are_counted_in_every_split(tmp_path: Path, first_day: Path, grow: bool) -> None:
    manifest = prepare(THIRD, tmp_path / "out", first_day, grow, split="1/3,1/3,1/3")
    splits = {"train": THIRD[:50], "validation": THIRD[50:100], "test": THIRD[100:]}
    for name, column in KEYS.items():
        values = any_rows.vocabulary(FIRST, column)
        values = any_rows.vocabulary(splits["train"], column, values) if grow else values
        expected = {
            split: sum(count for value, count in counts(rows, column).items() if value not in values)
            for split, rows in splits.items()
        }
        entry = manifest.vocabularies[name]
        assert entry.rows_dropped_by_split == expected and entry.rows_dropped == expected["train"], name
        assert Manifest.load(tmp_path / "out").vocabularies[name] == entry
        assert Manifest.load(first_day).vocabularies[name].rows_dropped_by_split is None
    totals = [
        sum((entry.rows_dropped_by_split or {})[split] for entry in manifest.vocabularies.values()) for split in splits
    ]
    assert min(totals) > 0
    said = " ".join(describe_dataset(manifest, "out"))
    for split, total in zip(splits, totals, strict=True):
        assert f"{total:,} times in {split}" in said


@pytest.mark.parametrize("split", ["validation", "test"])
def test_rows_may_be_evaluated_only(tmp_path: Path, first_day: Path, split: str) -> None:
    manifest = prepare(SECOND, tmp_path / "out", first_day, split=split)
    assert {name: each.num_rows for name, each in manifest.splits.items()} == {split: len(SECOND)}
    got = read_split(tmp_path / "out", split)
    for name, column in KEYS.items():
        values = any_rows.vocabulary(FIRST, column)
        assert [row[name] for row in got] == [any_rows.ids(row, column, values) for row in SECOND]
        unseen = sum(count for value, count in counts(SECOND, column).items() if value not in values)
        assert manifest.vocabularies[name].rows_dropped_by_split == {split: unseen}
        assert manifest.vocabularies[name].rows_dropped == 0
    first = Manifest.load(first_day)
    assert id_fingerprint(tmp_path / "out", manifest) == id_fingerprint(first_day, first)
    assert dataset_statistics(tmp_path / "out").splits[split].num_rows == len(SECOND)
    for grow, known in ((False, None), (True, first_day)):
        with pytest.raises(UserError, match=f"{split}', so that no row trains, and ids are learnt"):
            prepare(SECOND, tmp_path / "refused", known, grow, split)
    assert not (tmp_path / "refused").exists()


def test_a_run_stands_for_its_dataset(tmp_path: Path, first_day: Path) -> None:
    manifest = Manifest.load(first_day)
    run = tmp_path / "run"
    (run / "dataset").mkdir(parents=True)
    (run / "dataset" / "vocabulary").symlink_to(first_day / "vocabulary")
    manifest.without_rows().write(run / "dataset")
    prepare(SECOND, tmp_path / "by_run", run)
    prepare(SECOND, tmp_path / "by_dataset", first_day)
    assert folder_bytes(tmp_path / "by_run") == folder_bytes(tmp_path / "by_dataset")


def layout(*ids: KeyColumn, transform: str = "none") -> BlockLayout:
    number = NumberColumn("x", "dense", FLOAT32, transform)
    return BlockLayout((number,), ids, tuple(column.name for column in ids))


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    rows: list[Row] = [{"x": 1.0, "a": 1}, {"x": 2.0, "a": 1}]
    lists: list[Row] = [{"x": 1.0, "a": [1]}] * 2
    texts: list[Row] = [{"x": 1.0, "a": "1"}] * 2
    plain, hashed = KeyColumn("a", "feature", "integer"), KeyColumn("a", "feature", "integer", hash_size=9, hash_seed=4)
    none = PrepareOptions("none")
    prepare_rows(PythonRows(layout(plain), [rows]), tmp_path / "plain", none)
    recorded = {"schema": {"categorical": {"a": {"hash_seed": 4}}}}
    prepare_rows(PythonRows(layout(hashed), [rows]), tmp_path / "hashed", PrepareOptions("none", recorded=recorded))
    other_size, other_seed = replace(hashed, hash_size=8), replace(hashed, hash_seed=0)
    wrong = [
        ("plain", layout(replace(plain, name="b")), [{"x": 1.0, "b": 1}], "has the categorical features a, and"),
        ("plain", layout(replace(plain, kind="string")), texts, "and the column has string values"),
        ("plain", layout(replace(plain, is_list=True)), lists, "has one value a row, and its values are to have lists"),
        ("plain", layout(hashed), rows, "has a vocabulary, and its values are to have hashes: 9 ids with the seed 4"),
        ("hashed", layout(plain), rows, "has hashes: 9 ids with the seed 4, and its values are to have a vocabulary"),
        ("hashed", layout(other_size), rows, "hashes: 9 ids with .* are to have hashes: 8 ids with .*--hash-size"),
        ("hashed", layout(other_seed), rows, "the seed 4, and .* with the seed 0: give .*--hash-seed"),
        ("plain", layout(plain, transform="standardize"), rows, "learnt nothing of the column 'x'"),
    ]
    for known, given, of_layout, said in wrong:
        with pytest.raises(UserError, match=said):
            options = PrepareOptions("none", vocabulary=tmp_path / known)
            prepare_rows(PythonRows(given, [of_layout]), tmp_path / "out", options)
    for grow in (False, True):  # there is nothing to grow
        options = PrepareOptions("none", vocabulary=tmp_path / "hashed", grow=grow, recorded=recorded)
        prepare_rows(PythonRows(layout(hashed), [rows]), tmp_path / f"fits{grow}", options)
        assert read_split(tmp_path / f"fits{grow}", "train") == read_split(tmp_path / "hashed", "train")
    with pytest.raises(UserError, match="neither a dataset .* nor a run"):
        prepare(FIRST, tmp_path / "out", tmp_path)
    with pytest.raises(UserError, match="grow .* without vocabulary"):
        PrepareOptions(grow=True)


def test_a_damaged_vocabulary_is_refused(tmp_path: Path) -> None:
    prepare(FIRST, tmp_path / "first")
    file = tmp_path / "first" / "vocabulary" / "site.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="site.parquet"):
        prepare(SECOND, tmp_path / "second", tmp_path / "first", grow=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]


def command(*arguments: object) -> str:
    """Runs ``prepare criteo`` within this process, and returns what it prints."""
    with console.capture() as said, errors.capture() as noted:
        cli.app(["prepare", "criteo", *map(str, arguments)], standalone_mode=False)
    return noted.get() + said.get()


@pytest.mark.thorough
def test_days_of_criteo_one_after_the_other(tmp_path: Path) -> None:
    """Known ids never change, and one thread or two make the same bytes."""
    contents = [reference.content(200, seed) for seed in (1, 2)]
    for day, content in enumerate(contents):
        (tmp_path / f"day{day}.tsv").write_bytes(content)
    prepare_criteo([tmp_path / "day0.tsv"], tmp_path / "0", CriteoOptions(split="none"))
    grown = ("--split", "none", "--vocabulary", tmp_path / "0", "--grow")
    said = command(tmp_path / "day1.tsv", "-o", tmp_path / "1", *grown)
    command(tmp_path / "day1.tsv", "-o", tmp_path / "two", *grown, "--threads", 1)
    assert folder_bytes(tmp_path / "1") == folder_bytes(tmp_path / "two")
    manifest = Manifest.load(tmp_path / "1")
    new = sum(entry.num_ids for entry in manifest.vocabularies.values()) - sum(
        entry.num_ids for entry in Manifest.load(tmp_path / "0").vocabularies.values()
    )
    assert new > 0 and f"{new:,} values have new ids behind the known ones" in said
    for name in manifest.vocabularies:
        before, after = read_vocabulary(tmp_path / "0", name), read_vocabulary(tmp_path / "1", name)
        assert [entry[:2] for entry in after[: len(before)]] == [entry[:2] for entry in before]
    with pytest.raises(UserError, match="--hash-size"):
        command(tmp_path / "day1.tsv", "-o", tmp_path / "hashed", "--vocabulary", tmp_path / "0", "--hash-size", 50)


def test_criteo_options_that_make_other_values_are_refused(tmp_path: Path) -> None:
    (tmp_path / "day.tsv").write_bytes(reference.content(50, 1))
    day, hashed = tmp_path / "day.tsv", ("--hash-size", 9)
    for missing, other in (("zero", "keep"), ("keep", "zero")):
        command(day, "-o", tmp_path / missing, "--missing", missing, *hashed)
        said = f"dense.I1.missing is '{other}' and was '{missing}', .* and 8 more. Give .* --missing"
        with pytest.raises(UserError, match=said):
            command(day, "-o", tmp_path / "1", "--vocabulary", tmp_path / missing, "--missing", other, *hashed)
    assert not (tmp_path / "1").exists()
    # how often values are seen, and how rows are divided, may differ
    known = ("--vocabulary", tmp_path / "keep", "--missing", "keep", *hashed)
    command(day, "-o", tmp_path / "1", *known, "--min-count", 7)
    command(day, "-o", tmp_path / "2", *known, "--split", "test")
    with pytest.raises(UserError, match="so that no row trains"):
        command(day, "-o", tmp_path / "3", "--split", "test")


def test_the_vocabulary_of_a_url_is_that_of_the_folder(
    tmp_path: Path, first_day: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = "flaky://bucket/first"
    with flaky_files(0.02):
        upload_dataset(first_day, url)
        for place, known in {"folder": first_day, "url": url}.items():
            prepare(SECOND, tmp_path / place, known, grow=True)
        with pytest.raises(UserError, match="flaky://bucket/nothing is no dataset"):
            prepare(SECOND, tmp_path / "out", "flaky://bucket/nothing")
        with pytest.raises(UserError, match=f"the dataset {url} .* has the categorical features site"):
            rows = PythonRows(layout(KeyColumn("a", "feature", "integer")), [[{"x": 1.0, "a": 1}]])
            prepare_rows(rows, tmp_path / "out", PrepareOptions("none", vocabulary=url))
    assert folder_bytes(tmp_path / "url") == folder_bytes(tmp_path / "folder")


EARLIER = {"a": ["u", "a", "k"], "b": []}


def write_dataset(folder: Path, keys: Mapping[str, Sequence[str | int]] = EARLIER, **preparation: Any) -> Path:
    """Writes a dataset without splits, whose features have these keys as their vocabularies."""
    (folder / "vocabulary").mkdir(parents=True)
    for name, values in keys.items():
        ids = range(2, 2 + len(values))
        key_type = pa.int64() if values and isinstance(values[0], int) else pa.string()
        table = pa.table(
            {"id": pa.array(ids, pa.int64()), "key": pa.array(values, key_type), "count": [7] * len(values)}
        )
        pq.write_table(table, folder / f"vocabulary/{name}.parquet")
    features = tuple(CategoricalFeature(name, 2 + len(values)) for name, values in keys.items())
    vocabularies = {name: Vocabulary(f"vocabulary/{name}.parquet", len(v), 0, 0, 0) for name, v in keys.items()}
    Manifest(Schema("label", ("x",), features), {}, preparation, vocabularies).save(folder)
    return folder


def compare(earlier: Path, now: Path) -> None:
    require_grown_from(earlier, Manifest.load(earlier), now, Manifest.load(now))


@pytest.mark.parametrize(
    "keys",
    [EARLIER, {"a": [*EARLIER["a"], "b", "aa"], "b": []}, {"a": EARLIER["a"], "b": ["first"]}],
    ids=["same", "a", "b"],
)
def test_known_values_in_front_go_on(keys: dict[str, list[str]], tmp_path: Path) -> None:
    earlier, now = write_dataset(tmp_path / "earlier"), write_dataset(tmp_path / "now", keys)
    compare(earlier, now)  # which refuses by an error
    sizes = [[feature.num_embeddings for feature in Manifest.load(each).schema.categorical] for each in (earlier, now)]
    assert all(old <= new for old, new in zip(*sizes, strict=True))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"a": ["u", "k", "a", "z"], "b": []}, "id 3 of 'a' stood for 'a' and stands for 'k'"),
        ({"a": [1, 2, 3, 4], "b": []}, "had keys of type string and has int64"),
        ({"a": ["u", "a"], "b": []}, "feature 'a' had 5 ids and has 4"),
        ({"a": EARLIER["a"]}, "features were a, b, now a"),
        ({"b": [], "a": EARLIER["a"]}, "features were a, b, now b, a"),
    ],
)
def test_other_ids_are_refused_by_name(keys: dict[str, list[Any]], message: str, tmp_path: Path) -> None:
    earlier, now = write_dataset(tmp_path / "earlier"), write_dataset(tmp_path / "now", keys)
    with pytest.raises(UserError, match=message) as refused:
        compare(earlier, now)
    assert "--vocabulary" in str(refused.value)


def test_ids_that_mean_the_same(tmp_path: Path) -> None:
    earlier = write_dataset(tmp_path / "earlier")

    def is_same(now: Path, manifest: Manifest) -> bool:
        return has_same_ids(earlier, Manifest.load(earlier), now, manifest)

    manifest = Manifest.load(earlier)
    lists = tuple(replace(each, multi_hot=True) for each in manifest.schema.categorical)
    longer = tuple(replace(each, mean_ids_per_row=2.5) for each in lists)
    before, now = (
        replace(manifest, schema=replace(manifest.schema, categorical=features)) for features in (lists, longer)
    )
    assert is_same(earlier, manifest) and has_same_ids(earlier, before, earlier, now)
    for name, keys in {"grown": [*EARLIER["a"], "new"], "swapped": EARLIER["a"][::-1]}.items():
        other = write_dataset(tmp_path / name, {"a": keys, "b": []})
        assert not is_same(other, Manifest.load(other))
    assert not is_same(earlier, before)  # lists, where there was one value a row


def test_hashes_and_learnt_transforms_have_to_be_the_same(tmp_path: Path) -> None:
    earlier = write_dataset(tmp_path / "earlier", hash_size=50, hash_seed=1, learnt={"x": {"mean": 0.5, "std": 1.0}})
    same = write_dataset(tmp_path / "same", hash_size=50, hash_seed=1, learnt={"x": {"mean": 0.5, "std": 1.0}})
    compare(earlier, same)
    for changed in ({"hash_seed": 2}, {"hash_size": 60}, {"learnt": {"x": {"mean": 0.4, "std": 1.0}}}):
        (name,) = changed
        options = Manifest.load(earlier).preparation | changed
        with pytest.raises(UserError, match=f"{name} was"):
            compare(earlier, write_dataset(tmp_path / name, **options))


def test_hashes_of_a_table_have_to_be_the_same(tmp_path: Path) -> None:
    """Of a table, they stand in its schema, column by column."""

    def described(seed: int) -> Manifest:
        schema = {"hash_size": 50, "categorical": {"a": {"hash_seed": seed}, "b": {}}}
        features = tuple(CategoricalFeature(name, 50) for name in EARLIER)
        return Manifest(Schema("label", ("x",), features), {}, {"schema": schema})

    require_grown_from(tmp_path, described(1), tmp_path, described(1))
    with pytest.raises(UserError, match="hash of 'a' was {'hash_seed': 1} and is {'hash_seed': 2}"):
        require_grown_from(tmp_path, described(1), tmp_path, described(2))


def test_other_numbers_and_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    earlier, now = (
        write_dataset(tmp_path / "earlier"),
        write_dataset(tmp_path / "now", {"a": [*EARLIER["a"], "new"], "b": []}),
    )
    manifest = Manifest.load(now)
    other = replace(manifest, schema=replace(manifest.schema, dense=("y",)))
    with pytest.raises(UserError, match=r"dense was \('x',\) and is \('y',\)"):
        require_grown_from(earlier, Manifest.load(earlier), now, other)
    (earlier / "vocabulary/a.parquet").write_bytes(b"damaged")
    with pytest.raises(UserError, match="cut short or changed"):
        compare(earlier, now)
