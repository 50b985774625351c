"""A step of every kind of table on pretended CUDA: the host waits for nothing, and nothing is copied to the device.

The table that is covered: every scheme, every composition, every way to place a table, bags with one id each, with
several, with weights, and sequences. What is left out cannot be made: paths in ranges of columns, weights where a
maximum is pooled or nothing is.
"""

import itertools
import threading
from typing import Any

import pytest

from distembed.composition import COMPOSITIONS
from distembed.partitions import PARTITIONS, KeyedHash
from distembed.sse import SSE
from distembed.sse.draws import Drawer
from tests.cuda.must_wait import WAITS
from tests.cuda.rehearsal import BAG_SHARDINGS, BAGS, SEQUENCE_SHARDINGS, Cell, rehearsed

BY_COLUMNS = ("column_wise", "table_column_wise", "grid_shard")
PATHS = ("path_linear", "path_mlp")
SAMPLE = ("quotient_remainder", "explicit")
"""Schemes of the default suite: of one with constants and of one without; all are in the slow one."""


def cells(pooling: str | None, shardings: tuple[str, ...]) -> list[object]:
    found = []
    for scheme, composition, sharding in itertools.product(PARTITIONS, COMPOSITIONS, shardings):
        if composition in PATHS and sharding in BY_COLUMNS and scheme not in ("naive", "remainder"):
            continue
        is_sample = scheme in SAMPLE and sharding in ("table_wise", "row_wise", "data_parallel")
        marks = () if is_sample and composition in ("product", "concat", "path_mlp") else (pytest.mark.slow,)
        found.append(pytest.param(Cell(scheme, composition, sharding, pooling), marks=marks))
    return found


def check(cell: Cell, kinds: tuple[str, ...]) -> None:
    with rehearsed(cell) as made:
        for bags in kinds:
            made.rehearse(bags)
            assert set(made.waited) <= set(WAITS)
            assert made.watch.launches.total() > 0


@pytest.mark.thorough
@pytest.mark.parametrize("cell", cells("sum", BAG_SHARDINGS), ids=str)
def test_a_step_of_bags_waits_for_nothing(cell: Cell) -> None:
    check(cell, BAGS)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", cells(None, SEQUENCE_SHARDINGS), ids=str)
def test_a_step_of_sequences_waits_for_nothing(cell: Cell) -> None:
    check(cell, ("single", "ragged"))


OF_IDS: dict[str, dict[str, object]] = {
    "sse": {"sse": SSE(p0=0.5)},
    "sse_reserved": {"sse": SSE(p0=0.5, reserved=(0, 7))},
    "sse_rarely": {"sse": SSE(p0=0.01)},
    "clip_to_oov": {"id_policy": "clip_to_oov", "oov_id": 1},
    "modulo": {"id_policy": "modulo"},
    "pre_hash": {"pre_hash": KeyedHash(3)},
    "int32": {"id_dtype": "int32"},
}
"""What is done with ids before they are sent."""


@pytest.mark.thorough
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
@pytest.mark.parametrize("of_ids", OF_IDS)
def test_ids_are_checked_mapped_and_replaced_without_a_wait(of_ids: str, sharding: str) -> None:
    check(Cell("quotient_remainder", "product", sharding, settings=tuple(OF_IDS[of_ids].items())), BAGS)


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_means_and_maxima_wait_for_nothing(pooling: str, sharding: str) -> None:
    if pooling == "max" and sharding == "row_wise":
        pytest.skip("a maximum over rows on several ranks is no sum: such a table cannot be placed row_wise")
    check(Cell("quotient_remainder", "product", sharding, pooling), ("single", "ragged"))


def test_numbers_for_a_gpu_are_drawn_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    stock = Drawer.__call__

    def draw(drawer: Drawer, *arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return stock(drawer, *arguments)

    monkeypatch.setattr(Drawer, "__call__", draw)
    check(Cell("quotient_remainder", "product", "table_wise", settings=(("sse", SSE(p0=0.5)),)), ("single",))
    assert threads and all(name.startswith("distembed-sse") for name in threads)
