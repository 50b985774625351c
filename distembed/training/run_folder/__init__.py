"""The folder of a run: the process that owns it, the files that it writes, and reading them back."""
