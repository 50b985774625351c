"""What SSE must do, computed without its code: the paper's probabilities, and how well counts fit them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FALSE_ALARM = 1e-4
"""Share of the tests that fail by chance for a new seed, though the code is right; the seeds are fixed."""

Matrix = NDArray[np.float64]


def p_value(counts: Any, law: Any) -> float:
    """Returns the chi-square test of counts against probabilities; of matrices row by row, each with its own total."""
    counts, law = np.atleast_2d(np.asarray(counts, float)), np.atleast_2d(np.asarray(law, float))
    statistic, freedom = 0.0, 0
    for seen, probabilities in zip(counts, law, strict=True):
        np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-9)
        if seen[probabilities == 0].any():
            return 0.0  # what cannot be
        own_statistic, own_freedom = _chi_square(seen, probabilities * seen.sum())
        statistic, freedom = statistic + own_statistic, freedom + own_freedom
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0


def _chi_square(seen: Matrix, expected: Matrix) -> tuple[float, int]:
    """Returns the statistic and its degrees of freedom; cells of less than 5 are merged, smallest first."""
    order = np.argsort(expected)
    seen, expected = seen[order], expected[order]
    first = int(np.searchsorted(expected, 5.0))
    while 0 < first < len(expected) and expected[:first].sum() < 5:
        first += 1
    if first:
        seen = np.append(seen[first:], seen[:first].sum())
        expected = np.append(expected[first:], expected[:first].sum())
        seen, expected = seen[expected > 0], expected[expected > 0]
    return float(((seen - expected) ** 2 / expected).sum()), max(0, len(expected) - 1)


def share_p_value(seen: int, trials: int, probability: float) -> float:
    return float(stats.binomtest(int(seen), int(trials), probability).pvalue)


def independence_p_value(first: Any, second: Any) -> float:
    """Returns the test that one of two lists of small numbers says nothing about the other."""
    first, second = (np.unique(np.asarray(values), return_inverse=True)[1] for values in (first, second))
    table = np.bincount(first * (second.max() + 1) + second, minlength=(first.max() + 1) * (second.max() + 1))
    return float(stats.chi2_contingency(table.reshape(first.max() + 1, -1)).pvalue)


def transitions(old: Tensor, new: Tensor, num_ids: int) -> NDArray[np.int64]:
    """Returns how often each id became each other one, ``[old, new]``."""
    pairs = old.flatten() * num_ids + new.flatten()
    return torch.bincount(pairs, minlength=num_ids**2).view(num_ids, num_ids).numpy()


def replacement_law(
    num_ids: int,
    p0: float,
    *,
    reserved: tuple[int, ...] = (),
    keep_reserved: bool = False,
    rho: float = 1.0,
    weights: Matrix | None = None,
    walk: tuple[float, int] | None = None,
) -> Matrix:
    """Returns p(j, k) of equation 3, ``[num_ids, num_ids]``.

    Args:
        num_ids: Number of ids, reserved ones included.
        p0: Probability that an id is replaced.
        reserved: Ids that are not drawn.
        keep_reserved: Whether reserved ids are not replaced either.
        rho: Odds of a neighbour against another id.
        weights: Weight of the edge from each node to each other one; 0 where there is none.
        walk: Probability that a walk ends before a step, and the most steps.
    """
    adjacency = np.zeros((num_ids, num_ids)) if weights is None else weights
    law = np.zeros((num_ids, num_ids))
    for j in range(num_ids):
        if keep_reserved and j in reserved:
            law[j, j] = 1
            continue
        others = np.ones(num_ids)
        others[[j, *reserved]] = 0
        equation_3 = np.where(adjacency[j] > 0, rho, 1.0) * others
        if walk is None and len(set(adjacency[j])) <= 2:
            odds = equation_3
        else:  # what neighbours have more than others have is shared out in another way
            excess = equation_3.sum() - others.sum()
            shares = walk_law(adjacency, j, *walk) if walk else adjacency[j] / adjacency[j].sum()
            odds = others + excess * shares if excess else others
        law[j] = p0 * odds / odds.sum()
        law[j, j] = 1 - p0
    return law


def walk_law(weights: Matrix, start: int, restart: float, max_steps: int) -> Matrix:
    """Returns where a walk ends, by powers of the transition matrix of the pairs (node before, node)."""
    num_nodes = len(weights)
    totals = weights.sum(1, keepdims=True)
    step = np.divide(weights, totals, out=np.zeros_like(weights), where=totals > 0)
    size = num_nodes**2
    onwards = np.zeros((num_nodes, num_nodes, num_nodes, num_nodes))  # from (before, node) to (node, next)
    for node in range(num_nodes):
        onwards[:, node, node, :] = (1 - restart) * step[node]
    onwards = onwards.reshape(size, size)
    # pairs where a walk goes on, then pairs where it has ended, which it never leaves
    chain = np.block([[onwards, np.diag(1 - onwards.sum(1))], [np.zeros((size, size)), np.eye(size)]])
    first = np.zeros((2, num_nodes, num_nodes))
    first[0, start] = step[start]
    last = (first.reshape(-1) @ np.linalg.matrix_power(chain, max_steps - 1)).reshape(2, num_nodes, num_nodes).sum(0)
    ends = last.sum(0)
    ends[start] = 0
    return ends + last[:, start]


def jagged(ids: dict[str, Any], weights: bool = False) -> KeyedJaggedTensor:
    """Returns a batch of one row, whose bags are these ids."""
    values = torch.cat([torch.as_tensor(v, dtype=torch.int64).flatten() for v in ids.values()])
    lengths = torch.tensor([torch.as_tensor(v).numel() for v in ids.values()])
    return KeyedJaggedTensor(list(ids), values, torch.rand(len(values)) if weights else None, lengths)
