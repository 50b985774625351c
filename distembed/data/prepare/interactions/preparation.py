"""Interactions of users with items to a Parquet dataset: of ratings, or of sequences.

1. ``read``: files are read into a database (``tables.py``);
2. interactions are selected and split by SQL: by their rating, without duplicates, and by the k-core, the largest set
   in which every user and every item has at least k interactions (found by removing rarer ones until none is left);
3. ``write``: users, items and other values get ids, and rows are written as Parquet (``tables.py``).

The dataset appears when it is complete (:mod:`~distembed.data.prepare.staging`). Its bytes depend on the rows and the
options alone.
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
    TEST,
    TRAIN,
    VALIDATION,
    InteractionColumns,
    InteractionOptions,
    InteractionSplit,
    RatingOptions,
    SequenceOptions,
    require_free_names,
)
from distembed.data.prepare.interactions.tables import (
    EncodedInteractions,
    InteractionInput,
    Windows,
    encoded_interactions,
    rating_rows,
    read_interactions,
    sequence_rows,
    user_bounds,
    write_splits,
    write_text_vocabularies,
)
from distembed.data.prepare.options import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.staging import require_outside, staged_folder
from distembed.data.prepare.table.inputs import TableInput, find_inputs
from distembed.data.prepare.write_parquet import written_split
from distembed.data.table.encoder import INTERACTIONS, TIME_SINCE_FIRST
from distembed.data.table.vocabulary import FIRST_ID


def select(database: Database, options: InteractionOptions, in_time: str) -> dict[str, int]:
    """Deletes from the table ``rows`` the interactions that the options leave out; returns their numbers by reason.

    ``in_time`` is SQL of the time order. Raises a UserError if duplicates are refused, or if nothing is left.
    """
    left_out = dict[str, int]()
    if options.min_rating is not None:
        left_out["below_rating"] = _delete(database, f"rating < {options.min_rating!r}::float")
    if options.duplicates != "keep":
        order = f"part, {in_time}"
        if options.duplicates == "last":
            order = f"{order} desc".replace(",", " desc,")
        repeated = (
            f"(select k0, k1, place, row_number() over (partition by k0, k1 order by {order}) as number from rows "
            "semi join (select k0, k1 from rows group by k0, k1 having count(*) > 1) using (k0, k1))"
        )
        (count,) = database.row(f"select count(*) from {repeated} where number > 1")
        if count and options.duplicates == "error":
            user, item = database.row(
                "select users.key, items.key "
                f"from (select * from {repeated} where number > 1 order by place limit 1) "
                "join keys as users on k0 = users.code join keys as items on k1 = items.code"
            )
            raise UserError(
                f"{count:,} interactions of a user with an item are there more than once, such as user {user!r} and "
                f"item {item!r}: keep one (--duplicates first, or last) or all (--duplicates keep)"
            )
        left_out["duplicates"] = _delete(database, f"place in (select place from {repeated} where number > 1)")
    if options.k_core > 1:
        rare = "{0} in (select {0} from rows group by {0} having count(*) < {1})"
        condition = " or ".join(rare.format(column, options.k_core) for column in ("k0", "k1"))
        # Deleting rare users makes items rare, and conversely: repeats until a round deletes no row.
        left_out["outside_core"] = sum(iter(lambda: _delete(database, condition), 0))
    left_out = {reason: count for reason, count in left_out.items() if count}
    if not num_rows(database):
        listed = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items())
        raise UserError(
            f"no interaction is left; left out: {listed}. Lower --min-rating or --k-core, or give more rows"
        )
    return left_out


def num_rows(database: Database) -> int:
    """Returns the number of interactions that are left."""
    return int(database.row("select count(*) from rows")[0])


def _delete(database: Database, condition: str) -> int:
    return int(database.row(f"delete from rows where {condition}")[0])


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
    test: Sequence[AnyPath] = ()  # then no other file has test rows


@dataclass(frozen=True)
class Preparation:
    """Where a dataset is made, and how."""

    output: AnyPath
    memory_limit_bytes: int = DEFAULT_MEMORY_BYTES  # in addition to the interpreter's own (about 150 MB)
    overwrite: bool = False  # whether a dataset at the output is replaced
    progress: ProgressCallback = field(default=ignore)
    note: NoteCallback = field(default=ignore)  # takes one sentence about the input

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
        files: The inputs.
        preparation: Where the dataset is made.
        columns: Columns of the input; without a rating, every interaction counts as 1.
        options: Which interactions are taken, and how they are split.
    """
    return _prepare(files, preparation, columns or InteractionColumns(rating=RATING), options or RatingOptions())


