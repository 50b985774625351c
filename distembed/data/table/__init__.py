"""Tables of any columns: what is known of them, and how their values become those of a dataset.

- ``schema.py``: which columns there are and what becomes of each; ``schemas/`` has those of public datasets.
- It is shared by preparing (:mod:`distembed.data.prepare`) and by scoring raw rows.
"""
