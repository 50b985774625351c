"""Runs the GPU tests and benches (:mod:`gpu.driver`); ``tools/gpu.sh`` installs the packages first."""

import sys

from gpu.driver import main

if __name__ == "__main__":
    sys.exit(main())
