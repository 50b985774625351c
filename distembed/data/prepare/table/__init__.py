"""Prepares tables of any columns, by a schema: CSV, TSV, JSON lines and Parquet, from files, folders, URLs and pipes.

- ``preparation.py`` prepares a dataset of them; ``guess.py`` guesses a schema from the columns that ``sample.py`` saw.
- ``source.py`` is the source of rows: ``inputs.py`` finds the inputs, ``text_inputs.py`` reads what is text and learns
  its columns; ``delimited.py``, ``json_lines.py`` and ``parquet_rows.py`` turn blocks into the rows of ``raw_rows.py``.
- ``criteo_rows.py`` has what is Criteo's own: a grammar, a fast parse, headers.
"""

from distembed.data.prepare.table.preparation import TableOptions, prepare_table

__all__ = ["TableOptions", "prepare_table"]
