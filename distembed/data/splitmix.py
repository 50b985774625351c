"""SplitMix64 in numpy (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014)."""

import numpy as np
from numpy.typing import NDArray

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the generator's output function of each value: one to one on 64 bits, each bit depends on all.

    Applied to ``s, s + GOLDEN_GAMMA, s + 2 GOLDEN_GAMMA, ...`` it gives the numbers of the generator with state s.
    """
    values = values + np.uint64(GOLDEN_GAMMA)
    shifted = np.empty_like(values)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        values ^= np.right_shift(values, np.uint64(shift), out=shifted)
        if multiplier is not None:
            values *= np.uint64(multiplier)
    return values
