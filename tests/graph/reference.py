"""Graphs as dictionaries, edge by edge, and a check of graphs against them."""

from collections.abc import Iterable

import numpy as np
import pytest

from distembed.graph import Graph

Rows = dict[int, dict[int, float]]


def reference_rows(edges: Iterable[tuple[int, int, float]], directed: bool) -> Rows:
    """Returns the sum of weights by node and neighbour, edge by edge."""
    rows: Rows = {}
    for source, target, weight in edges:
        for a, b in [(source, target)] if directed else [(source, target), (target, source)]:
            if a != b:
                row = rows.setdefault(a, {})
                row[b] = row.get(b, 0.0) + weight
    return rows


def probabilities(graph: Graph, node: int) -> dict[int, float]:
    """Returns how likely each neighbour is drawn, slot by slot as Walker's method says."""
    neighbors = graph.neighbors_of(node).tolist()
    result = dict.fromkeys(neighbors, 0.0)
    for slot, neighbor in enumerate(neighbors):
        edge = int(graph.starts[node]) + slot
        keep, alias = (1.0, 0) if graph.keep is None else (float(graph.keep[edge]), int(graph.alias[edge]))
        assert 0 <= keep <= 1 and 0 <= alias < len(neighbors)
        result[neighbor] += keep / len(neighbors)
        result[neighbors[alias]] += (1 - keep) / len(neighbors)
    return result


def check_graph(graph: Graph, num_nodes: int, rows: Rows) -> None:
    assert graph.num_nodes == num_nodes and graph.starts.shape == (num_nodes + 1,)
    assert graph.num_edges == sum(map(len, rows.values()))
    assert graph.degrees().tolist() == [len(rows.get(node, ())) for node in range(num_nodes)]
    for node in range(num_nodes):
        row = rows.get(node, {})
        assert graph.neighbors_of(node).tolist() == sorted(row)
        if graph.weighted:
            total = sum(row.values())
            wanted = {neighbor: weight / total for neighbor, weight in row.items()}
            assert probabilities(graph, node) == pytest.approx(wanted, abs=1e-9)


def random_edges(
    num_nodes: int, num_edges: int, seed: int, decades: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, num_nodes, (2, num_edges))
    return ends[0], ends[1], 10 ** rng.uniform(-decades / 2, decades / 2, num_edges)
