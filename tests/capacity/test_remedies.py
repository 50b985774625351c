"""Remedies: each holds as it is typed, is the least of its kind, and the search for them ends."""

import dataclasses
import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest

from distembed.planning.devices import DEVICES, Cluster
from distembed.reports.plan import remedies
from distembed.reports.plan.assessment import assess_capacity, is_fitting
from distembed.reports.plan.plannable import ConfiguredModel, Plannable
from distembed.reports.plan.remedies import Remedies, find_remedies
from distembed.training.config import Config, load_config
from tests.capacity import commands
from tests.capacity.commands import KAGGLE, NAIVE, cluster

WITH_EXCEPTIONS = """
data: {schema: criteo_kaggle}
embedding:
  default: {partition: quotient_remainder, num_buckets: 4000000}
  tables: {C3: {threshold: 100}, C12: {collisions: 6}, C21: {partition: naive}}
"""


def holds(arguments: list[str], remedy: str) -> bool:
    """Whether the command exits with 0 if this is typed behind it."""
    return commands.plan(*arguments, *shlex.split(remedy), commands.EARLY)[0] == 0


def kinds(found: Remedies) -> set[str]:
    return {remedy.replace("=", " ").split()[0] for remedy in found.arguments}


CASES: dict[str, tuple[list[str], list[str], Cluster, set[str]]] = {
    "too little memory": (
        [NAIVE],
        [],
        cluster("2GB"),
        {"--gpus", "--nodes", "--memory", "embedding.default.partition"},
    ),
    "buckets": (
        ["embedding.default.collisions=null", "embedding.default.num_buckets=4000000"],
        [],
        cluster("1GB"),
        {"--gpus", "--nodes", "--memory", "embedding.default.num_buckets"},
    ),
    "batches": (["train.batch_size=1000001"], [], cluster("2GB", 1, 2), {"--nodes", "--memory", "train.batch_size"}),
    "host memory": (
        [NAIVE, "plan.host_memory=true"],
        ["--host-memory", "100MB"],
        cluster("600MB", 2, 2, 10**8),
        {"--nodes", "--memory", "--host-memory", "train.sparse_optimizer.name", "embedding.default.partition"},
    ),
}


