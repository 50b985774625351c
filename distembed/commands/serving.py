"""The commands ``distembed predict``, ``export`` and ``serve``: scores of raw rows, exported programs, and a server."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distembed.base.errors import UserError
from distembed.base.units import format_bytes, parse_bytes
from distembed.commands.shared import OverwriteOption, note, say
from distembed.commands.train import CheckpointOption, DataOption, RunFolderArgument

if TYPE_CHECKING:
    from distembed.training.trained_run import TrainedRun

app = typer.Typer()
_MOST_OF_WHOLE = 0.5
"""Share of a whole export's bytes above which a delta is not worth it."""


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
        list[str] | None, typer.Option(help="Column of INPUT to keep with the predictions. May be repeated.")
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
    overwrite: OverwriteOption = False,
) -> None:
    """Write a run's predictions for raw rows or a split: click probabilities, ratings, or items for users."""
    from distembed.training.trained_run import require_prediction_file

    if input and split is not None:
        raise UserError("--input and --split are both given: predict raw rows, or rows of a split.")
    if key and not input:
        raise UserError("--key names columns of --input, which is not given.")
    require_prediction_file(output, overwrite)
    if not input:
        _predict_split(run, output, split or "test", data, checkpoint, ids)
        return
    from distembed.serving.requests import RawRequest, find_run_for_rows, seen_items_note

    request = RawRequest(input, key or [], max_rejected)
    trained = find_run_for_rows(run, data, checkpoint)
    request.require_usable(trained.manifest, output)
    from distembed.serving.raw_predictions import predict_rows
    from distembed.training.inference import open_run

    with open_run(trained) as loaded:
        if loaded.ranks.is_first:
            note(seen_items_note(trained))
        predicted = predict_rows(
            loaded, trained, lambda: request.open(trained, loaded.model), output, raw_values=not ids
        )
        if predicted is not None:
            say(f"{output}: {predicted.num_lines:,} predictions{_null_ones(predicted.rejected)}")


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
    from distembed.training.inference import open_run, predict_split

    with open_run(found) as loaded:
        num_rows = predict_split(loaded.state, loaded.dataset, split, output, loaded.ranks, raw_values=not ids)
        if loaded.ranks.is_first:
            say(f"{output}: {num_rows:,} predictions")


@app.command(
    "export",
    epilog="Example: `distembed export runs/first --output model --precision int8`",
)
def export_command(
    run: RunFolderArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    precision: Annotated[
        str, typer.Option(metavar="[fp32|fp16|int8]", help="How the numbers of tables are stored; networks stay fp32.")
    ] = "fp32",
    materialise: Annotated[
        str,
        typer.Option(
            metavar="[auto|never|always]",
            help="Store the vector of each id in place of the partitions: where that is smaller, never, or always.",
        ),
    ] = "auto",
    server_memory: Annotated[
        str | None,
        typer.Option(
            "--server-memory",
            metavar="SIZE",
            help="Memory that one server has for tables, such as 16GB: larger models have a file of tables for each.",
        ),
    ] = None,
    num_best: Annotated[
        int, typer.Option(metavar="K", min=1, help="Items that a model of recommendations returns for a row.")
    ] = 10,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Also compile the program for this machine's processor, which needs g++."),
    ] = False,
    faiss: Annotated[
        str | None,
        typer.Option(
            metavar="[flat|hnsw]",
            help="Also write a FAISS index of the items of a model of two towers: exact, or a graph (HNSW).",
        ),
    ] = None,
    delta_since: Annotated[
        Path | None,
        typer.Option(
            "--delta-since",
            metavar="VERSION",
            help="Write a delta: only what changed since VERSION, an exported model or the delta before, or since the "
            "newest version in a folder. The delta has VERSION's precision and forms of tables.",
        ),
    ] = None,
    data: DataOption = None,
    checkpoint: CheckpointOption = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is an exported model.")] = False,
) -> None:
    """Write a run as programs of torch.export, which score as the trainer does: that is checked before they appear."""
    from distembed.training.trained_run import find_trained_run

    server_bytes = None if server_memory is None else parse_bytes("--server-memory", server_memory)
    trained = find_trained_run(run, data, checkpoint=checkpoint)
    if delta_since is not None:
        given = (precision, materialise, server_bytes, num_best, compile, faiss, overwrite)
        if given != ("fp32", "auto", None, 10, False, None, False):
            raise UserError(
                "--delta-since takes the precision, tables and items of its VERSION, and writes a new folder: leave "
                "--precision, --materialise, --server-memory, --num-best, --compile, --faiss and --overwrite out."
            )
        _export_delta(trained, output, delta_since)
        return
    from distembed.serving.export.export_run import ExportOptions, export_run

    kinds: Any = {"precision": precision, "materialise": materialise, "faiss": faiss}  # ExportOptions checks them
    options = ExportOptions(server_bytes=server_bytes, overwrite=overwrite, num_best=num_best, compile=compile, **kinds)
    manifest = export_run(trained, output, options, data)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    tables = sum(table.bytes for table in manifest.tables)
    say(f"{output}: {manifest.model} of step {manifest.step:,}, {format_bytes(size)}, tables {format_bytes(tables)}")
    for number, shard in enumerate(manifest.shards):
        say(f"server {number}: {shard.file}, {format_bytes(shard.bytes)} of tables for {len(shard.features)} features")
    if manifest.index is not None:
        also = "" if manifest.index.faiss is None else f" and {manifest.index.faiss}"
        say(f"items: {manifest.index.num_items:,} vectors of {manifest.index.dim} in {manifest.index.file}{also}")
    if manifest.compiled is not None:
        say(f"compiled: {manifest.compiled.file}, for {manifest.compiled.processor} ({manifest.compiled.instructions})")
    parity = manifest.parity
    say(f"sample: {parity.rows} rows, largest difference to the trained model {parity.largest_difference:.2g}")
    if parity.metric is None:
        note("the dataset is not here, so that no metric was compared, and the sample is of made-up rows; see --data.")
    else:
        say(f"{parity.split}: {parity.metric} {parity.exported:.6f}, trained {parity.trained:.6f}")


