"""Raw files to Parquet datasets.

- ``criteo.py`` prepares Criteo rows: its options, and the three passes.
- The first pass: ``source_files.py`` cuts files into blocks of whole lines, ``parse_rows.py`` turns blocks into
  columns, ``spool.py`` stores these, and ``ingest.py`` does it with several threads.
- The second: ``split.py`` says which rows train, ``key_counts.py`` counts their keys in bounded memory, and
  ``vocabulary.py`` gives the ids.
- The third: ``write_parquet.py`` writes the files.
- ``first_line.py`` tells a header from a row, ``space.py`` whether the disk has room, and ``notes.py`` what a user
  should know of the result.
- ``interactions/`` prepares ratings and sequences.
- ``column_batches.py`` reads named columns of Parquet, CSV and TSV files, and ``column_numbers.py`` turns them into
  numbers.
- For every kind of preparation: ``inputs.py`` checks the inputs, ``rejected_rows.py`` takes the malformed rows,
  ``limits.py`` and ``progress.py`` say what it may use and how far it is, and ``staging.py`` makes its output appear at
  once.
- For preparations in several processes, and those that go on after a kill: ``resumable.py`` gives the folders,
  ``work.py`` does each task once, ``processes.py`` starts the processes, and by ``beats.py`` they hear of each other.
- ``synthesize.py`` makes a Criteo-format file with a planted signal, of the rows of ``synthetic_rows.py``.
"""

from distembed.data.prepare.criteo import CriteoOptions, prepare_criteo
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.notes import dataset_warnings, describe_dataset
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ProgressUpdate
from distembed.data.prepare.synthesize import SyntheticSummary, synthesize_criteo

__all__ = [
    "CriteoOptions",
    "NoteCallback",
    "ProgressCallback",
    "ProgressUpdate",
    "ResourceLimits",
    "SyntheticSummary",
    "dataset_warnings",
    "describe_dataset",
    "prepare_criteo",
    "synthesize_criteo",
]
