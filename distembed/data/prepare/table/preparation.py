"""Tables of any columns to a dataset, as a schema says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.base import Base
from distembed.data.prepare.options import PrepareOptions, ResourceLimits
from distembed.data.prepare.pipeline import prepare_rows
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.table.schema import TABLE, TableSchema
from distembed.data.table.schema_files import load_schema


@dataclass(frozen=True)
class TableOptions:
    """What a preparation does otherwise than the schema says, and what a schema does not say.

    None stands for the schema's own setting; ``min_count`` and ``hash_size`` are of columns without one of their own.
    """

    split: str | None = None
    min_count: int | None = None
    hash_size: int | None = None
    missing: str | None = None  # zero or keep, for all dense columns
    max_rejected: float = 0.01  # largest share of malformed rows that is no error
    vocabulary: str | os.PathLike[str] | None = None  # folder or URL of a dataset, or a run, whose ids are applied
    grow: bool = False  # whether values that vocabulary lacks get ids behind its own

    def applied_to(self, schema: TableSchema) -> TableSchema:
        """Returns the schema with what is said here in place of what it says."""
        values = schema.to_json()
        given = {"split": self.split, "min_count": self.min_count, "hash_size": self.hash_size}
        values |= {name: value for name, value in given.items() if value is not None}
        if self.missing is not None:
            one_of("missing (--missing)", self.missing, ("zero", "keep"))
            values["dense"] = {
                name: {**column, "missing": self.missing} for name, column in values.get("dense", {}).items()
            }
        return TableSchema.from_json(values, "the schema with the options given")


def prepare_table(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    schema: TableSchema | str | os.PathLike[str] | None = None,
    options: TableOptions | None = None,
    limits: ResourceLimits | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Manifest:
    """Prepares tables of any columns.

    Args:
        inputs: CSV, TSV, JSON lines or Parquet files, plain, gzip or Zstandard, folders of them, patterns, URLs or
            pipes, in time order; ``-`` is standard input.
        output: Dataset folder to make, or the URL of one.
        schema: What becomes of the columns: a schema, the name of a shipped one, or a YAML file; None for that of the
            dataset whose ids are applied.
        options: What is done otherwise than the schema says.
        limits: Memory, threads and processes to use.
        overwrite: Whether a dataset at ``output`` is replaced.
        progress: Function that is called now and then, in the caller's thread.
        note: Function that is told in a sentence what should be known of the input.

    Returns:
        The manifest that was written.

    Raises:
        UserError: The schema is wrong, or the input cannot be read or is not as the schema says. Nothing was written.
        RunError: The disk is full, or will not have room. Nothing was left behind.
    """
    options = options or TableOptions()
    base = None if options.vocabulary is None else Base.load(options.vocabulary, options.grow)
    chosen = options.applied_to(_schema(schema, base))
    if base is not None:
        base.require_same_values(chosen)
    source = TableSource(find_inputs(inputs, note), chosen)
    recorded = {"source": TABLE, "schema": chosen.to_json(), "max_rejected": options.max_rejected}
    prepared = PrepareOptions(chosen.split, options.max_rejected, options.vocabulary, options.grow, recorded)
    return prepare_rows(source, output, prepared, limits, overwrite=overwrite, progress=progress, note=note)


def _schema(given: TableSchema | str | os.PathLike[str] | None, base: Base | None) -> TableSchema:
    """Returns the schema that is given, or that of the dataset whose ids are applied."""
    if isinstance(given, TableSchema):
        return given
    if given is not None:
        return load_schema(os.fspath(given))
    if base is None:
        raise UserError(
            "schema (--schema) is missing, which says what becomes of each column: give a YAML file, as `distembed "
            "prepare schema` writes it, or the name of a shipped one; or with --vocabulary a dataset that has one."
        )
    return TableSchema.of_manifest(base.manifest)
