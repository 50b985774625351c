"""Optimizers of tables and networks: their settings, their states, and their schedules."""
