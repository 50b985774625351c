"""The command ``distembed export``: a trained run as programs that need torch alone."""

from pathlib import Path
from typing import Annotated

import typer

from distembed.commands.shared import note, say
from distembed.commands.train import CheckpointOption, DataOption, RunFolderArgument

app = typer.Typer()


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
    data: DataOption = None,
    checkpoint: CheckpointOption = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is an exported model.")] = False,
) -> None:
    """Write a run as programs of torch.export, which score as the trainer does: that is checked before they appear."""
    from distembed.base.units import format_bytes, parse_bytes
    from distembed.training.trained_run import find_trained_run

    server_bytes = None if server_memory is None else parse_bytes("--server-memory", server_memory)
    found = find_trained_run(run, data, checkpoint=checkpoint)
    from distembed.serving.export.export_run import ExportOptions, export_run

    options = ExportOptions(precision, materialise, server_bytes, overwrite, num_best=num_best, compile=compile)  # type: ignore[arg-type]
    manifest = export_run(found, output, options, data)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    tables = sum(table.bytes for table in manifest.tables)
    say(f"{output}: {manifest.model} of step {manifest.step:,}, {format_bytes(size)}, tables {format_bytes(tables)}")
    for number, shard in enumerate(manifest.shards):
        say(f"server {number}: {shard.file}, {format_bytes(shard.bytes)} of tables for {len(shard.features)} features")
    if manifest.compiled is not None:
        say(f"compiled: {manifest.compiled.file}, for {manifest.compiled.processor} ({manifest.compiled.instructions})")
    parity = manifest.parity
    say(f"sample: {parity.rows} rows, largest difference to the trained model {parity.largest_difference:.2g}")
    if parity.metric is None:
        note("the dataset is not here, so that no metric was compared, and the sample is of made-up rows; see --data.")
    else:
        say(f"{parity.split}: {parity.metric} {parity.exported:.6f}, trained {parity.trained:.6f}")
