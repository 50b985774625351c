"""Tables to a dataset: of any columns, as a schema says, and Criteo's click logs as published.

Criteo's logs are tables of the shipped schema ``criteo``, with options of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.feature_ids import Base
from distembed.data.prepare.options import (
    NoteCallback,
    PrepareOptions,
    ProgressCallback,
    ResourceLimits,
    SplitRule,
    ignore,
)
from distembed.data.prepare.pipeline import prepare_rows
from distembed.data.prepare.table.inputs import TEXT, TableInput, find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.table.schema import TABLE, TableSchema
from distembed.data.table.schema_files import load_schema, schema_of_manifest, schema_of_preparation

_RANGES = {"min_count": (1, 2**63 - 1), "hash_size": (2, 2**62), "hash_seed": (0, 2**64 - 1)}


@dataclass(frozen=True)
class CriteoOptions:
    """The options that decide a dataset's bytes."""

    min_count: int = 2  # values seen fewer times in the training rows share the out-of-vocabulary id; 1 or more
    hash_size: int | None = None  # size of the tables that ids are hashed into, to 2^62; None builds a vocabulary
    hash_seed: int = 0  # below 2^64
    split: str = "0.8,0.1,0.1"  # shares, days, none or, with vocabulary, validation or test
    max_rejected: float = 0.01  # largest share of malformed rows that is no error; rejected.tsv lists them
    missing: str = "zero"  # missing integers: zero makes them 0, keep null
    vocabulary: str | os.PathLike[str] | None = None  # folder or URL of a dataset, or a run, whose ids are applied
    grow: bool = False  # whether new values, seen min_count times, get ids after the vocabulary's last

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"{name} (--{name.replace('_', '-')}) is {value}; give {least} to {most}")
        self.prepare_options()
        one_of("missing (--missing)", self.missing, ("zero", "keep"))
        if SplitRule.parse(self.split).kind in ("time", "column"):
            raise UserError(
                f"split (--split) is {self.split!r}, and Criteo's rows have neither a time nor such a column: give "
                "shares such as '0.8,0.1,0.1', 'days' or 'none'"
            )

    def prepare_options(self) -> PrepareOptions:
        """Builds, and so checks, the options of the pipeline; records only options that this dataset depends on."""
        unused = {"min_count"} if self.hash_size is not None else {"hash_size", "hash_seed"}
        unused |= {"vocabulary", "grow"}  # the pipeline records the base and its growth
        if self.missing == "zero":  # manifests of datasets with zeros are older than the choice
            unused.add("missing")
        recorded = {name: value for name, value in asdict(self).items() if name not in unused}
        return PrepareOptions(
            self.split, self.max_rejected, self.vocabulary, self.grow, {"source": "criteo", **recorded}
        )

    def schema(self) -> TableSchema:
        return schema_of_preparation(self.prepare_options().recorded)


def prepare_criteo(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: CriteoOptions | None = None,
    limits: ResourceLimits | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Manifest:
    """Prepares Criteo's rows; arguments as of :func:`prepare_table`, with options in place of a schema."""
    options = options or CriteoOptions()
    schema, prepared = options.schema(), options.prepare_options()
    if options.vocabulary is not None:
        Base.load(options.vocabulary, options.grow).require_same_values(schema)
    source = TableSource(criteo_inputs(inputs, note), schema)
    return prepare_rows(source, output, prepared, limits, overwrite=overwrite, progress=progress, note=note)


def criteo_inputs(named: Sequence[str | os.PathLike[str]], note: NoteCallback = ignore) -> list[TableInput]:
    """Returns the named inputs, which are read as text, with any suffix; of folders, the files that may be text."""
    inputs = find_inputs(named, note, lambda path: path.suffix.lower() in ("", ".tsv", ".txt", ".gz", ".zst"))
    return [replace(table_input, format=TEXT) for table_input in inputs]


@dataclass(frozen=True)
class TableOptions:
    """Options that replace settings of the schema, or that a schema lacks; None keeps the schema's setting."""

    split: str | None = None
    min_count: int | None = None
    hash_size: int | None = None
    missing: str | None = None  # zero or keep, for all dense columns
    max_rejected: float = 0.01  # largest share of malformed rows that is no error
    vocabulary: str | os.PathLike[str] | None = None  # folder or URL of a dataset, or a run, whose ids are applied
    grow: bool = False  # whether new values get ids after the vocabulary's last

    def applied_to(self, schema: TableSchema) -> TableSchema:
        """Returns the schema with these options in place of its settings; a UserError if the result is invalid."""
        values = schema.to_json()
        settings = {"split": self.split, "min_count": self.min_count, "hash_size": self.hash_size}
        values |= {name: value for name, value in settings.items() if value is not None}
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
    """Prepares tables of any columns, and returns the manifest that was written.

    Args:
        inputs: CSV, TSV, JSON lines or Parquet files, plain, gzip or Zstandard, folders of them, patterns, URLs or
            pipes, in time order; ``-`` is standard input.
        output: Dataset folder to make, or the URL of one.
        schema: A schema, the name of a shipped one, or a YAML file; None for that of ``options.vocabulary``.
        options: Options that replace settings of the schema.
        limits: Memory, threads and processes to use.
        overwrite: Whether a dataset at ``output`` is replaced.
        progress: Function that is called now and then, in the caller's thread.
        note: Function that is told notes on the input, a sentence each.
    """
    options = options or TableOptions()
    base = None if options.vocabulary is None else Base.load(options.vocabulary, options.grow)
    if schema is None:
        if base is None:
            raise UserError(
                "schema (--schema) is missing, which says what becomes of each column: give a YAML file, as `distembed "
                "prepare schema` writes it, or the name of a shipped one; or with --vocabulary a dataset that has one."
            )
        schema = schema_of_manifest(base.manifest)
    elif not isinstance(schema, TableSchema):
        schema = load_schema(os.fspath(schema))
    chosen = options.applied_to(schema)
    if base is not None:
        base.require_same_values(chosen)
    source = TableSource(find_inputs(inputs, note), chosen)
    recorded = {"source": TABLE, "schema": chosen.to_json(), "max_rejected": options.max_rejected}
    prepared = PrepareOptions(chosen.split, options.max_rejected, options.vocabulary, options.grow, recorded)
    return prepare_rows(source, output, prepared, limits, overwrite=overwrite, progress=progress, note=note)
