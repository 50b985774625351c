"""Which interactions a dataset is made of: those with a rating that is high enough, each once, and the k-core.

The k-core is the largest set of interactions in which every user and every item has at least k of them. It is what is
left when users and items with fewer are taken away again and again, in whatever order.
"""

from __future__ import annotations

from distembed.base.errors import UserError
from distembed.data.prepare.count import Database
from distembed.data.prepare.interactions.options import InteractionOptions


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
    left_out = dict[str, int]()
    if options.min_rating is not None:
        left_out["below_rating"] = _delete(database, f"rating < {options.min_rating!r}::float")
    if options.duplicates != "keep":
        order = f"part, {in_time}"
        if options.duplicates == "last":
            order = f"{order} desc".replace(",", " desc,")
        repeated = (
            f"(select k0, k1, place, row_number() over (partition by k0, k1 order by {order}) as number from rows "
            "semi join (select k0, k1 from rows group by k0, k1 having count(*) > 1) using (k0, k1))"
        )
        if options.duplicates == "error":
            _require_none(database, f"{repeated} as repeated where number > 1")
        left_out["duplicates"] = _delete(database, f"place in (select place from {repeated} where number > 1)")
    if options.k_core > 1:
        rare = "{0} in (select {0} from rows group by {0} having count(*) < {1})"
        condition = " or ".join(rare.format(column, options.k_core) for column in ("k0", "k1"))
        left_out["outside_core"] = sum(iter(lambda: _delete(database, condition), 0))
    left_out = {reason: count for reason, count in left_out.items() if count}
    if not num_rows(database):
        listed = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items())
        raise UserError(
            f"no interaction is left; left out: {listed}. Lower --min-rating or --k-core, or give more rows"
        )
    return left_out


def num_rows(database: Database) -> int:
    """Returns the number of interactions that are left."""
    return int(database.row("select count(*) from rows")[0])


def _delete(database: Database, condition: str) -> int:
    """Deletes rows, and returns how many."""
    return int(database.row(f"delete from rows where {condition}")[0])


def _require_none(database: Database, repeated: str) -> None:
    """Makes sure that no pair of user and item is there again.

    Raises:
        UserError: One is.
    """
    (count,) = database.row(f"select count(*) from {repeated}")
    if count:
        user, item = database.row(
            "select users.key, items.key "
            f"from (select * from {repeated} order by place limit 1) "
            "join keys as users on k0 = users.code join keys as items on k1 = items.code"
        )
        raise UserError(
            f"{count:,} interactions of a user with an item are there more than once, such as user {user!r} and item "
            f"{item!r}: keep one (--duplicates first, or last) or all (--duplicates keep)"
        )
