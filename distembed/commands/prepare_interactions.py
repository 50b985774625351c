"""The commands ``distembed prepare ratings`` and ``prepare sequences``: from interactions of users with items."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.base.units import parse_bytes
from distembed.commands.preparation import MaxRejectedOption, prepare_progress, say_dataset
from distembed.commands.shared import OverwriteOption, console, flattened, note

if TYPE_CHECKING:
    from distembed.data.prepare.interactions import InteractionColumns, InteractionFiles, Preparation
    from distembed.data.prepare.options import ProgressCallback

app = typer.Typer()

_INPUTS = (
    "CSV, TSV, JSON lines, Parquet or RecBole files (gzip, zstd too), folders, patterns, URLs or pipes; - is stdin."
)
InputsArgument = Annotated[list[str], typer.Argument(metavar="INPUT...", help=_INPUTS)]


@dataclass(frozen=True)
class ColumnOptions:
    """Which columns of the input are read."""

    user: Annotated[str | None, typer.Option(help="Column of the user; `user` unless given.")] = None
    item: Annotated[str | None, typer.Option(help="Column of the item; `item` unless given.")] = None
    rating: Annotated[str | None, typer.Option(help="Column of the rating.")] = None
    time: Annotated[str | None, typer.Option(help="Column of the time; without one, rows are in order.")] = None
    categorical: Annotated[str, typer.Option(help="Columns of other values, separated by commas.")] = ""
    dense: Annotated[str, typer.Option(help="Columns of numbers, which may be missing, separated by commas.")] = ""
    no_header: Annotated[
        bool, typer.Option("--no-header", help="Text has no column names: columns are named by their numbers, from 1.")
    ] = False
    newlines_in_values: Annotated[
        bool, typer.Option("--newlines-in-values", help="Values of text in quotation marks may have several lines.")
    ] = False


@dataclass(frozen=True)
class ChoiceOptions:
    """Which interactions are taken."""

    min_rating: Annotated[float | None, typer.Option(help="Leave out lower ratings.")] = None
    k_core: Annotated[int, typer.Option(help="Leave out users and items with fewer interactions.")] = 1
    max_rejected: MaxRejectedOption = 0.01


@dataclass(frozen=True)
class SplitFiles:
    """Files of their own for the test and the validation."""

    test: Annotated[list[str] | None, typer.Option(help="File to test on, in place of a split; may be repeated.")] = (
        None
    )
    validation: Annotated[list[str] | None, typer.Option(help="File to validate on, with --test.")] = None


@dataclass(frozen=True)
class OutputOptions:
    """Where the dataset goes."""

    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make; it appears whole or not at all.")]
    memory_limit: Annotated[str, typer.Option(help="Memory that interactions may take, such as 2GB.")] = "2GB"
    overwrite: OverwriteOption = False


@app.command(
    "ratings",
    epilog="Example: `distembed prepare ratings ratings.csv --time timestamp --split random:0.8,0.1,0.1 -o ratings`; "
    "`distembed prepare ratings train.csv --test test.csv --no-header -o ratings`",
)
@flattened
def prepare_ratings_command(
    inputs: InputsArgument,
    *,
    to: OutputOptions,
    columns: ColumnOptions,
    implicit: Annotated[bool, typer.Option("--implicit", help="There is no rating: every row counts as 1.")] = False,
    split: Annotated[
        str | None,
        typer.Option(help="`random:0.8,0.1,0.1` (the default), `time:0.8,0.1,0.1`, `last-two` or `last-one`."),
    ] = None,
    files: SplitFiles,
    choice: ChoiceOptions,
    duplicates: Annotated[
        str, typer.Option(help="Of a user's interactions with an item `keep` all, the `first` or `last`, or `error`.")
    ] = "first",
    seed: Annotated[int, typer.Option(help="Seed of a random split.")] = 0,
) -> None:
    """Turn ratings (a row for a user, an item and a number) into a Parquet dataset with a row for each."""
    from distembed.base.errors import UserError
    from distembed.data.prepare.interactions import RatingOptions, prepare_ratings

    if implicit and columns.rating is not None:
        raise UserError("--implicit says that there is no rating, and --rating names its column: give one of the two")
    default_rating = "3" if columns.no_header else "rating"
    rating = None if implicit else columns.rating or default_rating
    options = RatingOptions(
        split=_split(split, files, RatingOptions.split), duplicates=duplicates, seed=seed, **vars(choice)
    )
    with prepare_progress(console) as progress:
        manifest = prepare_ratings(*_arguments(inputs, files, to, progress), _columns(columns, rating), options)
    say_dataset(manifest, str(to.output))


@app.command(
    "sequences",
    epilog="Example: `distembed prepare sequences clicks.parquet --time at --k-core 5 -o sequences`; "
    "`distembed prepare sequences users.txt.gz --format lists -o sequences`",
)
@flattened
def prepare_sequences_command(
    inputs: InputsArgument,
    *,
    to: OutputOptions,
    columns: ColumnOptions,
    format: Annotated[str, typer.Option(help="`columns`, or `lists`: lines of a user and items in order.")] = "columns",
    split: Annotated[
        str | None, typer.Option(help="`last-two` (the default), `last-one` or `time:0.8,0.1,0.1`.")
    ] = None,
    files: SplitFiles,
    choice: ChoiceOptions,
    duplicates: Annotated[
        str, typer.Option(help="Of a user's interactions with an item `keep` all, the `first` or `last`, or `error`.")
    ] = "keep",
    max_length: Annotated[int, typer.Option(help="Items of a training row, besides the one after them.")] = 50,
    windows: Annotated[str, typer.Option(help="Training rows of a user: the `latest`, or `all` of the history.")] = (
        "latest"
    ),
) -> None:
    """Turn interactions into a Parquet dataset with a row for a stretch of a user's history, in the order of time."""
    from distembed.data.prepare.interactions import SequenceOptions, prepare_sequences

    options = SequenceOptions(
        split=_split(split, files, SequenceOptions.split),
        duplicates=duplicates,
        max_length=max_length,
        windows=windows,
        format=format,
        **vars(choice),
    )
    with prepare_progress(console) as progress:
        named_columns = _columns(columns, columns.rating)
        manifest = prepare_sequences(*_arguments(inputs, files, to, progress), named_columns, options)
    say_dataset(manifest, str(to.output))


def _split(chosen: str | None, files: SplitFiles, default: str) -> str:
    """Returns the split: by files where some are named for the test."""
    return chosen or ("files" if files.test else default)


def _arguments(
    inputs: list[str], files: SplitFiles, to: OutputOptions, progress: "ProgressCallback"
) -> "tuple[InteractionFiles, Preparation]":
    from distembed.data.prepare.interactions import InteractionFiles, Preparation
    from distembed.data.prepare.interactions.preparation import LEAST_MEMORY_BYTES

    memory_limit_bytes = parse_bytes("--memory-limit", to.memory_limit, LEAST_MEMORY_BYTES)
    preparation = Preparation(to.output, memory_limit_bytes, to.overwrite, progress, note)
    return InteractionFiles(inputs, files.validation or (), files.test or ()), preparation


def _columns(columns: ColumnOptions, rating: str | None) -> "InteractionColumns":
    from distembed.data.prepare.interactions import InteractionColumns

    return InteractionColumns(
        columns.user,
        columns.item,
        rating,
        columns.time,
        _names(columns.categorical),
        _names(columns.dense),
        has_header=not columns.no_header,
        newlines_in_values=columns.newlines_in_values,
    )


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())
