"""Training a model of a config, and using it afterwards.

- ``start.py`` finds what a run starts with, without a model: its folder, whether it is resumed, which plan is applied.
- ``run.py`` is a whole run: training and evaluation.
- ``build.py`` builds, plans and shards the model; ``trainer.py`` trains it, with ``pipeline.py`` for the steps.
- ``initial_run.py`` finds the run that a new one goes on from (``--init-from``), with the tables as they have grown;
  ``take_over.py`` reads its weights and optimizer states into them.
- ``due.py`` says after which steps the trainer evaluates and saves, ``best.py`` which evaluation is the best and when
  to stop, ``own_checkpoints.py`` where checkpoints lie; ``not_finite.py`` keeps the rows of a step that went wrong.
- ``resume.py`` reads the config, dataset and plan of an earlier run, and says what may differ when it is resumed.
- ``evaluation.py``, ``inference.py`` and ``materialise.py`` evaluate a model, predict with it and write its vectors.
- ``check.py`` holds a run, a checkpoint, a dataset or a graph against its checksums.
- ``interruption.py`` stops a run at a signal; ``start_lines.py``, ``metrics_window.py``, ``replaced_shares.py`` and
  ``progress.py`` are for the lines that it logs and shows.
"""
