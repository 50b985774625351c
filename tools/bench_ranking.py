"""Compares ranking a catalogue and drawing negative items with plain implementations, in CPU seconds and in turn.

The plain ranking computes all scores at once in float32, sets scores of excluded items to -inf, counts higher scores
and takes the best ten. The plain draw is rejection with numpy: draw items uniformly, look them up among the user's
items, and draw again the items that the user has::

    python tools/bench_ranking.py --repeats 5
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_commands import told
from bench_common import surroundings
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from distembed.base.machine import keep_freed_memory
from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig
from distembed.models.queries import Catalogue
from distembed.partitions import Naive
from distembed.tasks.catalogue import CatalogueRanking, NegativeDraws, UserItems, item_weights

Run = Callable[[], Any]
RANKINGS = ((8_192, 12_103, 64), (6_042, 3_708, 64), (256, 1_000_000, 64))
"""Queries, items and numbers of a vector: Amazon Beauty, MovieLens-1M, and a large catalogue."""
DRAWS = ((945, 1_684, 80_000, 2_048), (6_042, 3_708, 600_000, 2_048), (1_000_000, 1_000_000, 10_000_000, 65_536))
"""Users, items, pairs and draws of a batch: MovieLens-100k, MovieLens-1M, and a large dataset."""
_EXCLUDED = 20
"""Number of excluded items of each user."""


def rankings(num_queries: int, num_items: int, dim: int) -> tuple[Run, Run]:
    """Returns distembed's ranking and the peer's, of equal queries, items and excluded items."""
    owner = nn.Module()
    table = CompositionalEmbeddingConfig("item", num_items, dim, ["item"], Naive(num_items))
    owner.embeddings = CompositionalEmbeddingCollection([table])
    catalogue = Catalogue(owner, "embeddings", table, bias=True)
    queries = torch.randn(num_queries, dim)
    targets = torch.randint(2, num_items, (num_queries,))
    excluded = torch.randint(2, num_items, (num_queries, _EXCLUDED))
    rows = torch.arange(num_queries).repeat_interleave(_EXCLUDED)
    ranking = CatalogueRanking(catalogue, reserved=(0, 1))

    def ours() -> Any:
        relevant = JaggedTensor(targets, lengths=torch.ones_like(targets))
        lengths = torch.full((num_queries,), _EXCLUDED)
        return ranking.rank(queries, relevant, JaggedTensor(excluded.flatten(), lengths=lengths))

    @torch.no_grad()
    def peer() -> Tensor:
        scores = torch.addmm(catalogue.bias, queries, next(catalogue.share().chunks(num_items)).vectors.T)
        own = scores.gather(1, targets.unsqueeze(1))
        scores[:, :2] = -torch.inf
        scores[rows, excluded.flatten()] = -torch.inf
        scores.topk(10)
        return (scores > own).sum(1)

    return ours, peer


def draws(num_users: int, num_items: int, num_pairs: int, num_draws: int) -> tuple[Run, Run]:
    """Returns distembed's draw of a batch and the peer's."""
    generator = np.random.default_rng(0)
    users, items = generator.integers(0, num_users, num_pairs), generator.integers(2, num_items, num_pairs)
    taken = UserItems.from_pairs(users, items, num_users, num_items)
    negatives = NegativeDraws(item_weights(taken.users_of_items(), 0.0, (0, 1)), taken, seed=0)
    batch = torch.from_numpy(generator.integers(0, num_users, num_draws))
    keys, rows = taken.keys.numpy(), batch.numpy()

    def ours() -> Tensor:
        return negatives.draw(0, 0, batch, 1)

    def peer() -> Any:
        drawn = generator.integers(2, num_items, num_draws)
        left = np.arange(num_draws)
        while len(left):
            wanted = rows[left] * num_items + drawn[left]
            left = left[keys[np.searchsorted(keys, wanted).clip(max=len(keys) - 1)] == wanted]
            drawn[left] = generator.integers(2, num_items, len(left))
        return drawn

    return ours, peer


def cpu_seconds(run: Run) -> float:
    """Returns the CPU seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Prints CPU milliseconds of distembed and of the peer, and the median of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="calls of each, in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a run
    torch.manual_seed(0)
    console = Console(width=120)
    console.print(str(surroundings(torch.device("cpu"))), highlight=False)
    table = Table("what", "ours, CPU ms", "peer, CPU ms", "peer / ours", box=None)
    cases = [(f"rank {q:,} queries among {n:,}", rankings, (q, n, d)) for q, n, d in RANKINGS]
    cases += [(f"draw {b:,} of {n:,}, {p:,} pairs", draws, (u, n, p, b)) for u, n, p, b in DRAWS]
    for name, make, sizes in told(cases, "cases"):
        runs = make(*sizes)
        times = [[cpu_seconds(run) for run in runs] for _ in range(options.repeats + 1)][1:]  # the first one warms up
        ours, peers = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        table.add_row(name, f"{ours:,.2f}", f"{peers:,.2f}", f"{statistics.median(p / o for o, p in times):.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
