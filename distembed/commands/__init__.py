"""The commands of ``distembed``, a file a group: options and calls, no decisions."""
