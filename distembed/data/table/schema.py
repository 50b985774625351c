"""The schema of a table of raw rows: its columns, and the role of each in a dataset.

A schema is a YAML file (``distembed prepare schema`` guesses one)::

    label: {column: click}
    time: {column: hour, format: "%y%m%d%H"}
    dense:
      price: {transform: log}
    categorical:
      site: {kind: string, min_count: 5}
      genres: {kind: string, separator: "|"}
      site_x_device: {cross: [site, device]}
      price_bin: {column: price, kind: quantile_bins, num_bins: 32}
    split: time:0.8,0.1,0.1

Each name under ``dense`` and ``categorical`` is that of the dataset's column; ``column`` is that of the table, the same
unless given. A name with nothing behind it, as ``site:``, has the defaults.

A table with several outcomes has ``labels`` in the place of ``label``, by the name of the dataset's column. Rows may
lack some of them, and one column of the table may give several::

    labels:
      click: {}
      conversion: {column: buy}
      liked: {column: rating, at_least: 4}
      rating: {kind: number}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

import pydantic.dataclasses
from pydantic import TypeAdapter, field_validator, model_validator

from distembed.base.names import STRICT, nearest
from distembed.base.validation import validated
from distembed.data.table.columns import (
    BINS,
    CategoricalColumn,
    DenseColumn,
    HashSize,
    LabelColumn,
    LabelValues,
    MinCount,
    TextFormat,
    TimeColumn,
    WeightColumn,
)

TABLE, CRITEO = "table", "criteo"  # names of the parsers, and of the sources that a manifest names
SPLIT_BY_COLUMN, SPLIT_BY_TIME = "column:", "time:"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableSchema:
    """The columns of a table and their roles; labels, dense and categorical ones have the dataset's names."""

    label: LabelColumn | None = None
    labels: dict[str, LabelValues] = field(default_factory=dict)  # several labels, which rows may lack, by their names
    weight: WeightColumn | None = None  # null: all rows weigh 1
    time: TimeColumn | None = None
    dense: dict[str, DenseColumn] = field(default_factory=dict)
    categorical: dict[str, CategoricalColumn] = field(default_factory=dict)
    split: str = "0.8,0.1,0.1"  # into training, validation and test; see distembed.data.prepare.options.SplitRule
    min_count: MinCount = 2  # of the columns that have none of their own
    hash_size: HashSize | None = None  # of the columns that have none of their own, but for bins; null: vocabularies
    text: TextFormat = field(default_factory=TextFormat)
    parser: Literal["table", "criteo"] = "table"  # criteo: text in the grammar of Criteo's files, which is faster

    @field_validator("dense", "categorical", mode="before")
    @classmethod
    def _take_defaults(cls, columns: Any) -> Any:
        """Gives a column without settings, null in YAML, the defaults; missing gaps are kept by default."""
        if not isinstance(columns, dict):
            return columns
        columns = {name: {} if settings is None else settings for name, settings in columns.items()}
        return {
            name: {"missing": "keep", **settings} if isinstance(settings, dict) and "gap_to" in settings else settings
            for name, settings in columns.items()
        }

    @field_validator("labels", mode="before")
    @classmethod
    def _take_names(cls, labels: Any) -> Any:
        """Gives a label without a column of the table the column of its own name."""
        if not isinstance(labels, dict):
            return labels
        return {
            name: {"column": name, **(settings or {})} if isinstance(settings, dict | None) else settings
            for name, settings in labels.items()
        }

    @property
    def all_labels(self) -> dict[str, LabelValues]:
        """How each label of the dataset, none, one or several, is made; by its name."""
        return self.labels if self.label is None else {self.label.name: self.label}

    @property
    def dense_columns(self) -> dict[str, str]:
        return {name: dense.column or name for name, dense in self.dense.items()}

    @property
    def dense_sequences(self) -> dict[str, DenseColumn]:
        """The dense columns of lists of numbers, by their names: the dense sequences of the dataset's schema."""
        return {name: dense for name, dense in self.dense.items() if dense.beside is not None}

    @property
    def categorical_columns(self) -> dict[str, tuple[str, ...]]:
        """The table's columns of each categorical column of the dataset: one, or the columns of a cross."""
        return {
            name: tuple(categorical.cross) if categorical.cross is not None else (categorical.column or name,)
            for name, categorical in self.categorical.items()
        }

    @property
    def split_column(self) -> str | None:
        """The table's column that says which split a row belongs to; None where something else does."""
        if not self.split.startswith(SPLIT_BY_COLUMN):
            return None
        return self.split.removeprefix(SPLIT_BY_COLUMN).partition("=")[0]

    def hash_size_of(self, column: CategoricalColumn) -> int | None:
        """Returns the size of the table that a column's values are hashed into; None where a vocabulary is built."""
        return None if column.kind in BINS else column.hash_size or self.hash_size

    def with_features(self, names: Collection[str]) -> TableSchema:
        """Returns the schema of some features alone, to encode rows by a dataset's vocabularies.

        A column that shares the vocabulary of a column that is left out has the settings of its hash.
        """
        categorical = {}
        for name, column in self.categorical.items():
            if name not in names:
                continue
            if column.vocabulary is not None and column.vocabulary not in names:
                owner = self.categorical[column.vocabulary]
                size = self.hash_size_of(owner)
                column = dataclasses.replace(column, vocabulary=None, hash_size=size, hash_seed=owner.hash_seed)
            categorical[name] = column
        dense = {name: column for name, column in self.dense.items() if name in names}
        return dataclasses.replace(self, categorical=categorical, dense=dense)

    def to_json(self) -> dict[str, Any]:
        """Returns the settings that differ from the defaults, in plain values, which :meth:`from_json` reads back."""
        value: dict[str, Any] = _ADAPTER.dump_python(self, exclude_defaults=True)
        return value

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str) -> TableSchema:
        return validated(_ADAPTER, cls, values, source)

    @model_validator(mode="after")
    def _require_consistent(self) -> TableSchema:
        if mistakes := list(_inconsistencies(self)):
            raise ValueError("\n".join(mistakes))
        return self


