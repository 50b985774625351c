"""Assignments of tables to ranks by numbers alone: the fastest that fits, and a bound of what any could reach."""
