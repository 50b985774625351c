"""Which tables are on which server, where they do not fit into one: whole tables, the largest ones first."""

from __future__ import annotations

from collections.abc import Mapping

from distembed.base.errors import UserError
from distembed.base.units import format_bytes


def divide_tables(table_bytes: Mapping[str, int], server_bytes: int) -> list[list[str]]:
    """Returns the names of the tables on each server: as few servers as are found, of about equal loads.

    Args:
        table_bytes: Bytes of each table by its name.
        server_bytes: Bytes of tables that a server has room for.

    Raises:
        UserError: A table alone is larger.
    """
    largest = max(table_bytes, key=lambda name: table_bytes[name])
    if table_bytes[largest] > server_bytes:
        raise UserError(
            f"--server-memory is {format_bytes(server_bytes)}, and the table {largest!r} alone takes "
            f"{format_bytes(table_bytes[largest])}; tables are not divided: give more, store it with --precision int8, "
            "or train it further compressed."
        )
    for num_servers in range(-(-sum(table_bytes.values()) // server_bytes), len(table_bytes) + 1):
        loads, servers = [0] * num_servers, [list[str]() for _ in range(num_servers)]
        for name in sorted(table_bytes, key=lambda name: -table_bytes[name]):
            least = loads.index(min(loads))
            loads[least] += table_bytes[name]
            servers[least].append(name)
        if max(loads) <= server_bytes:
            return [server for server in servers if server]
    raise AssertionError("a server for each table has room, as none is larger")