_ADAPTER = TypeAdapter(TableSchema)


def _inconsistencies(schema: TableSchema) -> Iterator[str]:
    """Yields a line for each contradiction between settings of different columns."""
    yield from _repeated_names(schema)
    if not schema.dense and not schema.categorical:
        yield "dense, categorical: a schema names at least one column that a model is trained on"
    lists = {schema.categorical_columns[name][0] for name, column in schema.categorical.items() if column.holds_lists}
    for name, columns in schema.categorical_columns.items():
        if len(columns) > 1 and (crossed := [column for column in columns if column in lists]):
            yield f"categorical.{name}.cross: {crossed[0]!r} has lists, and a cross has one value of each column"
    yield from _unshared_vocabularies(schema)
    for name, dense in schema.dense_sequences.items():
        list_columns = [column for column, settings in schema.categorical.items() if settings.holds_lists]
        if dense.beside not in list_columns:
            guess = nearest(str(dense.beside), list_columns)
            hint = f"; did you mean {guess!r}?" if guess else ""
            yield f"dense.{name}.beside: the schema has no categorical column of lists {dense.beside!r}{hint}"
    yield from _ambiguous_labels(schema)
    label_of_column = {label.column: name for name, label in schema.all_labels.items()}
    if label_of_column:
        inputs: dict[str, tuple[str, ...]] = {f"dense.{name}": (raw,) for name, raw in schema.dense_columns.items()}
        inputs |= {f"dense.{name}.gap_to": (dense.gap_to,) for name, dense in schema.dense.items() if dense.gap_to}
        inputs |= {f"categorical.{name}": columns for name, columns in schema.categorical_columns.items()}
        for setting, columns in inputs.items():
            for column in (column for column in columns if column in label_of_column):
                label = "the label" if schema.labels == {} else f"the label {label_of_column[column]!r}"
                yield f"{setting}: {column!r} is {label}, which a model would be shown; leave it out"
    if schema.split.startswith(SPLIT_BY_TIME) and schema.time is None:
        yield f"split: {schema.split!r} is by time, and the schema has none; add `time: {{column: ...}}`"
    names = schema.text.columns or []
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield f"text.columns: {', '.join(repeated)} stands there more than once; a column has a name of its own"
    if schema.text.columns is not None and schema.text.header:
        yield "text.columns: files with a header name their columns themselves; add `header: false`, or leave it out"
    if schema.text.separator is not None and schema.text.separator == schema.text.quote:
        yield f"text.quote: {schema.text.quote!r} separates fields too; give another, or null"


def _ambiguous_labels(schema: TableSchema) -> Iterator[str]:
    """Yields a line where ``labels`` are beside ``label``, or are only one."""
    names = ", ".join(schema.labels)
    if schema.labels and schema.label is not None:
        yield (
            f"labels: the schema has label ({schema.label.column}) and labels ({names}); leave one of them out: label "
            "is the only label of a row, labels are two or more"
        )
    elif len(schema.labels) == 1:
        (label,) = schema.labels.values()
        yield (
            f"labels: {names} is the only one; write `label: {{column: {label.column}, name: {names}}}`, or name two "
            "or more labels"
        )


def _unshared_vocabularies(schema: TableSchema) -> Iterator[str]:
    """Yields a line for each column that names a vocabulary it cannot share."""
    for name, column in schema.categorical.items():
        setting, shared = f"categorical.{name}.vocabulary", column.vocabulary
        owner = schema.categorical.get(shared or name)
        if owner is None:
            guess = nearest(str(shared), [other_name for other_name in schema.categorical if other_name != name])
            hint = f"; did you mean {guess!r}?" if guess else ""
            yield f"{setting}: the schema has no categorical column {shared!r}{hint}"
        elif shared == name:
            yield f"{setting}: {shared!r} is the column itself; leave it out"
        elif shared is not None and owner.vocabulary is not None:
            yield f"{setting}: {shared!r} shares the vocabulary of {owner.vocabulary!r}; name {owner.vocabulary!r}"
        elif owner.kind != column.kind:
            yield f"{setting}: kind is {column.kind!r}, and that of {shared!r} is {owner.kind!r}; give both the same"


def _repeated_names(schema: TableSchema) -> Iterator[str]:
    setting_by_name: dict[str, str] = {}
    single = {"label": schema.label, "weight": schema.weight, "time": schema.time}
    names = [(f"{role}.name", column.name) for role, column in single.items() if column is not None]
    names += [(f"labels.{name}", name) for name in schema.labels]
    names += [(f"dense.{name}", name) for name in schema.dense]
    names += [(f"categorical.{name}", name) for name in schema.categorical]
    for setting, name in names:
        if not name:
            yield f"{setting}: a column's name has at least one character"
        elif name in setting_by_name:
            first = setting_by_name[name]
            yield f"{setting}: the dataset has a column {name!r} already, by {first}; name one otherwise"
        setting_by_name.setdefault(name, setting)
