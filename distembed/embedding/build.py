"""Builds the tables of a dataset's features as the ``embedding`` section of a config sets them, and lets them grow.

New ids are appended to a vocabulary, so that known ids keep their numbers, and schemes grow so that known ids keep
their rows. A setting that a scheme computes from the number of ids is therefore pinned when a table grows::

    before   1,000 ids   {partition: quotient_remainder, collisions: 4}       250 remainders, 4 quotients
    now      1,300 ids   {partition: quotient_remainder, num_buckets: 250}    250 remainders, 6 quotients

A full table stays full, and a compressed one stays compressed. A unified table cannot grow: the ids of its features
follow each other, so that later features would get other ids.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.base.units import enumerate_lines
from distembed.composition import COMPOSITIONS
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding.config import CompositionalEmbeddingBagConfig, DataType
from distembed.embedding.settings import EmbeddingConfig, TableConfig
from distembed.partitions import PARTITIONS, KeyedHash, Naive, Partition
from distembed.partitions.base import MAX_NUM_EMBEDDINGS
from distembed.partitions.settings import setting_names
from distembed.sse import SSE

_DATA_TYPES: dict[str, DataType] = {"fp32": "FP32", "fp16": "FP16", "bf16": "BF16"}
_WITHOUT_EFFECT_ON_WEIGHTS = ("assignments", "id_policy")
"""Settings that may differ from the earlier tables' settings; explicit assignments are compared by their rows."""
_MOST_SHOWN = 10


def build_tables(
    features: Sequence[CategoricalFeature], config: EmbeddingConfig, seed: int = 0, sse: Mapping[str, SSE] | None = None
) -> list[CompositionalEmbeddingBagConfig]:
    """Returns one table for each feature that does not name another feature's table; it has the feature's name.

    Features that name it are looked up in it too. Features of a unified table have that table in place of their own.
    A small table, or one that compression would not shrink, stays full.

    Args:
        features: The dataset's features.
        config: The ``embedding`` section.
        seed: The seed of the initial values and of ``sse``.
        sse: The rules by which ids are replaced in training, by feature; the ids of other features are not replaced.

    Raises:
        UserError: ``config.tables`` names a feature that does not exist, or a scheme's settings are not valid.
    """
    tables = []
    for feature in table_features(features, config):
        settings = config.for_table(feature.name)
        table = _build_table(feature, settings, seed)
        looked_up = {
            user.name: user.table_name
            for user in features
            if user.is_looked_up and config.table_of(user.table_name) == feature.name
        }
        first_ids = None
        if settings.features is not None:
            sizes = _feature_sizes(feature.name, settings, features)
            firsts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
            first_ids = {name: firsts[owner] for name, owner in looked_up.items()}
        rules = {name: rule for name, rule in (sse or {}).items() if name in looked_up}
        table = dataclasses.replace(
            table, feature_names=list(looked_up), first_ids=first_ids, sse=rules or None, kernel=config.kernel
        )
        tables.append(table)
    return tables


def table_features(features: Sequence[CategoricalFeature], config: EmbeddingConfig) -> list[CategoricalFeature]:
    """Returns a feature for each table of a config, with the table's name and number of ids.

    They are the features with tables of their own, and then one for each unified table, whose ids are the ids of its
    features one after another. The ids of a table of managed ids are its slots.

    Raises:
        UserError: ``config.tables`` names a feature that does not exist, or a unified table has too many ids.
    """
    own = {feature.name: feature for feature in features if feature.table is None}
    unified = []
    for name, settings in config.tables.items():
        if settings.features is None:
            one_of("embedding.tables", name, own)
            continue
        if any(feature.name == name for feature in features):
            raise UserError(
                f"embedding.tables.{name} has features, so it is a unified table, and {name!r} is a feature of the "
                "dataset; give the table another name."
            )
        num_ids = sum(_feature_sizes(name, settings, features).values())
        if num_ids > MAX_NUM_EMBEDDINGS:
            raise UserError(
                f"embedding.tables.{name}.features have {num_ids} ids in all, and a table has at most 2^63-1; set its "
                "hash_seed, by which each feature's ids are hashed into an equal share, or prepare the features with a "
                "smaller hash_size."
            )
        unified.append(CategoricalFeature(name, num_ids))
    return [_in_slots(feature, config) for name, feature in own.items() if config.table_of(name) == name] + unified


