"""Assigns tables to ranks by numbers alone: the fastest assignment that fits, and a lower bound of its time."""
