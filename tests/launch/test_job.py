"""What a run folder keeps of a job, what may change when it is submitted again, and how a damaged one is refused."""

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.runner import Runner, get_runner
from torchx.specs import AppState, AppStatus

from distembed.base.errors import RunError, UserError
from distembed.base.version import __version__
from distembed.launch.apps.request import ElasticRequest
from distembed.launch.jobs import job as jobs
from distembed.launch.jobs.job import Job, default_request, load_job, settled
from distembed.launch.schedulers.slurm.submission import OutcomeUnknown

ROOT = Path(__file__).parents[2]
NUMBERS = ElasticRequest(cpu=8, memMB=1000)


@pytest.fixture
def runner() -> Iterator[Runner]:
    with get_runner() as found:
        yield found


class FakeRunner:
    """Takes whatever it is handed.

    Args:
        known: Handles of the jobs that it says it has.
    """

    def __init__(self, *known: str) -> None:
        self.taken = 0
        self.known = known

    def scheduler_backends(self) -> list[str]:
        return ["slurm", "kubernetes"]

    def status(self, handle: str) -> AppStatus | None:
        return AppStatus(AppState.RUNNING) if handle in self.known else None

    def scheduler_run_opts(self, name: str) -> Any:
        with get_runner() as found:
            return found.scheduler_run_opts(name)

    def dryrun(self, *_: Any, **__: Any) -> Any:
        metadata = {"metadata": {"name": "run-xyz"}}
        return SimpleNamespace(
            _cfg={"namespace": "ml"}, request=SimpleNamespace(full_name="run-xyz/train", resource=metadata)
        )

    def schedule(self, _: Any) -> str:
        self.taken += 1
        return f"slurm://session/{self.taken}"


def job_at(folder: Path, **values: Any) -> Job:
    return Job(str(folder), **{"scheduler": "slurm", "j": "2x4", "component": NUMBERS, **values})


def queue(folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str, code: int = 0) -> None:
    """A Slurm without accounting whose queue lists this job, by whatever name it is asked for."""
    said = "Slurm accounting storage is disabled"
    for name, script in (
        ("squeue", f'[[ " $* " == *" --name=run-xyz/train "* ]] && echo "{listed}"; exit {code}'),
        ("sacct", f'echo "{said}" >&2; exit 1'),
    ):
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_a_job_is_read_as_it_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = FakeRunner()
    job = job_at(tmp_path / "runs" / "big", options={"partition": "gpu", "comment": "a, b"}, gpu="h100-80gb")
    job.prepare("model: {}\n", {"plan": None})
    assert load_job(job.run_dir) == job
    with pytest.raises(UserError, match="was prepared, but not submitted"):
        _ = job.handle
    twice = job.submit(fake).submit(fake)
    assert load_job(job.run_dir) == twice and twice.app_id == "2"
    assert twice.gpu == "h100-80gb"
    monkeypatch.chdir(tmp_path)
    assert load_job("big").handle == "slurm://session/2"
    for number in (1, 2):
        kept = job.folder / f"submission-{number}"
        assert {file.name for file in kept.iterdir()} == {"git.txt", "git.diff", "packages.txt"}
        assert (kept / "git.txt").read_text().strip()
    assert (job.folder / "config.yaml").read_text() == "model: {}\n"
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert load_job(str(tmp_path / "moved" / "big")).run_dir == str(tmp_path / "moved" / "big")


def test_what_was_not_submitted_may_be_launched_anew_and_what_was_may_not(tmp_path: Path) -> None:
    fake: Any = FakeRunner()
    first, second = job_at(tmp_path), job_at(tmp_path, options={"partition": "other"})
    first.prepare("a: 1\n", {})
    second.require_new()
    second.prepare("a: 2\n", {})
    assert load_job(str(tmp_path)).options == {"partition": "other"}
    second.submit(fake)
    for refused in (second.require_new, lambda: first.prepare("a: 3\n", {}), lambda: first.submit(fake)):
        with pytest.raises(UserError, match=r"holds a run already|was submitted by another process"):
            refused()
    assert fake.taken == 1 and (first.folder / "config.yaml").read_text() == "a: 2\n"


def submit_at_once(folder: Path, start: Any, results: Any) -> None:
    fake: Any = FakeRunner()
    job = load_job(str(folder))
    start.wait()
    try:
        job.submit(fake)
        results.put("submitted")
    except UserError as error:
        results.put(str(error))


def test_of_several_that_submit_at_once_one_does(tmp_path: Path) -> None:
    job_at(tmp_path).prepare("", {})
    context = multiprocessing.get_context("fork")  # for loading TorchX takes each of them seconds
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=submit_at_once, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    said = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert said.count("submitted") == 1, said
    assert len(load_job(str(tmp_path)).submissions) == 1