def prepare_sequences(
    files: InteractionFiles,
    preparation: Preparation,
    columns: InteractionColumns | None = None,
    options: SequenceOptions | None = None,
) -> Manifest:
    """Prepares a dataset whose rows are windows of a user's history; arguments as of :func:`prepare_ratings`."""
    options = options or SequenceOptions()
    return _prepare(files, preparation, None if options.format == LISTS else columns or InteractionColumns(), options)


def _prepare(
    files: InteractionFiles,
    preparation: Preparation,
    columns: InteractionColumns | None,
    options: RatingOptions | SequenceOptions,
) -> Manifest:
    split = InteractionSplit.parse(options.split)
    interactions = InteractionInput(*_find_inputs(files, split, preparation.note), columns, options.max_rejected)
    columns = columns or InteractionColumns()
    if isinstance(options, RatingOptions):
        require_free_names(columns, {RATING})
    if options.min_rating is not None and columns.rating is None:
        raise UserError("min_rating (--min-rating) needs ratings: name their column (--rating)")
    in_time = "place" if columns.time is None else "time, whole, place"
    output, memory_bytes = Path(preparation.output), 3 * preparation.memory_limit_bytes // 8
    require_outside([table_input.place for table_input in interactions.inputs], output)
    with staged_folder(output, overwrite=preparation.overwrite) as folder:
        with Database(folder / _SCRATCH, memory_bytes) as database:
            sources, rejected = read_interactions(database, interactions, folder, memory_bytes, preparation.progress)
            (num_validation,) = database.row("select count(*) from rows where part = ?", VALIDATION)
            left_out = select(database, options, in_time)
            total = num_rows(database)
            needed = total * (_ROW_BYTES + _COLUMN_BYTES * (len(columns.keys) + len(columns.numbers)))
            if needed > (allowed := preparation.memory_limit_bytes):
                raise UserError(
                    f"{total:,} interactions take about {format_bytes(needed)}, and the memory limit is "
                    f"{format_bytes(allowed)}: their ids must fit, so allow more (--memory-limit)"
                )
            vocabularies, ids = write_text_vocabularies(database, folder, columns.key_names)
            part, number = split.in_sql(in_time, total)
            is_sequences = isinstance(options, SequenceOptions)
            order = f"k0, part, {in_time}" if is_sequences else "place"
            numbered = f"(select *, {number} as n from rows)"
            query = f"from (select * replace (({part})::utinyint as part) from {numbered}) order by {order}"
            sizes = {name: FIRST_ID + vocabulary.num_ids for name, vocabulary in vocabularies.items()}
            chosen = encoded_interactions(database, columns, query, ids, sizes, since_first=is_sequences)
        shutil.rmtree(folder / _SCRATCH, ignore_errors=True)
        if split.is_random:
            chosen = replace(chosen, parts=split.random_splits(total, options.seed))
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
        files_by_split = write_splits(folder, splits, schema, preparation.progress)
        made = {"source": INTERACTIONS, **options.to_json(), "left_out": left_out}
        if is_sequences:
            made[TIME_SINCE_FIRST] = columns.time if columns.time in columns.dense else None
        manifest = Manifest(
            schema=schema,
            splits={name: written_split(files_by_split[name], schema) for name in splits},
            preparation=made,
            vocabularies=vocabularies,
            sources=sources,
            rejected=rejected,
            tool_version=__version__,
        )
        written_files = [file for split_files in files_by_split.values() for file in split_files]
        return manifest.save(folder, {written.file.path: written.pieces for written in written_files})


def _find_inputs(
    files: InteractionFiles, split: InteractionSplit, note: NoteCallback
) -> tuple[list[TableInput], list[int]]:
    """Returns all inputs, training files first, and the split number of each; refuses a split that does not fit."""
    if split.is_by_files != bool(files.test) or (files.validation and not files.test):
        raise UserError(
            f"{len(files.test)} files test and {len(files.validation)} validate: name files for the test (--test), "
            "perhaps others for the validation (--validation), and no split (--split files); or a split and no files "
            "for it"
        )
    paths_by_split = {TRAIN: files.train, VALIDATION: files.validation, TEST: files.test}
    split_numbers: list[int] = []
    for split_number, paths in paths_by_split.items():
        if paths or split_number == TRAIN:
            split_numbers += [split_number] * len(find_inputs(paths, note))
    return find_inputs([path for paths in paths_by_split.values() for path in paths]), split_numbers


def _notes(chosen: EncodedInteractions, windows: Mapping[str, Windows]) -> Iterator[str]:
    """Yields notes: users without rows, users without training items, splits much larger than the interactions."""
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
