"""TorchX's scheduler for AWS Batch, corrected: TorchX 0.7.0 takes the number of retries for that of attempts.

One retry is no retry there. And AWS Batch refuses more than 10 attempts only when the job is submitted.
"""

from typing import Any

from torchx.schedulers import aws_batch_scheduler
from torchx.specs import AppDef, AppDryRunInfo

from distembed.errors import UserError

MAX_ATTEMPTS = 10
"""AWS Batch's own limit, the first start included."""


class AWSBatchScheduler(aws_batch_scheduler.AWSBatchScheduler):
    """Runs applications as multi-node parallel jobs of AWS Batch."""

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
        retries = max(role.max_retries for role in app.roles)
        if retries >= MAX_ATTEMPTS:
            raise UserError(f"max_retries is {retries}; AWS Batch allows 0 to {MAX_ATTEMPTS - 1}")
        dryrun_info = super()._submit_dryrun(app, cfg)
        dryrun_info.request.job_def["retryStrategy"]["attempts"] = retries + 1
        return dryrun_info


def create_scheduler(
    session_name: str, client: Any = None, log_client: Any = None, docker_client: Any = None, **_: Any
) -> AWSBatchScheduler:
    """Returns the scheduler; TorchX calls this for ``-s aws_batch``."""
    return AWSBatchScheduler(session_name, client=client, log_client=log_client, docker_client=docker_client)
