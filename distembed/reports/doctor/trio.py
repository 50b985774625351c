"""The tested trios: versions of torch, torchrec and FBGEMM that load together, and the packages that they need.

The only place where they are written down (``pyproject.toml`` repeats torch's, and a test keeps the two in step):
``tools/setup.sh`` runs this file without importing the package, ``distembed doctor --fix`` reads it. A member of
another trio fails to load: FBGEMM's shared library is built against one torch release.

    python distembed/reports/doctor/trio.py default name prints the name of the trio that no call names
    python distembed/reports/doctor/trio.py 2.13 cpu     prints torch, then the packages for --no-deps, in order
    python distembed/reports/doctor/trio.py 2.13 needs   prints the further packages that it needs
    python distembed/reports/doctor/trio.py 2.13 pythons prints the versions of Python that it is tested on
    python distembed/reports/doctor/trio.py 2.13 suits      fails where this Python is none of these
    python distembed/reports/doctor/trio.py 2.13 stands cpu fails where this Python has other members, or none
    python distembed/reports/doctor/trio.py 2.13 toolkit    prints the CUDA that its CUDA members are built for
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

FBGEMM_DISTRIBUTIONS = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
"""Device -> the distribution that holds FBGEMM for it. Both write their files to the same folder."""

TORCHX = "0.7.0"
"""Version of TorchX, the last one with all schedulers.

Its metadata demands urllib3<1.27, which other packages exclude; ``pyproject.toml`` lists the packages that it needs.
"""


@dataclass(frozen=True)
class Trio:
    """Three versions that load together."""

    torch: str  # version of torch
    torchrec: str  # version of torchrec
    fbgemm: str  # version of FBGEMM, of either distribution
    cuda: str  # CUDA release that the wheels of its CUDA members are built for
    pythons: tuple[int, ...]  # minor versions of Python 3 that it is tested on
    # other packages that its torchrec imports, and no other trio's torchrec, as requirements
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Major and minor version of its torch, by which it is asked for."""
        return self.torch.rpartition(".")[0]

    @property
    def python_names(self) -> str:
        """The versions of Python that it is tested on, as a text."""
        return ", ".join(f"3.{minor}" for minor in self.pythons)

    def is_named_by(self, torch: str) -> bool:
        """Returns whether a version of torch, like ``2.11.0+cu130``, is of its major and minor version."""
        return torch.split(".")[:2] == self.name.split(".")

    def pins(self, device: str) -> dict[str, str]:
        """Returns distribution name -> version of the members for ``device``, in the order in which to install them."""
        return {"torch": self.torch, "torchrec": self.torchrec, FBGEMM_DISTRIBUTIONS[device]: self.fbgemm}


DEFAULT = Trio("2.13.0", "1.8.0", "1.8.0", cuda="13.0", pythons=(11, 12, 13, 14))
"""The trio that is installed where no other is asked for."""

# torchrec 1.6.0 is not to be had. That of 1.6.1 imports iopath in torchrec.datasets, and by it in torchrec.models.dlrm;
# of its later releases there are no wheels.
_OLDER = Trio("2.11.0", "1.6.1", "1.6.0", cuda="13.0", pythons=(12,), needs=("iopath==0.1.9",))

TRIOS = {trio.name: trio for trio in (DEFAULT, _OLDER)}
"""Name of a trio -> the trio."""


def trio_of(installed: Mapping[str, str]) -> Trio:
    """Returns the trio of the installed torch's major and minor version, or else the default."""
    return next((trio for trio in TRIOS.values() if trio.is_named_by(installed.get("torch", ""))), DEFAULT)


def _is_installed(pins: Mapping[str, str]) -> bool:
    """Returns whether this Python has the pinned versions installed; a build suffix like ``+cpu`` does not count."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return all(version(name).split("+")[0] == pinned for name, pinned in pins.items())
    except PackageNotFoundError:
        return False


def _main(name: str, question: str, device: str = "") -> int:
    """Answers a question of ``tools/setup.sh`` about a trio; returns the exit code."""
    trio = DEFAULT if name == "default" else TRIOS.get(name)
    if trio is None:
        print(f"unknown trio '{name}'; allowed are: {', '.join(TRIOS)}", file=sys.stderr)
        return 2
    if question == "suits":
        return int(sys.version_info[0] != 3 or sys.version_info[1] not in trio.pythons)
    if question == "stands":
        return int(not _is_installed(trio.pins(device)))
    if question == "name":
        print(trio.name)
    elif question == "pythons":
        print(trio.python_names)
    elif question == "toolkit":
        print(trio.cuda)
    elif question == "needs":
        print(*trio.needs)
    else:
        print(*(f"{name}=={version}" for name, version in {**trio.pins(question), "torchx": TORCHX}.items()))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
