"""Whether a config fits a cluster, how fast it is there, what would make it fit, and the compression that does."""
