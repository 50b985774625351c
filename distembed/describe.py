"""What a config amounts to: every embedding table and dense layer, counted without making any table."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from distembed.config import Config
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import CompositionalEmbeddingConfig, reason_to_stay_full
from distembed.embedding.modules import embedding_modules, table_configs
from distembed.models import ModelInputs
from distembed.units import format_bytes


def describe(config: Config) -> dict[str, Any]:
    """Counts parameters and bytes.

    Returns:
        ``{"tables": [{"name", "scheme", "partitions", "composition", "num_embeddings", "rows", "dim", "dims",
        "vectors", "pooling", "id_policy", "hash_seed", "parameters", "bytes", "compression", "complementary",
        "ids_per_row", "full_because"}], "dense": [{"name", "shape", "parameters"}], "embedding_parameters",
        "embedding_bytes", "dense_parameters", "parameters"}``. ``partitions`` are the equations, ``dims`` the numbers
        in a row of each partition, ``vectors`` those that an id gives; bytes are of weights, without optimizer state;
        compression is the full table's parameters over this one's.
    """
    schema = config.data.load_schema()
    features = {feature.name: feature for feature in schema.categorical}
    model = config.model.build(ModelInputs.from_config(schema, config.embedding))
    collections = embedding_modules(model)
    tables = [
        describe_table(table, _reason_to_stay_full(table, features, config))
        for module in collections.values()
        for table in table_configs(module)
    ]
    in_collections = {id(weight) for module in collections.values() for weight in module.parameters()}
    dense: list[dict[str, Any]] = [
        {"name": name, "shape": list(parameter.shape), "parameters": parameter.numel()}
        for name, parameter in model.named_parameters()
        if id(parameter) not in in_collections
    ]
    embedding_parameters = sum(table["parameters"] for table in tables)
    dense_parameters = sum(layer["parameters"] for layer in dense)
    return {
        "model": config.model.name,
        "tables": tables,
        "dense": dense,
        "embedding_parameters": embedding_parameters,
        "embedding_bytes": sum(table["bytes"] for table in tables),
        "dense_parameters": dense_parameters,
        "parameters": embedding_parameters + dense_parameters,
    }


def _reason_to_stay_full(
    table: CompositionalEmbeddingConfig, features: Mapping[str, CategoricalFeature], config: Config
) -> str | None:
    """Returns why a table is full although a scheme is set for its feature; None where it is not, or none is set."""
    feature = features.get(table.feature_names[0])
    if feature is None or table.scheme.name != "naive":
        return None
    return reason_to_stay_full(feature, config.embedding.for_table(feature.name))


def describe_table(table: CompositionalEmbeddingConfig, full_because: str | None = None) -> dict[str, Any]:
    """One of the ``tables`` of :func:`describe`."""
    full = table.num_embeddings * table.embedding_dim
    hash_seed = None if table.pre_hash is None else table.pre_hash.seed
    return {
        "name": table.name,
        "scheme": table.scheme.name,
        "partitions": table.scheme.description if hash_seed is None else f"{table.scheme.description}, x = hash(value)",
        "composition": table.combine.name if len(table.scheme.num_rows) > 1 else None,
        "num_embeddings": table.num_embeddings,
        "rows": list(table.scheme.num_rows),
        "dim": table.embedding_dim,
        "dims": [part.dim for part in table.partition_tables()],
        "vectors": table.num_vectors,
        "pooling": getattr(table, "pooling", None),
        "id_policy": table.id_policy,
        "hash_seed": hash_seed,
        "parameters": table.num_parameters,
        "bytes": table.memory_bytes,
        "compression": full / table.num_parameters,
        "complementary": table.scheme.is_complementary(),
        "ids_per_row": table.scheme.ids_per_row,
        "full_because": full_because,
    }


def print_description(description: dict[str, Any], console: Console) -> None:
    """Embedding tables, their partitions, dense layers and the totals."""
    console.print(_tables_table(description))
    for line in kept_full(description):
        console.print(line, highlight=False, soft_wrap=True)
    compressed = [row for row in description["tables"] if row["scheme"] != "naive" or row["hash_seed"] is not None]
    if compressed:
        console.print(_partitions_table(compressed))
    console.print(_dense_table(description))
    console.print(
        f"{description['parameters']:,} parameters: {description['embedding_parameters']:,} in embedding tables "
        f"({format_bytes(description['embedding_bytes'])} of weights), {description['dense_parameters']:,} dense",
        highlight=False,
    )


def _tables_table(description: dict[str, Any]) -> Table:
    table = Table("table", "scheme", "composition", title="embedding tables", title_justify="left", box=SIMPLE_HEAD)
    for column in ("ids", "rows", "dim", "parameters", "memory", "compression"):
        table.add_column(column, justify="right")
    for row in description["tables"]:
        table.add_row(
            row["name"],
            row["scheme"] + ("" if row["complementary"] else f" ({row['ids_per_row']:.3g} ids a row)"),
            row["composition"] or "-",
            f"{row['num_embeddings']:,}",
            " + ".join(f"{rows:,}" for rows in row["rows"]),
            str(row["dim"]),
            f"{row['parameters']:,}",
            format_bytes(row["bytes"]),
            f"{row['compression']:.2f}x",
        )
    return table


def kept_full(description: dict[str, Any]) -> list[str]:
    """A line for each reason for which tables were left full although a scheme is set."""
    names: dict[str, list[str]] = {}
    for row in description["tables"]:
        if row["full_because"]:
            names.setdefault(row["full_because"], []).append(row["name"])
    return [f"full tables: {', '.join(tables)} ({reason})" for reason, tables in names.items()]


def _partitions_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("table", "id x -> rows", title="partitions", title_justify="left", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(row["name"], escape(row["partitions"]))
    return table


def _dense_table(description: dict[str, Any]) -> Table:
    title = f"dense layers of {description['model']}"
    table = Table("parameter", title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("shape", justify="right")
    table.add_column("parameters", justify="right")
    for row in description["dense"]:
        table.add_row(row["name"], " x ".join(map(str, row["shape"])), f"{row['parameters']:,}")
    return table
