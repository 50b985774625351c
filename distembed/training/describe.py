"""The size of a config's model: every embedding table and dense layer, counted without making any table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distembed.base.units import format_bytes
from distembed.data.dataset.schema import Schema
from distembed.embedding import CompositionalEmbeddingConfig, reason_to_stay_full, table_features
from distembed.models import ModelInputs
from distembed.models.config import CountedModelConfig, ModelConfig, Shapes
from distembed.optim.table_storage import TableSize
from distembed.tasks import batch_schema
from distembed.training.config import Config

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class DescribedTable:
    """An embedding table, and the reason why it is full although a scheme is set for its feature, if it is."""

    config: CompositionalEmbeddingConfig
    size: TableSize
    reason_full: str | None = None

    @property
    def partitions(self) -> str:
        """The equations from an id x to its rows; in a unified table also from a feature's id to x."""
        equations, own = self.config.scheme.description, "id" if self.config.pre_hash is None else "hash(value)"
        if self.config.first_ids is not None:
            firsts = sorted(self.config.first_ids.items(), key=lambda item: item[1])
            ids = [f"{own} + {first:,} of {feature}" for feature, first in firsts]
            return f"{equations}, x = {', '.join(ids)}"
        if self.config.managed is not None:
            own = "slot(value)"
        return equations if own == "id" else f"{equations}, x = {own}"

    @property
    def composition(self) -> str | None:
        """The name of the composition; None for a table of one partition, where nothing is composed."""
        return self.config.combine.name if len(self.config.scheme.num_rows) > 1 else None

    @property
    def is_plain(self) -> bool:
        """Whether ids are rows as they are, without a partition, a hash and ids of other features."""
        config = self.config
        changes_ids = config.pre_hash is not None or config.first_ids is not None or config.managed is not None
        return config.scheme.name == "naive" and not changes_ids

    def as_json(self) -> dict[str, Any]:
        """Returns the table in plain values: ``dims`` are the numbers in a row of each partition.

        ``bytes`` are of weights and of stored rows of ids, which serving keeps; ``assignment_bytes`` are of these rows
        alone; ``training_bytes`` are with the optimizer's states. ``compression`` is the ratio of training bytes to the
        full fp32 table's, ``serving_compression`` the ratio without states. ``vectors`` is the number of vectors that
        an id gives. There is a ``data_type`` where it is not fp32, and a unified table has ``first_ids``. A table of
        managed ids has ``managed``, with the numbers of slots, candidates and buckets and the bytes of identities,
        which ``assignment_bytes`` include.
        """
        table = self.config
        more: dict[str, Any] = {} if table.data_type == "FP32" else {"data_type": table.data_type.lower()}
        more |= {} if table.first_ids is None else {"first_ids": dict(table.first_ids)}
        more |= {} if table.managed is None else {"managed": table.managed.sizes.as_json()}
        return {
            "name": table.name,
            "scheme": table.scheme.name,
            "partitions": self.partitions,
            "composition": self.composition,
            "num_embeddings": table.num_embeddings,
            "rows": list(table.scheme.num_rows),
            "dim": table.embedding_dim,
            "dims": [part.dim for part in table.partition_tables()],
            "vectors": table.num_vectors,
            "pooling": getattr(table, "pooling", None),
            "id_policy": table.id_policy,
            "hash_seed": None if table.pre_hash is None else table.pre_hash.seed,
            "parameters": table.num_parameters,
            **self.size.as_json(),
            "assignment_bytes": table.state_bytes,
            "complementary": table.scheme.is_complementary(),
            "ids_per_row": table.scheme.ids_per_row,
            "full_because": self.reason_full,
            **more,
        }


@dataclass(frozen=True)
class DescribedLayer:
    """A parameter of a model's networks, named by its path in the model."""

    name: str
    shape: tuple[int, ...]
    num_parameters: int

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "parameters": self.num_parameters}


