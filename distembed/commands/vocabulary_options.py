"""The options by which a preparation applies the ids of another dataset, which the kinds of rows share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class VocabularyOptions:
    """Whose ids are applied."""

    vocabulary: Annotated[
        Path | None,
        typer.Option(help="Dataset or run whose ids, means and bins are applied; other values are out of vocabulary."),
    ] = None
    grow: Annotated[
        bool, typer.Option("--grow", help="Values that --vocabulary lacks get ids behind those that are there.")
    ] = False
