"""What a prepared dataset is: its schema, its manifest, and where a config finds it."""
