"""Interactions of users with items to a Parquet dataset: of ratings, or of sequences.

1. ``read``: files are read into a database (``reading.py``);
2. the interactions that stay are chosen (``selection.py``) and split (``splits.py``) by SQL;
3. ``write``: users, items and other values get ids, and rows are written as Parquet (``tables.py``), those of sequences
   cut into windows (``windows.py``).

The dataset appears under its name when it is complete, and not before
(:mod:`~distembed.data.prepare.staging`). Its bytes depend on the rows and the options alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from distembed.base.errors import UserError
from distembed.base.units import format_bytes
from distembed.base.version import __version__
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import USER
from distembed.data.prepare.count import Database
from distembed.data.prepare.interactions.options import (
    LISTS,
    RATING,
    InteractionColumns,
    RatingOptions,
    SequenceOptions,
    require_free_names,
)
from distembed.data.prepare.interactions.reading import InteractionInput, read_interactions
from distembed.data.prepare.interactions.selection import num_rows, select
from distembed.data.prepare.interactions.splits import TEST, TRAIN, VALIDATION, InteractionSplit
from distembed.data.prepare.interactions.tables import (
    EncodedInteractions,
    encoded_interactions,
    rating_rows,
    sequence_rows,
    write_splits,
    write_text_vocabularies,
)
from distembed.data.prepare.interactions.windows import Windows, user_bounds
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.staging import require_outside, staged_folder
from distembed.data.prepare.table.inputs import TableInput, find_inputs
from distembed.data.prepare.vocabulary import FIRST_ID
from distembed.data.prepare.write_parquet import written_split

LEAST_MEMORY_BYTES = 64 << 20
DEFAULT_MEMORY_BYTES = 2 << 30

# Memory of an interaction's split and windows, and of an id or a number while they are read (measured).
_ROW_BYTES, _COLUMN_BYTES = 40, 8
_SCRATCH = ".scratch"
# What a split with a whole history in each row may hold, as a multiple of all interactions, before that is noted.
_MANY_HISTORIES = 10

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class InteractionFiles:
    """Files, folders or pipes of interactions; ``-`` is standard input."""

    train: Sequence[AnyPath]  # all rows, or the training rows
    validation: Sequence[AnyPath] = ()  # only with a test
    test: Sequence[AnyPath] = ()  # then the others do not test


@dataclass(frozen=True)
class Preparation:
    """Where a dataset is made, and how.

    Raises:
        UserError: The memory is too little.
    """

    output: AnyPath
    memory_limit_bytes: int = DEFAULT_MEMORY_BYTES  # beside the interpreter's own (about 150 MB)
    overwrite: bool = False  # whether a dataset at the output is replaced
    progress: ProgressCallback = field(default=ignore)
    note: NoteCallback = field(default=ignore)  # is told in a sentence what should be known of the input

    def __post_init__(self) -> None:
        if self.memory_limit_bytes < LEAST_MEMORY_BYTES:
            raise UserError(f"memory_limit_bytes is {self.memory_limit_bytes}: at least {LEAST_MEMORY_BYTES} (64 MiB)")


def prepare_ratings(
    files: InteractionFiles,
    preparation: Preparation,
    columns: InteractionColumns | None = None,
    options: RatingOptions | None = None,
) -> Manifest:
    """Prepares a dataset with a row for each interaction: the rating, the user, the item and attributes.

    Args:
        files: What to read.
        preparation: Where the dataset is made.
        columns: Columns of the input; without a rating, every interaction counts as 1.
        options: Which interactions are taken, and how they are split.

    Returns:
        The manifest that was written.

    Raises:
        UserError: The input cannot be read, or nothing is left of it. Nothing was written.
        RunError: The disk is full. Nothing was left behind.
    """
    return _prepare(files, preparation, columns or InteractionColumns(rating=RATING), options or RatingOptions())


def prepare_sequences(
    files: InteractionFiles,
    preparation: Preparation,
    columns: InteractionColumns | None = None,
    options: SequenceOptions | None = None,
) -> Manifest:
    """Prepares a dataset with a row for a stretch of a user's history: the user, items, and attributes beside them.

    Arguments and errors are those of :func:`prepare_ratings`; ``columns`` have no meaning for files of lists.
    """
    options = options or SequenceOptions()
    return _prepare(files, preparation, None if options.format == LISTS else columns or InteractionColumns(), options)


def _prepare(
    files: InteractionFiles,
    preparation: Preparation,
    columns: InteractionColumns | None,
    options: RatingOptions | SequenceOptions,
) -> Manifest:
    split = InteractionSplit.parse(options.split)
    given = InteractionInput(*_find_inputs(files, split, preparation.note), columns, options.max_rejected)
    columns = columns or InteractionColumns()
    if isinstance(options, RatingOptions):
        require_free_names(columns, {RATING})
    if options.min_rating is not None and columns.rating is None:
        raise UserError("min_rating (--min-rating) needs ratings: name their column (--rating)")
    in_time = "place" if columns.time is None else "time, whole, place"
    output, memory_bytes = Path(preparation.output), 3 * preparation.memory_limit_bytes // 8
    require_outside([each.place for each in given.inputs], output)
    with staged_folder(output, overwrite=preparation.overwrite) as folder:
        with Database(folder / _SCRATCH, memory_bytes) as database:
            sources, rejected = read_interactions(database, given, folder, memory_bytes, preparation.progress)
            (num_validation,) = database.row("select count(*) from rows where part = ?", VALIDATION)
            left_out = select(database, options, in_time)
            total = num_rows(database)
            _require_memory(total, columns, preparation.memory_limit_bytes)
            vocabularies, ids = write_text_vocabularies(database, folder, columns.key_names)
            part, number = split.in_sql(in_time, total)
            order = f"k0, part, {in_time}" if isinstance(options, SequenceOptions) else "place"
            numbered = f"(select *, {number} as n from rows)"
            query = f"from (select * replace (({part})::utinyint as part) from {numbered}) order by {order}"
            sizes = {name: FIRST_ID + vocabulary.num_ids for name, vocabulary in vocabularies.items()}
            chosen = encoded_interactions(database, columns, query, ids, sizes)
        shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
        if split.is_random:
            chosen = replace(chosen, parts=split.random_parts(total, options.seed))
        if isinstance(options, SequenceOptions):
            splits, schema, windows = sequence_rows(chosen, options)
            for sentence in _notes(chosen, windows):
                preparation.note(sentence)
        else:
            splits, schema = rating_rows(chosen)
        if not splits["train"].num_rows:
            raise UserError("the training part has no rows: give more interactions, or another split (--split)")
        if not (split.has_validation or (split.is_by_files and num_validation)):
            del splits["validation"]
        written = write_splits(folder, splits, schema.label, preparation.progress)
        manifest = Manifest(
            schema=schema,
            splits={name: written_split(written[name]) for name in splits},
            preparation={"source": "interactions", **options.to_json(), "left_out": left_out},
            vocabularies=vocabularies,
            sources=sources,
            rejected=rejected,
            tool_version=__version__,
        )
        return manifest.save(folder, {one.file.path: one.pieces for ones in written.values() for one in ones})


def _find_inputs(
    files: InteractionFiles, split: InteractionSplit, note: NoteCallback
) -> tuple[list[TableInput], list[int]]:
    """Returns the inputs in order, and the number of the split that each is for.

    Raises:
        UserError: An input cannot be read, or inputs and the split do not go together.
    """
    if split.is_by_files != bool(files.test) or (files.validation and not files.test):
        raise UserError(
            f"{len(files.test)} files test and {len(files.validation)} validate: name files for the test (--test), "
            "perhaps others for the validation (--validation), and no split (--split files); or a split and no files "
            "for it"
        )
    named = {TRAIN: files.train, VALIDATION: files.validation, TEST: files.test}
    parts = [part for part, paths in named.items() if paths or part == TRAIN for _ in find_inputs(paths, note)]
    return find_inputs([path for paths in named.values() for path in paths]), parts


def _require_memory(num_rows: int, columns: InteractionColumns, memory_bytes: int) -> None:
    """Makes sure that ids and numbers of all interactions fit in memory.

    Raises:
        UserError: They do not.
    """
    needed = num_rows * (_ROW_BYTES + _COLUMN_BYTES * (len(columns.keys) + len(columns.numbers)))
    if needed > memory_bytes:
        raise UserError(
            f"{num_rows:,} interactions take about {format_bytes(needed)}, and the memory limit is "
            f"{format_bytes(memory_bytes)}: their ids must fit, so allow more (--memory-limit)"
        )


def _notes(chosen: EncodedInteractions, windows: Mapping[str, Windows]) -> Iterator[str]:
    """Yields which users have no rows or no training, and which splits take far more room than the interactions."""
    bounds, total = user_bounds(chosen.ids[USER]), len(chosen.parts)
    if num_single := int(np.count_nonzero(np.diff(bounds) == 1)):
        yield f"{num_single:,} users have a single item, which nothing precedes: they have no row"
    if num_unseen := int(np.count_nonzero(chosen.parts[bounds[:-1]] != TRAIN)):
        yield f"{num_unseen:,} users have no item to train on; what is predicted of them, is from their later items"
    for name, rows in windows.items():
        if rows.num_entries > _MANY_HISTORIES * total:
            yield (
                f"{name} has {len(rows):,} rows with {rows.num_entries:,} items, each a whole history, of {total:,} "
                "interactions: a split 'last-two', or a shorter time, takes less"
            )
