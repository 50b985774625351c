"""Tables looked up in one pass, against one FBGEMM lookup for each partition and TorchRec's hashed tables.

On a GPU the kernels are Triton's; ``kernel: auto`` does not choose them until a GPU has measured them. A dry run uses
the CPU's kernels. Measured steps exclude the time in which Triton compiles.
"""

from bench_common import COLLISIONS
from bench_embedding import Contender, ours, torchrec

from distembed.composition import Product
from distembed.partitions import MixedRadix, QuotientRemainder, Remainder
from gpu.embedding import BASELINE, measure_in_turns
from gpu.results import Results
from gpu.scale import Scale


def contenders(num_ids: int, dim: int) -> dict[str, Contender]:
    """Returns all contenders by name, the baseline first."""
    halves, thirds = QuotientRemainder(num_ids, collisions=COLLISIONS), MixedRadix(num_ids, num_partitions=3)
    return {
        BASELINE: torchrec(Remainder(num_ids, collisions=COLLISIONS), dim),
        "product of two, FBGEMM": ours(halves, Product(), dim, "fbgemm"),
        "product of two, one pass": ours(halves, Product(), dim, "fused"),
        "product of three, FBGEMM": ours(thirds, Product(), dim, "fbgemm"),
        "product of three, one pass": ours(thirds, Product(), dim, "fused"),
    }


def measure(results: Results, scale: Scale) -> None:
    """Measures each number of columns and rows, all contenders in turns."""
    measure_in_turns(results, scale, contenders)
