"""Interactions of users with items to a Parquet dataset: of ratings, or of sequences.

1. ``read``: files are read into memory (``reading.py``);
2. the interactions that stay are chosen (``selection.py``) and split (``splits.py``), users, items and other values get
   ids (``text_vocabulary.py``);
3. ``write``: rows are written as Parquet (``tables.py``), those of sequences cut into windows (``windows.py``).

The dataset appears under its name when it is complete, and not before
(:mod:`~distembed.data.prepare.staging`). Its bytes depend on the rows and the options alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from distembed import __version__
from distembed.data.dataset.manifest import Manifest, Vocabulary
from distembed.data.dataset.schema import USER, CategoricalFeature, Schema
from distembed.data.prepare.column_batches import list_column_files, list_line_files, store_pipes
from distembed.data.prepare.inputs import require_outside
from distembed.data.prepare.interactions.interactions import Interactions
from distembed.data.prepare.interactions.options import (
    LISTS,
    RATING,
    InteractionColumns,
    InteractionOptions,
    RatingOptions,
    SequenceOptions,
    require_columns,
)
from distembed.data.prepare.interactions.reading import InteractionInput, InteractionsRead, read_interactions
from distembed.data.prepare.interactions.selection import select
from distembed.data.prepare.interactions.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    InteractionSplit,
    time_order,
    user_bounds,
)
from distembed.data.prepare.interactions.tables import (
    EncodedInteractions,
    RatingRows,
    Rows,
    SequenceRows,
    TableWriter,
    list_columns,
)
from distembed.data.prepare.interactions.text_vocabulary import num_embeddings, write_text_vocabulary
from distembed.data.prepare.interactions.windows import Windows, evaluation_windows, training_windows
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.split import SPLIT_NAMES
from distembed.data.prepare.staging import disk_is_full_text, staged_folder
from distembed.data.prepare.write_parquet import written_split
from distembed.errors import UserError
from distembed.files import full_disk_explained

LEAST_MEMORY_BYTES = 64 << 20
DEFAULT_MEMORY_BYTES = 2 << 30

# What a split with a whole history in each row may hold, as a multiple of all interactions, before that is noted.
_MANY_HISTORIES = 10

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class InteractionFiles:
    """Files, folders or pipes of interactions; ``-`` is standard input.

    Attributes:
        train: All of them, or those that train.
        validation: Those that validate; only with ``test``.
        test: Those that test; then the others do not.
    """

    train: Sequence[AnyPath]
    validation: Sequence[AnyPath] = ()
    test: Sequence[AnyPath] = ()


@dataclass(frozen=True)
class Preparation:
    """Where a dataset is made, and how.

    Attributes:
        output: Dataset folder to make.
        memory_limit_bytes: Memory that interactions may take, above what the interpreter takes (about 150 MB).
        overwrite: Whether a dataset at ``output`` is replaced.
        progress: Function that is called now and then.
        note: Function that is told in a sentence what should be known of the input.

    Raises:
        UserError: The memory is too little.
    """

    output: AnyPath
    memory_limit_bytes: int = DEFAULT_MEMORY_BYTES
    overwrite: bool = False
    progress: ProgressCallback = field(default=ignore)
    note: NoteCallback = field(default=ignore)

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

    Args:
        files: What to read.
        preparation: Where the dataset is made.
        columns: Columns of the input; they are not looked at where the files are of lists.
        options: Which interactions are taken, how they are split, and how histories are cut.

    Returns:
        The manifest that was written.

    Raises:
        UserError: The input cannot be read, or nothing is left of it. Nothing was written.
        RunError: The disk is full. Nothing was left behind.
    """
    options = options or SequenceOptions()
    return _prepare(files, preparation, None if options.format == LISTS else columns or InteractionColumns(), options)


def _prepare(
    files: InteractionFiles,
    preparation: Preparation,
    columns: InteractionColumns | None,
    options: RatingOptions | SequenceOptions,
) -> Manifest:
    require_columns(columns or InteractionColumns(), options)
    paths, parts = _list_files(files, options, columns is None, preparation.note)
    output = Path(preparation.output)
    require_outside(paths, output)
    with (
        staged_folder(output, overwrite=preparation.overwrite) as folder,
        full_disk_explained(
            lambda error: disk_is_full_text(error, output, folder), (OSError, pa.ArrowException), max_file_size=True
        ),
    ):
        scratch = folder / ".pipes"
        scratch.mkdir()
        memory_bytes = preparation.memory_limit_bytes
        given = InteractionInput(store_pipes(paths, scratch), parts, columns, memory_bytes, options.max_rejected)
        found = read_interactions(given, folder, preparation.progress)
        shutil.rmtree(scratch)
        return _write(folder, found, options, preparation)


def _list_files(
    files: InteractionFiles, options: InteractionOptions, are_lines: bool, note: NoteCallback
) -> tuple[list[Path], dict[Path, int]]:
    """Returns the files to read in order, and the number of the split that each is for.

    Raises:
        UserError: A file cannot be read, or files and the split do not go together.
    """
    by_files = InteractionSplit.parse(options.split).is_by_files
    if by_files != bool(files.test) or (files.validation and not files.test):
        raise UserError(
            f"split (--split) is {options.split!r} and {len(files.test)} files test, {len(files.validation)} validate: "
            "name files for the test (--test), perhaps others for the validation (--validation), and no split; or a "
            "split and no such files"
        )
    list_files = list_line_files if are_lines else list_column_files
    named = {TRAIN: files.train, VALIDATION: files.validation, TEST: files.test}
    listed = {part: list_files(paths, note) for part, paths in named.items() if paths or part == TRAIN}
    parts = {path: part for part, paths in listed.items() for path in paths}
    if len(parts) < sum(map(len, listed.values())):
        raise UserError("a file is named for two splits: its rows would be counted twice; name it once")
    return list(parts), parts


