"""TorchX's scheduler for Kubernetes with Volcano, corrected.

============================================  ======================================================================
TorchX 0.7.0                                  here
============================================  ======================================================================
the gang's size is left to Volcano's webhook  the job says how many pods must start together
a lost pod of an elastic job restarts it all  its pod alone comes back; the job ends when its first node has failed
an elastic job waits for pods never started   it is complete when one of its nodes has completed
a job without retries waits for its timeouts  it ends when a pod has failed, and frees the other pods' nodes
every end counts against the retries          an interruption does not, and a mistake of the user's ends the job
pods are killed 30 seconds after SIGTERM      after the seconds that the role asks for, and 30 more
``status`` fails on "Completing", and on 404  it is running; and there is no such job
============================================  ======================================================================

Volcano counts every start of a job alike, and stops at a number that is given in advance. So it is given a large
number, acts by the exit codes of the nodes (:mod:`launch.nodes.exit_codes`), and the nodes count failures themselves.
Only nodes of a role that has a state to save use these codes.
"""

import warnings
from typing import Any

from torchx.schedulers import kubernetes_scheduler
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role

from launch.apps.roles import GRACE_SECONDS
from launch.nodes.exit_codes import INTERRUPTED, MISTAKES, RETRIES_USED, RETRIES_VARIABLE

_FAILURES = ["PodFailed", "PodEvicted"]
_MOST_STARTS = 100
"""How often Volcano starts a job again whose nodes count failures themselves."""
# After the grace the launcher still has to end its processes and to print their errors.
_AFTER_GRACE_SECONDS = 30

# The job ends because one of its tasks has completed. TorchX's table lacks this state.
kubernetes_scheduler.JOB_STATE.setdefault("Completing", AppState.RUNNING)


class KubernetesScheduler(kubernetes_scheduler.KubernetesScheduler):
    """Runs applications as Volcano's jobs; see the module's comparison with TorchX's."""

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
        for role in filter(_is_resumable, app.roles):
            role.env[RETRIES_VARIABLE] = str(role.max_retries)
        with warnings.catch_warnings():
            # It warns of every retry that Volcano 1.4 had faults.
            warnings.filterwarnings("ignore", message=r"\s*Role .* configured with restarts")
            dryrun_info = super()._submit_dryrun(app, cfg)
        _correct(app, dryrun_info.request.resource["spec"])
        return dryrun_info

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        from kubernetes.client.exceptions import ApiException

        try:
            return super().describe(app_id)
        except ApiException as error:
            if error.status == 404:
                return None
            raise


def create_scheduler(session_name: str, client: Any = None, docker_client: Any = None, **_: Any) -> KubernetesScheduler:
    """Returns the scheduler; TorchX calls this for ``-s kubernetes``."""
    return KubernetesScheduler(session_name, client=client, docker_client=docker_client)


def _correct(app: AppDef, spec: dict[str, Any]) -> None:
    """Changes the specification of a Volcano job in place; its tasks are the replicas of all roles, in order."""
    spec["minAvailable"] = sum(_fewest(role) for role in app.roles)
    tasks = iter(spec["tasks"])
    for role in app.roles:
        for replica in range(role.num_replicas):
            task = next(tasks)
            task["policies"] = _policies(role, replica)
            if _is_resumable(role):
                grace = int(role.metadata[GRACE_SECONDS]) + _AFTER_GRACE_SECONDS
                task["template"].spec.termination_grace_period_seconds = grace
                spec["maxRetry"] = _MOST_STARTS
                if replica == 0 or not _is_elastic(role):
                    task["maxRetry"] = _MOST_STARTS
    if any(map(_is_elastic, app.roles)):
        # One completed node completes the job: the launchers end together, and pods that never started never would.
        spec["policies"] = [{"event": "TaskCompleted", "action": "CompleteJob"}]


def _policies(role: Role, replica: int) -> list[dict[str, Any]]:
    """Returns Volcano's policies for a replica's pod that has failed or was evicted; the first that applies counts."""
    # A task is one pod. The nodes meet at replica 0: without it the other replicas cannot continue.
    is_needed = replica == 0 or not _is_elastic(role)
    restart = "RestartJob" if is_needed else "RestartTask"
    give_up = [{"events": _FAILURES, "action": "TerminateJob"}] if is_needed else []
    if not _is_resumable(role):
        return [{"events": _FAILURES, "action": restart}] if role.max_retries else give_up
    by_code = [{"exitCode": code, "action": "TerminateJob"} for code in (*MISTAKES, RETRIES_USED)]
    by_code += [{"exitCode": INTERRUPTED, "action": restart}]
    # an evicted pod may have been told to end, and has saved; the nodes count it where it has not
    if role.max_retries:
        return [*by_code, {"events": _FAILURES, "action": restart}]
    failed = [{"event": "PodFailed", "action": "TerminateJob"}] if is_needed else []
    return [*by_code, {"event": "PodEvicted", "action": restart}, *failed]


def _is_resumable(role: Role) -> bool:
    """Returns whether the role's nodes end with the exit codes of :mod:`launch.nodes.exit_codes`."""
    return GRACE_SECONDS in role.metadata


def _fewest(role: Role) -> int:
    """Returns the fewest replicas that the role starts with."""
    return role.num_replicas if role.min_replicas is None else int(role.min_replicas)


def _is_elastic(role: Role) -> bool:
    """Returns whether the role can run on fewer replicas than it asks for."""
    return _fewest(role) < int(role.num_replicas)
