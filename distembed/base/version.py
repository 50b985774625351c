"""Versions of distembed and of the packages that a run's numbers depend on."""

import platform
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.2.0"
_PACKAGES = ("distembed", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run's numbers depend on."""
    versions_ = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions_[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_
