"""Compares the softmax over a catalogue with all scores at once: seconds of a step, and the memory that it takes.

A step is the loss of some queries and its gradients in queries, items and biases. The peer is ``cross_entropy(queries @
items.T + bias, targets)`` of torch on a weight of the same size. Each contender steps in a process of its own, in turn
with the other; memory is the most that the process had beyond what it had before its steps, gradients included::

    python tools/bench_catalogue.py --items 1000000 --queries 256 --output bench_catalogue.json
    python tools/bench_catalogue.py --items 10000000 --queries 256 --contenders tiles
"""

import argparse
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bench_common import surroundings
from rich.console import Console
from rich.table import Table
from torch import nn

from distembed.catalogue import Catalogue
from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig
from distembed.files import write_json
from distembed.partitions import Naive, QuotientRemainder
from distembed.units import format_bytes

Step = Callable[[], None]


def tiles(num_items: int, dim: int, collisions: int = 1) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Returns a model whose catalogue goes over its items tile by tile, and its loss of each query."""
    model = nn.Module()
    scheme = Naive(num_items) if collisions == 1 else QuotientRemainder(num_items, collisions=collisions)
    table = CompositionalEmbeddingConfig("item", num_items, dim, ["item"], scheme, dense_gradient=True)
    model.embeddings = CompositionalEmbeddingCollection([table])
    model.catalogue = Catalogue(model, "embeddings", table, bias=True)
    return model, model.catalogue.cross_entropy


def quotient_remainder(num_items: int, dim: int) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Returns the same of a quotient-remainder table at 4 collisions."""
    return tiles(num_items, dim, collisions=4)


def all_at_once(num_items: int, dim: int) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Returns torch's own linear layer, and a loss of all of its outputs."""
    model = nn.Linear(dim, num_items)

    def losses(queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(queries), targets, reduction="none")

    return model, losses


CONTENDERS = {"tiles": tiles, "quotient_remainder": quotient_remainder, "all_at_once": all_at_once}


def contend(name: str, options: argparse.Namespace, device: torch.device, results: Connection) -> None:
    """Steps whenever it is asked to; sends the seconds of each step, and at the end the most bytes."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with device:
        model, losses = CONTENDERS[name](options.items, options.dim)
        model.to(device)
        queries = torch.randn(options.queries, options.dim).mul_(0.3).requires_grad_()
        targets = torch.randint(options.items, (options.queries,))
    _start_counting(device)
    while results.recv():
        started = time.perf_counter()
        for parameter in (queries, *model.parameters()):
            parameter.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            inputs = queries * 1 if not options.bf16 else queries.bfloat16()
            losses(inputs, targets).mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        results.send(time.perf_counter() - started)
    results.send(_counted_bytes(device))


def _start_counting(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    global _before
    _before = _memory("VmRSS")


def _counted_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _memory("VmHWM") - _before


def _memory(field: str) -> int:
    """Returns a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """Returns the seconds of every contender's steps and the bytes that they took."""
    context, running = get_context("spawn"), {}
    for name in options.contenders:
        here, there = context.Pipe()
        process = context.Process(target=contend, args=(name, options, device, there))
        process.start()
        running[name] = process, here
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for number in range(options.steps + 2):
        for name, (_, pipe) in running.items():
            pipe.send(True)
            taken = pipe.recv()
            if number >= 2:
                seconds[name].append(taken)
    found = {}
    for name, (process, pipe) in running.items():
        pipe.send(False)
        found[name] = {"seconds": seconds[name], "median": statistics.median(seconds[name]), "bytes": pipe.recv()}
        process.join()
    return found


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=["tiles", "all_at_once"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="queries in bfloat16, under autocast")
    parser.add_argument("--output", type=Path, help="JSON file of all measurements")
    return parser.parse_args()


def main() -> None:
    """Compares, prints a table, and writes all measurements to a file if one is given."""
    options = parse_arguments()
    device = torch.device(options.device)
    found = compare(options, device)
    table = Table(title=f"{options.items:,} items of {options.dim} numbers, {options.queries:,} queries")
    for heading in ("", "seconds a step", "peak memory", "speed"):
        table.add_column(heading, justify="right" if heading else "left")
    slowest = found[options.contenders[-1]]["median"]
    for name, own in found.items():
        table.add_row(name, f"{own['median']:.3f}", format_bytes(own["bytes"]), f"{slowest / own['median']:.2f}x")
    Console().print(table)
    if options.output:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.output, {**surroundings(device), "settings": settings, "measured": found})


if __name__ == "__main__":
    main()
