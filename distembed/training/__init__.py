"""Trains the model of a config, and evaluates and uses it afterwards.

``run.py`` is a whole run and the place to start reading: ``start.py`` finds the run's folder and plan, ``build.py``
builds and shards the model, and ``trainer.py`` trains it.
"""
