"""The settings of partition schemes: keys of a table's section in a config, read and checked without torch.

Each scheme names the class of its own as ``settings``; a scheme without settings has :class:`SchemeSettings` itself.
"""

import dataclasses
from typing import Annotated, ClassVar

import pydantic.dataclasses
from pydantic import Field, PositiveInt

from distembed.base.names import STRICT


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class SchemeSettings:
    """The settings of a partition scheme or composition: a frozen dataclass whose fields have defaults.

    Attributes:
        alternatives: Pairs of fields of which a table sets one; an exception's takes the place of the other.
    """

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()


def setting_names(settings: type[SchemeSettings]) -> tuple[str, ...]:
    """Returns the names of the fields of a settings class, which are keywords of its scheme's constructor."""
    return tuple(each.name for each in dataclasses.fields(settings))


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class BucketSettings(SchemeSettings):
    """The settings of ``remainder`` and ``quotient_remainder``.

    Attributes:
        collisions: How many ids share a row of the first partition; 4 unless it or ``num_buckets`` is given.
        num_buckets: The rows of the first partition, in place of ``collisions``.
    """

    alternatives = (("collisions", "num_buckets"),)
    collisions: PositiveInt | None = None
    num_buckets: PositiveInt | None = None


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ModuliSettings(SchemeSettings):
    """The settings of ``mixed_radix`` and ``chinese_remainder``.

    Attributes:
        num_partitions: The number of partitions, whose moduli are then computed.
        moduli: The moduli themselves, in place of ``num_partitions``.
    """

    alternatives = (("num_partitions", "moduli"),)
    num_partitions: Annotated[int, Field(ge=2)] | None = None
    moduli: Annotated[list[PositiveInt], Field(min_length=1)] | None = None


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ExplicitSettings(SchemeSettings):
    """The settings of ``explicit``.

    Attributes:
        assignments: The Parquet file with a row for each id; a relative path starts at the working directory.
        columns: The columns of that file, each of which is a partition.
        allow_collisions: Whether ids may have the same rows.
    """

    assignments: str | None = None
    columns: Annotated[list[str], Field(min_length=1)] | None = None
    allow_collisions: bool = False
