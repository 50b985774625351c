"""Interactions of users with items to datasets of ratings and of sequences."""

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
