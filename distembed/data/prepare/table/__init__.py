"""Prepares tables of any columns by a schema: CSV, TSV, JSON lines and Parquet, from files, folders, URLs and pipes."""

from distembed.data.prepare.table.preparation import TableOptions, prepare_table

__all__ = ["TableOptions", "prepare_table"]
