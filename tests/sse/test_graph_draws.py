"""How often neighbours of a graph are drawn: frequencies of very many draws against equation 3."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from distembed.graph import Graph
from distembed.sse import SSE, Walk
from distembed.sse.replacement import NeighborDraw
from tests.sse.draws import MANY, evenly, replaced
from tests.sse.reference import FALSE_ALARM, independence_p_value, p_value, replacement_law, transitions

NUM_NODES = 16


def weighted_edges(weighted: bool, directed: bool, reserved: tuple[int, ...]) -> NDArray[np.float64]:
    """Returns the weights of random edges; node 2 has none, node 3 one to all, and node 5 only one."""
    rng = np.random.default_rng(7)
    weights = (rng.random((NUM_NODES, NUM_NODES)) < 0.2) * (10.0 ** rng.uniform(-2, 2, (NUM_NODES, NUM_NODES)))
    weights[3] = rng.uniform(1, 3, NUM_NODES)
    if not directed:
        weights = np.triu(weights) + np.triu(weights).T
        weights[:, 3] = weights[3]
    weights[2] = weights[5] = 0
    if not directed:
        weights[:, 2] = weights[:, 5] = 0
        weights[5, 4] = weights[4, 5] = 1
    else:
        weights[5, 4] = 1
    weights[:, list(reserved)] = 0
    if not directed:
        weights[list(reserved)] = 0
    np.fill_diagonal(weights, 0)
    return weights if weighted else (weights > 0) * 1.0


def graph_of(weights: NDArray[np.float64], directed: bool) -> Graph:
    sources, targets = np.nonzero(weights if directed else np.triu(weights))
    return Graph.from_edges(len(weights), sources, targets, weights[sources, targets], directed)


GRAPH_RULES: list[Any] = [
    *({"rho": rho} for rho in (2.0, 20.0, 1e3)),
    {"rho": 20.0, "directed": True},
    {"rho": 20.0, "weighted": True},
    pytest.param({"rho": 1e3, "weighted": True, "directed": True}, marks=pytest.mark.slow),
    {"rho": 20.0, "walk": (0.5, 8)},
    {"rho": 1e3, "walk": (0.0, 2)},
    {"rho": 1e3, "walk": (0.0, 3)},
    {"rho": 1e3, "walk": (0.3, 4), "directed": True},
    pytest.param({"rho": 1e3, "walk": (0.0, 20), "directed": True, "weighted": True}, marks=pytest.mark.slow),
    pytest.param({"rho": 50.0, "walk": (0.2, 5), "weighted": True}, marks=pytest.mark.slow),
    {"rho": 20.0, "reserved": (0, 7)},
    {"rho": 20.0, "reserved": (0, 7), "keep_reserved": True},
    {"rho": 20.0, "reserved": (0, 7, 15), "directed": True, "weighted": True},
    {"rho": 20.0, "reserved": (7,), "directed": True, "walk": (0.4, 3)},
    pytest.param({"rho": 1.0, "weighted": True, "walk": (0.5, 3)}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rule", GRAPH_RULES, ids=str)
def test_draws_follow_equation_3(rule: dict[str, Any]) -> None:
    reserved, keep_reserved = rule.get("reserved", ()), rule.get("keep_reserved", False)
    directed, walk = rule.get("directed", False), rule.get("walk")
    weights = weighted_edges(rule.get("weighted", False), directed, reserved)
    graph = graph_of(weights, directed)
    sse = SSE(0.9, rule["rho"], graph, Walk(*walk) if walk else None, reserved=reserved, keep_reserved=keep_reserved)
    old = evenly(NUM_NODES, 120_000 if walk is None else 200_000 // walk[1])
    counts = transitions(old, replaced(old, NUM_NODES, sse, seed=6), NUM_NODES)
    law = replacement_law(
        NUM_NODES, 0.9, reserved=reserved, keep_reserved=keep_reserved, rho=rule["rho"], weights=weights, walk=walk
    )
    assert p_value(counts, law) > FALSE_ALARM


@pytest.mark.parametrize("reserved", [(), (0, 7)])
@pytest.mark.parametrize("walk", [None, Walk()])
def test_a_graph_with_rho_1_draws_what_sse_se_draws(walk: Walk | None, reserved: tuple[int, ...]) -> None:
    graph = graph_of(weighted_edges(True, False, reserved), False)
    old = evenly(NUM_NODES, 10_000)
    with_graph = replaced(old, NUM_NODES, SSE(0.7, 1.0, graph, walk, reserved=reserved))
    assert torch.equal(with_graph, replaced(old, NUM_NODES, SSE(0.7, reserved=reserved)))


@pytest.mark.parametrize("walk", [Walk(restart=1.0, max_steps=7), Walk(restart=0.2, max_steps=1)])
def test_a_walk_of_one_step_is_a_step(walk: Walk) -> None:
    graph = graph_of(weighted_edges(True, True, ()), True)
    old = evenly(NUM_NODES, 10_000)
    assert torch.equal(
        replaced(old, NUM_NODES, SSE(0.7, 30.0, graph, walk)), replaced(old, NUM_NODES, SSE(0.7, 30.0, graph))
    )


@pytest.mark.parametrize("rho", [1e20, 1e39, 1e300, 1.7e308])
def test_at_any_large_rho_neighbours_alone_are_drawn(rho: float) -> None:
    ring = np.arange(50)
    old = evenly(50, 10_000)
    apart = (replaced(old, 50, SSE(1.0, rho, Graph.from_edges(50, ring, (ring + 1) % 50))) - old) % 50
    assert set(apart.tolist()) == {1, 49}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_type_of_a_models_weights_does_not_change_the_draws(dtype: torch.dtype) -> None:
    graph = graph_of(weighted_edges(True, False, ()), False)
    old, sse = evenly(NUM_NODES, 100_000), SSE(0.9, 33.3, graph, Walk())
    expected = replaced(old, NUM_NODES, sse)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(replaced(old, NUM_NODES, sse), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_chance_of_a_neighbour_is_exact_in_tables_of_any_size() -> None:
    # (rho - 1) d / ((rho - 1) d + n), approached from both sides to one part in 10^12
    rho, num_others = 10**9 + 32, 10**9 + 7
    draw = NeighborDraw(Graph.from_edges(2, [0], [1]), None, torch.device("cpu"))
    exact = Fraction(rho - 1, rho - 1 + num_others)
    words = np.array([int(exact * 2**63 * (1 + sign * Fraction(1, 10**12))) for sign in (-1, 1)])
    chosen, _ = draw(np.zeros(2, int), np.full(2, num_others), np.full(2, rho - 1.0), [words, words])
    assert chosen.tolist() == [True, False]


def test_what_is_drawn_has_nothing_to_do_with_where() -> None:
    # the gap before an id and what it becomes come of the same generator; of a large table also the upper bits count
    new = replaced(torch.zeros(MANY // 2, dtype=torch.long), 2**62, SSE(0.4), seed=9).numpy()
    places = np.flatnonzero(new)
    assert independence_p_value(np.minimum(np.diff(places), 6), new[places][1:] >> 58) > FALSE_ALARM
    # and so do whether a neighbour is drawn, and which one
    node, num_ids = np.arange(1, 9), 100
    sse = SSE(0.4, 20.0, Graph.from_edges(num_ids, np.zeros(8, int), node, directed=True), Walk(0.5, 3))
    new = replaced(torch.zeros(MANY // 2, dtype=torch.long), num_ids, sse, seed=9).numpy()
    places = np.flatnonzero(new)
    gaps, values = np.minimum(np.diff(places), 6), new[places][1:]
    kinds = np.where(values <= 8, values, 9 + values % 8)
    assert independence_p_value(gaps, kinds) > FALSE_ALARM
    assert independence_p_value(kinds[:-1], kinds[1:]) > FALSE_ALARM
    assert independence_p_value(places[1:] % 7, kinds) > FALSE_ALARM
    assert stats.spearmanr(kinds, np.arange(len(kinds))).pvalue > FALSE_ALARM
