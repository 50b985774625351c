"""``manifest.json`` of an exported model as values with types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MANIFEST_NAME = "manifest.json"
FORMAT = 1
"""Raised when a reader of the earlier format would misread a folder."""

Precision = Literal["fp32", "fp16", "int8"]
"""How the numbers of the tables are stored; networks keep float32."""
TableForm = Literal["compositional", "materialised"]


@dataclass(frozen=True)
class ExportedFeature:
    """A categorical feature, in the order of ``lengths``.

    Attributes:
        name: Name of the feature.
        table: Name of its table.
        num_embeddings: The number of its ids, which lie in ``[0, num_embeddings)``.
        is_list: Whether a row may have any number of ids; if not, it has one.
        vocabulary: File of its raw values; None where its ids are hashed, are bins of numbers, or have no names.
        change: How raw values become ids: ``kind``, ``edges`` of bins, ``hash_size`` and so on, as in the dataset.
    """

    name: str
    table: str
    num_embeddings: int
    is_list: bool
    vocabulary: str | None
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ExportedNumber:
    """A column of numbers, in the order of ``dense``; ``change`` has ``log``, ``mean`` and so on of its raw numbers."""

    name: str
    change: Mapping[str, Any]


@dataclass(frozen=True)
class ExportedSequence:
    """A column of lists of numbers, in the order of ``sequences``.

    Attributes:
        name: Name of the column.
        beside: The feature of lists that has an id for each of its numbers.
        change: How raw numbers become numbers: ``transform``, ``gap_to`` and so on, as in the dataset.
    """

    name: str
    beside: str
    change: Mapping[str, Any]


@dataclass(frozen=True)
class ExportedTable:
    """A table in its stored form, with the bytes of that form, and its shard; 0 where the network has all tables."""

    name: str
    form: TableForm
    bytes: int
    shard: int


@dataclass(frozen=True)
class ExportedProgram:
    """A program of ``torch.export``.

    Attributes:
        file: Its file.
        inputs: Names of its inputs in order: ``values lengths dense sequences``, without the ones that it does not
            take; or ``vectors dense`` after shards of tables.
        outputs: Names of its outputs in order, for example ``prediction``; of a shard, ``vectors``.
        features: Names of the features whose ids it takes, in the order of ``lengths``.
        bytes: Bytes of its tables.
    """

    file: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    features: Sequence[str] = ()
    bytes: int = 0


@dataclass(frozen=True)
class ExportedTower:
    """The program that gives the vectors of users, or of items.

    Attributes:
        program: The program.
        features: Its features, in the order of ``lengths``.
        numbers: Its numbers, in the order of ``dense``.
        largest_difference: Largest difference of a number of a vector from the trainer's, on the compared rows.
    """

    program: ExportedProgram
    features: Sequence[ExportedFeature]
    numbers: Sequence[ExportedNumber]
    largest_difference: float = 0.0


@dataclass(frozen=True)
class RecommendedItems:
    """The outputs ``items`` and ``scores`` of a model that recommends items.

    Attributes:
        feature: The feature whose ids ``items`` are, and whose vocabulary has their raw values. It is an input too, as
            a list.
        num_best: Number of items of each row, the best first. Where there are fewer, ids are -1 and scores -inf.
        excludes_seen: Whether the model was evaluated without the items that a user has, as ``task.exclude_seen`` says.
            A model of next items leaves out the items of the history; a model of users leaves out the given items.
    """

    feature: str
    num_best: int
    excludes_seen: bool = True


@dataclass(frozen=True)
class ItemIndex:
    """The vectors of all items of a catalogue.

    Attributes:
        file: A Parquet file with ``id``, ``item`` (its raw value) and ``vector``, of each item.
        num_items: Number of the items.
        dim: Dimension of the vectors.
        faiss: A FAISS index of the vectors, whose entry i is row i of ``file``; None where there is none.
    """

    file: str
    num_items: int
    dim: int
    faiss: str | None = None


@dataclass(frozen=True)
class Parity:
    """Differences of the exported model's scores, in the sample and on a split, from the trained model's.

    Attributes:
        rows: Number of rows of the sample.
        largest_difference: Largest difference of a score in the sample.
        metric: Name of the task's headline metric.
        exported: Its value for the exported model on ``split``; None without rows.
        trained: Its value for the trained model on these rows.
        split: Name of the split.
    """

    rows: int
    largest_difference: float
    metric: str | None = None
    exported: float | None = None
    trained: float | None = None
    split: str | None = None


@dataclass(frozen=True)
class CompiledProgram:
    """The network compiled by AOTInductor: machine code with the tables within, which runs where it was made.

    Attributes:
        file: Its file, with the inputs and outputs of the network.
        processor: Name of the processor that it was made for and on.
        instructions: The vector instructions that torch uses there, for example ``AVX2``.
        largest_difference: Largest difference of a score from the trainer's, in the sample.
    """

    file: str
    processor: str
    instructions: str
    largest_difference: float


@dataclass(frozen=True)
class ExportManifest:
    """All of ``manifest.json``.

    Attributes:
        task: Name of the task, for example ``click``.
        model: Name of the model, for example ``dlrm``.
        step: Number of training steps of the checkpoint.
        network: The program that gives scores.
        shards: The programs that give vectors, one for each server, where the tables are not within the network. The
            network takes their concatenated outputs, in this order, as ``vectors``.
        recommends: The meaning of its outputs, where it recommends items; None where it gives a number for each row.
        compiled: The network compiled by AOTInductor, where it was asked for.
        towers: The programs of the user's and the item's vectors, where the model has towers.
        index: The vectors of all items, where the model has towers.
        versions: Versions of torch and distembed that wrote it.
        checksums: SHA-256 of each other file by its name.
        sequence: The number of this version among the versions in its parent folder; 0 in exports of earlier releases.
        config_checksum: Checksum of the run's sections ``model``, ``embedding`` and ``task``.
    """

    task: str
    model: str
    step: int
    precision: Precision
    network: ExportedProgram
    features: Sequence[ExportedFeature]
    numbers: Sequence[ExportedNumber]
    tables: Sequence[ExportedTable]
    parity: Parity
    versions: Mapping[str, str]
    checksums: Mapping[str, str]
    shards: Sequence[ExportedProgram] = ()
    recommends: RecommendedItems | None = None
    compiled: CompiledProgram | None = None
    sequences: Sequence[ExportedSequence] = ()
    towers: Sequence[ExportedTower] = ()
    index: ItemIndex | None = None
    sequence: int = 0
    config_checksum: str | None = None
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest in plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ChangedWeight:
    """A weight with new rows in a delta.

    Attributes:
        program: File of the program in the exported model.
        names: Names of its tensors in the program; a weight in int8 has three, with one row of each for a row.
        num_rows: Number of the changed rows; None where all rows changed, and the delta has whole tensors.
    """

    program: str
    names: Sequence[str]
    num_rows: int | None


@dataclass(frozen=True)
class DeltaManifest:
    """All of ``delta.json``, beside a checksum of these values.

    Attributes:
        sequence: The number of the version that the delta makes: 1 more than the version that it changes.
        base: Identity of the version that it changes.
        step: Number of training steps of the new version's checkpoint.
        rows: The file of the changed rows.
        rows_checksum: SHA-256 of that file.
        weights: The changed weights, in the order of the file.
        outputs: Each output of the new version for the rows in the exported model's ``sample.json``.
        parity: Difference of the new version's scores from the trained model's.
    """

    sequence: int
    base: str
    step: int
    rows: str
    rows_checksum: str
    weights: Sequence[ChangedWeight]
    outputs: Mapping[str, Sequence[Any]]
    parity: Parity
    versions: Mapping[str, str]
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest in plain values."""
        return dataclasses.asdict(self)