@dataclass(frozen=True)
class TiedOutput:
    """A table of a model's input whose vectors are its output too."""

    table: CompositionalEmbeddingConfig

    @property
    def text(self) -> str:
        return (
            f"tied: the output reuses table {self.table.name!r}; untied it would add {self.table.num_parameters:,} "
            f"parameters ({format_bytes(self.table.memory_bytes)} of weights)"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the table's name, and the parameters and bytes that an output table of its own would add."""
        table = self.table
        return {
            "table": table.name,
            "untied_parameters": table.num_parameters,
            "untied_bytes": table.memory_bytes,
        }


@dataclass(frozen=True)
class Description:
    """A model's embedding tables, dense layers (output biases among them) and tied tables, with their totals."""

    model: str
    sparse_optimizer: str  # whose states training keeps of tables
    tables: tuple[DescribedTable, ...]
    dense_layers: tuple[DescribedLayer, ...]
    tied_outputs: tuple[TiedOutput, ...] = ()

    @property
    def num_embedding_parameters(self) -> int:
        return sum(table.config.num_parameters for table in self.tables)

    @property
    def size(self) -> TableSize:
        """The bytes of all embedding tables, of their optimizers' states, and of full fp32 tables."""
        return sum((table.size for table in self.tables), TableSize())

    @property
    def embedding_rows(self) -> int:
        return sum(sum(table.config.scheme.num_rows) for table in self.tables)

    @property
    def full_embedding_rows(self) -> int:
        """The number of rows that the tables would have if none were compressed."""
        return sum(table.config.num_embeddings for table in self.tables)

    @property
    def num_dense_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.dense_layers)

    @property
    def num_parameters(self) -> int:
        return self.num_embedding_parameters + self.num_dense_parameters

    def full_table_lines(self) -> list[str]:
        """Returns a line for each reason for which tables are full although a scheme is set, with their names."""
        names: dict[str, list[str]] = {}
        for table in self.tables:
            if table.reason_full:
                names.setdefault(table.reason_full, []).append(table.config.name)
        return [f"full tables: {', '.join(tables)} ({reason})" for reason, tables in names.items()]

    def sizes_as_json(self) -> dict[str, int]:
        """Returns the bytes of all tables, as ``run.json`` has them too; full tables are fp32."""
        return {
            "embedding_bytes": self.size.serving,
            "embedding_training_bytes": self.size.training,
            "full_embedding_bytes": self.size.full_serving,
            "full_embedding_training_bytes": self.size.full_training,
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "sparse_optimizer": self.sparse_optimizer,
            "tables": [table.as_json() for table in self.tables],
            "dense": [layer.as_json() for layer in self.dense_layers],
            "tied_outputs": [output.as_json() for output in self.tied_outputs],
            "embedding_parameters": self.num_embedding_parameters,
            **self.sizes_as_json(),
            "dense_parameters": self.num_dense_parameters,
            "parameters": self.num_parameters,
        }


def describe(config: Config) -> Description:
    """Counts the parameters and bytes of a config's model, by its section's formulas or by building it.

    A model that is built has its tables on the meta device, where they take no memory.

    Raises:
        UserError: The dataset cannot be read, or a table cannot be made as it is set.
    """
    schema, optimizers = batch_schema(config.task, config.data.load_schema()), config.train.table_optimizers
    inputs = ModelInputs.from_config(schema, config.embedding)
    tables: Sequence[CompositionalEmbeddingConfig] = list(inputs.tables.values())
    tied: tuple[TiedOutput, ...] = ()
    if isinstance(config.model, CountedModelConfig) and tables:
        shapes = config.model.dense_shapes(inputs)
    else:
        tables, shapes, tied = _built(config.model, inputs)
    return Description(
        config.model.name,
        optimizers.sparse,
        tuple(
            DescribedTable(table, TableSize.of(table, optimizers), _reason_full(table, schema, config))
            for table in tables
        ),
        tuple(DescribedLayer(name, shape, math.prod(shape)) for name, shape in shapes.items()),
        tied,
    )


