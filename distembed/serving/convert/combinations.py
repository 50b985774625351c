"""The settings common to all tables that ``distembed compress-search`` compares: dimension, type, optimizer.

A *combination* has a value of each setting. The config as given is one; others are written like the settings of a
sweep, a combination for each product of values::

    --try "embedding.default.embedding_dim=16,8 embedding.default.data_type=fp16"   16,fp16   8,fp16
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distembed.base.checksums import checksum_of
from distembed.base.errors import UserError
from distembed.serving.convert.searched_tables import SearchedTables
from distembed.training.config import Config, load_config
from distembed.training.start import require_trainable
from distembed.training.sweeps.axes import parse_axes

_GIVEN = "given"
"""The combination of the config's own settings."""
_MOST_NAME_CHARACTERS = 150


@dataclass(frozen=True)
class Combination:
    """A combination's name, and the tables of the config with its settings."""

    name: str
    tables: SearchedTables

    def run_name(self, kind: str) -> str:
        """Returns the name of a run of the combination."""
        return kind if self.name == _GIVEN else f"{kind}-{self.name}"


def default_tries(config: Config) -> list[str]:
    """Returns half precision with one optimizer state a row, at the config's dimension and at half of it.

    FBGEMM has dimensions that are multiples of 4.
    """
    default = config.embedding.default
    dims = [default.embedding_dim, *([default.embedding_dim // 2] if default.embedding_dim % 8 == 0 else [])]
    data_type = "fp16" if default.data_type == "fp32" else default.data_type
    return [
        f"embedding.default.embedding_dim={','.join(map(str, dims))} embedding.default.data_type={data_type} "
        "train.sparse_optimizer.name=row_wise_adagrad"
    ]


def find_combinations(
    config_file: Path, overrides: Sequence[str], tries: Sequence[str] | None, say: Callable[[str], None]
) -> list[Combination]:
    """Returns the config as given and the combinations to try; default ones that cannot be trained are left out.

    Args:
        config_file: The config.
        overrides: Settings that replace the config's, as ``dotted.key=value``.
        tries: Settings with one or several values, separated by blanks; None for :func:`default_tries`.
        say: Prints a line.

    Raises:
        UserError: The config or a combination cannot be searched.
    """

    def is_valid(settings: Sequence[str]) -> bool:
        try:
            load_config(config_file, [*overrides, *settings])
        except UserError:
            return False
        return True

    config = load_config(config_file, overrides)
    found = {_GIVEN: Combination(_GIVEN, SearchedTables.of(config))}
    for text in default_tries(config) if tries is None else tries:
        axes = parse_axes(text.split(), is_valid)
        for values in itertools.product(*(zip(axis.names, axis.overrides, strict=True) for axis in axes)):
            named = [(axis.key, name) for axis, (name, _) in zip(axes, values, strict=True)]
            name = ",".join(name for _, name in named)
            try:
                tried = load_config(config_file, [*overrides, *(override for _, override in values)])
                require_trainable(tried, tried.data.require_path())
                if (tried.data, tried.task) != (config.data, config.task):
                    raise UserError(
                        "it changes data or task, and tables are compared on the same rows and labels; give settings "
                        "of embedding, model or train."
                    )
                tables = SearchedTables.of(tried)
            except UserError as error:
                if tries is not None:
                    raise UserError(f"--try {text}: {error}") from error
                say(f"not tried: {name} ({error})")
                continue
            if any(tried.to_yaml() == own.tables.config.to_yaml() for own in found.values()):
                continue
            if name in found:
                name = ",".join(f"{key.rpartition('.')[2]}={name}" for key, name in named)
            if name in found or len(name) > _MOST_NAME_CHARACTERS:
                name = f"{name[:_MOST_NAME_CHARACTERS]}-{checksum_of(tried.to_yaml().encode())[:6]}"
            found[name] = Combination(name, tables)
    return list(found.values())
