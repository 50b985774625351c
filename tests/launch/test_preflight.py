"""What is looked at before a job is submitted, each with what makes it go wrong."""

import dataclasses
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchx import specs

from distembed.data.dataset.manifest import Manifest
from distembed.planning.devices import Cluster, find_device
from distembed.reports.plan.assessment import assess_capacity
from distembed.training.config import Config, validate
from launch.apps.request import parse_shape
from launch.jobs.preflight import (
    check_acceptance,
    check_capacity,
    check_checkpoints,
    check_dataset,
    check_partition,
    check_writable,
)
from launch.schedulers.slurm.script import SlurmJob
from tests.small_runs import write_dataset

NODES = """\
gpu|node1|96|2000000|gpu:h100:8(S:0-1)|idle
gpu|node2|96|2000000|gpu:h100:8(S:0-1)|allocated
gpu|node3|96|2000000|gpu:h100:8(S:0-1)|drained
gpu|node4|96|2000000|gpu:h100:8(S:0-1)|idle*
gpu|node5|96|2000000|gpu:h100:8(S:0-1)|idle~
cpu*|node6|64|1|(null)|mixed
cpu*|node7|64|1|(null)|down*
small|node8|8|16000|gpu:t4:1,gpu:a2:2|planned
"""
"""Of the five in "gpu" one is being emptied, and one does not respond; one that is switched off is started again."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script in the place of one of Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, text: str) -> None:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.fixture
def sinfo(command: Callable[[str, str], None]) -> None:
    command("sinfo", f"cat <<'END'\n{NODES}END")


@pytest.mark.usefixtures("sinfo")
@pytest.mark.parametrize(
    ("j", "need", "partition", "status", "said"),
    [
        ("3x8", (96, 8, 1_000_000), "gpu", "ok", "gpu: 3 node(s)"),
        ("2:9x8", (96, 8, 1_000_000), "gpu", "ok", "such as the 2:9 asked for"),
        ("1x1", (64, 0, 500_000), None, "ok", "cpu: 1 node(s)"),
        ("1x3", (8, 3, 1000), "small", "ok", "small: 1 node(s)"),
        ("1x3", (8, 1, 1000), "small,gpu", "ok", "gpu: 3 node(s)"),
        ("4x8", (96, 8, 1_000_000), "gpu", "wrong", "3 node(s) of 96 CPUs, 1000000 MB and 8 GPUs or more that are up"),
        ("1x1", (97, 8, 1_000_000), "gpu", "wrong", "of its 5 the largest has 96 CPUs, 2000000 MB and 8 GPUs"),
        ("1x1", (1, 9, 1), "gpu", "wrong", "gpu has 0 node(s)"),
        ("1x1", (1, 0, 16_001), "small", "wrong", "small has 0 node(s)"),
        ("2x1", (1, 0, 1), None, "wrong", "cpu has 1 node(s)"),
        ("1x1", (1, 0, 1), "gold", "wrong", "the partition 'gold' is not there, or has no nodes"),
    ],
)
def test_a_partition_has_nodes_that_suffice_or_misses_them(
    j: str, need: tuple[int, int, int], partition: str | None, status: str, said: str
) -> None:
    cpus, gpus, memory = need
    finding = check_partition(parse_shape(j), specs.Resource(cpu=cpus, gpu=gpus, memMB=memory), partition)
    assert finding.status == status and said in finding.detail and bool(finding.remedy) == (status == "wrong")


def test_a_slurm_that_is_not_there_or_does_not_answer_is_said(command: Callable[[str, str], None]) -> None:
    arguments: Any = parse_shape("1x1"), specs.Resource(1, 0, 1), None
    missing = check_partition(*arguments)
    assert missing.status == "wrong" and "there is no sinfo on PATH" in missing.detail
    command("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    silent = check_partition(*arguments)
    assert silent.status == "wrong" and "Unable to contact slurm controller" in silent.detail


def test_slurm_itself_is_asked_and_nothing_is_submitted(command: Callable[[str, str], None], tmp_path: Path) -> None:
    job = SlurmJob("job", "train", ["true"], tmp_path, {}, 1, 1, {})
    command("sbatch", f'echo "$@" >>{tmp_path}/asked; echo "sbatch: Job 7 to start at noon on node1" >&2')
    accepted = check_acceptance(job)
    assert accepted.status == "ok" and accepted.detail == "to start at noon on node1"
    assert "--test-only" in (tmp_path / "asked").read_text().split()
    command("sbatch", "echo 'allocation failure: Invalid account' >&2; exit 1")
    refused = check_acceptance(job)
    assert refused.status == "wrong" and "Invalid account" in refused.detail


def config_of(folder: Path, **train: Any) -> Config:
    return validate({"data": {"path": str(folder)}, "train": {"batch_size": 32, **train}}, "the test")


def test_a_plan_that_does_not_fit_is_refused_with_its_numbers(tmp_path: Path) -> None:
    config = config_of(write_dataset(tmp_path / "dataset"))
    for memory, status, said in (
        ("64GiB", "ok", "of 64.00 GiB a rank"),
        ("64KiB", "wrong", "does not fit 2 x 4 custom (else l4-24gb): without any tables each rank needs"),
    ):
        assessment = assess_capacity(config, Cluster(find_device(f"memory={memory}"), 2, 4))
        finding = check_capacity(assessment, parse_shape("2x4"))
        assert finding.status == status and "2 x 4" in finding.detail and said in finding.detail


def test_a_dataset_without_a_file_of_its_manifest_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "dataset")
    assert check_dataset(config_of(folder)).status == "ok"
    content = (folder / "test" / "part-0.parquet").read_bytes()
    (folder / "test" / "part-0.parquet").write_bytes(content[:-1])
    cut = check_dataset(config_of(folder))
    assert cut.status == "wrong" and f"test/part-0.parquet has {len(content) - 1} bytes" in cut.detail
    (folder / "test" / "part-0.parquet").unlink()
    lacking = check_dataset(config_of(folder))
    assert lacking.status == "wrong" and "lacks 1 of its 3 files, test/part-0.parquet first" in lacking.detail
    (manifest,) = folder.glob("*.json")
    manifest.write_text(json.dumps({}))
    assert check_dataset(config_of(folder)).status == "wrong"
    assert check_dataset(config_of(tmp_path / "none")).status == "wrong"


def test_a_resumed_job_may_compare_evaluations_without_a_metric_and_a_new_one_may_not(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "dataset")
    manifest = Manifest.load(folder)
    one_kind = dataclasses.replace(manifest.splits["validation"], label_rate=1.0)
    dataclasses.replace(manifest, splits={**manifest.splits, "validation": one_kind}).write(folder)
    config = config_of(folder, keep_best=True)
    new = check_dataset(config, is_new=True)
    assert new.status == "wrong" and "it has only rows whose label is 1" in new.detail
    assert check_dataset(config, is_new=False).status == "ok"


def test_folders_must_take_files(tmp_path: Path) -> None:
    assert check_writable("run folder", tmp_path / "a" / "b").status == "ok"
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert check_writable("run folder", folder).status == "wrong", folder
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_folders_for_checkpoints_behind_a_url_are_asked_for(tmp_path: Path) -> None:
    for place, status in (
        (None, "ok"),
        (str(tmp_path / "elsewhere"), "ok"),
        ("memory://checkpoints", "ok"),
        ("/proc/none", "wrong"),
        ("nowhere://checkpoints", "wrong"),
    ):
        finding = check_checkpoints(config_of(tmp_path, checkpoint_dir=place), tmp_path / "run", is_new=True)
        assert finding.status == status, finding


def test_checkpoints_of_another_run_are_no_place_for_a_new_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, checkpoint_dir=str(tmp_path / "elsewhere"))
    checkpoint = tmp_path / "elsewhere" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text("{}")
    found = check_checkpoints(config, tmp_path / "run", is_new=True)
    assert found.status == "wrong" and "holds step-00000010 of another run" in found.detail
    assert check_checkpoints(config, tmp_path / "run", is_new=False).status == "ok"
