"""Numbers of a device with which estimates of steps differ least from what these took.

An estimate adds up the seconds of rows, of bytes, of operations and of collectives, but where it takes the longer of
two: of sending and receiving, and of two ranks. Of probes that load all ranks alike it is taken for linear, so that
they are a matrix, one column a number. It is found by estimating for devices that take one second of one kind and none
of all others. What is minimised is the sum of squares of relative errors, over numbers that are not negative.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from distembed.planning.devices import Device

Floats = npt.NDArray[np.float64]

BANDWIDTHS = ("lookup_bandwidth", "memory_bandwidth", "local_bandwidth", "node_bandwidth", "reduce_bandwidth")
SECONDS = ("row_seconds", "launch_seconds", "collective_seconds")
_GB = 1e9


def count_numbers(estimate: Callable[[Device], float], device: Device) -> Mapping[str, float]:
    """Returns how many of each of a device's numbers an estimate counts: seconds, or gigabytes over a bandwidth.

    The estimate returns the seconds of a step for a device, which may be any of the kind.
    """
    nothing: dict[str, Any] = dict.fromkeys(SECONDS, 0.0) | dict.fromkeys(BANDWIDTHS, math.inf)
    free = replace(device, **nothing, host_bandwidth=math.inf, ranks_at_once=None)  # on it nothing takes any time
    units: dict[str, Any] = dict.fromkeys(SECONDS, 1.0) | dict.fromkeys(BANDWIDTHS, _GB)
    return {name: estimate(replace(free, **{name: unit})) for name, unit in units.items()}


def fit(counts: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Returns the numbers of a device, those that no step counts left out.

    The counts are those of each step, by :func:`count_numbers`; the seconds are those that each step took.
    """
    names = [name for name in counts[0] if any(own[name] > 0 for own in counts)]
    matrix = np.array([[own[name] for name in names] for own in counts]) / np.array(seconds)[:, None]
    found = dict(zip(names, _least_squares(matrix).tolist(), strict=True))
    return {
        name: _GB / value if name in BANDWIDTHS else value
        for name, value in found.items()
        if value > 0 or name in SECONDS
    }


def _least_squares(matrix: Floats) -> Floats:
    """Returns the numbers of 0 and more whose products with the matrix's rows differ least from ones.

    All sets of numbers that are above 0 are tried: they are few.
    """
    num_rows, num_columns = matrix.shape
    scales, ones = matrix.max(axis=0), np.ones(num_rows)
    best, least = np.zeros(num_columns), float(num_rows)
    for chosen in chain.from_iterable(combinations(range(num_columns), count + 1) for count in range(num_columns)):
        own = list(chosen)
        scaled = matrix[:, own] / scales[own]
        values, *_ = np.linalg.lstsq(scaled, ones, rcond=None)
        error = float(np.square(scaled @ values - ones).sum())
        if (values > 0).all() and error < least:
            best, least = np.zeros(num_columns), error
            best[own] = values / scales[own]
    return best
