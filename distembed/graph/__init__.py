"""Knowledge graphs over the ids of one table, in compressed sparse rows.

- ``csr.py`` is the graph, ``edges.py`` what it is built of, ``alias_method.py`` how weighted neighbours are drawn, and
  ``folder.py`` how a graph lies in a folder.
- ``prepare/`` makes one of files, larger than memory.
"""

from distembed.graph.csr import Graph

__all__ = ["Graph"]
