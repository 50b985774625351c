"""Trains the runs of a sweep, each in a process of its own, as trials of an Optuna study.

This process asks Optuna for the next run whenever a worker is free, and tells it the result. Optuna chooses by TPE
(Bergstra et al., NeurIPS 2011), prunes by the median rule, and keeps its journal in the sweep's folder. Processes are
forked once torch is loaded, so that they know every model and task that a script has registered.

The first Ctrl-C, SIGTERM or SIGUSR1 reaches each process once, as SIGTERM: its run saves a checkpoint. The second one
kills the processes.
"""

import importlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from distembed.base.errors import InsufficientMemory, Interrupted, RunError, UserError, one_line
from distembed.base.process import PARENT_VARIABLE, end_with_parent
from distembed.tasks import build_task
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.run_folder.lock import owned
from distembed.training.run_folder.record import PRUNED, RunRecord
from distembed.training.sweeps.sweep import LOGS, STUDY_FILE, Outcome, PlannedRun, Sweep, require_no_mistakes

try:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import Trial, TrialState, create_trial
except ImportError as error:
    raise UserError(
        f"sweep, reproduce and compress-search need optuna, which cannot be imported ({error}): "
        "`pip install 'distembed[sweep]'`"
    ) from None

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_CONTEXT = multiprocessing.get_context("fork")
Say = Callable[[str], None]


class PrunedRun(Interrupted):
    """A run that is stopped early, since other runs were better at its step."""


def train_sweep(
    sweep: Sweep, num_workers: int, say: Say, show: Callable[[int], None] = lambda ended: None
) -> dict[str, Outcome]:
    """Trains the runs of a sweep that are not finished, also after one fails, and returns the outcomes by name.

    Args:
        sweep: The sweep.
        num_workers: Number of runs that are trained at a time.
        say: Is called with a line when a run starts and when one ends.
        show: Is called with the number of runs that have ended, at the start, after each run, and each second.

    Raises:
        UserError: The model of a run cannot be built, or another process trains this sweep; nothing is trained then.
        Interrupted: After a signal, once the runs that were being trained have saved a checkpoint.
    """
    # torch then looks for GPUs by NVML: forked processes could not use CUDA if this process had initialised it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    config = sweep.runs[0].config
    metric = build_task(config.task, config.data.load_schema()).headline
    if metric.better is None and (sweep.prune or sweep.sampler == "tpe"):
        raise UserError(f"--sampler tpe and --prune need a metric to improve, and {metric.name!r} is none.")
    (sweep.folder / LOGS).mkdir(parents=True, exist_ok=True)
    outcomes = {run.name: Outcome(run.state) for run in sweep.runs if run.state in ("finished", "pruned")}
    to_train = [run for run in sweep.runs if run.name not in outcomes]
    show(len(outcomes))
    if not to_train:
        sweep.record(outcomes)
        return outcomes
    with owned(sweep.folder), _Processes(num_workers) as processes:
        sweep.record(outcomes)
        for module in ("torch._dynamo", "torch.utils.tensorboard", "numba", "distembed.training.run"):
            importlib.import_module(module)  # once for all processes
        if sweep.sampler != "tpe":  # tpe trains few of the combinations
            processes.check(to_train, sweep.folder / LOGS / "check.log")
        study, space = _create_study(sweep, metric)
        choices = _choices(sweep, to_train, study, space)
        while True:
            has_room = len(processes.running) < num_workers and not processes.stopped
            if has_room and (choice := next(choices, None)) is not None:
                run, trial = choice
                say(f"{'resuming' if run.state == 'resumed' else 'training'} {run.name}")
                processes.start(sweep.folder / LOGS / f"{run.name}.log", run, trial)
                continue
            if not processes.running:
                break
            run, trial, outcome = processes.wait_for_one(lambda: show(len(outcomes)))
            value = validated(run, metric)[1] if outcome.status == "finished" else math.nan
            state = TrialState.PRUNED if outcome.status == "pruned" else TrialState.FAIL
            if math.isfinite(value):
                study.tell(trial, value)
            else:
                study.tell(trial, state=state)
            outcomes[run.name] = outcome
            sweep.record(outcomes)
            show(len(outcomes))
            progress = f"[{len(outcomes)}/{sweep.trials or len(sweep.runs)}]"
            detail = outcome.described or outcome.error or ""
            say(f"{progress} {run.name} {outcome.status} in {outcome.seconds:,.0f} s  {detail}".rstrip())
    if processes.stopped:
        num_finished = sum(outcome.status == "finished" for outcome in outcomes.values())
        raise Interrupted(
            f"interrupted with {num_finished} of {len(sweep.runs)} runs finished; the same command resumes the sweep."
        )
    return outcomes


