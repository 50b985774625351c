"""A training job: what is asked for, what its run folder keeps of it, and handing it to a scheduler.

A run folder holds, beside what the run itself leaves (:class:`distembed.training.tracking.RunFolder`)::

    launch/
      config.yaml     the resolved config that every node reads
      plan.json       where each table goes on all of the nodes asked for
      job.json        what was asked for, and a line for each time that it was submitted
      git.txt         revision of the working tree that it was submitted from
      git.diff        what was changed since
      packages.txt    installed packages and their versions
      logs/           of every rank; error.json in a node's is the traceback of the rank that failed first
"""

import fcntl
import json
import logging
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from torchx import specs
from torchx.runner import Runner

from distembed.errors import UserError
from distembed.whole_file import whole_file
from launch.components import train
from launch.shape import parse_shape

log = logging.getLogger(__name__)

FOLDER = "launch"
LOCAL = ("local_cwd", "local_docker")
"""Schedulers whose jobs end with the command that submitted them."""


@dataclass(frozen=True)
class Submission:
    """One time that a job was handed to its scheduler.

    Attributes:
        handle: by which TorchX knows it, ``slurm://session/123``.
        time: when, in UTC.
    """

    handle: str
    time: str


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        run_dir: run folder, which every node must see.
        scheduler: one of TorchX's.
        j: ``[MIN:]NODESxPROCESSES``.
        options: of the scheduler, such as Slurm's partition.
        component: other arguments of ``launch.components.train``, such as ``image`` or ``max_restarts``.
        submissions: the newest last.
    """

    run_dir: str
    scheduler: str
    j: str
    options: Mapping[str, str] = field(default_factory=dict)
    component: Mapping[str, Any] = field(default_factory=dict)
    submissions: tuple[Submission, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the run folder keeps what launching leaves."""
        return Path(self.run_dir) / FOLDER

    @property
    def handle(self) -> str:
        """Of the newest submission.

        Raises:
            UserError: It was never submitted.
        """
        if not self.submissions:
            raise UserError(f"{self.run_dir} was prepared, but not submitted; start it with `distembed resume`.")
        return self.submissions[-1].handle

    @property
    def app_id(self) -> str:
        """The scheduler's own name of the newest submission."""
        return self.handle.rpartition("/")[2]

    def app(self) -> specs.AppDef:
        """The application that TorchX submits."""
        folder = self.folder.absolute()
        return train(
            config=str(folder / "config.yaml"),
            run_dir=str(Path(self.run_dir).absolute()),
            j=self.j,
            plan=str(folder / "plan.json"),
            **self.component,
        )

    def dry_run(self, runner: Runner) -> Any:
        """The scheduler's request.

        Raises:
            UserError: for options that the scheduler does not have, or does not take.
        """
        app = self.app()
        try:
            return runner.dryrun(app, self.scheduler, cfg=self._options(runner))
        except (specs.InvalidRunConfigException, KeyError, AssertionError) as error:
            raise UserError(f"the scheduler {self.scheduler} does not take this job: {error}") from error

    def create(self, config_yaml: str, plan: Mapping[str, Any]) -> None:
        """Keeps in the run folder what is asked for, and what it is made of.

        Args:
            config_yaml: the resolved config.
            plan: as ``distembed plan --json`` gives it.

        Raises:
            UserError: Another job was made there meanwhile.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if self._file.exists():
                raise UserError(f"--run-dir {self.run_dir} was taken by another launch just now; give another.")
            (self.folder / "config.yaml").write_text(config_yaml)
            (self.folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
            (self.folder / "git.txt").write_text(_git("rev-parse", "HEAD") or "not in a git repository\n")
            (self.folder / "git.diff").write_text(_git("diff", "HEAD"))
            packages = sorted(f"{found.name}=={found.version}" for found in distributions())
            (self.folder / "packages.txt").write_text("\n".join(dict.fromkeys(packages)) + "\n")
            self._save()  # last: a job that is there is whole

    def submit(self, runner: Runner) -> "Job":
        """Hands it to the scheduler, and notes so in the run folder.

        Raises:
            UserError: It was submitted by another process since it was read.
        """
        request = self.dry_run(runner)
        with self._alone():
            there = _read(self._file).submissions
            if len(there) != len(self.submissions):
                raise UserError(f"{self.run_dir} was submitted by another process just now, as {there[-1].handle}.")
            submission = Submission(str(runner.schedule(request)), datetime.now(UTC).isoformat(timespec="seconds"))
            submitted = replace(self, submissions=(*self.submissions, submission))
            submitted._save()
        return submitted

    @property
    def _file(self) -> Path:
        return self.folder / "job.json"

    def _save(self) -> None:
        with whole_file(self._file) as temporary:
            Path(temporary).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time makes or submits the job."""
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.run_dir} is being launched by another process; wait for it.") from None
            except OSError as error:
                log.warning("%s cannot be locked (%s): launch it only once at a time", self.folder, error)
            yield

    def _options(self, runner: Runner) -> dict[str, Any]:
        """Options as the scheduler has them; its logs go into the run folder where it asks for a place."""
        known = runner.scheduler_run_opts(self.scheduler)
        types = {name: option.opt_type for name, option in known}
        logs = {"log_dir": str((self.folder / "logs").absolute())} if "log_dir" in types else {}
        options: dict[str, Any] = {}
        for name, text in {**logs, **self.options}.items():
            if name not in types:
                there_are = ", ".join(sorted(types)) or "none"
                raise UserError(f"the scheduler {self.scheduler} has no option {name!r}; it has {there_are}.")
            # a comma in a text is part of it
            options[name] = text if types[name] is str else known.cfg_from_str(f"{name}={text}")[name]
        return options


def find_job(run: str) -> Job:
    """The job of a run, by its folder or by its name under ``runs``.

    Raises:
        UserError: There is none.
    """
    for folder in (Path(run), Path("runs") / run):
        file = folder / FOLDER / "job.json"
        if file.is_file():
            return _read(file)
    raise UserError(f"{run!r} is no run that `distembed launch` has started; give its folder, or its name under runs.")


def _read(file: Path) -> Job:
    try:
        values = json.loads(file.read_text())
        submissions = tuple(Submission(**submission) for submission in values.pop("submissions"))
        job = Job(**values, submissions=submissions)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file} cannot be read: {error}; start the run anew in another folder.") from error
    parse_shape(job.j)
    # the folder may have been moved since
    return replace(job, run_dir=str(file.parent.parent))


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return ""
    return answer.stdout if answer.returncode == 0 else ""
