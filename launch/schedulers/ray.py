"""TorchX's scheduler for Ray, without the NameError that importing it ends in where Ray is missing."""

from importlib.util import find_spec
from typing import Any


def create_scheduler(session_name: str, **options: Any) -> Any:
    """Returns the scheduler; TorchX calls this for ``-s ray``.

    Raises:
        ModuleNotFoundError: Ray is not installed. TorchX's commands that list schedulers expect this one.
    """
    if find_spec("ray") is None:
        raise ModuleNotFoundError("Ray is not installed; pip install 'ray[default]'")
    from torchx.schedulers import ray_scheduler

    return ray_scheduler.create_scheduler(session_name, **options)
