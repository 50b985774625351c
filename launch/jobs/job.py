"""A training job: its request, its files in the run folder, and its submission to a scheduler.

A launched run's folder has, in addition to the files of :class:`distembed.training.run_folder.folder.RunFolder`::

    launch/
      config.yaml       the resolved config that every node reads
      plan.json         where each table goes on all of the nodes asked for
      job.json          the request, and each time that it was submitted
      submission-1/     the code of the first submission
        git.txt         revision of distembed's working tree, and files in it that git does not know
        git.diff        changes since
        packages.txt    installed packages and their versions
      logs/             of every rank; a node's error.json is the traceback of the rank that failed first
"""

import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torchx import specs
from torchx.runner import Runner, get_runner

from distembed.base.errors import RunError, UserError
from distembed.base.files import write_json, write_text
from distembed.base.machine import host_memory_bytes
from distembed.base.names import one_of
from distembed.base.version import __version__
from distembed.launch.apps.applications import training_app
from distembed.launch.apps.request import ElasticRequest, parse_shape
from distembed.launch.apps.roles import NEED_IMAGE, default_image, find_resource
from distembed.launch.jobs.asking import asking, find_handle, planned_name
from distembed.launch.schedulers.slurm.submission import OutcomeUnknown
from distembed.training.run_folder.lock import owned

FOLDER = "launch"
LOCAL_SCHEDULERS = ("local_cwd", "local_docker")
"""Schedulers whose jobs end with the command that submitted them."""
CONTAINERS = ("local_docker", "kubernetes", "aws_batch")
"""Schedulers whose jobs see nothing of a node but its mounts."""
_SETTLE_SECONDS = 60
"""How long a submission may still be on its way to the scheduler after the process that began it has died."""


@dataclass(frozen=True)
class Submission:
    """One submission of a job to its scheduler.

    Attributes:
        handle: TorchX's name of the job, ``slurm://session/123``; "" until the scheduler has it.
        time: When it was submitted, in UTC.
        name: Name by which the job is found while there is no handle; see :mod:`distembed.launch.jobs.asking`.
    """

    handle: str
    time: str
    j: str
    name: str = ""


