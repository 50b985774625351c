"""Tables of any columns: their schema, and how raw values become the values of a dataset, to prepare and to score."""