def _export_delta(run: "TrainedRun", output: Path, since: Path) -> None:
    """Writes a delta and says how large it is."""
    from distembed.serving.export.export_delta import export_delta

    delta = export_delta(run, output, since)
    manifest, share = delta.manifest, delta.num_bytes / delta.whole_bytes
    rows = sum(weight.num_rows or 0 for weight in manifest.weights)
    whole = sum(weight.num_rows is None for weight in manifest.weights)
    say(
        f"{output}: version {manifest.sequence}, of step {manifest.step:,}: {rows:,} rows and {whole} whole weights, "
        f"{format_bytes(delta.num_bytes)}, {share:.1%} of the whole programs"
    )
    if share > _MOST_OF_WHOLE:
        note("most of the model changed: a whole export is loaded beside the served one, and a delta pauses answers.")
    parity = manifest.parity
    say(f"sample: {parity.rows} rows, largest difference to the trained model {parity.largest_difference:.2g}")


@app.command(
    "serve", epilog="Example: `distembed serve model`, then `curl --json '{\"rows\": [...]}' localhost:8000/predict`"
)
def serve_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder that `distembed export` made.")],
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's own are open to all.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that score.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Rows of requests that are scored together.")] = 1024,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, max=10000, help="Milliseconds that a free thread waits for more requests.")
    ] = 0,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are answered with 429.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds that a request may take, or it gets 503.")] = 30,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest body of a request; 413 above.")] = "16MiB",
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows of a request; 413 above.")] = 65536,
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="Run the compiled program of MODEL: code, of whoever exported it."),
    ] = False,
    deltas: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of versions: newer exports and deltas in it are taken at the start, and as they appear.",
        ),
    ] = None,
) -> None:
    """Serve an exported model over HTTP, for trying and for small loads: JSON or Arrow in, scores out."""
    try:
        import fastapi  # noqa: F401
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is missing, which serving needs: `pip install 'distembed[serve]'`.") from error
    body_bytes = parse_bytes("--max-body", max_body)
    from distembed.serving.server.batching import ServerSettings
    from distembed.serving.server.serve import serve

    settings = ServerSettings(threads, max_batch, queue, max_wait_ms / 1000, timeout, body_bytes, max_rows)
    serve(model, host, port, settings, _say_at_once, compiled, deltas)


def _say_at_once(text: str) -> None:
    """Prints a line that whoever waits for the server reads at once, be it from a file."""
    say(text)
    sys.stdout.flush()
