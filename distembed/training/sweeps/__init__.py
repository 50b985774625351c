"""Sweeps: a run for each combination of values of some settings, trained one after the other or by several workers.

========== =========================================================================================
axes.py    the settings that vary, and the runs that are their product, with their names
planned.py the runs of a sweep with their configs, found and checked without torch
workers.py processes that train run after run, so that what takes seconds to import is imported once
worker.py  what such a process does of a run
sweep.py   the sweep as a whole: its folder, what becomes of its runs, the comparison at its end
========== =========================================================================================
"""