def _in_slots(feature: CategoricalFeature, config: EmbeddingConfig) -> CategoricalFeature:
    """Returns a feature with managed ids as one of slots, any other as it is."""
    ids = config.for_table(feature.name).ids
    return feature if ids is None else dataclasses.replace(feature, num_embeddings=ids.size)


def _feature_sizes(name: str, settings: TableConfig, features: Sequence[CategoricalFeature]) -> dict[str, int]:
    """Returns the number of ids of each feature in ``settings.features`` of a unified table, in their order.

    The ids of a table that hashes them are cut to equal shares of 2^63-1 ids where they are more.
    """
    sizes = {feature.name: feature.num_embeddings for feature in features if feature.table is None}
    chosen = settings.features or ()
    most = MAX_NUM_EMBEDDINGS if settings.hash_seed is None else MAX_NUM_EMBEDDINGS // len(chosen)
    return {each: min(sizes[one_of(f"embedding.tables.{name}.features", each, sizes)], most) for each in chosen}


def reason_to_stay_full(feature: CategoricalFeature, settings: TableConfig) -> str | None:
    """Returns why a feature's table stays full although a scheme is set; None if the scheme applies or is ``naive``."""
    if settings.force or settings.partition == "naive":
        return None
    if feature.num_embeddings <= settings.threshold:
        return f"no more than {settings.threshold} ids"
    compressed = _table(feature, settings, _make_partition(feature, settings), seed=0)
    saved = feature.num_embeddings * settings.embedding_dim - compressed.num_parameters
    if saved * compressed.bytes_per_number <= compressed.scheme.assignment_bytes:
        return f"{settings.partition} with {settings.composition} would save no parameters"
    return None


def _build_table(feature: CategoricalFeature, settings: TableConfig, seed: int) -> CompositionalEmbeddingBagConfig:
    """Returns a feature's table with the configured scheme, or full (:func:`reason_to_stay_full`)."""
    if reason_to_stay_full(feature, settings) is None:
        return _table(feature, settings, _make_partition(feature, settings), seed)
    return _table(feature, settings, Naive(feature.num_embeddings), seed)


def _table(
    feature: CategoricalFeature, settings: TableConfig, partition: Partition, seed: int
) -> CompositionalEmbeddingBagConfig:
    """Returns a feature's table with a given partition; a full table has nothing to compose, by any composition."""
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
        ids=settings.ids,
    )


def _make_partition(feature: CategoricalFeature, settings: TableConfig) -> Partition:
    """Returns the configured partition of a feature's table, with the feature's name in errors."""
    try:
        scheme = PARTITIONS[settings.partition].from_settings(feature.num_embeddings, settings)
    except UserError as error:
        raise UserError(f"embedding, table {feature.name!r}: {error}") from None
    return scheme.for_table(feature.name)


def grown_embedding(
    before: EmbeddingConfig,
    features_before: Sequence[CategoricalFeature],
    now: EmbeddingConfig,
    features: Sequence[CategoricalFeature],
) -> EmbeddingConfig:
    """Returns the settings of tables that start from an earlier run's weights: every earlier id keeps its rows.

    ``id_policy``, assignments and ``output_dtype`` come from ``now``, all other settings from ``before``.

    Raises:
        UserError: Features have other tables than before, a table has fewer ids, hashes its ids and would grow, or an
            explicit assignment changes the rows of an earlier id.
    """
    grown, old = ({each.name: each for each in table_features(own, before)} for own in (features, features_before))
    if grown.keys() != old.keys():
        differing = ", ".join(sorted(grown.keys() ^ old.keys()))
        raise UserError(f"the tables differ from the earlier run's tables: {differing}; use the same tables in both.")
    tables = {}
    for name, feature in grown.items():
        settings = dataclasses.replace(
            before.for_table(name), **{key: getattr(now.for_table(name), key) for key in _WITHOUT_EFFECT_ON_WEIGHTS}
        )
        tables[name] = _grown_table(old[name], before.for_table(name), feature, settings)
    default = dataclasses.replace(before.default, id_policy=now.default.id_policy, assignments=now.default.assignments)
    own_tables = {name: table for name, table in tables.items() if table != default}
    return EmbeddingConfig(default, own_tables, now.output_dtype)


