"""Interactions of users with items to datasets of ratings and of sequences.

- ``preparation.py`` puts the steps together; ``options.py`` says what a dataset depends on besides the input.
- ``reading.py`` reads files into tables of a database.
- ``selection.py`` says which interactions stay, ``splits.py`` which of them train, validate and test, and
  ``windows.py`` how histories become rows.
- ``tables.py`` gives ids and writes the files.
"""

from distembed.data.prepare.interactions.options import InteractionColumns, RatingOptions, SequenceOptions
from distembed.data.prepare.interactions.preparation import (
    InteractionFiles,
    Preparation,
    prepare_ratings,
    prepare_sequences,
)

__all__ = [
    "InteractionColumns",
    "InteractionFiles",
    "Preparation",
    "RatingOptions",
    "SequenceOptions",
    "prepare_ratings",
    "prepare_sequences",
]
