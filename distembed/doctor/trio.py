"""The tested trio: the versions of torch, torchrec and FBGEMM that load together.

The only place where they are written down (``pyproject.toml`` repeats torch's, and a test keeps the two equal):
``tools/setup.sh`` runs this file without importing the package, ``distembed doctor`` reads it. The neighbours of
these versions fail to load: FBGEMM's shared library is built against one torch release.
"""

import sys

TORCH = "2.13.0"
TORCHREC = "1.8.0"
FBGEMM = "1.8.0"

FBGEMM_DISTRIBUTIONS = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
"""Device -> the distribution that holds FBGEMM for it. Both write their files to the same folder."""


def pins(device: str) -> dict[str, str]:
    """Returns distribution name -> version of the members for ``device``, in the order in which to install them."""
    return {"torch": TORCH, "torchrec": TORCHREC, FBGEMM_DISTRIBUTIONS[device]: FBGEMM}


if __name__ == "__main__":
    print(*(f"{name}=={version}" for name, version in pins(sys.argv[1]).items()))
