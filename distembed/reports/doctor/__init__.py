"""Examines this machine: its software and hardware, the defects, and the command that mends each.

``facts`` gathers facts about the machine, and pure functions in ``findings`` judge them, so that tests can invent a
machine. The package imports the standard library alone: ``python -m distembed.reports.doctor`` works where the rest of
distembed does not.
"""

from distembed.base.cuda_driver import nvidia_smi_works
from distembed.reports.doctor.facts import Facts, LoadResult, gather_facts, installed_versions
from distembed.reports.doctor.findings import (
    Finding,
    check_trio_versions,
    chosen_device,
    judge,
    name_trio,
    print_doctor_report,
    run_doctor,
    run_fix,
)

__all__ = [
    "Facts",
    "Finding",
    "LoadResult",
    "check_trio_versions",
    "chosen_device",
    "gather_facts",
    "installed_versions",
    "judge",
    "name_trio",
    "nvidia_smi_works",
    "print_doctor_report",
    "run_doctor",
    "run_fix",
]
