"""The commands of ``distembed``, one file a group: options and calls, no decisions.

Each file has a typer application, ``app``, which :mod:`distembed.commands.cli` joins.
"""
