"""Tables that grow with their vocabulary: the settings with which known ids keep their vectors.

A vocabulary grows behind its end, so that known ids keep their numbers, and the schemes of
:mod:`distembed.partitions` grow so that these keep their rows. What a scheme computes from the number of ids, such as
the buckets of ``quotient_remainder``, is therefore written down when a table grows, and no longer computed::

    before   1,000 ids   {partition: quotient_remainder, collisions: 4}       250 remainders, 4 quotients
    now      1,300 ids   {partition: quotient_remainder, num_buckets: 250}    250 remainders, 6 quotients

A table that stayed full stays full, however many ids it has now, and one that was compressed stays compressed.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distembed.base.errors import UserError
from distembed.base.units import enumerate_lines
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding.build import build_tables, reason_to_stay_full
from distembed.embedding.settings import EmbeddingConfig, TableConfig
from distembed.partitions import PARTITIONS

if TYPE_CHECKING:
    from distembed.partitions import Partition

_WITHOUT_EFFECT_ON_WEIGHTS = ("assignments", "id_policy")
"""Settings that may differ from those of the tables before; what explicit assignments say is compared by itself."""
_MOST_SHOWN = 10


def grown_embedding(
    before: EmbeddingConfig,
    features_before: Sequence[CategoricalFeature],
    now: EmbeddingConfig,
    features: Sequence[CategoricalFeature],
) -> EmbeddingConfig:
    """Returns the settings with which tables go on from earlier ones: each known id has the rows that it had.

    Args:
        before: The settings of the tables as they are.
        features_before: The features whose tables they are.
        now: The settings that are asked for, whose ``id_policy``, files of assignments and ``output_dtype`` are taken.
        features: The same features, with as many ids or more.

    Raises:
        UserError: A feature is new, is gone or has fewer ids, or a table cannot grow; the error names it.
    """
    own = {feature.name: feature for feature in features if feature.table is None}
    own_before = {feature.name: feature for feature in features_before if feature.table is None}
    if own.keys() != own_before.keys():
        differing = ", ".join(sorted(own.keys() ^ own_before.keys()))
        raise UserError(f"the tables differ from those of the run that is gone on from: {differing}; use the same.")
    tables = {}
    for name, feature in own.items():
        settings = dataclasses.replace(
            before.for_table(name),
            **{key: getattr(now.for_table(name), key) for key in _WITHOUT_EFFECT_ON_WEIGHTS},
        )
        tables[name] = _grown_table(own_before[name], before.for_table(name), feature, settings)
    default = dataclasses.replace(before.default, id_policy=now.default.id_policy, assignments=now.default.assignments)
    own_tables = {name: table for name, table in tables.items() if table != default}
    return EmbeddingConfig(default, own_tables, now.output_dtype)


def require_same_settings(
    before: EmbeddingConfig, now: EmbeddingConfig, features: Sequence[CategoricalFeature], run: str
) -> None:
    """Makes sure that tables are set as those of an earlier run were.

    Args:
        before: The settings that the earlier run was given.
        now: The settings that are given now.
        features: The features.
        run: The earlier run, for the error.

    Raises:
        UserError: Settings differ that decide what a table's weights mean; the error lists them.
    """
    differences = []
    for feature in features:
        if feature.table is not None:
            continue
        old, new = (_relevant(embedding.for_table(feature.name)) for embedding in (before, now))
        differences += [
            f"embedding, table {feature.name!r}: {key} was {old.get(key)!r} and is {new.get(key)!r}"
            for key in old | new
            if old.get(key) != new.get(key)
        ]
    if differences:
        raise UserError(
            f"tables that go on from {run} need the settings that it was given:"
            f"{enumerate_lines(differences, _MOST_SHOWN)}"
            "\nSet these as they were; what grows with the vocabulary is computed."
        )


def _relevant(settings: TableConfig) -> dict[str, Any]:
    """Returns the settings that decide what a table's weights mean."""
    values = dataclasses.asdict(settings)
    return {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT_ON_WEIGHTS}


def _grown_table(
    feature_before: CategoricalFeature, before: TableConfig, feature: CategoricalFeature, settings: TableConfig
) -> TableConfig:
    """Returns the settings of a table that goes on from an earlier one.

    Args:
        feature_before: The feature as it was.
        before: The settings of the earlier table.
        feature: The feature as it is.
        settings: The same, with what may differ as it is asked for.
    """
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
    if new_size > old_size:
        settings = dataclasses.replace(settings, **_pinned_settings(feature_before, before, new_size))
    _require_same_assignments(_scheme(feature_before, before), _scheme(feature, settings), feature.name)
    return settings


def _pinned_settings(feature: CategoricalFeature, settings: TableConfig, num_embeddings: int) -> Mapping[str, Any]:
    """Returns the settings that have to be written down when a table grows."""
    if reason_to_stay_full(feature, settings) is not None or settings.partition == "naive":
        return {"partition": "naive"}
    if settings.partition == "explicit":
        return {"force": True}
    try:
        grown = _scheme(feature, settings).grown_settings(num_embeddings)
    except UserError as error:
        raise UserError(f"embedding, table {feature.name!r}: {error}") from None
    unset = dataclasses.asdict(PARTITIONS[settings.partition].settings())
    return {**unset, **grown, "force": True}


def _scheme(feature: CategoricalFeature, settings: TableConfig) -> "Partition":
    """Returns the scheme that a feature's table has with these settings."""
    (table,) = build_tables([feature], EmbeddingConfig(settings))
    return table.scheme


def _require_same_assignments(before: "Partition", now: "Partition", name: str) -> None:
    """Refuses explicit assignments in which a known id has another row than before."""
    if now.name != "explicit":
        return
    from distembed.partitions import Explicit

    assert isinstance(before, Explicit) and isinstance(now, Explicit)
    changed = now.first_changed_id(before)
    if changed is not None:
        raise UserError(
            f"embedding, table {name!r}: id {changed} has other rows in the assignments than it had; known ids keep "
            "theirs. Rows are numbered by ascending value, so that new values have to sort behind the known ones."
        )
