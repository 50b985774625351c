"""A prepared dataset: its schema, its manifest, its row groups, and where a config finds it."""
