"""Laws of numbers as text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distembed.base.units import format_duration, format_ranges


@given(st.sets(st.integers(0, 40)), st.integers(1, 20))
def test_ranges_are_the_numbers_and_what_is_left_out_is_counted(drawn: set[int], most: int) -> None:
    numbers = sorted(drawn)
    shown, _, more = format_ranges(numbers, most).partition(" and ")
    ranges = [(int(first), int(last or first)) for first, last in re.findall(r"(\d+)(?:-(\d+))?", shown)]
    covered = [number for first, last in ranges for number in range(first, last + 1)]
    num_others = int(more.split()[0]) if more else 0
    assert covered == numbers[: len(covered)] and len(covered) + num_others == len(numbers)
    assert len(ranges) <= most and (not num_others or len(ranges) == most)
    assert all(next_first > last + 1 for (_, last), (next_first, _) in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.432, "0.43 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (119, "119 s"),
        (121, "2 min"),
        (7199, "120 min"),
        (9000, "2.5 h"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
