"""Knowledge graphs over the ids of one table, in compressed sparse rows.

``csr.py`` holds the graph, ``rows.py`` its arithmetic, ``folder.py`` its files; ``prepare/`` makes one from files.
"""

from distembed.graph.csr import Graph

__all__ = ["Graph"]
