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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic.dataclasses
from pydantic import Field, TypeAdapter, field_validator, model_validator

from distembed.base.errors import UserError
from distembed.base.files import read_regular_file
from distembed.base.names import STRICT, nearest
from distembed.base.validation import MAX_BYTES, parse_yaml, validated

if TYPE_CHECKING:
    from distembed.data.dataset.manifest import Manifest


TABLE, CRITEO = "table", "criteo"  # names of the parsers, and of the sources that a manifest names
BINS = ("log_bins", "quantile_bins")  # kinds of categorical columns that are numbers in the table
SPLIT_BY_COLUMN, SPLIT_BY_TIME = "column:", "time:"
_SPECIAL_TIMES = ("auto", "seconds", "milliseconds")
_MinCount = Annotated[int, Field(ge=1, le=2**63 - 1)]
_HashSize = Annotated[int, Field(ge=2, le=2**62)]
_Letter = Annotated[str, Field(min_length=1, max_length=1)]
_Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TextFormat:
    """How text files are read; of Parquet and JSON lines, ``missing_values`` and ``columns`` alone concern them."""

    header: bool = True  # whether the first line has the names of the columns
    # In order, of files without a header; null: their numbers, from 1. Of JSON lines, keys that are columns though
    # no file has them in its first megabyte.
    columns: list[str] | None = None
    separator: _Letter | None = None  # of fields; null for that of the file's name: a comma of .csv, a tab of .tsv
    quote: _Letter | None = '"'  # the quotation mark; null where it is a letter like others
    newlines_in_values: bool = False  # whether a quoted value may have several lines; the file is read by one process
    missing_values: list[str] = field(default_factory=lambda: [""])  # texts for a missing value, in every column

    @model_validator(mode="after")
    def _require_marks(self) -> TextFormat:
        marks = {"separator": self.separator, "quote": self.quote}
        wrong = {name: mark for name, mark in marks.items() if mark and (mark in "\n\r\0" or not mark.isascii())}
        if wrong:
            listed = " and ".join(f"{name} is {mark!r}" for name, mark in wrong.items())
            raise ValueError(f"{listed}: give an ASCII character that ends no line, such as ',', '|' or \"\\t\"")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LabelValues:
    """How the values of a column of the table become a label."""

    column: str  # the table's
    kind: Literal["binary", "number"] = "binary"  # binary: 0 or 1, or true or false; number: any finite number
    at_least: Annotated[float, Field(allow_inf_nan=False)] | None = None  # 1 where the number is this or more, else 0

    @model_validator(mode="after")
    def _require_one_meaning(self) -> LabelValues:
        if self.kind == "number" and self.at_least is not None:
            raise ValueError("at_least makes a label of 0 and 1, which kind: number is not; leave one of them out")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LabelColumn(LabelValues):
    """The only label: ``column`` is the table's, ``name`` the dataset's, as of weight and time."""

    name: str = "label"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class WeightColumn:
    """The weight of a row in the loss and the metrics: a finite number, 0 or more; a missing one is malformed."""

    column: str
    name: str = "weight"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TimeColumn:
    """The time of a row.

    The format is ``seconds`` or ``milliseconds`` since 1970, to the year 9999; one of strptime, as ``%y%m%d%H``, in
    UTC; or ``auto``: numbers are seconds, texts ISO 8601, and Parquet's times as they are.
    """

    column: str
    format: str = "auto"
    name: str = "time"

    @model_validator(mode="after")
    def _require_format(self) -> TimeColumn:
        if self.format not in _SPECIAL_TIMES and "%" not in self.format:
            guess = nearest(self.format, _SPECIAL_TIMES)
            hint = f" (did you mean {guess!r}?)" if guess else ""
            special = ", ".join(_SPECIAL_TIMES)
            raise ValueError(f"format is {self.format!r}{hint}; give {special}, or a format such as %Y-%m-%d %H:%M:%S")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DenseColumn:
    """A column of numbers; with ``beside``, of lists of numbers."""

    column: str | None = None  # the table's column; null for the dataset's name
    # log: log(1 + x), and 0 for negative numbers; standardize: less the mean of the training rows, and divided by their
    # standard deviation; none: the number itself, as soft one-hot encoding takes it
    transform: Literal["log", "standardize", "none"] = "none"
    # zero: missing values become 0 after the transform, as the mean does in standardize; keep: they are null in the
    # dataset, where all dense columns then may have null; with gap_to, keep alone: a gap of 0 is no time at all
    missing: Literal["zero", "keep"] = "zero"
    # A categorical column of lists: each of its values has a number in this column's lists, as each item of a history
    # has a time. A row without a number has missing ones for all values. Numbers of values that are left out, which are
    # missing or before the last max_length, are left out too.
    beside: str | None = None
    separator: Annotated[str, Field(min_length=1)] | None = None  # of lists of numbers in a text
    # A column of the table with one number a row, as its time: the gap, this number less the list's number, takes the
    # place of each number of the list before the transform. It is computed in 64 bits.
    gap_to: str | None = None
    # Whether the lists are times, ascending and none of them missing: the time since the list's first takes the place
    # of each before the transform. It is computed in 64 bits; dates count as seconds.
    since_first: bool = False

    @model_validator(mode="after")
    def _require_lists(self) -> DenseColumn:
        if self.beside is not None and self.transform == "standardize":
            raise ValueError("transform is 'standardize', which is of one number a row; give log or none beside a list")
        if self.gap_to is not None and self.missing == "zero":
            raise ValueError("missing is 'zero', and a gap of 0 is no time at all; give keep, or leave missing out")
        if self.since_first and self.gap_to is not None:
            raise ValueError("since_first and gap_to each take the place of the list's numbers; leave one of them out")
        for name in ("separator", "gap_to", "since_first"):
            if self.beside is None and getattr(self, name):
                raise ValueError(f"{name} is of lists of numbers; name their list column by beside, or leave it out")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class CategoricalColumn:
    """A column of values that get ids; null stands for the schema's min_count and hash_size."""

    column: str | None = None  # the table's column; null for the dataset's name
    # integer: of 64 bits; hexadecimal: the digits of a number, at most 8; log_bins: the square of the
    # logarithm of a number above 2, rounded down, and lower numbers rounded down themselves; quantile_bins: bins of
    # equally many training rows, as far as equal numbers allow
    kind: Literal["string", "integer", "hexadecimal", "log_bins", "quantile_bins"] = "string"
    min_count: _MinCount | None = None  # values seen fewer times in training share the out-of-vocabulary id
    hash_size: _HashSize | None = None  # size of the table that values are hashed into
    hash_seed: _Seed = 0
    separator: Annotated[str, Field(min_length=1)] | None = (
        None  # of lists in a text; their missing values are left out
    )
    is_list: bool = False  # whether rows have lists; true where a separator is given
    max_length: Annotated[int, Field(ge=1)] | None = None  # most values of a list, the last ones; null for all
    # Other columns of the table, whose values, as they are written there, are one value together; it is missing where
    # one of them is.
    cross: Annotated[list[str], Field(min_length=2)] | None = None
    num_bins: Annotated[int, Field(ge=2, le=1_000_000)] = 32  # of quantile_bins
    # Another categorical column of the dataset, whose vocabulary or hash, and whose table in a model, this column
    # shares: a value has one id in both. The values of both are counted together.
    vocabulary: str | None = None

    @property
    def holds_lists(self) -> bool:
        return self.is_list or self.separator is not None

    @model_validator(mode="after")
    def _require_one_meaning(self) -> CategoricalColumn:
        cross, kind, is_bins, shared = self.cross or [], self.kind, self.kind in BINS, self.vocabulary
        settings = {"min_count": self.min_count, "hash_size": self.hash_size, "hash_seed": self.hash_seed or None}
        given_names = [name for name, value in settings.items() if value is not None]
        mistakes = {
            "column has no meaning beside cross, whose columns are the table's; leave one out": cross
            and self.column is not None,
            f"kind is {kind!r}, and the values of a cross are of kind string": cross and kind != "string",
            "a cross has one value a row; leave is_list and separator out": cross and self.holds_lists,
            f"cross has a column twice: {', '.join(cross)}; name each once": len(set(cross)) < len(cross),
            f"kind is {kind!r}, which is of one number a row; leave is_list and separator out": is_bins
            and self.holds_lists,
            f"kind is {kind!r}, whose bins are too few to be hashed; leave hash_size out": is_bins and self.hash_size,
            "kind is 'quantile_bins', of which all bins are kept; leave min_count out": kind == "quantile_bins"
            and self.min_count,
            f"kind is {kind!r}, whose bins are a column's own; leave vocabulary out": is_bins and shared is not None,
            f"{', '.join(given_names)}: the settings of vocabulary {shared!r} apply; leave them out": given_names
            and shared is not None,
            "max_length is of lists; give a separator or is_list: true too, or leave it out": self.max_length
            and not self.holds_lists,
        }
        if messages := [mistake for mistake, is_made in mistakes.items() if is_made]:
            raise ValueError("; ".join(messages))
        return self


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
    min_count: _MinCount = 2  # of the columns that have none of their own
    hash_size: _HashSize | None = None  # of the columns that have none of their own, but for bins; null: vocabularies
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
    def dense_lists(self) -> dict[str, DenseColumn]:
        """The dense columns of lists of numbers."""
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

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> TableSchema:
        """Returns the schema of the raw rows that a dataset of a table, or of Criteo's rows, was prepared from."""
        return schema_of_preparation(manifest.preparation)

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
    for name, dense in schema.dense_lists.items():
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


