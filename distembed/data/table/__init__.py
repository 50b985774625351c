"""Tables of any columns: what is known of them, and how their values become those of a dataset.

- ``schema.py``: which columns there are and what becomes of each; ``schema_files.py`` reads it from YAML and from
  manifests, and ``schemas/`` has those of public datasets.
- ``parser.py`` turns a table of raw columns into a block of a dataset's columns, and sets the malformed rows aside:
  ``raw_columns.py`` finds the columns, ``numbers.py`` reads labels, times and numbers, ``keys.py`` the values that get
  ids, ``value_texts.py`` has the one text of a value, and ``text_keys.py`` the hashes of texts.
- ``given_values.py`` makes columns of values of JSON and Python.
- ``encoder.py`` gives a parsed block the ids and transforms of a dataset that is there, by its ``vocabularies.py``;
  ``unknown_values.py`` warns where it knows too few of the values.
- It is shared by preparing (:mod:`distembed.data.prepare`) and by scoring raw rows.
"""
