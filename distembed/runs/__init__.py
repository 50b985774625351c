"""A run's folder: who owns it, what is recorded in it, and the report that compares runs by what they recorded."""
