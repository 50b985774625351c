"""The copy that a run keeps of the codes of its tables, where it begins with a run that ``distembed compress`` made.

Codes are assignments of explicit partitions in ``RUN/codes``. A run that begins with them gets a copy in its own
folder, so that both runs may be moved or removed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from distembed.base.errors import RunError
from distembed.base.files import replaced_file
from distembed.embedding.settings import TableConfig
from distembed.training.config import Config

CODES = "codes"
"""The folder of the codes in a run, and the key of ``run.json`` that says how they were made."""


def keep_codes(config: Config, run: Path) -> Config:
    """Copies the codes that lie in other runs' folders into a run's folder, unless files of these names are there.

    Args:
        config: The run's config.
        run: The run's folder, which is made as needed.

    Returns:
        The config with the paths of the copies.

    Raises:
        RunError: A file cannot be copied.
    """
    tables = {name: _with_own_codes(table, run) for name, table in config.embedding.tables.items()}
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tables=tables))


def _with_own_codes(table: TableConfig, run: Path) -> TableConfig:
    if table.assignments is None:
        return table
    source, target = Path(table.assignments), run.absolute() / CODES / Path(table.assignments).name
    is_of_run = source.parent.name == CODES and (source.parents[1] / "run.json").is_file()
    if not is_of_run or os.path.realpath(source) == os.path.realpath(target):
        return table
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(target) as temporary:
                shutil.copyfile(source, temporary)
        except OSError as error:
            raise RunError(f"the codes {source} could not be copied to {target}: {error}") from error
    return dataclasses.replace(table, assignments=str(target))