_SHIPPED_FOLDER = Path(__file__).parent / "schemas"
_SUFFIX = ".yaml"


def shipped_schemas() -> list[str]:
    """Returns the names of the schemas that are shipped."""
    return sorted(path.stem for path in _SHIPPED_FOLDER.glob(f"*{_SUFFIX}"))


@cache
def _shipped_schema(name: str) -> TableSchema:
    return read_schema(_SHIPPED_FOLDER / (name + _SUFFIX))


def load_schema(name_or_path: str) -> TableSchema:
    """Reads a shipped schema by its name, or a YAML file; a UserError lists every mistake with the nearest name."""
    if name_or_path in shipped_schemas():
        return _shipped_schema(name_or_path)
    path = Path(name_or_path)
    if not path.exists() and not path.suffix and path.name == name_or_path:
        guess = nearest(name_or_path, shipped_schemas())
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise UserError(
            f"the schema (--schema) is {name_or_path!r}, which is neither a file nor one that is shipped.{hint} "
            f"Shipped: {', '.join(shipped_schemas())}; `distembed prepare schema INPUT -o schema.yaml` writes one."
        )
    return read_schema(path)


def read_schema(path: Path) -> TableSchema:
    """Reads a schema from a YAML file; a UserError lists every mistake."""
    try:
        text = read_regular_file(path, MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:  # ValueErrors are other encodings, and a path that no file can have
        raise UserError(f"the schema {path} cannot be read: {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise UserError(f"the schema {path} holds a {type(values).__name__}; it must hold keys such as `categorical:`.")
    return TableSchema.from_json(values, str(path))


def schema_of_preparation(preparation: Mapping[str, Any]) -> TableSchema:
    """Returns the schema of a dataset's raw rows from the manifest's ``preparation``.

    A table's preparation holds its schema; Criteo's holds the options that change the shipped schema. Raises a
    UserError for datasets of other sources.
    """
    source = preparation.get("source")
    if source == TABLE and isinstance(preparation.get("schema"), Mapping):
        return TableSchema.from_json(preparation["schema"], "the schema in the dataset's manifest")
    if source != CRITEO:
        raise UserError(
            f"the dataset was prepared from {source or 'files of its own'!r}: raw rows are known of datasets of "
            "`distembed prepare table` and `prepare criteo`"
        )
    schema = load_schema(CRITEO)
    missing = preparation.get("missing", "zero")
    seed = preparation.get("hash_seed", 0)
    return dataclasses.replace(
        schema,
        dense={name: dataclasses.replace(column, missing=missing) for name, column in schema.dense.items()},
        categorical={name: dataclasses.replace(column, hash_seed=seed) for name, column in schema.categorical.items()},
        split=preparation.get("split", schema.split),
        min_count=preparation.get("min_count", schema.min_count),
        hash_size=preparation.get("hash_size"),
    )
