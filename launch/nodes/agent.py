"""The agent of ``torch.distributed.run`` on a node, which acts by the exit codes of its ranks.

torch's own agent starts all ranks again when a rank has ended with any code but 0. This one does so for failures only:

- *A mistake of the user's* (:data:`~distembed.launch.nodes.exit_codes.MISTAKES`) on any rank ends the ranks of all
  nodes. The node that noted it first prints it.
- *An interruption* on any rank ends the ranks of all nodes too, for every rank has saved by then. An elastic job
  continues without the node that was told to end.

Agents exchange this verdict in the store in which their nodes meet. A rank that lost its connection to the failing rank
may be seen to end first: so a failure is judged only after some seconds, in which ends of other ranks are seen.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils import store as stores
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

from distembed.commands.error_file import TOLD_VARIABLE
from distembed.launch.nodes.exit_codes import FAILED, INTERRUPTED, MISTAKES, ToldToEnd, ignore_signals, raise_when_told

JUDGE_SECONDS = 5.0
"""How long after a failure the agent waits for ends of other ranks, which may have caused it."""
LEAVE_SECONDS = 15.0
"""How long agents wait for one another when the job ends on all nodes."""

_LOOK_SECONDS = 1.0
_RESTART_SECONDS = 30
"""How long ranks have to end before they start again: their state is that of a failed step."""
_KEY = "distembed/verdict"

Say = Callable[[str], None]


def run_ranks(arguments: Sequence[str], grace_seconds: int, say: Say) -> int:
    """Runs the ranks of this node by ``arguments`` of ``torch.distributed.run``, and returns the node's exit code.

    Told to end, the ranks have ``grace_seconds`` to save their state. ``say`` prints a line for the user. Two variables
    are set in this process's environment.

    Raises:
        ToldToEnd: A signal has asked this process to end, and the ranks have ended.
    """
    config, entrypoint, program = config_from_args(parse_args(list(arguments)))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    os.environ[TOLD_VARIABLE] = "1"
    agent = NodeAgent(config, entrypoint, tuple(program), grace_seconds, say)
    try:
        code = _end_of(agent, say)
        raise_when_told()  # torch's handlers stay, and raise an error of its own
        return code
    except SignalException as told:
        ignore_signals()
        if not agent.is_elastic:
            agent.leave()
        raise ToldToEnd(agent.has_ended_by(told.sigval)) from None


def _end_of(agent: "NodeAgent", say: Say) -> int:
    """Runs the agent and returns the node's exit code; prints why ranks failed, or that other nodes were not met."""
    try:
        return _run(agent) or 0
    except ChildFailedError as error:
        say(str(error))
        return FAILED
    except RendezvousError as error:
        verdict = agent.others_verdict()
        if verdict is None:
            say(f"this node has not met the other nodes, or has lost them: {str(error) or type(error).__name__}")
        return FAILED if verdict is None else verdict


@record
def _run(agent: "NodeAgent") -> int:
    """Runs the agent; ``record`` writes the error of the rank that failed first into this node's error file."""
    return agent.run_to_end()


