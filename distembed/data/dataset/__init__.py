"""A prepared dataset: its schema and its manifest."""
