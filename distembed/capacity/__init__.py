"""Whether a config fits a cluster, how fast it is there, what would make it fit, and the compression that does.

:mod:`~distembed.capacity.assessment` plans a config and says what each rank holds; :mod:`~distembed.capacity.remedies`
looks for changes that make it fit; :mod:`~distembed.capacity.compression` finds the least compression that does.
:mod:`~distembed.capacity.run_plan` is the command ``distembed plan`` without its options: its result, a
:class:`~distembed.capacity.report.CapacityReport`, becomes JSON (``as_json``), text (``terminal``), a page or a chart
(``page``, ``chart``). All of these show the same: :mod:`~distembed.capacity.memory_by_rank`,
:mod:`~distembed.capacity.time_by_rank`, the reasons of :mod:`~distembed.capacity.reasons` and the sentences of
:mod:`~distembed.capacity.texts`.
"""
