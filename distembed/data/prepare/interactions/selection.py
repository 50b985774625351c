"""Which interactions a dataset is made of: those with a rating that is high enough, each once, and the k-core.

The k-core is the largest set of interactions in which every user and every item has at least k of them. It is what is
left when users and items with fewer are taken away again and again, in whatever order.
"""

from __future__ import annotations

from distembed.data.prepare.count import Database
from distembed.data.prepare.interactions.options import InteractionOptions
from distembed.errors import UserError

_CORE = (
    "semi join (select k0 from rows group by k0 having count(*) >= {k}) using (k0) "
    "semi join (select k1 from rows group by k1 having count(*) >= {k}) using (k1)"
)


def select(database: Database, options: InteractionOptions, in_time: str) -> dict[str, int]:
    """Leaves in the table ``rows`` the interactions that the options keep.

    Args:
        database: Database with the tables of :mod:`~distembed.data.prepare.interactions.reading`.
        options: Which interactions are kept.
        in_time: Columns by which rows are in the order of time.

    Returns:
        Number of the interactions left out, by reason: ``below_rating``, ``duplicates``, ``outside_core``.

    Raises:
        UserError: Duplicates are an error and there are some, or nothing is left.
    """
    left_out = {}
    if options.min_rating is not None:
        left_out["below_rating"] = _keep(database, f"where rating >= {options.min_rating!r}::float")
    if options.duplicates != "keep":
        columns = f"part, {in_time}".split(", ")
        order = ", ".join(f"{column} desc" if options.duplicates == "last" else column for column in columns)
        rank = f"row_number() over (partition by k0, k1 order by {order})"
        if options.duplicates == "error":
            _require_distinct(database, rank)
        left_out["duplicates"] = _keep(database, f"qualify {rank} = 1")
    if options.k_core > 1:
        left_out["outside_core"] = 0
        while taken := _keep(database, _CORE.format(k=options.k_core)):
            left_out["outside_core"] += taken
    left_out = {reason: count for reason, count in left_out.items() if count}
    if not num_rows(database):
        listed = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items())
        raise UserError(
            f"no interaction is left; left out: {listed}. Lower --min-rating or --k-core, or give more rows"
        )
    return left_out


def num_rows(database: Database) -> int:
    """Returns the number of interactions that are left."""
    (count,) = database.row("select count(*) from rows")
    return int(count)


def _keep(database: Database, condition: str) -> int:
    """Leaves the rows that a clause of SQL keeps, and returns the number of the others."""
    before = num_rows(database)
    database.run(f"create or replace table rows as select * from rows {condition}")
    return before - num_rows(database)


def _require_distinct(database: Database, rank: str) -> None:
    """Makes sure that each pair of user and item is there once.

    Raises:
        UserError: One is there again.
    """
    (count,) = database.row(f"select count(*) from (select place from rows qualify {rank} > 1)")
    if count:
        user, item = database.row(
            "select keys0.key, keys1.key from rows join keys0 on k0 = keys0.code join keys1 on k1 = keys1.code "
            f"qualify {rank} > 1 order by place limit 1"
        )
        raise UserError(
            f"{count:,} interactions of a user with an item are there more than once, such as user {user!r} and item "
            f"{item!r}: keep one (--duplicates first, or last) or all (--duplicates keep)"
        )
