"""What a launch finds out before it submits anything: for which devices it plans, and what containers would not see."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from distembed.base.errors import UserError
from distembed.training.config import Config, validate
from launch.apps.request import ElasticRequest
from launch.jobs.job import Job, default_request
from launch.jobs.start import start
from tests.small_runs import write_dataset

IMAGE = {"image": "registry/distembed:1", "cpu": 4, "memMB": 4000}
Dry = Callable[..., str]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = write_dataset(tmp_path_factory.mktemp("start") / "dataset")
    return validate({"data": {"path": str(folder)}, "train": {"batch_size": 64}}, "the test")


@pytest.fixture
def dry(config: Config, tmp_path: Path) -> Dry:
    """What a dry run says; ``code`` is its exit code."""

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
    assert "launch.nodes.run" in output and "plan: 4 table_wise" in output


def test_nodes_with_gpus_need_the_builds_for_them(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    for fbgemm, code in (("fbgemm-gpu-cpu", 3), ("fbgemm-gpu", 0)):
        installed = {"torch": "2.13.0", "torchrec": "1.8.0", fbgemm: "1.8.0"}
        monkeypatch.setattr("launch.jobs.preflight.installed_versions", installed.copy)
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
    monkeypatch.setattr("launch.jobs.preflight.installed_versions", installed.copy)
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
    half = dry("kubernetes", 3, component={**IMAGE, "mounts": mounts}, options={"queue": "default"})
    assert f"containers cannot reach {data}, or not write there (mount a folder" in half
    mounts += ["type=volume", "src=claim", f"dst={Path(data).parent}"]
    output = dry("kubernetes", component={**IMAGE, "mounts": mounts}, options={"queue": "default"})
    assert "ok     mounts: " in output
    everything = ["type=bind", "src=/", "dst=/"]
    for more, said in (
        (["type=bind", f"src={tmp_path}", f"dst={tmp_path}", "readonly"], f"cannot reach {tmp_path}/run"),
        (["type=bind", "src=/elsewhere", "dst=/shared"], "/elsewhere of the nodes is /shared in the containers"),
    ):
        component = {**IMAGE, "mounts": [*everything, *more]}
        assert said in dry("kubernetes", 3, component=component, options={"queue": "default"})


def test_a_dry_run_of_what_does_not_fit_prints_the_request_as_well(dry: Dry) -> None:
    output = dry("local_cwd", 3, component={"cpu": 4, "memMB": 4})
    assert "wrong  plan: the model does not fit" in output and "plan: none" in output
    assert "launch.nodes.run" in output and output.endswith("nothing was submitted")


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

    monkeypatch.setattr("launch.jobs.start.submit_and_follow", stop)
    run = str(tmp_path / "run")
    with pytest.raises(Stop):
        job = Job(run, "local_cwd", "1x2", component=default_request("local_cwd", run, "1x2"))
        start(job, relative, dry_run=False, detach=False, say=lambda _: None)
    kept = (tmp_path / "run" / "launch" / "config.yaml").read_text()
    assert f"path: {config.data.path}\n" in kept
    # that of checkpoints is within the run folder
    assert "checkpoint_dir: elsewhere\n" in kept
