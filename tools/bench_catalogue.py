"""Compares the tiled softmax over a catalogue with all scores at once: seconds and memory of a step.

A step is the loss of some queries and its gradients in queries, items and biases. The peer is torch's
``cross_entropy(queries @ items.T + bias, targets)`` on a weight of equal size. The contenders step in turn, each in a
separate process. Memory is the peak of the process minus its memory before the first step, gradients included::

    python tools/bench_catalogue.py --items 1000000 --queries 256 --output bench_catalogue.json
    python tools/bench_catalogue.py --items 10000000 --queries 256 --contenders tiles
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from bench_commands import bench_parser, write_output
from bench_common import Step, surroundings, take_turns_in_processes
from rich.console import Console
from rich.table import Table
from torch import nn

from distembed.base.units import format_bytes
from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig
from distembed.models.queries import Catalogue
from distembed.partitions import Naive, QuotientRemainder
from distembed.tasks.catalogue.softmax import catalogue_cross_entropy


def tiles(num_items: int, dim: int, collisions: int = 1) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Returns a model whose catalogue scores its items tile by tile, and the function of its losses."""
    model = nn.Module()
    scheme = Naive(num_items) if collisions == 1 else QuotientRemainder(num_items, collisions=collisions)
    table = CompositionalEmbeddingConfig("item", num_items, dim, ["item"], scheme, dense_gradient=True)
    model.embeddings = CompositionalEmbeddingCollection([table])
    model.catalogue = Catalogue(model, "embeddings", table, bias=True)
    return model, partial(catalogue_cross_entropy, model.catalogue)


def all_at_once(num_items: int, dim: int) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Returns torch's linear layer, and the function of its losses over all outputs."""
    model = nn.Linear(dim, num_items)

    def losses(queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(queries), targets, reduction="none")

    return model, losses


CONTENDERS: dict[str, Callable[[int, int], tuple[nn.Module, Callable[..., torch.Tensor]]]] = {
    "tiles": tiles,
    "quotient_remainder": partial(tiles, collisions=4),
    "all_at_once": all_at_once,
}


def make_step(name: str, options: argparse.Namespace, device: torch.device) -> Step:
    """Returns a contender's step."""
    with device:
        model, losses = CONTENDERS[name](options.items, options.dim)
        model.to(device)
        queries = torch.randn(options.queries, options.dim).mul_(0.3).requires_grad_()
        targets = torch.randint(options.items, (options.queries,))

    def step() -> None:
        for parameter in (queries, *model.parameters()):
            parameter.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            inputs = queries * 1 if not options.bf16 else queries.bfloat16()
            losses(inputs, targets).mean().backward()

    return step


def main() -> None:
    """Compares and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=["tiles", "all_at_once"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="queries in bfloat16, under autocast")
    options = parser.parse_args()
    device = torch.device(options.device)
    makers = {name: partial(make_step, name, options, device) for name in options.contenders}
    found = take_turns_in_processes(makers, options.steps, device, options.threads)
    table = Table(title=f"{options.items:,} items of {options.dim} numbers, {options.queries:,} queries")
    for heading in ("", "seconds a step", "peak memory", "speed"):
        table.add_column(heading, justify="right" if heading else "left")
    slowest = found[options.contenders[-1]].median
    for name, own in found.items():
        table.add_row(name, f"{own.median:.3f}", format_bytes(own.bytes), f"{slowest / own.median:.2f}x")
    Console().print(table)
    measured = {name: dataclasses.asdict(own) for name, own in found.items()}
    settings = {name: str(value) for name, value in vars(options).items()}
    write_output(options, {**surroundings(device), "settings": settings, "measured": measured})


if __name__ == "__main__":
    main()
