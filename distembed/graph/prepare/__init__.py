"""From files of edges, or of shared attributes, to a graph over a table's ids.

- ``preparation.py`` puts the steps together; ``options.py`` says what the graph depends on besides the input.
- ``value_ids.py`` turns the values that :mod:`distembed.data.prepare` reads from columns of files into ids.
- ``edge_reader.py`` reads rows of edges or of attributes, ``co_occurrence.py`` a dataset's training split.
- ``counted_edges.py`` sorts the edges, and joins ids that share a value, in bounded memory.
"""

from distembed.graph.prepare.options import GraphOptions, NodeIds
from distembed.graph.prepare.preparation import LEAST_MEMORY_BYTES, describe_graph, prepare_graph

__all__ = ["LEAST_MEMORY_BYTES", "GraphOptions", "NodeIds", "describe_graph", "prepare_graph"]
