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
number, acts by the exit codes of the nodes (:mod:`distembed.launch.nodes.exit_codes`), and the nodes count failures
themselves. Only nodes of a role that has a state to save use these codes.
"""

import warnings
from typing import Any

from torchx.schedulers import kubernetes_scheduler
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role

from distembed.launch.apps.roles import GRACE_SECONDS
from distembed.launch.nodes.exit_codes import INTERRUPTED, MISTAKES, RETRIES_USED, RETRIES_VARIABLE

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
                if _is_needed(role, replica):
                    task["maxRetry"] = _MOST_STARTS
    if any(map(_is_elastic, app.roles)):
        # One completed node completes the job: the launchers end together, and pods that never started never would.
        spec["policies"] = [{"event": "TaskCompleted", "action": "CompleteJob"}]


def _policies(role: Role, replica: int) -> list[dict[str, Any]]:
    """Returns Volcano's policies for the end of a replica's pod; the first that applies counts.

    ============================================  =================  =======================================
    the pod ends                                  role with retries  role without retries
    ============================================  =================  =======================================
    with MISTAKES or RETRIES_USED (if resumable)  end the job        end the job
    with INTERRUPTED (if resumable)               restart            restart
    by any other failure                          restart            end the job
    by an eviction                                restart            restart if resumable, else end the job
    ============================================  =================  =======================================

    A pod that the other pods need restarts the whole job, and any other pod itself alone. The last two rows end the job
    only for a needed pod; otherwise there is no policy, and the job continues without the pod.
    """
    is_needed, is_resumable = _is_needed(role, replica), _is_resumable(role)
    restart = "RestartJob" if is_needed else "RestartTask"  # a task is one pod
    by_code = _policies_by_exit_code(restart) if is_resumable else []
    if role.max_retries:
        return [*by_code, {"events": ["PodFailed", "PodEvicted"], "action": restart}]
    if not is_resumable:
        return [{"events": ["PodFailed", "PodEvicted"], "action": "TerminateJob"}] if is_needed else []
    # A pod is mostly told to end before it is evicted, and saves. If it could not, the next start counts the failure.
    evicted = {"event": "PodEvicted", "action": restart}
    failed = [{"event": "PodFailed", "action": "TerminateJob"}] if is_needed else []
    return [*by_code, evicted, *failed]


def _policies_by_exit_code(restart: str) -> list[dict[str, Any]]:
    """Returns the policies for the exit codes of a resumable role's nodes; ``restart`` is the action that restarts."""
    give_up = [{"exitCode": code, "action": "TerminateJob"} for code in (*MISTAKES, RETRIES_USED)]
    return [*give_up, {"exitCode": INTERRUPTED, "action": restart}]


def _is_needed(role: Role, replica: int) -> bool:
    """Returns whether the other replicas cannot continue without this one; elastic nodes meet at replica 0."""
    return replica == 0 or not _is_elastic(role)


def _is_resumable(role: Role) -> bool:
    """Returns whether the role's nodes end with the exit codes of :mod:`distembed.launch.nodes.exit_codes`."""
    return GRACE_SECONDS in role.metadata


def _fewest(role: Role) -> int:
    """Returns the fewest replicas that the role starts with."""
    return role.num_replicas if role.min_replicas is None else int(role.min_replicas)


def _is_elastic(role: Role) -> bool:
    """Returns whether the role can run on fewer replicas than it asks for."""
    return _fewest(role) < int(role.num_replicas)