class NodeAgent(LocalElasticAgent):
    """The agent of one node; see the module. ``entrypoint`` is the program of each rank, ``program`` its arguments."""

    def __init__(
        self, config: LaunchConfig, entrypoint: Any, program: tuple[str, ...], grace_seconds: int, say: Say
    ) -> None:
        assert config.logs_specs is not None
        meeting = RendezvousParameters(
            config.rdzv_backend,
            config.rdzv_endpoint,
            config.run_id,
            config.min_nodes,
            config.max_nodes,
            config.local_addr,
            **config.rdzv_configs,
        )
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=entrypoint,
            args=program,
            rdzv_handler=get_rendezvous_handler(meeting),
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            event_log_handler=config.event_log_handler,
            numa_options=config.numa_options,
        )
        super().__init__(
            spec,
            logs_specs=config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
        )
        self._grace_seconds = grace_seconds
        self._name = next((word for word in program if not word.startswith("-")), str(entrypoint))
        self.is_elastic = config.min_nodes < config.max_nodes
        self._say = say
        self._verdict: int | None = None
        self._failed_at: float | None = None
        self._looked_at = 0.0

    def run_to_end(self) -> int:
        """Runs the ranks, as often as they may start, and returns the exit code of the node.

        It raises ChildFailedError for ranks that may not start again, and RendezvousError where the other nodes have
        ended the job or cannot be reached.
        """
        handler = self._worker_group.spec.rdzv_handler
        try:
            result = self.run()
        except SignalException:
            raise  # no shutdown: the other nodes of an elastic job may meet again
        except BaseException:
            handler.shutdown()
            raise
        handler.shutdown()
        if self._verdict is not None:
            return self._verdict
        if result is not None and result.is_failed():  # None: the other nodes have finished without this node
            raise ChildFailedError(self._name, result.failures)
        return 0

    def has_ended_by(self, number: signal.Signals) -> bool:
        """Returns whether no rank was killed: all have saved, or died of the signal ``number`` with nothing to save."""
        return all(code in (0, INTERRUPTED, -number) for code in self._exit_codes())

    def others_verdict(self) -> int | None:
        """Returns the exit code with which another node ends the job; None without one, or with a lost store."""
        if self._worker_group.group_world_size == 1 or self._store is None:
            return None
        try:
            return int(self._store.get(_KEY).split()[0]) if self._store.check([_KEY]) else None
        except RuntimeError:  # the first node is gone, and the store with it
            return None

    def _invoke_run(self, role: str = "default") -> Any:
        try:
            return super()._invoke_run(role)
        except SignalException:
            # A second signal would end this process before the ranks have saved; the scheduler kills slow processes.
            ignore_signals()
            raise

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        # waits for the grace period first: torch 2.11's agent waits for 30 s, and 2.13's for an option's time
        self._end_ranks(death_sig, self._grace_seconds)
        super()._shutdown(death_sig)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end_ranks(signal.SIGTERM, _RESTART_SECONDS)
        super()._stop_workers(worker_group)

    def _end_ranks(self, death_sig: signal.Signals, seconds: int) -> None:
        """Sends a signal to the running ranks, waits for them, and kills ranks that have not ended by then."""
        if self._pcontext is not None:
            self._pcontext.close(death_sig, seconds)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._failed_at = None
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._exit_codes()
        failed = [code for code in codes if code]
        if failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        is_early = bool(failed) and self._may_be_a_consequence(codes)
        self._verdict = self._judge(failed, is_early)
        if self._verdict is not None:
            self._agree(self._verdict)
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        if is_early or (None in codes and not failed):
            return RunResult(WorkerState.HEALTHY)  # torch would take a rank that has ended since for a failure
        if failed and set(failed) == {INTERRUPTED}:
            self._remaining_restarts += 1  # to continue an elastic job without a node is no failure
        return super()._monitor_workers(worker_group)

    def _exit_codes(self) -> list[int | None]:
        """Returns the exit code of each rank of this node, None for a running rank; no codes before they start."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc.poll() for _, handler in sorted(handlers.items())]

    def _judge(self, failed: Sequence[int], is_early: bool) -> int | None:
        """Returns the exit code with which all nodes have to end, or None.

        Args:
            failed: Exit codes other than 0 of ranks of this node.
            is_early: Whether the ends of other ranks are still awaited.
        """
        mistakes = [code for code in failed if code in MISTAKES]
        if mistakes:
            return mistakes[0]
        if INTERRUPTED in failed and not self.is_elastic and not is_early:
            return INTERRUPTED
        now = time.monotonic()
        if not failed and now - self._looked_at < _LOOK_SECONDS:
            return None
        self._looked_at = now
        return self.others_verdict()

    def _may_be_a_consequence(self, codes: Sequence[int | None]) -> bool:
        """Returns whether a failure on this node may follow from another rank's, which may still show itself.

        Other ranks are waited for :data:`JUDGE_SECONDS`, or for the grace period where all ends are interruptions.
        """
        assert self._failed_at is not None
        is_saving = all(code in (None, 0, INTERRUPTED) for code in codes)
        patience = float(self._grace_seconds) if is_saving else JUDGE_SECONDS
        has_others = None in codes or ((self._worker_group.group_world_size or 1) > 1 and not is_saving)
        return has_others and time.monotonic() - self._failed_at < patience

    def _agree(self, code: int) -> None:
        """Writes the exit code to the store, unless another node has; the first writer tells the user the reason.

        Then waits for all nodes (:meth:`leave`). An interruption is not written: every node's ranks show it.
        """
        mine = f"{code} {self._worker_group.group_rank}"
        is_first = True
        # an interruption shows in the ranks of every node
        if code != INTERRUPTED and self._worker_group.group_world_size != 1 and self._store is not None:
            # without the first node's store the reason is printed twice rather than never
            with contextlib.suppress(RuntimeError):
                is_first = self._store.compare_set(_KEY, "", mine).decode() == mine
        if is_first:
            self._tell(code)
        self.leave()

    def leave(self) -> None:
        """Waits up to :data:`LEAVE_SECONDS` for all nodes to get here: other nodes need the first node's store."""
        group = self._worker_group
        if group.group_world_size == 1 or self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            stores.barrier(self._store, group.group_world_size, f"{_KEY}/left", barrier_timeout=LEAVE_SECONDS)

    def _tell(self, code: int) -> None:
        if code == INTERRUPTED:
            self._say("interrupted: the ranks have saved their state")
            return
        codes = self._exit_codes()
        if code in codes:
            message = self._message_of(codes.index(code))
            self._say(f"error: {message}" if message else f"a rank has ended with code {code}, and has said why")
            self._say("The ranks do not start again, which would not mend it.")

    def _message_of(self, local_rank: int) -> str:
        """Returns the error in the file of a rank of this node; "" where there is none."""
        assert self._pcontext is not None
        try:
            noted = json.loads(Path(self._pcontext.error_files[local_rank]).read_text())["message"]["message"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return str(noted).partition(": ")[2]