def _create_study(sweep: Sweep, metric: ReportedMetric) -> tuple[optuna.Study, dict[str, BaseDistribution]]:
    """Returns a new Optuna study for this command, and the values of each setting that varies.

    The study gets a trial for each run that is finished, so that TPE and the pruner know the results of earlier
    commands.
    """
    values: dict[str, list[str]] = {}
    for run in sweep.runs:
        for key, text in _params(run).items():
            values.setdefault(key, []).append(text)
    space: dict[str, BaseDistribution] = {
        key: CategoricalDistribution(list(dict.fromkeys(texts))) for key, texts in values.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(sweep.folder / STUDY_FILE))),
        study_name=f"{sweep.config.stem} {datetime.now():%Y-%m-%d %H:%M:%S.%f}",
        direction="maximize" if metric.better == "higher" else "minimize",
        sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True),
        pruner=optuna.pruners.MedianPruner() if sweep.prune else optuna.pruners.NopPruner(),
    )
    for run in sweep.runs:
        evaluations, value = validated(run, metric) if run.state == "finished" else ({}, math.nan)
        if math.isfinite(value):
            params = _params(run)
            trial = create_trial(value=value, params=params, distributions=space, intermediate_values=evaluations)
            study.add_trial(trial)
    return study, space


def _choices(
    sweep: Sweep, to_train: Sequence[PlannedRun], study: optuna.Study, space: dict[str, BaseDistribution]
) -> Iterator[tuple[PlannedRun, Trial]]:
    """Yields each run to train with its Optuna trial; TPE chooses a run when the caller asks for it.

    Optuna draws parameters itself. A run that is chosen here, in the order of a grid, is enqueued first: the next trial
    that is asked for then has its parameters.
    """
    waiting = {run.varied: run for run in to_train}
    num_left = len(waiting)
    if sweep.sampler == "tpe":
        # len(sweep.runs) - num_left runs of earlier commands count among the trials
        num_left = min(num_left, (sweep.trials or 0) - (len(sweep.runs) - num_left))
    for _ in range(num_left):
        if sweep.sampler != "tpe":
            study.enqueue_trial(_params(next(iter(waiting.values()))))
        trial = study.ask(space)
        run = waiting.pop(tuple(f"{key}={trial.params[key]}" for key in space), None)
        if run is None:  # TPE has drawn a combination that is already taken: train the first waiting run instead
            study.tell(trial, state=TrialState.FAIL)
            run = waiting.pop(next(iter(waiting)))
            study.enqueue_trial(_params(run))
            trial = study.ask(space)
        yield run, trial


class _Running(NamedTuple):
    """A run in training: its process, the pipe that delivers its outcome, the worker's number and the Optuna trial."""

    process: ForkProcess
    receiver: Connection
    worker: int
    run: PlannedRun
    trial: Trial


class _Processes:
    """A context manager that owns the processes of a sweep and passes signals on to them."""

    def __init__(self, num_workers: int) -> None:
        self.stopped = False
        self._num_workers = num_workers
        self.running: list[_Running] = []
        self._started: list[ForkProcess] = []

    def __enter__(self) -> "_Processes":
        self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        for process in self._started:
            process.kill() if self.stopped else process.terminate()
        self.stopped = True

    def _start(self, function: Callable[..., None], *arguments: object) -> ForkProcess:
        """Starts a process to which :meth:`_receive` passes signals, also a signal that arrives during the start."""
        process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
        # until it has set its own handlers, the forked process would call _receive, and signal its siblings
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.start()
            self._started.append(process)
            if self.stopped:
                process.terminate()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return process

    def check(self, runs: Sequence[PlannedRun], log: Path) -> None:
        """Builds the model of every recipe without weights, in a process; refuses the sweep with all mistakes found.

        Runs of a recipe differ in the seed alone, so the first run of each recipe is enough.
        """
        recipes = {run.recipe: run for run in reversed(runs)}
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = self._start(_send_mistakes, [*reversed(recipes.values())], log, sender)
        sender.close()
        try:
            mistakes: dict[str, list[str]] = receiver.recv()
        except (EOFError, OSError) as error:
            if self.stopped:
                raise Interrupted("interrupted before the first run; the same command starts the sweep.") from None
            raise RunError(f"the process that builds the models of all runs has died; see {log}.") from error
        finally:
            process.join()
        require_no_mistakes(mistakes)

    def start(self, log: Path, run: PlannedRun, trial: Trial) -> None:
        """Starts a process that trains a run, as the free worker of the lowest number, and prints to a log."""
        worker = min(set(range(self._num_workers)) - {running.worker for running in self.running})
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        arguments = log, run, trial, worker, share_of_cores(worker, self._num_workers), sender
        self.running.append(_Running(self._start(_work, *arguments), receiver, worker, run, trial))
        sender.close()

    def wait_for_one(self, every_second: Callable[[], None]) -> tuple[PlannedRun, Trial, Outcome]:
        """Waits until any run ends, and returns it with its trial and outcome: ``failed`` if its process died."""
        while not (receivers := wait([running.receiver for running in self.running], timeout=1.0)):
            every_second()
        ready = receivers[0]
        ended = next(running for running in self.running if running.receiver is ready)
        try:
            outcome: Outcome = ended.receiver.recv()
            ended.process.join()
        except (EOFError, OSError):
            ended.process.join()
            code = ended.process.exitcode or 0
            ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            outcome = Outcome("failed", f"its process ended with {ending}")
            if self.stopped:
                outcome = Outcome("interrupted", "it was ended before it could save a checkpoint")
        self.running.remove(ended)
        return ended.run, ended.trial, outcome


