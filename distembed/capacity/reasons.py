"""Why a plan is as it is: how near it is to the fastest there can be, and what other placements would cost."""

from collections.abc import Callable

from distembed.capacity.assessment import AssessedTable, Assessment
from distembed.capacity.number_texts import added_bytes, added_milliseconds, milliseconds_at_least, percent_at_most
from distembed.planning.alternatives import Alternative
from distembed.units import enumerate_names

ALTERNATIVES_LEGEND = (
    "instead: other placements of a table, the others staying where they are, with what they would add: milliseconds "
    "of the slowest rank's step, bytes of the fullest rank, bytes that all ranks send in a step"
)
_MAX_LINES = 32
_ROUNDING = 1e-9


def bound_lines(assessment: Assessment) -> list[str]:
    """Returns how far the plan is from the fastest one there can be, and whether the search was stopped early.

    Nothing is said where no plan fits, and of the bound where none is known.
    """
    if not assessment.fits:
        return []
    slowest, bound = max(rank.times.total for rank in assessment.ranks), assessment.lower_bound_ms or 0.0
    if 0 < slowest <= bound * (1 + _ROUNDING):
        return ["bound: no plan that fits is faster"]
    lines = []
    if bound > 0:
        lines.append(
            f"bound: no plan that fits takes less than {milliseconds_at_least(bound)} ms; this one is at most "
            f"{percent_at_most(slowest / bound - 1)} above what any plan could reach"
        )
    if not assessment.is_search_complete:
        lines.append("the search was stopped early, after its last allowed try; a faster plan may be there")
    return lines


def sharding_text(sharding_type: str, compute_kernel: str) -> str:
    """Returns a sharding type, with the kernel where that is not the usual one; of replicated tables it is torch's."""
    is_usual = compute_kernel == "fused" or sharding_type == "data_parallel"
    return sharding_type if is_usual else f"{sharding_type} ({compute_kernel})"


def reason(table: AssessedTable) -> str:
    """Returns why a table is placed as it is; empty where there is no plan."""
    return "" if table.placement is None else table.placement.reason


def alternatives_text(table: AssessedTable) -> str:
    """Returns the other placements of a table with what they would cost, a line each; empty where there are none."""
    return "" if table.placement is None else "\n".join(map(_alternative_text, table.placement.alternatives))


def reason_lines(assessment: Assessment) -> list[str]:
    """Returns a line for each reason why tables are placed as they are, with their names."""
    return _lines_by_text(assessment, "why", reason)


def alternative_lines(assessment: Assessment) -> list[str]:
    """Returns a line for all tables whose other placements would cost the same."""
    return _lines_by_text(assessment, "instead", lambda table: alternatives_text(table).replace("\n", "; "))


def _lines_by_text(assessment: Assessment, title: str, text: Callable[[AssessedTable], str]) -> list[str]:
    """Returns such as ``why (C1, C2): whole: fastest``, a line for each text; of too many texts the first ones."""
    names_by_text: dict[str, list[str]] = {}
    for table in assessment.tables:
        if own := text(table):
            names_by_text.setdefault(own, []).append(table.name)
    num_tables = len(assessment.tables)
    lines = [
        f"{title} ({'all tables' if 1 < num_tables == len(names) else enumerate_names(names)}): {shared}"
        for shared, names in names_by_text.items()
    ]
    num_unshown = sum(len(names) for names in list(names_by_text.values())[_MAX_LINES:])
    rest = [f"{title} ({num_unshown:,} more tables): --report and --json say it"] if num_unshown else []
    return lines[:_MAX_LINES] + rest


def _alternative_text(alternative: Alternative) -> str:
    """Returns such as ``column_wise in 2 shards +0.125 ms, +1.50 MiB, +12.00 MiB sent, does not fit``."""
    placed = sharding_text(alternative.sharding_type, alternative.compute_kernel)
    shards = f" in {alternative.num_shards:,} shards" if alternative.num_shards > 1 else ""
    sent = f", {added_bytes(alternative.sent_bytes)} sent" if alternative.sent_bytes else ""
    fits = "" if alternative.fits else ", does not fit"
    return (
        f"{placed}{shards} {added_milliseconds(alternative.milliseconds)}, "
        f"{added_bytes(alternative.memory_bytes)}{sent}{fits}"
    )
