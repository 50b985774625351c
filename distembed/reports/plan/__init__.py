"""Whether a config fits a cluster, how fast it is there, what would make it fit, and the compression that does.

``run_plan`` is the command ``distembed plan`` without its options: ``assessment`` plans a model and lists the memory
and time of each rank, ``remedies`` finds changes with which the model fits, ``compression`` the least compression.
``terminal`` and ``page`` show the columns and sentences of ``tables``.
"""
