"""Raw files to Parquet datasets.

``pipeline.py`` prepares rows of any kind in three passes: ``ingest.py`` reads and parses parts of the inputs into a
``spool.py``, ``dataset_columns.py`` learns ids, means and bins of each column, and ``write_parquet.py`` writes the
files. ``work.py`` runs the tasks of each pass and resumes after a kill; ``staging.py`` makes the output appear at once.
``table/`` prepares tables and Criteo's logs, ``interactions/`` ratings and sequences.
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
