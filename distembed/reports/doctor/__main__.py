"""``python -m distembed.reports.doctor``: the doctor where the rest of the package does not load."""

import sys

from distembed.reports.doctor.findings import run_doctor

try:
    from rich.console import Console
except ImportError:
    sys.exit(run_doctor(console=None))
sys.exit(run_doctor(Console()))
