"""Training a model of a config, and using it afterwards.

- ``start.py`` finds what a run starts with, without a model: its folder, whether it is resumed, which plan is applied.
- ``run.py`` is a whole run: training and evaluation.
- ``build.py`` builds, plans and shards the model; ``trainer.py`` trains it, with ``pipeline.py`` for the steps.
- ``resume.py`` reads the config, dataset and plan of an earlier run, and says what may differ when it is resumed.
- ``evaluation.py``, ``inference.py`` and ``materialise.py`` evaluate a model, predict with it and write its vectors.
- ``check.py`` holds a run, a checkpoint, a dataset or a graph against its checksums.
- ``interruption.py`` stops a run at a signal; ``metrics_window.py``, ``replaced_shares.py`` and ``progress.py`` are for
  the lines of metrics that it logs and shows.
"""
