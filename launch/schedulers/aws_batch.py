"""TorchX's scheduler for AWS Batch, corrected.

- TorchX 0.7.0 takes the number of retries for the number of attempts: one retry is no retry. And AWS Batch refuses more
  than 10 attempts only when the job is submitted.
- An interruption is no failure, and a mistake of the user's is not tried again. AWS Batch counts all attempts alike: so
  a job that saves its state gets the most attempts, the exit code of its first node decides whether there is another
  (:mod:`distembed.launch.nodes.exit_codes`), and the nodes count failures.
"""

from typing import Any

from torchx.schedulers import aws_batch_scheduler
from torchx.specs import AppDef, AppDryRunInfo

from distembed.base.errors import UserError
from distembed.launch.apps.roles import GRACE_SECONDS
from distembed.launch.nodes.exit_codes import MISTAKES, RETRIES_USED, RETRIES_VARIABLE

MAX_ATTEMPTS = 10
"""AWS Batch's own limit, the first start included."""


class AWSBatchScheduler(aws_batch_scheduler.AWSBatchScheduler):
    """Runs applications as multi-node parallel jobs of AWS Batch."""

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
        retries = max(role.max_retries for role in app.roles)
        if retries >= MAX_ATTEMPTS:
            raise UserError(f"max_retries is {retries}; AWS Batch allows 0 to {MAX_ATTEMPTS - 1}")
        resumable = [role for role in app.roles if GRACE_SECONDS in role.metadata]
        for role in resumable:
            role.env[RETRIES_VARIABLE] = str(role.max_retries)
        dryrun_info = super()._submit_dryrun(app, cfg)
        strategy = dryrun_info.request.job_def["retryStrategy"]
        strategy["attempts"] = MAX_ATTEMPTS if resumable else retries + 1
        if resumable:
            # an exit code that matches none of these is tried again
            ends = [{"onExitCode": str(code), "action": "EXIT"} for code in (0, *MISTAKES, RETRIES_USED)]
            strategy["evaluateOnExit"] = ends
        return dryrun_info


def create_scheduler(
    session_name: str, client: Any = None, log_client: Any = None, docker_client: Any = None, **_: Any
) -> AWSBatchScheduler:
    """Returns the scheduler; TorchX calls this for ``-s aws_batch``."""
    return AWSBatchScheduler(session_name, client=client, log_client=log_client, docker_client=docker_client)