def require_same_settings(
    before: EmbeddingConfig, now: EmbeddingConfig, features: Sequence[CategoricalFeature], run: str
) -> None:
    """Raises a UserError that lists the settings, of features' own tables, in which ``now`` differs from ``before``.

    ``run`` names the earlier run. Settings without effect on weights may differ.
    """
    differences = []
    names = [feature.name for embedding in (before, now) for feature in table_features(features, embedding)]
    for name in dict.fromkeys(names):
        old, new = (_relevant(embedding.for_table(name)) for embedding in (before, now))
        differences += [
            f"embedding, table {name!r}: {key} was {old.get(key)!r} and is {new.get(key)!r}"
            for key in old | new
            if old.get(key) != new.get(key)
        ]
    if differences:
        raise UserError(
            f"tables that start from {run} need its settings:"
            f"{enumerate_lines(differences, _MOST_SHOWN)}"
            "\nSet them to their earlier values; sizes that grow with the vocabulary are computed."
        )


def _relevant(settings: TableConfig) -> dict[str, Any]:
    """Returns all settings that decide which vectors a table's weights give."""
    values = dataclasses.asdict(settings)
    return {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT_ON_WEIGHTS}


def _grown_table(
    feature_before: CategoricalFeature, before: TableConfig, feature: CategoricalFeature, settings: TableConfig
) -> TableConfig:
    """Returns ``settings``, pinned if the table has grown; refuses changes that would move an earlier id's rows."""
    old_size, new_size = feature_before.num_embeddings, feature.num_embeddings
    if new_size < old_size:
        raise UserError(
            f"table {feature.name!r} has {new_size} ids and had {old_size}; a vocabulary grows and never shrinks: "
            "prepare the dataset with --vocabulary and --grow."
        )
    if new_size > old_size and settings.hash_seed is not None:
        raise UserError(
            f"table {feature.name!r} hashes its ids (hash_seed {settings.hash_seed}) into {old_size}, so that it "
            f"cannot grow to {new_size}: known values would have other ids. Keep the dataset's number of ids."
        )
    if new_size > old_size and settings.features is not None:
        raise UserError(
            f"table {feature.name!r} is unified: the ids of {', '.join(settings.features)} follow each other, so that "
            f"it cannot grow from {old_size} ids to {new_size}: known values would have other ids. Keep the dataset's "
            "vocabularies, or train from initial weights."
        )
    if new_size > old_size:
        settings = dataclasses.replace(settings, **_pinned_settings(feature_before, before, new_size))
    _require_same_assignments(_scheme(feature_before, before), _scheme(feature, settings), feature.name)
    return settings


def _pinned_settings(feature: CategoricalFeature, settings: TableConfig, num_embeddings: int) -> Mapping[str, Any]:
    """Returns the settings that make a scheme for ``num_embeddings`` ids keep the rows of the feature's ids.

    They replace settings that the scheme would compute from the number of ids.
    """
    if reason_to_stay_full(feature, settings) is not None or settings.partition == "naive":
        return {"partition": "naive"}
    if settings.partition == "explicit":
        return {"force": True}
    try:
        grown = _scheme(feature, settings).grown_settings(num_embeddings)
    except UserError as error:
        raise UserError(f"embedding, table {feature.name!r}: {error}") from None
    # the scheme's own defaults take back the settings that the grown ones replace (collisions by num_buckets)
    unset = dataclasses.asdict(PARTITIONS[settings.partition].settings())
    return {**unset, **grown, "force": True}


def _scheme(feature: CategoricalFeature, settings: TableConfig) -> Partition:
    """Returns the scheme that a feature's table has with these settings."""
    return _build_table(feature, settings, seed=0).scheme


def _require_same_assignments(before: Partition, now: Partition, name: str) -> None:
    """Refuses explicit assignments in which a known id has another row than before."""
    if now.name != "explicit":
        return
    from distembed.partitions import Explicit

    assert isinstance(before, Explicit) and isinstance(now, Explicit)
    changed = now.first_changed_id(before)
    if changed is not None:
        raise UserError(
            f"embedding, table {name!r}: id {changed} has other rows in the assignments than it had; known ids keep "
            "theirs. Rows are numbered by ascending value, so new values must sort after the known values."
        )