def tied_outputs(model: "nn.Module") -> tuple[TiedOutput, ...]:
    """Returns the tables that are input and output of a model."""
    from distembed.models.queries import Catalogue

    catalogues = (module for module in model.modules() if isinstance(module, Catalogue))
    return tuple(TiedOutput(catalogue.table) for catalogue in catalogues if catalogue.is_tied)


def _built(
    model_config: ModelConfig, inputs: ModelInputs
) -> tuple[list[CompositionalEmbeddingConfig], Shapes, tuple[TiedOutput, ...]]:
    """Builds a model, and returns its tables, the shapes of all parameters outside of them, and its tied tables."""
    from distembed.embedding.collections import embedding_modules, table_configs

    model = model_config.build(inputs)
    collections = embedding_modules(model).values()
    in_collections = {id(weight) for module in collections for weight in module.parameters()}
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if id(parameter) not in in_collections
    }
    return [table for module in collections for table in table_configs(module)], shapes, tied_outputs(model)


def _reason_full(table: CompositionalEmbeddingConfig, schema: Schema, config: Config) -> str | None:
    """Returns why a table is full although a scheme is set for its feature; None where it is not, or none is set."""
    owners = {feature.name: config.embedding.table_of(feature.table_name) for feature in schema.categorical}
    owner = owners.get(table.feature_names[0])
    if owner is None or table.scheme.name != "naive":
        return None
    feature = next(each for each in table_features(schema.categorical, config.embedding) if each.name == owner)
    return reason_to_stay_full(feature, config.embedding.for_table(owner))


def print_description(description: Description, console: Console) -> None:
    """Prints the embedding tables, the partitions of compressed tables, the dense layers and the totals."""
    console.print(_embedding_rows(description))
    for line in description.full_table_lines():
        console.print(line, highlight=False, soft_wrap=True)
    compressed = [table for table in description.tables if not table.is_plain]
    if compressed:
        console.print(_partition_rows(compressed))
    console.print(_dense_rows(description))
    for output in description.tied_outputs:
        console.print(output.text, highlight=False, soft_wrap=True)
    console.print(
        f"{description.num_parameters:,} parameters: {description.num_embedding_parameters:,} in embedding tables "
        f"({description.size.text} with {description.sparse_optimizer}), {description.num_dense_parameters:,} dense",
        highlight=False,
    )


def _embedding_rows(description: Description) -> Table:
    rows = Table("table", "scheme", "composition", title="embedding tables", title_justify="left", box=SIMPLE_HEAD)
    for column in ("ids", "rows", "dim", "parameters", "serving", "training", "compression"):
        rows.add_column(column, justify="right")
    for described in description.tables:
        table, scheme = described.config, described.config.scheme
        rows.add_row(
            table.name,
            scheme.name + ("" if scheme.is_complementary() else f" ({scheme.ids_per_row:.3g} ids a row)"),
            described.composition or "-",
            f"{table.num_embeddings:,}",
            " + ".join(f"{num_rows:,}" for num_rows in scheme.num_rows),
            str(table.embedding_dim),
            f"{table.num_parameters:,}",
            format_bytes(described.size.serving),
            format_bytes(described.size.training),
            f"{described.size.compression:.2f}x",
        )
    return rows


def _partition_rows(tables: list[DescribedTable]) -> Table:
    rows = Table("table", "id x -> rows", title="partitions", title_justify="left", box=SIMPLE_HEAD)
    for table in tables:
        rows.add_row(table.config.name, escape(table.partitions))
    return rows


def _dense_rows(description: Description) -> Table:
    title = f"dense layers of {description.model}"
    rows = Table("parameter", title=title, title_justify="left", box=SIMPLE_HEAD)
    rows.add_column("shape", justify="right")
    rows.add_column("parameters", justify="right")
    for layer in description.dense_layers:
        rows.add_row(layer.name, " x ".join(map(str, layer.shape)), f"{layer.num_parameters:,}")
    return rows
