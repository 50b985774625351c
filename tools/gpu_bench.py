"""Runs all that needs a card; :mod:`gpu.driver` says how, and ``tools/gpu.sh`` installs what it needs first."""

import sys

from gpu.driver import main

if __name__ == "__main__":
    sys.exit(main())