@dataclass(frozen=True)
class Job:
    """A training job, as ``job.json`` keeps it.

    Attributes:
        run_dir: Run folder, which every node must see.
        j: Nodes and processes, ``[MIN:]NODESxPROCESSES``.
        options: Options of the scheduler, like Slurm's partition.
        component: Resources of the nodes, and start of their ranks: arguments of ``distembed.launch.components.train``.
        gpu: Device of each process, as ``distembed plan --gpu`` takes it; None for the named resource's, or CPUs.
        submissions: The newest submission is the last.
    """

    run_dir: str
    scheduler: str
    j: str
    options: Mapping[str, str] = field(default_factory=dict)
    component: ElasticRequest = ElasticRequest()
    gpu: str | None = None
    submissions: tuple[Submission, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the job's files within the run folder."""
        return Path(self.run_dir) / FOLDER

    @property
    def handle(self) -> str:
        """TorchX's name of the newest submission."""
        if not self.submissions:
            raise UserError(f"{self.run_dir} was prepared, but not submitted; start it with `distembed resume`.")
        return self.submissions[-1].handle

    @property
    def app_id(self) -> str:
        """The scheduler's own name of the newest submission, like Slurm's number."""
        return self.handle.rpartition("/")[2]

    @property
    def nodes(self) -> range:
        """Numbers of the nodes of the newest submission."""
        return range(parse_shape(self.submissions[-1].j).max_nodes)

    def changed(
        self,
        j: str | None = None,
        options: Mapping[str, str] | None = None,
        device: str | None = None,
        **fields: Any,
    ) -> "Job":
        """Returns the job with other values, as :meth:`~.NodeRequest.changed` takes ``fields``.

        None and empty values change nothing, and ``options`` are added to the present options. A named resource, ``h``,
        replaces the device unless another ``device`` is given.
        """
        return replace(
            self,
            j=j or self.j,
            options={**self.options, **(options or {})},
            component=self.component.changed(**fields),
            gpu=device or (None if fields.get("h") else self.gpu),
        )

    def require_new(self) -> None:
        """Refuses a run folder that holds a run, launched or trained in place; see ``require_new_or_resume``."""
        if self._file.exists() and _read(self._file).submissions:
            raise UserError(
                f"--run-dir {self.run_dir} holds a run already; give another, or go on with "
                f"`distembed resume {self.run_dir}`."
            )
        from distembed.training.run_folder.folder import holds_run, require_new_or_resume

        if holds_run(Path(self.run_dir)):
            raise UserError(
                f"--run-dir {self.run_dir} holds a run that `distembed train` has started; give another, or go on with "
                f"`distembed train ... --run-dir {self.run_dir} --resume`."
            )
        require_new_or_resume(Path(self.run_dir), resume=False)

    def app(self) -> specs.AppDef:
        """Returns the application that TorchX submits.

        With a kind of GPU (:attr:`gpu`) but neither a number of GPUs (``request.gpu``) nor a named resource (``h``), a
        node gets a GPU for each process. Containers without an image (``request.image``) run :func:`default_image`.
        """
        folder, request = self.folder.absolute(), self.component
        if self.gpu is not None and not self.gpu.startswith("cpu") and request.h is None and request.gpu is None:
            request = replace(request, gpu=parse_shape(self.j).processes)
        if self.scheduler.removeprefix("local_") in NEED_IMAGE and not request.image:
            request = replace(request, image=default_image(find_resource(request)))
        return training_app(
            str(folder / "config.yaml"),
            [],
            run_dir=str(Path(self.run_dir).absolute()),
            j=self.j,
            plan=str(folder / "plan.json"),
            name=None,
            request=request,
        )

    def dry_run(self, runner: Runner) -> Any:
        """Returns the job in the scheduler's own form, and submits nothing."""
        one_of("--scheduler", self.scheduler, runner.scheduler_backends())
        app = self.app()
        with asking(self.scheduler):
            return runner.dryrun(app, self.scheduler, cfg=self._options(runner))

    def prepare(self, config_yaml: str, plan: Mapping[str, Any]) -> None:
        """Writes the request, the resolved config and the plan of ``distembed plan --json`` into the run folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if self._file.exists():
                self._require_unchanged()
            write_text(self.folder / "config.yaml", config_yaml)
            write_json(self.folder / "plan.json", plan)
            self._save()  # last: with its request, a job is whole

    def submit(self, runner: Runner) -> "Job":
        """Submits the job to its scheduler and notes it in the run folder; returns the job with one submission more."""
        request = self.dry_run(runner)
        with self._locked():
            self._require_unchanged()
            _keep_versions(self.folder / f"submission-{len(self.submissions) + 1}")
            # Saved before the scheduler is called: if this process dies, `settled` finds the job by its name.
            now = datetime.now(UTC).isoformat(timespec="seconds")
            submission = Submission("", now, self.j, planned_name(self.scheduler, request) or "")
            pending = replace(self, submissions=(*self.submissions, submission))
            if submission.name:
                pending._save()
            try:
                with asking(self.scheduler):
                    handle = str(runner.schedule(request))
            except UserError:
                self._save()  # refused
                raise
            except RunError as error:
                return pending._recovered(runner, error)
            try:
                return pending._with_outcome(handle)
            except BaseException as error:
                error.add_note(f"The job was submitted all the same: {handle}. `torchx cancel {handle}` ends it.")
                raise

    def _find_pending(self, runner: Runner) -> str | None:
        """Returns the handle of the newest submission, which has only a name yet; None if the job does not exist."""
        with asking(self.scheduler):
            return find_handle(self.scheduler, self.submissions[-1].name, runner)

    def _with_outcome(self, handle: str | None) -> "Job":
        """Saves the job with the handle of its newest submission, or without the submission if the handle is None."""
        *earlier, submission = self.submissions
        newest = [] if handle is None else [replace(submission, handle=handle, name="")]
        job = replace(self, submissions=(*earlier, *newest))
        job._save()
        return job

    def _locked(self) -> AbstractContextManager[None]:
        """Locks the folder, so that one process at a time prepares or submits the job."""
        return owned(self.folder, refusal="{folder.parent} is being launched by {owner}; wait for it.")

    def _recovered(self, runner: Runner, error: RunError) -> "Job":
        """Looks for the job after an error of its submission; returns it with its handle if the scheduler has it.

        Else raises the error, and removes the submission, unless the job may still be on its way.
        """
        if not self.submissions[-1].name:
            raise error
        try:
            handle = self._find_pending(runner)
        except (UserError, RunError):
            error.add_note(f"Whether it has the job is not known; `distembed status {self.run_dir}` looks for it.")
            raise error from None
        if handle is None and isinstance(error, OutcomeUnknown):
            raise error  # it may still be on its way
        job = self._with_outcome(handle)
        if handle is None:
            raise error
        return job

    def _require_unchanged(self) -> None:
        """Raises a UserError if ``job.json`` has other submissions than this value: another process has submitted."""
        saved_submissions = _read(self._file).submissions
        if len(saved_submissions) != len(self.submissions):
            handle = saved_submissions[-1].handle if saved_submissions else ""
            raise UserError(
                f"{self.run_dir} was submitted by another process meanwhile, as {handle or 'is not known'}."
            )

    @property
    def _file(self) -> Path:
        return self.folder / "job.json"

    def _save(self) -> None:
        write_json(self._file, asdict(self))

    def _options(self, runner: Runner) -> dict[str, Any]:
        """Returns options in the scheduler's types, with the run folder as its place of logs where it has one."""
        known_options = runner.scheduler_run_opts(self.scheduler)
        types = {name: option.opt_type for name, option in known_options}
        logs = {"log_dir": str((self.folder / "logs").absolute())} if "log_dir" in types else {}
        options: dict[str, Any] = {}
        for name, text in {**logs, **self.options}.items():
            if name not in types:
                there_are = ", ".join(sorted(types)) or "none"
                raise UserError(f"the scheduler {self.scheduler} has no option {name!r}; it has {there_are}.")
            # a comma in a text is part of it
            options[name] = text if types[name] is str else known_options.cfg_from_str(f"{name}={text}")[name]
        return options


_ADAPTER = TypeAdapter(Job)


def default_request(scheduler: str, run_dir: str, j: str) -> ElasticRequest:
    """Returns the request of a job without options.

    Nodes of a job on this machine share all of it, and nodes outside of containers run this interpreter. The port comes
    from the run folder, so that jobs on one node do not meet.
    """
    request = ElasticRequest(rdzv_port=20000 + zlib.crc32(str(Path(run_dir).absolute()).encode()) % 10000)
    if scheduler in ("local_cwd", "slurm"):
        request = replace(request, python=sys.executable)
    if scheduler in LOCAL_SCHEDULERS:
        nodes = parse_shape(j).max_nodes
        cpus = max(1, (os.cpu_count() or 1) // nodes)
        request = replace(request, cpu=cpus, memMB=(host_memory_bytes() >> 20) // nodes)
    return request


def load_job(run: str) -> Job:
    """Returns the job of a run, by its folder or by its name under ``runs``."""
    for folder in (Path(run), Path("runs") / run):
        file = folder / FOLDER / "job.json"
        try:
            is_there = file.is_file()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from error
        if is_there:
            return _read(file)
    raise UserError(f"{run!r} is no run that `distembed launch` has started; give its folder, or its name under runs.")


def settled(job: Job) -> Job:
    """Returns the job after finding the outcome of a submission whose process died before it saved a handle.

    The submission gets its handle, or is removed where the scheduler has no job of its name. RunError within the first
    minute, in which the job may still appear.
    """
    if not job.submissions or job.submissions[-1].handle:
        return job
    with job._locked():
        job = _read(job._file)
        submission = job.submissions[-1]
        if submission.handle:
            return job
        with get_runner() as runner:
            handle = job._find_pending(runner)
        seconds = (datetime.now(UTC) - datetime.fromisoformat(submission.time)).total_seconds()
        if handle is None and seconds < _SETTLE_SECONDS:
            raise RunError(
                f"{job.run_dir} was being submitted {seconds:.0f} s ago by a process that is gone, and {job.scheduler} "
                f"has no such job yet; try again in {_SETTLE_SECONDS - seconds:.0f} s."
            )
        return job._with_outcome(handle)


def _read(file: Path) -> Job:
    """Reads a job; its run folder is that of the file."""
    try:
        job = _ADAPTER.validate_json(file.read_bytes())
        parse_shape(job.j)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; start the run anew in another folder.") from error
    # the folder may have been moved since
    return replace(job, run_dir=str(file.parent.parent))


def _keep_versions(folder: Path) -> None:
    """Writes ``git.txt``, ``git.diff`` and ``packages.txt``: distembed's revision, changes since, installed packages.

    Untracked files are named only: they may be large.
    """
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    is_tracked = bool(_git("-C", str(root), "ls-files", "--", "launch/jobs/job.py"))
    revision, unknown, diff = f"distembed {__version__}, not in a git repository\n", "", ""
    if is_tracked:
        revision = _git("-C", str(root), "rev-parse", "HEAD")
        unknown = _git("-C", str(root), "ls-files", "--others", "--exclude-standard")
        diff = _git("-C", str(root), "diff", "HEAD")
    (folder / "git.txt").write_text(revision + (f"\nnot known to git:\n{unknown}" if unknown else ""))
    (folder / "git.diff").write_text(diff)
    packages = sorted({f"{package.name}=={package.version}" for package in distributions()})
    (folder / "packages.txt").write_text("\n".join(packages) + "\n")


def _git(*arguments: str) -> str:
    """Returns the output of git; "" where it fails or is not installed."""
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return ""
    return answer.stdout if answer.returncode == 0 else ""
