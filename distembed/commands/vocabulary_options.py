"""The options by which a preparation applies the ids of another dataset, which the kinds of rows share."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class VocabularyOptions:
    """Whose ids are applied."""

    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="Dataset (or its URL) or run whose ids, means, bins are applied; others are out of vocabulary."
        ),
    ] = None
    grow: Annotated[
        bool, typer.Option("--grow", help="Values that --vocabulary lacks get ids behind those that are there.")
    ] = False
