"""A dataset's ids go on from an earlier one: its vocabularies begin with the earlier ones, or its hash is the same."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.kept import has_same_ids, require_grown_from
from distembed.data.dataset.manifest import Manifest, Vocabulary
from distembed.data.dataset.schema import CategoricalFeature, Schema

KEYS = {"a": ["u", "a", "k"], "b": []}


def write(folder: Path, keys: Mapping[str, Sequence[str | int]] = KEYS, **preparation: Any) -> Path:
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
    "keys", [KEYS, {"a": [*KEYS["a"], "b", "aa"], "b": []}, {"a": KEYS["a"], "b": ["first"]}], ids=["same", "a", "b"]
)
def test_known_values_in_front_go_on(keys: dict[str, list[str]], tmp_path: Path) -> None:
    earlier, now = write(tmp_path / "earlier"), write(tmp_path / "now", keys)
    compare(earlier, now)  # which refuses by an error
    sizes = [[feature.num_embeddings for feature in Manifest.load(each).schema.categorical] for each in (earlier, now)]
    assert all(old <= new for old, new in zip(*sizes, strict=True))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"a": ["u", "k", "a", "z"], "b": []}, "id 3 of 'a' stood for 'a' and stands for 'k'"),
        ({"a": [1, 2, 3, 4], "b": []}, "had keys of type string and has int64"),
        ({"a": ["u", "a"], "b": []}, "feature 'a' had 5 ids and has 4"),
        ({"a": KEYS["a"]}, "features were a, b, now a"),
        ({"b": [], "a": KEYS["a"]}, "features were a, b, now b, a"),
    ],
)
def test_other_ids_are_refused_by_name(keys: dict[str, list[Any]], message: str, tmp_path: Path) -> None:
    earlier, now = write(tmp_path / "earlier"), write(tmp_path / "now", keys)
    with pytest.raises(UserError, match=message) as refused:
        compare(earlier, now)
    assert "--vocabulary" in str(refused.value)


def test_ids_that_mean_the_same(tmp_path: Path) -> None:
    earlier = write(tmp_path / "earlier")

    def is_same(now: Path, manifest: Manifest) -> bool:
        return has_same_ids(earlier, Manifest.load(earlier), now, manifest)

    manifest = Manifest.load(earlier)
    lists = tuple(dataclasses.replace(each, multi_hot=True) for each in manifest.schema.categorical)
    longer = tuple(dataclasses.replace(each, mean_ids_per_row=2.5) for each in lists)
    before, now = (
        dataclasses.replace(manifest, schema=dataclasses.replace(manifest.schema, categorical=features))
        for features in (lists, longer)
    )
    assert is_same(earlier, manifest) and has_same_ids(earlier, before, earlier, now)
    for name, keys in {"grown": [*KEYS["a"], "new"], "swapped": KEYS["a"][::-1]}.items():
        other = write(tmp_path / name, {"a": keys, "b": []})
        assert not is_same(other, Manifest.load(other))
    assert not is_same(earlier, before)  # lists, where there was one value a row


def test_hashes_and_learnt_transforms_have_to_be_the_same(tmp_path: Path) -> None:
    earlier = write(tmp_path / "earlier", hash_size=50, hash_seed=1, learnt={"x": {"mean": 0.5, "std": 1.0}})
    same = write(tmp_path / "same", hash_size=50, hash_seed=1, learnt={"x": {"mean": 0.5, "std": 1.0}})
    compare(earlier, same)
    for changed in ({"hash_seed": 2}, {"hash_size": 60}, {"learnt": {"x": {"mean": 0.4, "std": 1.0}}}):
        (name,) = changed
        options = Manifest.load(earlier).preparation | changed
        with pytest.raises(UserError, match=f"{name} was"):
            compare(earlier, write(tmp_path / name, **options))


def test_hashes_of_a_table_have_to_be_the_same(tmp_path: Path) -> None:
    """Of a table, they stand in its schema, column by column."""

    def described(seed: int) -> Manifest:
        schema = {"hash_size": 50, "categorical": {"a": {"hash_seed": seed}, "b": {}}}
        features = tuple(CategoricalFeature(name, 50) for name in KEYS)
        return Manifest(Schema("label", ("x",), features), {}, {"schema": schema})

    require_grown_from(tmp_path, described(1), tmp_path, described(1))
    with pytest.raises(UserError, match="hash of 'a' was {'hash_seed': 1} and is {'hash_seed': 2}"):
        require_grown_from(tmp_path, described(1), tmp_path, described(2))


def test_other_numbers_and_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    earlier, now = write(tmp_path / "earlier"), write(tmp_path / "now", {"a": [*KEYS["a"], "new"], "b": []})
    manifest = Manifest.load(now)
    other = dataclasses.replace(manifest, schema=dataclasses.replace(manifest.schema, dense=("y",)))
    with pytest.raises(UserError, match=r"dense was \('x',\) and is \('y',\)"):
        require_grown_from(earlier, Manifest.load(earlier), now, other)
    (earlier / "vocabulary/a.parquet").write_bytes(b"damaged")
    with pytest.raises(UserError, match="cut short or changed"):
        compare(earlier, now)
