"""Whether a config fits a cluster, how fast it is there, what would make it fit, and the compression that does.

:mod:`~distembed.capacity.run_plan` is the command ``distembed plan`` without its options:
:mod:`~distembed.capacity.assessment` plans a model and says what each rank holds; :mod:`~distembed.capacity.remedies`
looks for changes that make it fit; :mod:`~distembed.capacity.compression` finds the least compression that does.
The renderers ``as_json``, ``terminal``, ``page`` and ``chart`` go over the items of
:mod:`~distembed.capacity.by_rank` and the columns and sentences of :mod:`~distembed.capacity.texts`.
"""
