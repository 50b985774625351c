"""The checks before a job is submitted, each with a reason to fail, and the devices that are planned for."""

import dataclasses
import json
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from torchx import specs

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.launch.apps.request import ElasticRequest, parse_shape
from distembed.launch.jobs.job import Job, default_request
from distembed.launch.jobs.preflight import (
    check_acceptance,
    check_capacity,
    check_checkpoints,
    check_dataset,
    check_mounts,
    check_partition,
    check_writable,
)
from distembed.launch.jobs.start import start
from distembed.launch.schedulers.slurm.script import SlurmJob
from distembed.planning.devices import Cluster, find_device
from distembed.reports.plan import assessment
from distembed.reports.plan.assessment import assess_capacity
from distembed.training.config import Config, validate
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
        found = assess_capacity(config, Cluster(find_device(f"memory={memory}"), 2, 4))
        finding = check_capacity(found, parse_shape("2x4"))
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


IMAGE = {"image": "registry/distembed:1", "cpu": 4, "memMB": 4000}
Dry = Callable[..., str]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = write_dataset(tmp_path_factory.mktemp("start") / "dataset")
    return validate({"data": {"path": str(folder)}, "train": {"batch_size": 64}}, "the test")


ASSESSED: dict[tuple[str, Cluster], assessment.Assessment] = {}
"""By configs and clusters: the search for a plan takes a second."""


def assess_once(config: Config, cluster: Cluster) -> assessment.Assessment:
    key = config.to_yaml(), cluster
    if key not in ASSESSED:
        ASSESSED[key] = assess_capacity(config, cluster)
    return ASSESSED[key]