def _write(
    folder: Path, found: InteractionsRead, options: RatingOptions | SequenceOptions, preparation: Preparation
) -> Manifest:
    """Chooses, splits and writes what was read."""
    interactions, left_out = select(found.interactions, options)
    split = InteractionSplit.parse(options.split)
    has_validation = split.has_validation(bool((found.interactions.parts == VALIDATION).any()))
    if not split.is_by_files:
        parts = split.parts(interactions.users.codes, interactions.times, options.seed)
        interactions = interactions.with_parts(parts)
    if isinstance(options, SequenceOptions):
        order = time_order(interactions.users.codes, interactions.times, interactions.parts)
        interactions = interactions.take(order)
    written, vocabularies = _with_ids(folder, interactions)
    if isinstance(options, SequenceOptions):
        splits, schema = _sequence_rows(interactions, written, vocabularies, options, preparation.note)
    else:
        splits, schema = _rating_rows(interactions, written, vocabularies)
    if not splits["train"].num_rows:
        raise UserError("the training part has no rows: give more interactions, or another split (--split)")
    if not has_validation:
        del splits["validation"]
    files = TableWriter(folder, preparation.progress).write(splits, schema.label)
    manifest = Manifest(
        schema=schema,
        splits={name: written_split(files[name]) for name in splits},
        preparation={"source": "interactions", **options.to_json(), "left_out": left_out.to_json()},
        vocabularies=vocabularies,
        sources=found.sources,
        rejected=found.rejected,
        tool_version=__version__,
    )
    return manifest.save(folder, {one.file.path: one.pieces for ones in files.values() for one in ones})


def _with_ids(folder: Path, interactions: Interactions) -> tuple[EncodedInteractions, dict[str, Vocabulary]]:
    """Writes the vocabularies, and returns the interactions in ids and numbers."""
    (folder / "vocabulary").mkdir()
    ids, vocabularies = {}, {}
    for name, column in interactions.key_columns.items():
        ids[name], vocabularies[name] = write_text_vocabulary(folder, name, column)
    ratings = interactions.ratings
    ratings = np.ones(interactions.num_rows, np.float32) if ratings is None else ratings
    return EncodedInteractions(ids, interactions.dense, ratings), vocabularies


def _rating_rows(
    interactions: Interactions, written: EncodedInteractions, vocabularies: Mapping[str, Vocabulary]
) -> tuple[dict[str, Rows], Schema]:
    features = tuple(CategoricalFeature(name, num_embeddings(entry)) for name, entry in vocabularies.items())
    schema = Schema(RATING, tuple(written.dense), features, label_kind="number", missing_dense=_has_missing(written))
    splits: dict[str, Rows] = {
        name: RatingRows(written, np.flatnonzero(interactions.parts == part)) for part, name in enumerate(SPLIT_NAMES)
    }
    return splits, schema


def _sequence_rows(
    interactions: Interactions,
    written: EncodedInteractions,
    vocabularies: Mapping[str, Vocabulary],
    options: SequenceOptions,
    note: NoteCallback,
) -> tuple[dict[str, Rows], Schema]:
    users, parts = interactions.users.codes, interactions.parts
    windows = {"train": training_windows(users, parts, options.max_length, options.windows)}
    windows |= {SPLIT_NAMES[part]: evaluation_windows(users, parts, part) for part in (VALIDATION, TEST)}
    for sentence in (*_notes_on_users(interactions), *_notes_on_histories(windows, interactions.num_rows)):
        note(sentence)
    mean = windows["train"].num_entries / max(1, len(windows["train"]))
    features = [CategoricalFeature(USER, num_embeddings(vocabularies[USER]))]
    for name in list_columns(written):
        features.append(CategoricalFeature(name, num_embeddings(vocabularies[name]), True, mean))
    dense = tuple(written.dense)
    schema = Schema(None, (), tuple(features), dense_sequences=dense, missing_dense=_has_missing(written))
    return {name: SequenceRows(written, rows) for name, rows in windows.items()}, schema


def _notes_on_users(interactions: Interactions) -> Iterator[str]:
    """Yields what becomes of users from whom nothing can be learnt or predicted."""
    bounds = user_bounds(interactions.users.codes)
    parts_of_first = interactions.parts[bounds[:-1]]
    if num_single := int(np.count_nonzero(np.diff(bounds) == 1)):
        yield f"{num_single:,} users have a single item, which nothing precedes: they have no row"
    if num_unseen := int(np.count_nonzero(parts_of_first != TRAIN)):
        yield f"{num_unseen:,} users have no item to train on; what is predicted of them, is from their later items"


def _notes_on_histories(windows: Mapping[str, Windows], num_rows: int) -> Iterator[str]:
    """Yields which splits take far more room than the interactions, since a history is there for each of its items."""
    for name, rows in windows.items():
        if rows.num_entries > _MANY_HISTORIES * num_rows:
            yield (
                f"{name} has {len(rows):,} rows with {rows.num_entries:,} items, each a whole history, of {num_rows:,} "
                "interactions: a split 'last-two', or a shorter time, takes less"
            )


def _has_missing(written: EncodedInteractions) -> bool:
    return any(bool(np.isnan(values).any()) for values in written.dense.values())
