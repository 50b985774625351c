"""The commands ``distembed prepare table`` and ``prepare schema``: from tables of any columns to a dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distembed.base.files import write_text
from distembed.base.outputs import require_file
from distembed.commands.parameters import flattened
from distembed.commands.shared import console, note, say
from distembed.commands.vocabulary_options import VocabularyOptions
from distembed.commands.work_options import OutputOption, WorkOptions

app = typer.Typer()

_INPUTS = (
    "CSV, TSV, JSON lines or Parquet, plain, gzip or Zstandard: files, folders, patterns, URLs, pipes; - is stdin."
)
InputsArgument = Annotated[list[str], typer.Argument(metavar="INPUT...", help=_INPUTS)]


@dataclass(frozen=True)
class TableDatasetOptions:
    """What a preparation does otherwise than the schema says."""

    split: Annotated[
        str | None,
        typer.Option(
            help="Shares of training, validation and test, `days`, `none`, `time:0.8,0.1,0.1`, `time:T1,T2`, "
            "`column:NAME` or, with --vocabulary, `validation` or `test`, in place of the schema's."
        ),
    ] = None
    min_count: Annotated[
        int | None, typer.Option(help="Values seen less often in training are out of vocabulary; the schema's.")
    ] = None
    hash_size: Annotated[int | None, typer.Option(help="Hash values into so many ids; the schema's.")] = None
    missing: Annotated[
        str | None, typer.Option(help="Missing numbers: `zero` makes them 0, `keep` null; the schema's.")
    ] = None
    max_rejected: Annotated[float, typer.Option(help="Share of malformed rows, above which nothing is written.")] = 0.01


@app.command(
    "table",
    epilog="Example: `distembed prepare table day_*.csv.gz --schema schema.yaml --output clicks`; "
    "`distembed prepare table s3://logs/clicks/ --schema avazu --output avazu --split time:0.8,0.1,0.1`",
)
@flattened
def prepare_table_command(
    inputs: InputsArgument,
    output: OutputOption,
    *,
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            help="YAML file of the columns, or a shipped name: `criteo` ...; that of --vocabulary unless given.",
        ),
    ] = None,
    dataset: TableDatasetOptions,
    known: VocabularyOptions,
    using: WorkOptions,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Turn tables of any columns into a Parquet dataset with a manifest, as a schema says."""
    from distembed.commands.prepare_progress import prepare_progress, say_dataset
    from distembed.data.prepare.table import TableOptions, prepare_table

    limits, options = using.limits(), TableOptions(**vars(dataset), **vars(known))
    with prepare_progress(console) as progress:
        manifest = prepare_table(
            inputs, output, schema, options, limits, overwrite=overwrite, progress=progress, note=note
        )
    say_dataset(manifest, output)


@app.command(
    "schema",
    epilog="Example: `distembed prepare schema clicks.csv --output schema.yaml`",
)
def prepare_schema_command(
    inputs: InputsArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; unless given, the schema is printed.")
    ] = None,
    rows: Annotated[int, typer.Option(help="About how many rows are looked at.", min=1)] = 100_000,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Guess the schema of a table from its first rows, and write it with comments that say what was seen."""
    from distembed.data.prepare.table.guess import guess_schema
    from distembed.data.prepare.table.inputs import find_inputs

    if output is not None:
        require_file("--output", output, overwrite)
    text = guess_schema(find_inputs(inputs, note), rows)
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)
        say(f"schema {output}: read it, and mend what is wrong")