@pytest.mark.parametrize("scheduler", ["kubernetes", "aws_batch", "local_docker", "slurm", "local_cwd"])
def test_containers_without_an_image_run_that_of_tools_dockerfile(scheduler: str) -> None:
    tags = re.findall(r"^#   docker build .*-t (\S+) \.$", (ROOT / "tools/Dockerfile").read_text(), re.MULTILINE)
    assert tags == [f"distembed:{__version__}-{device}" for device in ("cuda", "cpu")]
    images = tags if scheduler in ("kubernetes", "aws_batch", "local_docker") else ["", ""]
    jobs = [Job("run", scheduler, "1x1", component=request) for request in (ElasticRequest(h="gpu_8_h100"), NUMBERS)]
    assert [job.app().roles[0].image for job in jobs] == images
    assert jobs[0].changed(image="own").app().roles[0].image == "own"


def test_a_change_replaces_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    job = job_at(tmp_path, options={"time": "1:00:00", "partition": "gpu"}, component=replace(NUMBERS, env={"A": "1"}))
    assert job.changed() == job
    assert job.changed(memMB=None, image="", env={}) == job
    changed = job.changed("1x4", {"time": "2:00:00"}, memMB=2000, env={"B": "2"})
    assert changed.j == "1x4" and changed.options == {"time": "2:00:00", "partition": "gpu"}
    assert changed.component == ElasticRequest(cpu=8, memMB=2000, env={"A": "1", "B": "2"})
    named = replace(changed, gpu="a100-40gb").changed(h="gpu_8_h100")
    assert named.component == ElasticRequest(h="gpu_8_h100", env={"A": "1", "B": "2"}) and named.gpu is None
    # not taken for a job without GPUs
    with pytest.raises(UserError, match="and memMB=9000 too; give one of them"):
        named.changed(memMB=9000).app()


def test_a_process_has_a_gpu_where_one_is_named(tmp_path: Path) -> None:
    def gpus(**values: Any) -> int:
        return int(job_at(tmp_path, **values).app().roles[0].resource.gpu)

    assert gpus(gpu="h100-80gb") == 4
    assert gpus(gpu="h100-80gb", j="8") == 8
    assert gpus(gpu="h100-80gb", component=replace(NUMBERS, gpu=6)) == 6
    assert gpus(gpu="cpu-256gb") == 0 == gpus()
    assert gpus(component=ElasticRequest(h="gpu_8_h100")) == 8


def test_jobs_meet_at_ports_by_their_run_folder_and_run_by_this_interpreter(tmp_path: Path) -> None:
    ports = [default_request("slurm", str(tmp_path / str(number)), "2x1").rdzv_port for number in range(50)]
    assert len(set(ports)) > 45 and all(20000 <= port < 30000 for port in ports)
    assert default_request("slurm", str(tmp_path / "0"), "2x1").rdzv_port == ports[0]
    for scheduler in ("slurm", "local_cwd"):
        assert default_request(scheduler, "run", "1x1").python == sys.executable
    whole, half = (default_request("local_cwd", "run", j).memMB for j in ("1x4", "2x1"))
    assert half == whole // 2
    assert default_request("kubernetes", "run", "1x1").python == "python"


def test_a_damaged_job_is_refused_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "launch" / "job.json"
    file.parent.mkdir()
    whole = {"run_dir": "r", "scheduler": "slurm", "j": "1x1"}
    numbered = [{"handle": 1, "time": "", "j": "1"}]
    changes = {"valid string": {"j": 3}, "start at 1": {"j": "0x1"}, "options": {"options": [1]}}
    changes |= {"colour": {"component": {"colour": 1}}, "handle": {"submissions": numbered}}
    contents = {said: json.dumps({**whole, **change}) for said, change in changes.items()}
    contents["j\n"] = json.dumps({"run_dir": "r", "scheduler": "slurm"})
    for said, content in [("", ""), ("", '{"run_dir": "r"'), ("", "[]"), *contents.items()]:
        file.write_text(content)
        with pytest.raises(UserError, match=r"job\.json cannot be read") as refused:
            load_job(str(tmp_path))
        assert said in str(refused.value)


def test_a_job_that_names_only_some_of_what_it_asks_for_is_read_with_the_defaults(tmp_path: Path) -> None:
    values = {
        **{"run_dir": "/elsewhere", "scheduler": "kubernetes", "j": "2:4x8", "options": {"queue": "q"}, "gpu": None},
        "component": {"h": "gpu_8_h100", "image": "x", "env": {"A": "1"}, "rdzv_port": 23456, "max_retries": 2},
        "submissions": [{"handle": "kubernetes://torchx/ml:a-1", "time": "2026-01-01T00:00:00+00:00", "j": "4x8"}],
    }
    file = tmp_path / "launch" / "job.json"
    file.parent.mkdir()
    file.write_text(json.dumps(values))
    job = load_job(str(tmp_path))
    assert job.component == ElasticRequest(
        h="gpu_8_h100", image="x", env={"A": "1"}, rdzv_port=23456, max_retries=2, python="python", grace_seconds=120
    )
    assert (job.run_dir, job.j, job.app_id, len(job.nodes)) == (str(tmp_path), "2:4x8", "ml:a-1", 4)


