"""From files of edges, or of shared attributes, to a graph over a table's ids.

- ``preparation.py`` puts the steps together; ``options.py`` says what the graph depends on besides the input.
- ``value_ids.py`` turns the values that :mod:`distembed.data.prepare` reads from columns of files into ids.
- ``co_occurrence.py`` makes edges of ids that occur together in a dataset's training split; ``strongest.py`` keeps the
  strongest.
- ``edge_reader.py`` makes edges of rows, ``shared_attributes.py`` of ids that share a value, and ``sorted_runs.py``
  sorts them in bounded memory.
"""

from distembed.graph.prepare.options import GraphOptions, NodeIds
from distembed.graph.prepare.preparation import LEAST_MEMORY_BYTES, describe_graph, prepare_graph

__all__ = ["LEAST_MEMORY_BYTES", "GraphOptions", "NodeIds", "describe_graph", "prepare_graph"]
