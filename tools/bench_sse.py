"""Measures the time of replacing ids within a training step of DLRM, and its share of the step.

The paper's DLRM with 26 quotient-remainder tables of 400,000 ids steps through batches of skewed ids; every replacement
is timed inside the step. In the graph each id has 10 neighbours on average, and rho makes about half of the
replacements neighbours::

    python tools/bench_sse.py --output bench_sse.json
"""

import statistics
import time
from functools import partial
from typing import Any

import torch
from bench_commands import bench_parser, kept_rows, write_output
from bench_common import NAMES, NUM_IDS, surroundings, trainer_step, wait_for
from bench_train import build_ours, draw_batches
from rich.console import Console
from rich.table import Table
from torch import nn

from distembed.base.ranks import Ranks, process_group
from distembed.graph import Graph
from distembed.sse import SSE, FeaturePerturbation

_RESERVED = (0, 1)


class Stopwatch:
    """Records the seconds of every call of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.seconds: list[float] = []
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._stop)

    def _start(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def rules(p0: float, graph: Graph) -> dict[str, SSE]:
    """Returns the measured rules by name."""
    mean_degree = graph.num_edges / graph.num_nodes
    return {
        "SSE-SE": SSE(p0, reserved=_RESERVED),
        "SSE-Graph": SSE(p0, rho=1 + graph.num_nodes / mean_degree, graph=graph, reserved=_RESERVED),
    }


def random_graph(num_edges: int, num_ids: int = NUM_IDS) -> Graph:
    """Returns a graph of random edges between ids that are not reserved."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(len(_RESERVED), num_ids, (2, num_edges), generator=generator)
    return Graph.from_edges(num_ids, ends[0], ends[1])


def measure(rule: SSE, batch_size: int, precision: str, steps: int, ranks: Ranks) -> tuple[float, float]:
    """Trains a new model; returns the mean seconds of the replacement within a step and of the step."""
    _, state = build_ours(batch_size, ranks, precision, sse=dict.fromkeys(NAMES, rule))
    (perturbation,) = [module for module in state.model.modules() if isinstance(module, FeaturePerturbation)]
    watch = Stopwatch(perturbation)
    take_step = trainer_step(state, draw_batches(batch_size, NUM_IDS))
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        take_step()
        wait_for(ranks.device)
        seconds.append(time.perf_counter() - started)
    warm = steps // 5
    return statistics.mean(watch.seconds[warm:steps]), statistics.mean(seconds[warm:])


def main() -> None:
    """Measures every setting and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--p0", type=float, nargs="+", default=[0.0, 0.01, 0.1])
    parser.add_argument("--seconds", type=float, default=6.0, help="approximate seconds of each measurement")
    options = parser.parse_args()
    graph = random_graph(5 * NUM_IDS)
    table = Table("batch", "precision", "rule", "p0", "replacement, ms", "step, ms", "share of the step")
    with process_group("auto") as ranks:

        def row(batch_size: int, precision: str, p0: float, name: str) -> dict[str, Any]:
            steps = max(25, round(options.seconds * 40_000 / batch_size))
            replacement, step = measure(rules(p0, graph)[name], batch_size, precision, steps, ranks)
            result = {"rule": name, "p0": p0, "batch_size": batch_size, "precision": precision}
            return {**result, "replacement_ms": replacement * 1e3, "step_ms": step * 1e3, "share": replacement / step}

        measures = {
            f"{batch_size}, {precision}, {name} {p0}": partial(row, batch_size, precision, p0, name)
            for batch_size in options.batch_sizes
            for precision in options.precisions
            for p0 in options.p0
            for name in rules(p0, graph)
        }
        results = [*kept_rows(options, measures).values()]
        for result in results:
            times = f"{result['replacement_ms']:.3f}", f"{result['step_ms']:.2f}", f"{result['share']:.2%}"
            table.add_row(str(result["batch_size"]), result["precision"], result["rule"], str(result["p0"]), *times)
        Console(width=120).print(table)
        write_output(options, {**surroundings(ranks.device), "results": results})


if __name__ == "__main__":
    main()
