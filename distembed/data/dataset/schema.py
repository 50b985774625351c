"""The columns of a dataset: labels, dense numbers, categorical ids, and numbers for each id of a list.

Models, embedding tables and the reader share a :class:`Schema`. Single-valued features have exactly
one id a row; multi-hot features have a list of ids a row, which may be empty::

    row   C1 (single)   genres (multi_hot)
    0     17            [3, 9]
    1     4             []              an empty or null list: no ids

A row has one label, or several (``labels``). A label that a row lacks is NaN in a batch::

    row   click   conversion     labels of the batch [batch, 2]
    0     1       0              1    0
    1     0       null           0    NaN

A list may also be a sequence in the order of time, beside which other lists say more of each of its entries::

    row   user   item           hour             item: multi-hot; hour: one number for each entry
    0     7      [12, 5, 9]     [0.1, 0.4, 0.2]

``SCHEMAS`` holds the schemas of public datasets by name, so that a model can be described without any data.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from distembed.base.errors import UserError


@dataclass(frozen=True)
class CategoricalFeature:
    """Describes a categorical column of a dataset: its ids, and whether a row has one id or a list."""

    name: str
    num_embeddings: int  # ids lie in [0, num_embeddings)
    multi_hot: bool = False  # whether a row holds a list of ids rather than exactly one
    mean_ids_per_row: float = 1.0  # the planner's pooling factor; 1 for a single-valued feature
    table: str | None = None  # the feature in whose table this one is looked up; None for a table of its own
    is_looked_up: bool = True  # whether vectors of the ids are looked up; if not, ids are in batches as labels alone
    max_ids_per_row: int | None = None  # None where there is no bound

    def __post_init__(self) -> None:
        _check_name("categorical feature", self.name)
        if self.table is not None:
            _check_name("table", self.table)
        size, mean, max_ids = self.num_embeddings, self.mean_ids_per_row, self.max_ids_per_row
        if not isinstance(size, numbers.Integral) or isinstance(size, bool) or not 1 <= size < 2**63:
            law = "it must be an integer, at least 1 and below 2**63"
            raise UserError(f"num_embeddings of the categorical feature {self.name!r} is {size!r}: {law}")
        if not (math.isfinite(mean) and mean >= 0):
            raise UserError(f"mean_ids_per_row of {self.name!r} is {mean}: it must be 0 or more")
        if not self.multi_hot and mean != 1.0:
            raise UserError(
                f"mean_ids_per_row of {self.name!r} is {mean}: a feature with multi_hot=False has exactly 1 id a row; "
                "set multi_hot=True for a list column"
            )
        if max_ids is not None and max_ids < 1:
            raise UserError(f"max_ids_per_row of {self.name!r} is {max_ids}: give 1 or more, or None")
        if self.table is None and not self.is_looked_up:
            raise UserError(
                f"the categorical feature {self.name!r} has a table of its own, in which it is not looked up; name the "
                "feature whose ids it has as its table"
            )

    @property
    def table_name(self) -> str:
        return self.table or self.name


# Names of the fields of batches; a dataset without labels, weights or dense sequences lacks the field.
LABELS, DENSE_FEATURES, SPARSE_FEATURES = "labels", "dense_features", "sparse_features"
WEIGHTS, DENSE_SEQUENCES = "weights", "dense_sequences"

# Names of columns: of ratings and sequences, and of the items that tasks add, to predict and to tell them from.
USER, ITEM = "user", "item"
ITEM_TARGET, ITEM_NEGATIVE = "item_target", "item_negative"
LabelKind = Literal["binary", "number"]


@dataclass(frozen=True)
class Label:
    """A label of a dataset with several, which a row may lack: null in a file, NaN in a batch."""

    name: str  # of the column
    kind: LabelKind = "binary"  # whether it is 0 or 1, or any finite number

    def __post_init__(self) -> None:
        _check_name("label", self.name)
        if self.kind not in get_args(LabelKind):
            raise UserError(
                f"the kind of the label {self.name!r} is {self.kind!r}: give one of {', '.join(get_args(LabelKind))}"
            )


@dataclass(frozen=True)
class BatchField:
    """A field of every batch: a float32 tensor ``[batch, columns]``, unless it is said to be another kind."""

    name: str  # by which models and tasks take the field
    columns: tuple[str, ...]  # the dataset's columns that are in the field, in its order
    is_jagged: bool = False  # a KeyedJaggedTensor with a key for each column: of ids, or of float32 numbers
    is_vector: bool = False  # a tensor [batch] of the only column

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Returns the shape of the tensor of a batch of ``num_rows`` rows, of a field that is not jagged."""
        return (num_rows,) if self.is_vector else (num_rows, len(self.columns))


