"""How far converted tables are from the full ones, as a table in the terminal."""

from collections.abc import Sequence

from rich.table import Table

from distembed.base.units import format_bytes
from distembed.serving.convert.tables import FitError


def error_table(errors: Sequence[FitError]) -> Table:
    """Returns a row for each table; ``FitError`` says what the columns mean."""
    table = Table("table", "ids", "full", "compositional", "variance left", "worst id", "its distance")
    for error in errors:
        table.add_row(
            error.table,
            f"{error.num_embeddings:,}",
            format_bytes(error.full_bytes),
            format_bytes(error.compositional_bytes),
            f"{error.variance_left:.2%}",
            f"{error.worst_id:,}",
            f"{error.worst_distance:.3g}",
        )
    return table
