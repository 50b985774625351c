"""Counts what a step launches and moves, from the rehearsal: ``python -m tests.cuda.launches``.

Twenty-six tables on one rank, looked up, composed, pooled and gone back through; what stands for FBGEMM's tables counts
once forward and once backward. Of a step in one pass Triton's kernels are counted, not the bytes that they move."""

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Sequence

from tests.cuda import rehearsal
from tests.cuda.one_pass import one_pass
from tests.cuda.rehearsal import Cell, rehearsed

NUM_TABLES, ROWS = 26, 8192
COMPOSITIONS = ("product", "sum", "concat", "path_linear", "path_mlp")
ONE_PASS = ("product", "sum", "concat")
NUM_REHEARSED_STEPS = 2
KINDS = {"one id": "single", "4 ids": "ragged"}


def count(composition: str, bags: str) -> tuple[int, int, int]:
    """Returns the launches of a step, those of them after the dist of ids, and the bytes that the latter move."""
    cell = Cell("quotient_remainder", composition, "table_wise")
    with rehearsed(cell, world_size=1) as made:
        made.rehearse(bags)
        launches, moved = made.watch.launches.total(), made.watch.moved_bytes
        return launches, launches - made.dist_launches, moved - made.dist_bytes


def count_in_one_pass(composition: str, bags: str) -> tuple[int, int]:
    """Returns the launches of a step in one pass by Triton's kernels, and those of them after the dist of ids."""
    cell = Cell("quotient_remainder", composition, "table_wise", settings=(("kernel", "fused"),))
    launched: Counter[str] = Counter()
    with one_pass(launched), rehearsed(cell, world_size=1) as made:
        made.rehearse(bags)
        launches = made.watch.launches.total() + launched.total() // NUM_REHEARSED_STEPS
        return launches, launches - made.dist_launches


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table in Markdown."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    names = tuple(f"f{i}" for i in range(NUM_TABLES))
    rehearsal.FEATURES, rehearsal.ROWS = names, ROWS  # type: ignore[assignment]
    rehearsal.NUM_EMBEDDINGS = dict.fromkeys(names, 100_000)
    rehearsal.RAGGED = dict.fromkeys(names, 4)
    print("| composition | bags | launches a step | of them lookups | MiB these move |\n|---|---|---|---|---|")
    for composition in COMPOSITIONS:
        for kind, bags in KINDS.items():
            launches, lookups, moved = count(composition, bags)
            print(f"| {composition} | {kind} | {launches} | {lookups} | {moved / 2**20:,.0f} |")
    for composition in ONE_PASS:
        for kind, bags in KINDS.items():
            launches, lookups = count_in_one_pass(composition, bags)
            print(f"| {composition}, one pass | {kind} | {launches} | {lookups} | - |")


if __name__ == "__main__":
    main()
