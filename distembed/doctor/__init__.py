"""What this machine has, what does not work, and the command that mends it.

Facts are gathered first (:mod:`~distembed.doctor.facts`), then judged by pure functions
(:mod:`~distembed.doctor.findings`), so that every judgement can be tested without the machine that it speaks of, and
printed at the end (:mod:`~distembed.doctor.report`). The package needs nothing but the standard library to be
imported, so that ``python -m distembed.doctor`` works where the rest of distembed does not.
"""

from distembed.cuda_driver import nvidia_smi_works
from distembed.doctor.facts import Facts, LoadResult, gather_facts, installed_versions
from distembed.doctor.findings import Finding, check_trio_versions, chosen_device, judge, name_trio
from distembed.doctor.report import print_doctor_report, run_doctor

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
]
