"""Raw files to Parquet datasets: of tables, Criteo's logs, ratings and sequences."""

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
