"""From files of edges, or of shared attributes, to a graph over a table's ids."""