@pytest.fixture
def dry(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dry:
    """What a dry run says; ``code`` is its exit code."""
    monkeypatch.setattr(assessment, "assess_capacity", assess_once)

    def run(scheduler: str, code: int = 0, **values: Any) -> str:
        said: list[str] = []
        component = ElasticRequest(**values.pop("component", {}))
        job = Job(str(tmp_path / "run"), scheduler, **{"j": "1x4", "component": component, **values})
        try:
            start(job, config, dry_run=True, detach=False, say=said.append)
            assert code == 0
        except typer.Exit as ended:
            assert ended.exit_code == code
        assert not (tmp_path / "run").exists()
        return "\n".join(said)

    return run


def test_the_gpu_of_a_named_resource_is_planned_for(dry: Dry) -> None:
    output = dry("local_cwd", component={"h": "gpu_8_h100"})
    assert "ok     plan: fits 1 x 4 h100-80gb" in output and "of 79.65 GiB a rank" in output
    assert "distembed.launch.nodes.run" in output and "plan: 4 table_wise" in output


def test_nodes_with_gpus_need_the_builds_for_them(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    for fbgemm, code in (("fbgemm-gpu-cpu", 3), ("fbgemm-gpu", 0)):
        installed = {"torch": "2.13.0", "torchrec": "1.8.0", fbgemm: "1.8.0"}
        monkeypatch.setattr("distembed.launch.jobs.preflight.installed_versions", installed.copy)
        output = dry("local_cwd", code, component={"h": "gpu_8_h100", "python": sys.executable})
        assert ("wrong  build: the nodes have GPUs" in output) == (code == 3)
        assert "ok     torch" in output
        # somebody else's, of which nothing is known here
        assert "build:" not in dry("local_cwd", component={"h": "gpu_8_h100", "python": "/opt/python"})


@pytest.mark.parametrize("fbgemm", ["1.8.0", "1.6.0"])
def test_the_tested_trio_that_is_installed_is_named_and_judged_by(
    fbgemm: str, dry: Dry, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"torch": "2.11.0+cu130", "torchrec": "1.6.1", "fbgemm-gpu-cpu": fbgemm}
    monkeypatch.setattr("distembed.launch.jobs.preflight.installed_versions", installed.copy)
    output = dry("local_cwd", 0 if fbgemm == "1.6.0" else 3)
    assert "ok     trio: 2.11: torch 2.11.0, torchrec 1.6.1, FBGEMM 1.6.0" in output
    assert ("wrong  fbgemm-gpu-cpu: 1.8.0 is installed, 1.6.0 is tested" in output) == (fbgemm == "1.8.0")


def test_a_job_that_asks_for_gpus_trains_on_them_or_fails(dry: Dry, config: Config, tmp_path: Path) -> None:
    output = dry("local_cwd", component={"h": "gpu_8_h100"})
    assert "ok     device: cuda" in output and output.count("train.device=cuda") == 1
    assert "train.device=" not in dry("local_cwd", component={"cpu": 4, "memMB": 8000})
    on_processors = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
    job, said = Job(str(tmp_path / "run"), "local_cwd", "1x4", component=ElasticRequest(h="gpu_8_h100")), []
    with pytest.raises(typer.Exit):
        start(job, on_processors, dry_run=True, detach=False, say=said.append)
    assert any(line.startswith("wrong  device: train.device is cpu, and the job asks for nodes with") for line in said)


def test_nodes_without_gpus_are_planned_with_their_memory(dry: Dry) -> None:
    # four ranks share a node of 8,000 MB
    assert "of 1.95 GiB a rank" in dry("local_cwd", component={"cpu": 4, "memMB": 8000})
    assert "of 1.95 GiB a rank" in dry("local_cwd", component={"cpu": 4, "memMB": 8000}, gpu="cpu-256gb")


@pytest.mark.thorough
def test_an_elastic_job_must_fit_its_fewest_nodes(dry: Dry) -> None:
    everything = ["type=bind", "src=/", "dst=/"]
    component = {"h": "gpu_8_h100", "image": "registry/distembed:1", "mounts": everything}
    output = dry("kubernetes", j="2:3x4", component=component, options={"queue": "default"})
    assert "fits 2 x 4 h100-80gb, the fewest nodes" in output


def test_gpus_of_which_nothing_is_known_are_refused(dry: Dry) -> None:
    with pytest.raises(UserError, match="GPUs of an unknown kind: name it with --gpu"):
        dry("local_cwd", component={"cpu": 4, "memMB": 4000, "gpu": 4})
    with pytest.raises(UserError, match="gpu is 4 without cpu and memMB"):
        dry("local_cwd", gpu="h100-80gb")
    with pytest.raises(UserError, match="cpu-256gb, and the nodes have 4 GPUs"):
        dry("local_cwd", gpu="cpu-256gb", component={"cpu": 4, "memMB": 4000, "gpu": 4})
    with pytest.raises(UserError, match="the nodes have no GPUs"):
        dry("local_cwd", gpu="h100-80gb", component={"h": "cpu_16"})


def test_what_is_said_twice_must_agree(dry: Dry) -> None:
    with pytest.raises(UserError, match="--resource gcp_a2-highgpu-8g has a100-40gb: leave --gpu out"):
        dry("local_cwd", gpu="h100-80gb", component={"h": "gcp_a2-highgpu-8g"})
    assert "fits 1 x 4 h100-80gb" in dry("local_cwd", gpu="h100-80gb,memory=64GiB", component={"h": "gpu_8_h100"})
    with pytest.raises(UserError, match="-o mem is 1M, which the plan would not use: give --memory-mb"):
        dry("slurm", component={"cpu": 4, "memMB": 4000}, options={"mem": "1M"})


@pytest.mark.parametrize("component", [{}, {"cpu": 4}, {"memMB": 4000}])
def test_what_a_node_of_a_cluster_has_must_be_said(dry: Dry, component: dict[str, int]) -> None:
    with pytest.raises(UserError, match="the size of a node of slurm is not given"):
        dry("slurm", component=component)


def test_containers_must_see_the_run_folder_and_the_data_under_the_same_paths(
    dry: Dry, config: Config, tmp_path: Path
) -> None:
    data = str(config.data.path)
    lacking = dry("kubernetes", 3, component=IMAGE, options={"queue": "default"})
    assert f"wrong  mounts: containers cannot reach {data}, {tmp_path}/run, {tmp_path}/run/checkpoints" in lacking
    assert "nothing was submitted" in lacking
    mounts = ["type=bind", f"src={tmp_path}", f"dst={tmp_path}"]
    half = check_mounts(config, tmp_path / "run", specs.parse_mounts(mounts))
    assert f"containers cannot reach {data}, or not write there" in half.detail and "mount a folder" in half.remedy
    mounts += ["type=volume", "src=claim", f"dst={Path(data).parent}"]
    output = dry("kubernetes", component={**IMAGE, "mounts": mounts}, options={"queue": "default"})
    assert "ok     mounts: " in output and "ok     image: registry/distembed:1" in output
    everything = ["type=bind", "src=/", "dst=/"]
    for more, said in (
        (["type=bind", f"src={tmp_path}", f"dst={tmp_path}", "readonly"], f"cannot reach {tmp_path}/run"),
        (["type=bind", "src=/elsewhere", "dst=/shared"], "/elsewhere of the nodes is /shared in the containers"),
    ):
        wrong = check_mounts(config, tmp_path / "run", specs.parse_mounts([*everything, *more]))
        assert wrong.status == "wrong" and said in wrong.detail


def test_an_image_without_a_registry_is_warned_of_before_nodes_pull_it(dry: Dry) -> None:
    mounts = {"mounts": ["type=bind", "src=/", "dst=/"], "cpu": 4, "memMB": 4000}
    output = dry("kubernetes", component=mounts, options={"queue": "default"})
    assert re.search(r"note   image: distembed:[\d.]+-cpu names no registry: .* name it by --image", output)


def test_a_dry_run_of_what_does_not_fit_prints_the_request_as_well(dry: Dry) -> None:
    output = dry("local_cwd", 3, component={"cpu": 4, "memMB": 4})
    assert "wrong  plan: the model does not fit" in output and "plan: none" in output
    assert "distembed.launch.nodes.run" in output and output.endswith("nothing was submitted")


@pytest.mark.thorough
def test_paths_are_those_of_the_folder_that_it_was_launched_from(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(str(config.data.path)).parent)
    relative = validate(
        {"data": {"path": "dataset"}, "train": {"batch_size": 64, "checkpoint_dir": "elsewhere"}}, "the test"
    )

    class Stop(Exception):
        """Instead of submitting."""

    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    monkeypatch.setattr("distembed.launch.jobs.start.submit_and_follow", stop)
    run = str(tmp_path / "run")
    with pytest.raises(Stop):
        job = Job(run, "local_cwd", "1x2", component=default_request("local_cwd", run, "1x2"))
        start(job, relative, dry_run=False, detach=False, say=lambda _: None)
    kept = (tmp_path / "run" / "launch" / "config.yaml").read_text()
    assert f"path: {config.data.path}\n" in kept
    # that of checkpoints is within the run folder
    assert "checkpoint_dir: elsewhere\n" in kept
