"""TorchX's scheduler for Ray, corrected.

- Importing it ends in a NameError where Ray is missing.
- Neither Ray nor TorchX starts a job again: so the nodes of a job that saves its state start again themselves, after an
  interruption, and after a failure as often as ``max_retries`` allows (:mod:`distembed.launch.nodes.run`).
- ``status`` fails for a job that does not exist.
"""

from importlib.util import find_spec
from typing import Any

from torchx.specs import AppDef, AppDryRunInfo

from distembed.launch.apps.roles import GRACE_SECONDS
from distembed.launch.nodes.exit_codes import AGAIN_VARIABLE, RETRIES_VARIABLE


def create_scheduler(session_name: str, **options: Any) -> Any:
    """Returns the scheduler; TorchX calls this for ``-s ray``."""
    if find_spec("ray") is None:
        raise ModuleNotFoundError("Ray is not installed; pip install 'ray[default]'")
    from torchx.schedulers import ray_scheduler

    class RayScheduler(ray_scheduler.RayScheduler):
        """Runs the nodes of an application as Ray's actors."""

        def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[Any]:
            for role in app.roles:
                if GRACE_SECONDS in role.metadata:
                    role.env |= {RETRIES_VARIABLE: str(role.max_retries), AGAIN_VARIABLE: "1"}
            return super()._submit_dryrun(app, cfg)

        def describe(self, app_id: str) -> Any:
            try:
                return super().describe(app_id)
            except RuntimeError as error:
                if "does not exist" in str(error):
                    return None
                raise

    ray_options = {name: value for name, value in options.items() if name == "ray_client"}
    return RayScheduler(session_name, **ray_options)
