"""Runs with managed ids: equal to a vocabulary and to a dictionary, killed, resumed and resharded."""

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.reader import BatchOrder, BatchReader
from distembed.embedding import CompositionalEmbeddingConfig, managed_sizes
from distembed.embedding.settings import ManagedConfig
from distembed.partitions import QuotientRemainder
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.training.managed_ids import private_rows
from tests.embedding.managed_dictionary import DictionaryPolicy, managed_config
from tests.server.processes import serving
from tests.small_runs import command, config_values, distembed, losses, metrics, stopped_at, write_dataset
from tests.training.test_click_models import with_history
from tests.training.test_raw_ids import SCHEMA, write_rows
from tests.training.test_runs import start_ranks, wait_for_steps

C3: dict[str, Any] = {"size": 102, "admission": {"min_count": 2, "candidates": 400}}
TABLES = {
    "C3": {"partition": "naive", "ids": {**C3, "eviction": {"policy": "lru", "every": 7}}},
    "M": {"ids": {"size": 40, "eviction": {"every": 10, "half_life_steps": 7}}},
}
ROUNDING = 2e-6
"""Ranks sum gradients of their own rows first: float32 sums in another order, whose last bits differ."""
SETTINGS = [
    *("train.checkpoint_every=5", "train.keep_checkpoints=9", "train.epochs=2", "train.max_steps=40"),
    "train.sparse_optimizer={name: row_wise_adagrad, learning_rate: 0.1}",
]


PLUGINS = "managed_ids_plugin.py", "rank_order_plugin.py"
"""With the first plugin, C3 has 4 buckets of 25 slots."""


def write_config(folder: Path, dataset: Path, tables: dict[str, Any], plugins: Sequence[str] = PLUGINS) -> Path:
    values = config_values(dataset)
    values["embedding"]["tables"] = tables
    values["plugins"] = [str(Path(__file__).with_name(plugin)) for plugin in plugins]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def saved(run: Path, step: int = 40) -> dict[str, torch.Tensor]:
    tensors = StockCheckpoint(run / "checkpoints" / f"step-{step:08}")
    return {name: tensors[name] for name in tensors if name.startswith(("model.", "optimizer."))}


