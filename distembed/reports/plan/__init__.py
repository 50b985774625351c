"""Whether a config fits a cluster, how fast it is there, and the changes and the least compression that make it fit.

``run_plan`` is the command ``distembed plan`` without its options: ``assessment`` plans a model and lists the memory
and time of each rank, ``remedies`` finds changes with which the model fits, ``compression`` the least compression.
``terminal`` and ``page`` show the columns and sentences of ``tables``.
"""
