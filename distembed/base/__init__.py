"""Helpers of all rooms: errors, files, names in configs, units, memory and processor cores, ranks, plugins."""
