"""TorchX's scheduler for Kubernetes with Volcano, corrected.

What differs from the scheduler of TorchX 0.7.0:

============================================  ======================================================================
TorchX                                        here
============================================  ======================================================================
the gang's size is left to Volcano's webhook  the job says how many pods must start together
a lost pod of an elastic job restarts it all  its pod alone comes back; the job ends when its first node has failed
an elastic job waits for pods never started   it is complete when one of its nodes has completed
a job without retries waits for its timeouts  it ends when a pod has failed, and gives back the others' nodes
pods are killed 30 seconds after SIGTERM      after the seconds that the role asks for, and 30 more
``status`` fails on "Completing", and on 404  it is running; and there is no such job
============================================  ======================================================================
"""

import warnings
from typing import Any

from torchx.schedulers import kubernetes_scheduler
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role

from launch.apps.roles import GRACE_SECONDS

_FAILURES = ["PodFailed", "PodEvicted"]
# After the grace the launcher still has to end its processes and to print their errors.
_AFTER_GRACE_SECONDS = 30

# The job's processes are being ended because one of its tasks has completed. TorchX's table lacks it.
kubernetes_scheduler.JOB_STATE.setdefault("Completing", AppState.RUNNING)


class KubernetesScheduler(kubernetes_scheduler.KubernetesScheduler):
    """Runs applications as Volcano's jobs; see the module's comparison with TorchX's."""

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
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
    """Corrects the specification of a Volcano job, whose tasks are the replicas of all roles in their order."""
    spec["minAvailable"] = sum(_fewest(role) for role in app.roles)
    tasks = iter(spec["tasks"])
    for role in app.roles:
        for replica in range(role.num_replicas):
            task = next(tasks)
            task["policies"] = _policies(role, replica)
            if GRACE_SECONDS in role.metadata:
                grace = int(role.metadata[GRACE_SECONDS]) + _AFTER_GRACE_SECONDS
                task["template"].spec.termination_grace_period_seconds = grace
    if any(map(_is_elastic, app.roles)):
        # Nodes end together: the launcher of each waits for all others.
        spec["policies"] = [{"event": "TaskCompleted", "action": "CompleteJob"}]


def _policies(role: Role, replica: int) -> list[dict[str, Any]]:
    """Returns what Volcano does when a replica's pod has failed or was evicted; [] for nothing."""
    if _is_elastic(role) and replica > 0:
        # A task is one pod. Replica 0 is where the others meet: without it they cannot continue.
        return [{"events": _FAILURES, "action": "RestartTask"}] if role.max_retries else []
    return [{"events": _FAILURES, "action": "RestartJob" if role.max_retries else "TerminateJob"}]


def _fewest(role: Role) -> int:
    """Returns the fewest replicas that the role starts with."""
    return role.num_replicas if role.min_replicas is None else int(role.min_replicas)


def _is_elastic(role: Role) -> bool:
    """Returns whether the role can run on fewer replicas than it asks for."""
    return _fewest(role) < int(role.num_replicas)
