"""The base of the settings of partition schemes and compositions, read and checked without torch."""

import dataclasses
from typing import ClassVar

import pydantic.dataclasses

from distembed.base.names import STRICT


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class SchemeSettings:
    """The settings of a partition scheme or composition: a frozen dataclass whose fields have defaults."""

    # pairs of fields; a table sets one field of a pair; the exception of a table replaces the other
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()


def setting_names(settings: type[SchemeSettings]) -> tuple[str, ...]:
    """Returns the names of the fields of a settings class, which are keywords of its scheme's constructor."""
    return tuple(field.name for field in dataclasses.fields(settings))