def _params(run: PlannedRun) -> dict[str, str]:
    """Returns the varying settings of a run as Optuna has them: key -> text of the value."""
    return {key: text for key, _, text in (setting.partition("=") for setting in run.varied)}


def validated(run: PlannedRun, metric: ReportedMetric) -> tuple[dict[int, float], float]:
    """Returns a run's metric on the validation split by step, and the metric of the weights that the run keeps.

    The weights kept are the best with ``train.keep_best``, else the last. Without a metric on the validation split, the
    second value is that of the final evaluation, or NaN.
    """
    record = RunRecord.read(run.folder)
    evaluations = {line.step or 0: line.metric(metric.name) for line in record.validation_evals()}
    evaluations = {step: value for step, value in evaluations.items() if math.isfinite(value)}
    if not evaluations:
        return {}, math.nan if record.evaluation is None else record.evaluation.metric(metric.name)
    if run.config.train.keep_best:
        return evaluations, max(evaluations.values()) if metric.better == "higher" else min(evaluations.values())
    return evaluations, evaluations[max(evaluations)]


def share_of_cores(worker: int, num_workers: int) -> tuple[int, ...]:
    """Returns the cores that a worker, from 0, is bound to: an equal share of this process's cores.

    With more workers than cores, several workers get the same core. Returns no cores where ``OMP_NUM_THREADS`` is set:
    workers are then not bound, and each has that number of threads.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return ()
    cores = sorted(os.sched_getaffinity(0))
    cores_per_worker = max(1, len(cores) // num_workers)
    return tuple(cores[(worker * cores_per_worker + number) % len(cores)] for number in range(cores_per_worker))


def _send_mistakes(runs: list[PlannedRun], log: Path, sender: Connection) -> None:
    """Builds the models of runs, and sends each error message with the names of its runs; the forked process's main."""
    from distembed.base.ranks import process_group
    from distembed.planning.networks import require_networks_fit
    from distembed.training.build import Blueprint
    from distembed.training.start import find_start

    _be_forked(log)
    mistakes: dict[str, list[str]] = {}
    for run in runs:
        with process_group(run.config.train.device) as ranks:
            try:
                start = find_start(run.config, run.options, lambda function: function(), _print)
                blueprint = Blueprint.for_ranks(start.config, start.manifest.schema, ranks, start.sse)
                require_networks_fit(blueprint.config.model, blueprint.model_inputs, 1)
                blueprint.build_plannable()
            except (UserError, RunError, InsufficientMemory) as error:
                mistakes.setdefault(str(error), []).append(run.name)
            except Exception as error:  # of a user's own model
                traceback.print_exc()
                mistakes.setdefault(one_line(error), []).append(run.name)
    sender.send(mistakes)


def _be_forked(log: Path) -> None:
    """Sets a forked process up: it ends with its parent, gets signals from its parent alone, and prints to ``log``."""
    parent = os.getppid()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # Ctrl-C goes to the sweep, which passes it on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ[PARENT_VARIABLE] = str(parent)
    end_with_parent()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)


def _work(log: Path, run: PlannedRun, trial: Trial, worker: int, cores: tuple[int, ...], sender: Connection) -> None:
    """Trains a run, reports evaluations to its trial, and sends the outcome; the main function of a forked process."""
    import torch
    from rich.console import Console

    from distembed.base.ranks import process_group
    from distembed.training.run import train_run

    _be_forked(log)
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
    started, described, error = time.perf_counter(), None, None
    status: Literal["finished", "pruned", "failed", "interrupted"] = "failed"
    try:
        with process_group(run.config.train.device, worker) as ranks:
            report = partial(_report, trial)
            finished = train_run(run.config, run.options, ranks, Console(width=140), _print, evaluated=report)
        status, described = "finished", finished.described
        _print(described or status)
    except PrunedRun as pruned:
        status, error = "pruned", str(pruned)
    except (Interrupted, KeyboardInterrupt) as interrupted:
        status, error = "interrupted", str(interrupted) or "interrupted"
    except (UserError, RunError, InsufficientMemory) as failure:
        error = str(failure)
        _print(f"failed: {error}")
    except Exception as failure:
        error = one_line(failure)
        traceback.print_exc()
    sender.send(Outcome(status, error, described, time.perf_counter() - started))


def _report(trial: Trial, step: int, value: float) -> None:
    """Tells Optuna the value of an evaluation; raises PrunedRun if the trial should stop. NaN is not reported."""
    if math.isfinite(value):
        trial.report(value, step)
        if trial.should_prune():
            raise PrunedRun(f"{PRUNED}{step}: its value of {value:.4g} is worse than the median of other runs")


def _print(text: str) -> None:
    print(text, flush=True)
