"""Raw rows to batches: rows of Python, JSON and Arrow as tables, parsed by the dataset's schema and encoded by its ids.

::

    given.py        dictionaries, columns, pandas, Arrow  ->  RawRows: a table, and the rows that no table can hold
    decoders        a table                               ->  the dataset's columns, and the malformed rows
    decoder.py      the dataset's columns                 ->  batches of a model
    malformed.py    the malformed rows                    ->  their columns, values and problems as texts

``table_rows.py`` decodes rows of clicks, ratings and several labels, ``user_rows.py`` users who get recommendations,
and ``sequence_rows.py`` sequences of items. Rows need the lists that the model reads; other lists of the dataset are
filled with missing values.
"""
