r"""Bytes of several tables: the most accurate choice of a size for each table that keeps a budget.

Each table has options, with their bytes and their distortion: the error of codes, or the cost in the loss. Minimising
the total distortion plus ``lambda`` times the total bytes is a choice for each table by itself (Shoham and Gersho,
"Efficient bit allocation for an arbitrary set of quantizers", 1988), which lies on the lower convex hull of the table's
options. So all tables begin with their smallest option, and take the steps along their hulls in the order of the
distortion that a byte saves::

    distortion  o                     a table's hull: steps of falling slope
                 \
                  o   x               x is above the hull: no lambda chooses it
                    `--.__o______o
                                 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from distembed.base.errors import UserError
from distembed.base.units import format_bytes

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Option(Generic[Choice]):
    """One way to store a table; the ``choice`` tells which, for the caller."""

    choice: Choice
    num_bytes: int
    distortion: float


class _Step(NamedTuple):
    """The step of a table from one option of its hull to the next."""

    slope: float  # distortion saved by a byte, negative
    table: int
    option: int


class TableSizes(Generic[Choice]):
    """The hulls of several tables and the order of the steps along them.

    Args:
        options: The options of each table, at least one.
    """

    def __init__(self, options: Sequence[Sequence[Option[Choice]]]) -> None:
        self._options = options
        self._hulls = [lower_hull(own) for own in options]
        steps = [
            _Step((after.distortion - before.distortion) / (after.num_bytes - before.num_bytes), table, number + 1)
            for table, hull in enumerate(self._hulls)
            for number, (before, after) in enumerate(zip(hull, hull[1:], strict=False))
        ]
        self._steps = sorted(steps)

    @property
    def num_steps(self) -> int:
        """The number of steps from the smallest to the largest sizes."""
        return len(self._steps)

    def after(self, num_steps: int) -> list[Option[Choice]]:
        """Returns each table's option after the first steps."""
        chosen = [0] * len(self._hulls)
        for step in self._steps[:num_steps]:
            chosen[step.table] = step.option
        return [hull[number] for hull, number in zip(self._hulls, chosen, strict=True)]

    def within(self, budget_bytes: int) -> list[Option[Choice]]:
        """Returns each table's option within a budget of all tables together.

        A table stops at its first step that exceeds the budget. The bytes that are left then go, one table after
        another, to the option of any table that saves most distortion, on the hull or above it.

        Raises:
            UserError: The smallest sizes exceed the budget.
        """
        chosen, stopped = [0] * len(self._hulls), set[int]()
        left = budget_bytes - total_bytes(self.after(0))
        if left < 0:
            raise UserError(
                f"--budget is {budget_bytes:,} bytes, and the smallest sizes of all tables take "
                f"{budget_bytes - left:,} ({format_bytes(budget_bytes - left)}); give as much or more."
            )
        for step in self._steps:
            hull = self._hulls[step.table]
            added = hull[step.option].num_bytes - hull[step.option - 1].num_bytes
            if step.table in stopped or added > left:
                stopped.add(step.table)
                continue
            chosen[step.table], left = step.option, left - added
        return self._filled([hull[number] for hull, number in zip(self._hulls, chosen, strict=True)], left)

    def _filled(self, chosen: list[Option[Choice]], left: int) -> list[Option[Choice]]:
        """Returns the options after the replacements that save most distortion, until none fits into the bytes left."""
        while True:
            replacements = [
                (before.distortion - option.distortion, before.num_bytes - option.num_bytes, table, number)
                for table, before in enumerate(chosen)
                for number, option in enumerate(self._options[table])
                if option.num_bytes - before.num_bytes <= left and option.distortion < before.distortion
            ]
            if not replacements:
                return chosen
            _, freed, table, number = max(replacements)
            chosen[table], left = self._options[table][number], left + freed


def lower_hull(options: Sequence[Option[Choice]]) -> list[Option[Choice]]:
    """Returns the options on the lower convex hull, by rising bytes and falling distortion."""
    hull: list[Option[Choice]] = []
    for option in sorted(options, key=lambda own: (own.num_bytes, own.distortion)):
        if hull and option.distortion >= hull[-1].distortion:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _is_above(middle: Option[Choice], first: Option[Choice], last: Option[Choice]) -> bool:
    """Returns whether an option is on or above the line from ``first`` to ``last``."""
    to_middle = (middle.distortion - first.distortion) * (last.num_bytes - first.num_bytes)
    return to_middle >= (last.distortion - first.distortion) * (middle.num_bytes - first.num_bytes)


def total_bytes(options: Sequence[Option[Choice]]) -> int:
    """Returns the bytes of all tables."""
    return sum(option.num_bytes for option in options)
