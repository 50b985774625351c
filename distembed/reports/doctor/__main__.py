"""``python -m distembed.reports.doctor``: the doctor where the rest of the package does not load."""

import argparse
import sys

from distembed.reports.doctor.findings import run_doctor, run_fix
from distembed.reports.doctor.trio import FBGEMM_DISTRIBUTIONS

try:
    from rich.console import Console
except ImportError:
    console = None
else:
    console = Console()
parser = argparse.ArgumentParser(prog="python -m distembed.reports.doctor", description="Check this installation.")
parser.add_argument("--fix", action="store_true", help="run the commands of pip that mend what is wrong")
parser.add_argument("--dry-run", action="store_true", help="print the commands of --fix and run none")
parser.add_argument("--device", choices=FBGEMM_DISTRIBUTIONS, help="the device to install FBGEMM for")
options = parser.parse_args()
if options.fix or options.dry_run:
    sys.exit(run_fix(console, options.device, dry_run=options.dry_run))
sys.exit(run_doctor(console, options.device))
