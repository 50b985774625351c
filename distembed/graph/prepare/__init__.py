"""From files of edges, files of attributes or a dataset's training split to a graph over a table's ids."""

from distembed.graph.prepare.options import GraphOptions, NodeIds
from distembed.graph.prepare.preparation import LEAST_MEMORY_BYTES, describe_graph, prepare_graph

__all__ = ["LEAST_MEMORY_BYTES", "GraphOptions", "NodeIds", "describe_graph", "prepare_graph"]