def assert_equal(run: Path, other: Path, only: str = "", tolerance: float = 0.0, step: int = 40) -> None:
    first, second = saved(run, step), saved(other, step)
    names = [name for name in first if only in name]
    assert names and first.keys() == second.keys()
    for name in names:
        torch.testing.assert_close(first[name], second[name], rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module", autouse=True)
def small_buckets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(managed_sizes, "_SLOTS_PER_BUCKET", 20)
        yield


def counts(run: Path) -> list[Any]:
    return [(line["hit_rate"], line["evicted_ids"]) for line in metrics(run, "train")]


def evaluations(run: Path) -> list[float]:
    return [line["logloss"] for line in metrics(run, "eval")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("managed")
    write_config(folder, write_dataset(folder / "data"), TABLES)
    said = distembed("train", folder / "config.yaml", *SETTINGS, "--run-dir", folder / "1").stdout
    (folder / "said").write_text(said)
    return folder


def test_identities_and_counts_are_a_dictionarys(folder: Path) -> None:
    c3 = managed_config(102, "lru", min_count=2, candidates=400, every=7)
    policies = {"C3": DictionaryPolicy(c3), "M": DictionaryPolicy(managed_config(40, every=10, half_life_steps=7))}
    reader = BatchReader(str(folder / "data"), "train", BatchOrder(64, seed=0), prefetch_batches=0)
    batches = [batch["sparse_features"] for _ in range(2) for batch in reader]
    said, noted = " ".join((folder / "said").read_text().split()), set[str]()
    for step, (batch, line) in enumerate(zip(batches, metrics(folder / "1", "train"), strict=False), start=1):
        slots = {name: np.array(policy.batch(batch[name].values().tolist())) for name, policy in policies.items()}
        assert line["hit_rate"] == {name: (own > 1).sum() / (own > 0).sum() for name, own in slots.items()}
        assert line["evicted_ids"] == {name: policy.evicted for name, policy in policies.items()}
        for name, policy in policies.items():
            if step % policy.config.eviction.every == 0:
                refused = sum(bucket.refused for bucket in policy.buckets)
                if refused and name not in noted:
                    noted.add(name)
                    assert f"{name!r} did not count {refused:,} occurrences" in said
                    assert f"before the eviction at step {step}," in said
                policy.evict()
    assert noted and said.count("did not count") == len(noted) < len(policies)
    assert step == 40
    for name, policy in policies.items():
        entries, used = (saved(folder / "1")[f"model.model.embeddings.{name}__{part}"] for part in ("entries", "used"))
        assert len(entries) == len(policy.buckets) == {"C3": 4, "M": 1}[name]
        for bucket, own_entries in zip(policy.buckets, entries, strict=True):
            known = {own.slot: id for id, own in bucket.seen.items() if own.slot is not None}
            assert {slot: int(id) for slot, (id, _) in zip(bucket.slots, own_entries, strict=False) if id} == known
        assert used[:, 4].tolist() == [bucket.evicted for bucket in policy.buckets]
        assert policy.evicted > 2


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize(
    "ranks, resumed_on, types, plugins",
    [
        (2, 1, "row_wise", PLUGINS),
        (4, 2, "row_wise", PLUGINS),
        (4, 1, "table_wise,data_parallel", PLUGINS),
        (1, 4, "", PLUGINS),
        (2, 2, "row_wise", PLUGINS[:1]),  # with the all-reduce of users
        (4, 4, "row_wise", PLUGINS[:1]),
    ],
)
def test_resharded_and_resumed_runs_equal_undisturbed_ones(
    folder: Path, tmp_path: Path, ranks: int, resumed_on: int, types: str, plugins: Sequence[str]
) -> None:
    config = write_config(tmp_path, folder / "data", TABLES, plugins)
    layout = [f"plan.sharding_types=[{types}]"] if types else []
    distembed("train", config, *SETTINGS, *layout, "--run-dir", tmp_path / "whole", ranks=ranks)
    assert_equal(tmp_path / "whole", folder / "1", "__entries")
    assert_equal(tmp_path / "whole", folder / "1", "__used")
    assert_equal(tmp_path / "whole", folder / "1", tolerance=ROUNDING)
    for values in (losses, evaluations):
        assert values(tmp_path / "whole") == pytest.approx(values(folder / "1"), rel=ROUNDING)
    assert counts(tmp_path / "whole") == counts(folder / "1")
    for others in {ranks, resumed_on}:
        run = stopped_at(25, tmp_path / "whole", tmp_path / f"resumed-{others}")
        distembed("train", config, *SETTINGS, *layout, "--resume", "--run-dir", run, ranks=others)
        assert_equal(run, tmp_path / "whole", "__entries")
        assert counts(run) == counts(folder / "1")
        is_exact = others == ranks and (plugins == PLUGINS or ranks < 4)
        assert_equal(run, tmp_path / "whole", tolerance=0.0 if is_exact else ROUNDING)


@pytest.mark.thorough
def test_a_run_killed_after_an_eviction_resumes_as_if_it_had_not_been(folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, folder / "data", TABLES, [*PLUGINS, "killed_plugin.py"])
    arguments = command("train", config, *SETTINGS, "--run-dir", tmp_path / "run")
    killed = subprocess.run(arguments, env=os.environ | {"KILLED_AFTER_STEP": "28"})
    assert killed.returncode == -signal.SIGKILL
    assert len(metrics(tmp_path / "run", "train")) == 28
    distembed("train", config, *SETTINGS, "--resume", "--run-dir", tmp_path / "run")
    assert_equal(tmp_path / "run", folder / "1")
    assert losses(tmp_path / "run") == losses(folder / "1") and counts(tmp_path / "run") == counts(folder / "1")


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("more", ["", ", history: mean"])
def test_histories_and_items_have_slots_in_common(tmp_path: Path, more: str) -> None:
    history: dict[str, Any] = {"more": [CategoricalFeature("H", 400, True, 2.0, table="C2")], "dense_sequences": ("G",)}
    data = write_dataset(tmp_path / "data", change=with_history, beside=("H",), missing_dense=True, **history)
    config = write_config(tmp_path, data, {"C2": {"ids": {"size": 90, "eviction": {"policy": "lru", "every": 5}}}})
    arguments = [config, f"model={{name: din, attention: [8], deep: [16]{more}}}", *SETTINGS]
    distembed("train", *arguments, "--run-dir", tmp_path / "1")
    distembed("train", *arguments, "--run-dir", tmp_path / "2", ranks=2)
    assert_equal(tmp_path / "2", tmp_path / "1", "__entries")
    assert_equal(tmp_path / "2", tmp_path / "1", tolerance=ROUNDING)
    assert counts(tmp_path / "2") == counts(tmp_path / "1")
    assert counts(tmp_path / "1")[-1][1]["C2"] > 50
    run = stopped_at(25, tmp_path / "2", tmp_path / "resumed")
    distembed("train", *arguments, "--resume", "--run-dir", run, ranks=2)
    assert_equal(run, tmp_path / "2")
    distembed("export", run, "--output", tmp_path / "model")  # refused if its scores differ


@pytest.mark.thorough
@pytest.mark.distributed
def test_an_interruption_trains_the_batches_whose_ids_were_admitted(folder: Path, tmp_path: Path) -> None:
    config, settings = (
        folder / "config.yaml",
        [*SETTINGS, "train.epochs=40", "train.max_steps=400", "train.checkpoint_every=1000"],
    )
    distembed("train", config, *settings, "--run-dir", tmp_path / "whole", ranks=2)
    run = tmp_path / "run"
    processes = start_ranks(2, config, run, *settings)
    wait_for_steps(run, processes[0], 20)
    for process in processes:
        os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [75, 75] and len(losses(run)) < 400
    distembed("train", config, *settings, "--resume", "--run-dir", run, ranks=2)
    assert_equal(run, tmp_path / "whole", step=400)
    assert losses(run) == losses(tmp_path / "whole") and counts(run) == counts(tmp_path / "whole")


def test_with_room_for_all_ids_managed_ids_equal_a_vocabulary(folder: Path, tmp_path: Path) -> None:
    size = 1002
    config = write_config(tmp_path, folder / "data", {"C3": {"ids": {"size": size}}}, plugins=[])
    distembed("train", config, *SETTINGS, "--run-dir", tmp_path / "managed")
    entries = saved(tmp_path / "managed")["model.model.embeddings.C3__entries"][0, :1000]
    slots = {int(id): slot + 2 for slot, (id, value) in enumerate(entries) if value} | {0: 0}

    def numbered(_: str, table: pa.Table) -> pa.Table:
        ids = pa.array([slots.get(id, 1) for id in table["C3"].to_pylist()], pa.int32())
        return table.set_column(table.column_names.index("C3"), "C3", ids)

    data = write_dataset(tmp_path / "vocabulary", change=numbered, sizes={"C3": size})
    config = write_config(tmp_path, data, {})
    distembed("train", config, *SETTINGS, "--run-dir", tmp_path / "plain")
    assert losses(tmp_path / "managed") == losses(tmp_path / "plain")
    assert evaluations(tmp_path / "managed") == evaluations(tmp_path / "plain")


@pytest.mark.parametrize("reset", [True, False])
def test_private_rows_of_evicted_ids_start_again(folder: Path, tmp_path: Path, reset: bool) -> None:
    ids = {**C3, "eviction": {"policy": "lru", "every": 7, "reset": reset}}
    tables = {"C3": {"partition": "naive", "ids": ids}}
    config = write_config(tmp_path, folder / "data", tables)
    settings = ["train.checkpoint_every=1", "train.keep_checkpoints=99", "train.max_steps=14", *SETTINGS[-1:]]
    distembed("train", config, *settings, "--run-dir", tmp_path / "run")
    before, after = saved(tmp_path / "run", 13), saved(tmp_path / "run", 14)
    name = "model.model.embeddings.embedding_bags.C3__p0.weight"
    entries = (own["model.model.embeddings.C3__entries"] for own in (before, after))
    ids_before, ids_after = (own[:, :25, 0].flatten() for own in entries)
    changed = (ids_before * (ids_before != ids_after)).nonzero().flatten() + 2  # other slots were free
    assert len(changed)
    states = after[next(key for key in after if key.startswith("optimizer.") and "C3__p0" in key)].flatten()
    started_again = states[changed] == 0
    assert bool(started_again.all()) == reset
    first = torch.empty_like(after[name])
    CompositionalEmbeddingConfig("C3", 102, 8, ["C3"]).partition_tables()[0].init(first)
    assert torch.equal(after[name][changed], first[changed]) == reset


@pytest.mark.thorough
def test_described_exported_and_predicted(folder: Path, tmp_path: Path) -> None:
    described = json.loads(distembed("describe", folder / "config.yaml", "--json").stdout)
    table = next(table for table in described["tables"] if table["name"] == "C3")
    assert table["assignment_bytes"] == 16 * 102 == table["bytes"] - 102 * 8 * 4
    assert table["managed"]["memory_bytes"] == 16 * (100 + 400) + 4 * 6 * 8 + 4 * 1024
    # an export appears only if its scores are the trained model's
    distembed("export", folder / "1", "--output", tmp_path / "model")
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert manifest["parity"]["largest_difference"] < 1e-6
    assert "managed ids" in distembed("materialise", folder / "1", "--output", tmp_path / "vectors", code=2).stderr


def test_a_run_with_managed_ids_is_not_converted(folder: Path, tmp_path: Path) -> None:
    said = distembed("convert", folder / "1", "--output", tmp_path / "converted", code=2).stderr
    assert "has managed ids, which convert and compress do not carry over" in " ".join(said.split())


def test_rows_that_slots_share_are_not_private() -> None:
    table = CompositionalEmbeddingConfig("t", 102, 8, ["t"], QuotientRemainder(102, collisions=4))
    rows = np.stack([table.scheme.rows(torch.tensor([slot])).flatten().numpy() for slot in range(102)], axis=1)
    for own, private in zip(rows, private_rows(table), strict=True):
        assert private.tolist() == [int((own == row).sum()) == 1 for row in range(len(private))]


@pytest.mark.parametrize(
    "settings", [{"partition": "truncated"}, {"id_policy": "modulo"}, {"oov_id": 1, "all_scored": True}]
)
def test_settings_that_do_not_go_with_managed_ids_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="managed ids and"):
        CompositionalEmbeddingConfig("t", 102, 8, ["t"], ids=ManagedConfig(102), **settings)


@pytest.mark.thorough
@pytest.mark.distributed
def test_raw_values_are_mapped_alike_in_splits_rows_exports_and_servers(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet")
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    rows, schema, dataset = (tmp_path / name for name in ("rows.parquet", "schema.yaml", "dataset"))
    distembed("prepare", "table", rows, "--schema", schema, "--output", dataset)
    tables = {"user": {"ids": {"size": 30, "eviction": {"every": 9}}}, "pages": {"ids": {"size": 60}}}
    config = write_config(tmp_path, dataset, tables, plugins=[])
    more = ["train.epochs=4", "train.max_steps=76", "train.keep_checkpoints=99"]
    distembed("train", config, *SETTINGS, *more, "--run-dir", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["auc"] > 0.8  # 28 slots for 40 users
    distembed("predict", tmp_path / "run", "--output", tmp_path / "split.parquet")
    distembed("predict", tmp_path / "run", "--input", rows, "--output", tmp_path / "raw.parquet")
    split, raw = (pq.read_table(tmp_path / f"{name}.parquet")["prediction"].to_numpy() for name in ("split", "raw"))
    np.testing.assert_allclose(raw[-len(split) :], split, atol=1e-6)
    distembed("export", tmp_path / "run", "--output", tmp_path / "model")  # refused if its scores differ
    given = pq.read_table(rows).drop_columns("click").to_pylist()
    users = [row["user"] for row in given]
    ids = ds.dataset(dataset / "train").to_table()["user"].to_pylist()
    user_of_id = dict(zip(ids, users, strict=False))  # rows of the training split come first
    early, late = (
        {user_of_id[int(id)] for id in saved(tmp_path / "run", step)["model.model.embeddings.user__entries"][0, :28, 0]}
        for step in (5, 76)
    )
    unknown, with_slot = 12345, min(late)
    assert {2**63 - 1, -(2**63), -1, 0} < set(users) and early - late
    with serving(tmp_path / "model", tmp_path / "server") as server:
        status, answer = server.ask(given[-len(split) :])
        assert status == 200 and answer["prediction"] == pytest.approx(split.tolist(), abs=1e-6)

        def scores(users: Iterable[int | None]) -> list[float]:
            return server.ask([{**given[0], "user": user} for user in users])[1]["prediction"]

        missing, known, *others = scores([None, with_slot, unknown, 2**62, -2, *sorted({*users} - late)])
    assert len(set(others)) == 1 and len({missing, known, others[0]}) == 3