def test_a_folder_of_something_else_is_no_place_for_a_job(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UserError, match="other files and no run"):
        job_at(tmp_path).require_new()
    for name in ("config.yaml", "run.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"`distembed train \.\.\. --run-dir .* --resume`"):
        job_at(tmp_path).require_new()


def test_a_submission_that_cannot_be_noted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = FakeRunner()
    job = job_at(tmp_path)
    job.prepare("", {})

    save = Job._save

    def full(job: Job) -> None:
        if job.submissions[-1].handle:
            raise RunError("no space left")
        save(job)

    monkeypatch.setattr(Job, "_save", full)
    with pytest.raises(RunError) as failed:
        job.submit(fake)
    assert "torchx cancel slurm://session/1" in failed.value.__notes__[0]


def test_a_run_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"'none' is no run"):
        load_job("none")


@pytest.mark.parametrize(
    ("scheduler", "options", "said"),
    [
        ("slurm", {"colour": "red"}, "no option 'colour'; it has account"),
        ("slurm", {"signal_seconds": "abc"}, "abc"),
        ("slurms", {}, "Did you mean 'slurm'"),
        ("ray", {}, "ray"),
    ],
)
def test_a_request_that_cannot_be_made_is_an_error_of_one_sentence(
    runner: Runner, tmp_path: Path, scheduler: str, options: dict[str, str], said: str
) -> None:
    job = replace(job_at(tmp_path, options=options), scheduler=scheduler)
    with pytest.raises((UserError, RunError)) as refused:
        job.dry_run(runner)
    assert said in str(refused.value)
    assert not job.folder.exists()


def test_a_submission_that_fails_leaves_a_job_to_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(FakeRunner):
        def schedule(self, _: Any) -> str:
            raise ConnectionError("no route to host")

    away: Any = Away()
    job = job_at(tmp_path)
    job.prepare("", {})
    queue(tmp_path, monkeypatch, "")
    with pytest.raises(RunError, match="slurm cannot be used: ConnectionError: no route to host"):
        job.submit(away)
    assert json.loads((job.folder / "job.json").read_text())["submissions"] == []
    taker: Any = FakeRunner()
    assert load_job(str(tmp_path)).submit(taker).app_id == "1"


class Killed(BaseException):
    """What a killed process does next: nothing."""


class Dying(FakeRunner):
    """The process dies when the scheduler has been asked."""

    def schedule(self, _: Any) -> str:
        raise Killed


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
@pytest.mark.parametrize("has_job", [True, False])
def test_a_submission_that_nobody_noted_is_looked_for_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str, has_job: bool
) -> None:
    dying: Any = Dying()
    job = job_at(tmp_path, scheduler=scheduler)
    job.prepare("", {})
    with pytest.raises(Killed):
        job.submit(dying)
    handle = {"slurm": "slurm://torchx/42", "kubernetes": "kubernetes://torchx/ml:run-xyz"}[scheduler]
    queue(tmp_path, monkeypatch, "42" if has_job else "")
    answering = nullcontext(FakeRunner(*([handle] if has_job else [])))
    monkeypatch.setattr(jobs, "get_runner", lambda: answering)
    if not has_job:
        with pytest.raises(RunError, match=r"by a process that is gone, and \w+ has no such job yet; try again in"):
            settled(load_job(str(tmp_path)))
        monkeypatch.setattr(jobs, "_SETTLE_SECONDS", -1)
    found = settled(load_job(str(tmp_path)))
    assert [one.handle for one in found.submissions] == ([handle] if has_job else [])
    assert load_job(str(tmp_path)) == found == settled(found)
    if not has_job:  # it may be submitted now
        taker: Any = FakeRunner()
        assert found.submit(taker).app_id == "1"


def test_a_submission_stays_noted_while_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying: Any = Dying()
    job_at(tmp_path).prepare("", {})
    with pytest.raises(Killed):
        load_job(str(tmp_path)).submit(dying)
    queue(tmp_path, monkeypatch, "", code=1)
    monkeypatch.setattr(jobs, "_SETTLE_SECONDS", -1)
    for _ in range(2):
        with pytest.raises(RunError, match="jobs cannot be listed"):
            settled(load_job(str(tmp_path)))
    assert load_job(str(tmp_path)).submissions[-1].name == "run-xyz/train"


@pytest.mark.parametrize("unknown", [True, False])
def test_a_job_that_was_taken_without_a_word_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: bool
) -> None:
    class Silent(FakeRunner):
        def schedule(self, _: Any) -> str:
            raise OutcomeUnknown("timed out") if unknown else RunError("broken pipe")

    silent: Any = Silent()
    job = job_at(tmp_path)
    job.prepare("", {})
    queue(tmp_path, monkeypatch, "")
    with pytest.raises(RunError):
        job.submit(silent)
    # Slurm may still take what it has not refused
    assert len(load_job(str(tmp_path)).submissions) == unknown
    job._save()
    queue(tmp_path, monkeypatch, "42")
    assert job.submit(silent).handle == "slurm://torchx/42"
    assert load_job(str(tmp_path)).app_id == "42"