SLOW = {"buckets", "batches", "host memory"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_each_holds_as_it_is_typed_behind_the_command(case: str) -> None:
    settings, options, there_is, expected = CASES[case]
    typed = [str(KAGGLE), *settings, *options, "--memory", str(there_is.device.memory_bytes)]
    typed += ["--nodes", str(there_is.nodes), "--gpus", str(there_is.ranks_per_node)]
    found = find_remedies(
        ConfiguredModel(load_config(KAGGLE, settings)), there_is, memory_is_given=True, max_seconds=600
    )
    assert found.is_complete and kinds(found) == expected
    for remedy in found.arguments:
        assert holds(typed, remedy), remedy


@pytest.mark.thorough
def test_without_a_memory_that_was_typed_another_device_is_one() -> None:
    config, there_is = load_config(KAGGLE, [NAIVE, "embedding.default.embedding_dim=512"]), cluster("40GiB")
    found = find_remedies(ConfiguredModel(config), there_is, max_seconds=600)
    (device,) = [remedy for remedy in found.arguments if remedy.startswith("--gpu ")]
    assert holds([str(KAGGLE), NAIVE, "embedding.default.embedding_dim=512", "--gpus", "1"], device)
    larger = [other for other in DEVICES.values() if other.kind == "cuda" and other.memory_bytes > 40 * 2**30]
    enough = [other for other in larger if fits(config, dataclasses.replace(there_is, device=other))]
    assert device == f"--gpu {min(enough, key=lambda other: other.memory_bytes).name}"


@pytest.mark.slow
def test_each_number_is_the_least() -> None:
    """Against trying one number after another."""
    config, there_is = load_config(KAGGLE, [NAIVE]), cluster("700MB")
    found = find_remedies(ConfiguredModel(config), there_is, max_seconds=600)

    def first(change: Any) -> int:
        return next(n for n in itertools.count(1) if change(n))

    gpus = first(lambda n: fits(config, dataclasses.replace(there_is, ranks_per_node=n)))
    nodes = first(lambda n: fits(config, dataclasses.replace(there_is, nodes=n)))
    assert {f"--gpus {gpus}", f"--nodes {nodes}"} <= set(found.arguments)
    compressed = "embedding.default.partition=quotient_remainder embedding.default.collisions="
    collisions = first(lambda n: fits(load_config(KAGGLE, f"{compressed}{n}".split()), there_is))
    assert f"{compressed}{collisions}" in found.arguments
    large_batches = load_config(KAGGLE, ["train.batch_size=1000001"])
    found = find_remedies(ConfiguredModel(large_batches), cluster("2GB"), max_seconds=600)
    (smaller,) = [one for one in found.arguments if one.startswith("train.batch_size")]
    enough = [1_000_001 >> n for n in range(19) if fits(batches_of(1_000_001 >> n), cluster("2GB"))]
    assert smaller == f"train.batch_size={max(enough)}"


def fits(config: Config, cluster: Cluster) -> bool:
    return is_fitting(ConfiguredModel(config), cluster)


def batches_of(rows: int) -> Config:
    return load_config(KAGGLE, [f"train.batch_size={rows}"])


@pytest.mark.thorough
def test_tables_with_settings_of_their_own_keep_them(tmp_path: Path) -> None:
    file = tmp_path / "exceptions.yaml"
    file.write_text(WITH_EXCEPTIONS)
    config = load_config(file)
    found = find_remedies(ConfiguredModel(config), cluster("1GB"), max_seconds=600)
    (remedy,) = [one for one in found.arguments if one.startswith("embedding.")]
    typed = load_config(file, shlex.split(remedy))
    assert assess_capacity(typed, cluster("1GB")).fits
    for name, rows in (("C3", (4_000_000, 3)), ("C12", (-(-8_351_593 // 6), 6)), ("C21", (7_046_547,))):
        (table,) = [one for one in assess_capacity(typed, cluster("1GB")).tables if one.name == name]
        assert table.num_rows == rows
    collisions = typed.embedding.default.collisions
    assert collisions is not None
    fewer = remedy.replace(f"default.collisions={collisions}", f"default.collisions={collisions - 1}")
    assert not fits(load_config(file, shlex.split(fewer)), cluster("1GB"))


@pytest.mark.slow
def test_what_is_not_planned_would_not_have_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    config, there_is = load_config(KAGGLE, [NAIVE]), cluster("400MB", 1, 2)
    bounded = find_remedies(ConfiguredModel(config), there_is, max_seconds=600)
    monkeypatch.setattr(ConfiguredModel, "table_bytes", lambda self: 0)
    assert bounded == find_remedies(ConfiguredModel(config), there_is, max_seconds=600) != Remedies()


@pytest.mark.thorough
def test_smaller_tables_are_no_remedy_for_networks_that_are_too_large() -> None:
    config = load_config(KAGGLE, ["model.top=[4096, 4096]", "train.sparse_optimizer.name=adam"])
    found = find_remedies(ConfiguredModel(config), cluster("300MB"), max_seconds=600)
    assert kinds(found) == {"--gpu"}


def test_the_search_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config, there_is = load_config(KAGGLE, [NAIVE]), cluster("700MB")
    found, planned = assess_capacity(config, there_is), list[int]()

    def does_not_fit(plannable: Plannable, cluster: Cluster) -> bool:
        planned.append(cluster.world_size)
        return False

    monkeypatch.setattr(remedies, "is_fitting", does_not_fit)
    nothing = find_remedies(ConfiguredModel(config), there_is, assessment=found, max_seconds=0)
    assert nothing == Remedies(is_complete=False) and not planned
    many = find_remedies(
        ConfiguredModel(config),
        dataclasses.replace(there_is, nodes=500, ranks_per_node=8),
        assessment=found,
        max_seconds=600,
    )
    assert many == Remedies(is_complete=False)
    assert max(planned) == 4000
