"""A plugin for test runs: buckets of 20 slots and more."""

from distembed.embedding import managed_sizes

managed_sizes._SLOTS_PER_BUCKET = 20
