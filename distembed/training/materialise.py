"""Writes the composed vectors of a run's tables as Parquet files, reading its checkpoint table by table."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distembed.base.errors import UserError
from distembed.base.files import require_file
from distembed.base.names import one_of
from distembed.base.units import enumerate_names
from distembed.checkpoints.checkpoint import load_weights
from distembed.data.dataset.schema import Schema
from distembed.embedding import materialise
from distembed.embedding.collections import embedding_modules, table_configs, weight_names_of_table
from distembed.models import ModelInputs
from distembed.tasks import batch_schema
from distembed.training.config import Config
from distembed.training.inference import is_removed, removed_meanwhile
from distembed.training.resume import find_checkpoint
from distembed.training.trained_run import id_column, read_ids

_FEW = 5


@dataclass(frozen=True)
class MaterialisedTable:
    """A table whose vectors were written to a file, with the seconds for reading its weights and writing the file.

    A unified table has a file for each vocabulary, named as its feature.
    """

    name: str
    path: Path
    num_rows: int
    seconds: float


def materialise_run(
    run_dir: Path,
    config: Config,
    schema: Schema,
    output: Path,
    names: Sequence[str] = (),
    ids_file: Path | None = None,
    overwrite: bool = False,
    checkpoint_choice: str | None = None,
) -> Iterator[MaterialisedTable]:
    """Writes ``<output>/<table>.parquet`` for one table after the other, and yields each table once it is written.

    Args:
        run_dir: The folder of a run with a checkpoint.
        config: The run's config.
        schema: The columns of the run's dataset.
        output: The folder to write to, made if it is missing.
        names: Names of the tables to write, or of features of a unified table; all unless given.
        ids_file: Parquet file of the ids of a single table to write; all ids of each table unless given.
        overwrite: Whether to replace existing files.
        checkpoint_choice: ``best``, ``newest`` or a step, in place of the run's best or newest checkpoint.

    Raises:
        UserError: The run lacks a table, a file exists, or the ids cannot be read or are missing for a hashed
            table.
        RunError: A file cannot be written.
    """
    inputs = ModelInputs.from_config(batch_schema(config.task, schema), config.embedding)
    collections = embedding_modules(config.model.build(inputs))
    tables = [table for module in collections.values() for table in table_configs(module)]
    weight_names = {
        table.name: weight_names_of_table(module, table)
        for module in collections.values()
        for table in table_configs(module)
    }
    known = {name: (table, feature) for table in tables for name, feature in table.vocabularies.items()}
    chosen = {one_of("--table", name, known): known[name] for name in names} or known
    if ids_file is not None and len(chosen) != 1:
        raise UserError(f"--ids holds the ids of one table; name it with --table. Known: {', '.join(known)}.")
    for name, (table, _) in chosen.items():
        if table.managed is not None:
            raise UserError(
                f"table {name!r} has managed ids, whose vectors are not materialised; distembed.load(RUN).embed gives "
                "the vectors of raw values." + _others_sentence([o for o, (t, _) in known.items() if t.managed is None])
            )
    hashing = [name for name, (table, _) in chosen.items() if table.pre_hash is not None]
    if hashing and ids_file is None:
        raise UserError(
            f"table {hashing[0]!r} hashes its ids, so there is no list of all; give them with --ids, for one --table."
            + _others_sentence([name for name in chosen if name not in hashing])
        )
    paths = [output / f"{name}.parquet" for name in chosen]
    for path in paths:
        require_file("--output", path, overwrite)
    column = None if ids_file is None else id_column(ids_file)
    checkpoint = find_checkpoint(run_dir, config, checkpoint_choice)
    for (name, (table, feature)), path in zip(chosen.items(), paths, strict=True):
        started = time.perf_counter()
        try:
            names, states = weight_names[table.name], list(table.scheme.state)
            loaded = load_weights(checkpoint, [*names, *(f"{table.name}__{state}" for state in states)])
        except UserError as error:
            raise removed_meanwhile(checkpoint) if is_removed(checkpoint) else error from None
        weights = loaded[: len(names)]
        table.scheme.load_state(dict(zip(states, loaded[len(names) :], strict=True)))
        ids = None if ids_file is None or column is None else read_ids(ids_file, column)
        num_rows = materialise(table, weights, path, ids, feature=feature)
        yield MaterialisedTable(name, path, num_rows, time.perf_counter() - started)


def _others_sentence(names: Sequence[str]) -> str:
    """Returns a sentence that names the tables which need no list of ids; empty where there are none."""
    if not names:
        return ""
    return f" Without --ids, --table takes any of the others: {enumerate_names(names, most=_FEW)}."
