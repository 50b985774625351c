"""Sweeps: a run for each combination of values of some settings, trained in turn or by several workers.

``sweep.py`` is the place to start reading: the sweep's folder and its runs, checked before the first one starts.
``axes.py`` parses the values and names the runs; ``train.py`` trains them in processes, as trials of an Optuna study.
"""
