"""Raw files to Parquet datasets.

- ``pipeline.py`` prepares rows of any kind, in three passes, by the options and limits of ``options.py``; ``blocks.py``
  says what it knows of a kind of rows.
- The first pass: ``ingest.py`` reads blocks with several threads, and ``spool.py`` stores their columns.
- The second: ``split.py`` and ``row_splits.py`` say which rows train, ``count.py`` counts their keys by DuckDB,
  ``feature_ids.py`` gives ids, or those of another dataset (``base.py``), and ``learnt_numbers.py`` learns means and
  bins, column by column (``dataset_columns.py``); ``vocabulary.py`` says what ids are.
- The third: ``write_parquet.py`` writes the files.
- ``notes.py`` tells what a user should know of the result.
- ``table/`` prepares tables of any columns, by a schema, and ``criteo.py`` those of Criteo.
- ``interactions/`` prepares ratings and sequences.
- For every kind of preparation: ``table/inputs.py`` finds the inputs, ``input_bytes.py`` unpacks them and cuts them
  into blocks of lines, ``rejected_rows.py`` takes the malformed rows, ``progress.py`` says how far it is, and
  ``staging.py`` makes its output appear at once.
- ``work.py`` runs each task once and resumes after a kill, ``engine.py`` has threads, Ray or Spark run the tasks, and
  ``destination.py`` uploads a dataset to a URL.
- ``synthesize.py`` makes a Criteo-format file with a planted signal.
"""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.data.prepare.options import (
        NoteCallback,
        PrepareOptions,
        ProgressCallback,
        ProgressUpdate,
        ResourceLimits,
    )
    from distembed.data.prepare.pipeline import dataset_warnings, describe_dataset, prepare_rows
    from distembed.data.prepare.synthesize import SyntheticSummary, synthesize_criteo
    from distembed.data.prepare.table.preparation import CriteoOptions, prepare_criteo

__all__ = [
    "CriteoOptions",
    "NoteCallback",
    "PrepareOptions",
    "ProgressCallback",
    "ProgressUpdate",
    "ResourceLimits",
    "SyntheticSummary",
    "dataset_warnings",
    "describe_dataset",
    "prepare_criteo",
    "prepare_rows",
    "synthesize_criteo",
]

__getattr__ = imports_on_demand(__name__)
