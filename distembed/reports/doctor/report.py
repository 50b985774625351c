"""The findings on the terminal: a table, and the commands that mend what is wrong."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distembed.reports.doctor.facts import gather_facts
from distembed.reports.doctor.findings import Finding, judge

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def run_doctor(console: "Console | None") -> int:
    """Gathers the facts, judges them and prints the findings.

    Args:
        console: Where to print a table; None prints plain text, for a Python without rich.

    Returns:
        The exit code: 1 where something is wrong, else 0.
    """
    findings = judge(gather_facts())
    if console is None:
        print(*(f"{finding.subject:20} {finding.status:6} {finding.detail}" for finding in findings), sep="\n")
        print(*remedy_lines(findings), sep="\n")
    else:
        print_doctor_report(findings, console)
    return int(any(finding.status == "wrong" for finding in findings))


def print_doctor_report(findings: Sequence[Finding], console: "Console") -> None:
    """Prints the findings as a table, and below it the commands that mend what is wrong."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, Text(finding.status, style=_STYLES[finding.status]), finding.detail)
    console.print(table, markup=False, highlight=False)
    remedies = remedy_lines(findings)
    console.print("\nAll is well." if not remedies else "\nTo mend what is wrong:", markup=False)
    for line in remedies:
        # unwrapped, so that it can be copied
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def remedy_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns a comment and a command for each wrong finding, in the order in which to run them."""
    wrong = [finding for finding in findings if finding.status == "wrong"]
    return [line for finding in wrong for line in (f"  # {finding.subject}: {finding.detail}", f"  {finding.remedy}")]