@dataclass(frozen=True)
class Schema:
    """The columns of a dataset that a model is trained on."""

    label: str | None  # None where rows have no label, or several
    dense: tuple[str, ...]  # columns of numbers
    categorical: tuple[CategoricalFeature, ...]
    dense_sequences: tuple[str, ...] = ()  # columns of lists of numbers, one for each id of a list column
    # the list column of each dense sequence, in their order; empty where all lists of a row are equally long
    beside: tuple[str, ...] = ()
    label_kind: LabelKind = "binary"  # whether a label is 0 or 1, or any finite number
    missing_dense: bool = False  # whether numbers may be missing: null in a file, NaN in a batch
    weight: str | None = None  # column of the rows' weights, finite and not negative; None where all weigh 1
    time: str | None = None  # column of the rows' times (int64 seconds since 1970), which is in no batch
    labels: tuple[Label, ...] = ()  # several labels, two or more, in the order of a batch; () where ``label`` is used

    def __post_init__(self) -> None:
        names = self.columns if self.time is None else (*self.columns, self.time)
        for name in names:
            _check_name("column", name)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise UserError(f"the schema names columns more than once: {', '.join(repeated)}; each has one role")
        if self.labels:
            self._check_labels()
        lists = [feature.name for feature in self.categorical if feature.multi_hot]
        if self.beside and (len(self.beside) != len(self.dense_sequences) or not {*self.beside} <= {*lists}):
            raise UserError(
                f"beside is {', '.join(self.beside)}: name one of the list columns ({', '.join(lists) or 'none'}) for "
                f"each of the {len(self.dense_sequences)} dense sequences, or leave it out"
            )
        sizes = {feature.name: feature.num_embeddings for feature in self.categorical if feature.table is None}
        for feature in self.categorical:
            if sizes.get(feature.table_name) != feature.num_embeddings:
                raise UserError(
                    f"the categorical feature {feature.name!r} has {feature.num_embeddings} ids and the table "
                    f"{feature.table_name!r}, whose feature has {sizes.get(feature.table_name, 'none')}; name a "
                    "feature with a table of its own and as many ids"
                )

    @property
    def categorical_names(self) -> tuple[str, ...]:
        """The names of the categorical features in order, which are the keys of every batch's KeyedJaggedTensor."""
        return tuple(feature.name for feature in self.categorical)

    @property
    def fields(self) -> tuple[BatchField, ...]:
        """The fields of every batch: dense features, ids, labels, weights, and dense sequences."""
        fields = [
            BatchField(DENSE_FEATURES, self.dense),
            BatchField(SPARSE_FEATURES, self.categorical_names, is_jagged=True),
        ]
        if self.all_labels:
            fields.append(BatchField(LABELS, self.label_names, is_vector=self.label is not None))
        if self.weight is not None:
            fields.append(BatchField(WEIGHTS, (self.weight,), is_vector=True))
        if self.dense_sequences:
            fields.append(BatchField(DENSE_SEQUENCES, self.dense_sequences, is_jagged=True))
        return tuple(fields)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.targets, *self.dense, *self.categorical_names, *self.dense_sequences)

    @property
    def all_labels(self) -> tuple[Label, ...]:
        """The labels of a row, in the order of the batch's field: none, one, or several."""
        return self.labels if self.label is None else (Label(self.label, self.label_kind),)

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.all_labels)

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of numbers that only training and evaluations read: the labels, then the weight."""
        return self.label_names if self.weight is None else (*self.label_names, self.weight)

    @property
    def mean_list_length(self) -> float:
        lists = (feature for feature in self.categorical if feature.multi_hot and feature.table is None)
        return max((feature.mean_ids_per_row for feature in lists), default=0.0)

    def lists_beside(self, sequence: str) -> tuple[str, ...]:
        """Returns the list columns whose rows have as many values as a dense sequence has numbers."""
        if self.beside:
            return (self.beside[self.dense_sequences.index(sequence)],)
        return tuple(feature.name for feature in self.categorical if feature.multi_hot)

    def mean_numbers_per_row(self, sequence: str) -> float:
        """Returns the mean number of numbers of a row of a dense sequence."""
        means = {feature.name: feature.mean_ids_per_row for feature in self.categorical}
        return means[self.lists_beside(sequence)[0]] if self.beside else self.mean_list_length

    def to_json(self) -> dict[str, Any]:
        features = [plain_fields(feature, *["mean_ids_per_row"] * feature.multi_hot) for feature in self.categorical]
        labels = {"labels": [plain_fields(label) for label in self.labels]} if self.labels else {}
        return {**plain_fields(self), "categorical": features, **labels}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schema:
        lists = {name: tuple(value.get(name, ())) for name in ("dense", "dense_sequences", "beside")}
        features = tuple(CategoricalFeature(**feature) for feature in value["categorical"])
        labels = tuple(Label(**label) for label in value.get("labels", ()))
        return cls(**{**value, **lists, "categorical": features, "labels": labels})

    def _check_labels(self) -> None:
        names = ", ".join(label.name for label in self.labels)
        if self.label is not None:
            raise UserError(
                f"the schema has both the label {self.label!r} and labels ({names}); leave one out: label names the "
                "only label, labels two or more"
            )
        if len(self.labels) == 1:
            raise UserError(f"labels has one label, {names!r}: give it as label and label_kind, or two or more labels")
        if self.label_kind != "binary":
            raise UserError(
                f"label_kind is {self.label_kind!r} beside labels ({names}), and each label has its own kind; "
                "leave label_kind out"
            )


def plain_fields(value: Any, *always: str) -> dict[str, Any]:
    """Converts a dataclass to JSON values; omits fields equal to their defaults, except fields named in ``always``."""
    defaults = {field.name: field.default for field in fields(value) if field.name not in always}
    plain = {}
    for name, content in asdict(value).items():
        if name not in defaults or content != defaults[name]:
            plain[name] = list(content) if isinstance(content, tuple) else content
    return plain


def _check_name(role: str, name: object) -> None:
    if not isinstance(name, str) or not name:
        raise UserError(f"a {role} is named {name!r}: a name is a string of at least one character")


CRITEO_DENSE: tuple[str, ...] = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL: tuple[str, ...] = tuple(f"C{i}" for i in range(1, 27))

# Distinct ids of each categorical feature in the seven days of the Criteo Kaggle training file, as published.
CRITEO_KAGGLE_CARDINALITIES: tuple[int, ...] = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def criteo_schema(num_embeddings: Sequence[int]) -> Schema:
    """Returns the schema of Criteo rows: label, I1..I13 and C1..C26, which have these numbers of ids."""
    features = zip(CRITEO_CATEGORICAL, num_embeddings, strict=True)
    return Schema("label", CRITEO_DENSE, tuple(CategoricalFeature(name, size) for name, size in features))


# Ids of each categorical feature of the Criteo 1TB rows, hashed to at most 40 million as in MLPerf's DLRM-DCNv2, whose
# rows have several ids of most features: configs/mlperf_dlrm_dcnv2.yaml.
CRITEO_TERABYTE_CARDINALITIES: tuple[int, ...] = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)

SCHEMAS: dict[str, Schema] = {
    "criteo_kaggle": criteo_schema(CRITEO_KAGGLE_CARDINALITIES),
    "criteo_terabyte": criteo_schema(CRITEO_TERABYTE_CARDINALITIES),
}
