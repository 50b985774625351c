"""The command ``distembed predict``: scores of a split's rows, or of raw rows."""

from pathlib import Path
from typing import Annotated

import typer

from distembed.base.errors import UserError
from distembed.commands.shared import note, say
from distembed.commands.train import CheckpointOption, DataOption, RunFolderArgument

app = typer.Typer()


@app.command(
    "predict",
    epilog="Example: `distembed predict runs/first --input today.csv --key id --output scores.parquet`; "
    "of a split: `distembed predict runs/first --split test --output predictions.parquet`",
)
def predict_command(
    run: RunFolderArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .parquet or .csv.")],
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            help="Raw rows to predict: CSV, TSV, JSON lines or Parquet; a file, folder, pattern, URL, or - for "
            "standard input, with the columns that the run's dataset was prepared from. May be repeated.",
        ),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="Column of INPUT to keep beside the predictions. May be repeated.")
    ] = None,
    max_rejected: Annotated[
        float, typer.Option(help="Largest share of malformed rows of INPUT, whose predictions are null.")
    ] = 0.01,
    split: Annotated[str | None, typer.Option(help="Split of the dataset to predict; test without --input.")] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Write users and items as ids of the dataset, not as raw values.")
    ] = False,
    data: DataOption = None,
    checkpoint: CheckpointOption = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Write what a run predicts of raw rows or of a split: click probabilities, ratings, or items for users."""
    from distembed.training.trained_run import require_prediction_file

    if input and split is not None:
        raise UserError("--input and --split are both given: predict raw rows, or those of a split.")
    if key and not input:
        raise UserError("--key names columns of --input, which is not given.")
    require_prediction_file(output, overwrite)
    if not input:
        _predict_split(run, output, split or "test", data, checkpoint, ids)
        return
    from distembed.serving.requests import RawRequest, find_run_for_rows, seen_items_note

    request = RawRequest(input, key or [], max_rejected)
    found = find_run_for_rows(run, data, checkpoint)
    request.require_usable(found.manifest, output)
    from distembed.serving.raw_predictions import RawScoring
    from distembed.training.inference import load_run

    with load_run(found) as loaded:
        if loaded.ranks.is_first:
            note(seen_items_note(found))
        scoring = RawScoring.of_run(loaded, found, raw_values=not ids)
        written = scoring.write(lambda: request.open(found), output)
        if written is not None:
            say(f"{output}: {written.num_lines:,} predictions{_null_ones(written.rejected)}")


def _null_ones(rejected: dict[str, int]) -> str:
    """Returns how many predictions are null and why, or nothing where none is."""
    if not rejected:
        return ""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
    return f", of which {sum(rejected.values()):,} are null for malformed rows ({reasons})"


def _predict_split(run: Path, output: Path, split: str, data: str | None, checkpoint: str | None, ids: bool) -> None:
    """Predicts the rows of a split."""
    from distembed.training.trained_run import find_trained_run

    found = find_trained_run(run, data, split, checkpoint)
    from distembed.training.inference import load_run, predict_split

    with load_run(found) as loaded:
        num_rows = predict_split(loaded.state, loaded.dataset, split, output, loaded.ranks, raw_values=not ids)
        if loaded.ranks.is_first:
            say(f"{output}: {num_rows:,} predictions")
