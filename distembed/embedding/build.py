"""Builds the tables of a dataset's features as the ``embedding`` section of a config sets them."""

import dataclasses
from collections.abc import Mapping, Sequence

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.composition import COMPOSITIONS
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding.config import CompositionalEmbeddingBagConfig, DataType
from distembed.embedding.settings import EmbeddingConfig, TableConfig
from distembed.partitions import PARTITIONS, KeyedHash, Naive, Partition
from distembed.partitions.settings import setting_names
from distembed.sse import SSE

_DATA_TYPES: dict[str, DataType] = {"fp32": "FP32", "fp16": "FP16", "bf16": "BF16"}


def build_tables(
    features: Sequence[CategoricalFeature],
    config: EmbeddingConfig,
    seed: int = 0,
    sse: Mapping[str, SSE] | None = None,
) -> list[CompositionalEmbeddingBagConfig]:
    """Returns one table for each feature that has one of its own, with that feature's name.

    Args:
        features: The dataset's features.
        config: The ``embedding`` section.
        seed: The seed of the initial values and of ``sse``.
        sse: The rules by which ids are replaced in training, by feature; the ids of other features are not replaced.

    Raises:
        UserError: ``config.tables`` names a feature that does not exist, or a scheme's settings are not valid.
    """
    own = [feature for feature in features if feature.table is None]
    names = [feature.name for feature in own]
    for name in config.tables:
        one_of("embedding.tables", name, names)
    tables = []
    for feature in own:
        table = _build_table(feature, config.for_table(feature.name), seed)
        looked_up = [each.name for each in features if each.table_name == feature.name and each.is_looked_up]
        rules = {name: rule for name, rule in (sse or {}).items() if name in looked_up}
        tables.append(dataclasses.replace(table, feature_names=looked_up, sse=rules or None, kernel=config.kernel))
    return tables


def reason_to_stay_full(feature: CategoricalFeature, settings: TableConfig) -> str | None:
    """Returns why a feature's table stays full although a scheme is set, or None where the scheme is applied."""
    if settings.force or settings.partition == "naive":
        return None
    if feature.num_embeddings <= settings.threshold:
        return f"no more than {settings.threshold} ids"
    compressed = _table(feature, settings, _make_partition(feature, settings), seed=0)
    if compressed.num_parameters >= feature.num_embeddings * settings.embedding_dim:
        return f"{settings.partition} with {settings.composition} would save no parameters"
    return None


def _build_table(feature: CategoricalFeature, settings: TableConfig, seed: int) -> CompositionalEmbeddingBagConfig:
    """Returns a feature's table, which is full where there is a reason for it to stay so."""
    if reason_to_stay_full(feature, settings) is None:
        return _table(feature, settings, _make_partition(feature, settings), seed)
    return _table(feature, settings, Naive(feature.num_embeddings), seed)


def _table(
    feature: CategoricalFeature, settings: TableConfig, partition: Partition, seed: int
) -> CompositionalEmbeddingBagConfig:
    """Returns a feature's table with a given partition."""
    composition = COMPOSITIONS["product" if partition.name == "naive" else settings.composition]
    chosen = {name: getattr(settings, name) for name in setting_names(composition.settings)}
    return CompositionalEmbeddingBagConfig(
        name=feature.name,
        num_embeddings=feature.num_embeddings,
        embedding_dim=settings.embedding_dim,
        feature_names=[feature.name],
        partition=partition,
        composition=composition(**chosen),
        pooling=settings.pooling,
        seed=seed,
        id_policy=settings.id_policy,
        pre_hash=None if settings.hash_seed is None else KeyedHash(settings.hash_seed),
        data_type=_DATA_TYPES[settings.data_type],
    )


def _make_partition(feature: CategoricalFeature, settings: TableConfig) -> Partition:
    """Returns the partition of a feature's table.

    Raises:
        UserError: The scheme's settings are not valid; the error names the table.
    """
    try:
        return PARTITIONS[settings.partition].from_settings(feature.num_embeddings, settings)
    except UserError as error:
        raise UserError(f"embedding, table {feature.name!r}: {error}") from None
