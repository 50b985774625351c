"""``python -m distembed.doctor``: the doctor where the rest of the package does not load."""

import sys

from distembed.doctor.doctor import diagnose, remedy_lines, run_doctor


def _print_findings() -> int:
    """Does what ``distembed doctor`` does, in plain text where rich is missing; returns the exit code."""
    try:
        from rich.console import Console
    except ImportError:
        findings = diagnose()
        print(*(f"{finding.subject:20} {finding.status:6} {finding.detail}" for finding in findings), sep="\n")
        print(*remedy_lines(findings), sep="\n")
        return int(any(finding.status == "wrong" for finding in findings))
    return run_doctor(Console())


sys.exit(_print_findings())
