"""A step of tables that are looked up in one pass, on pretended CUDA: it waits for nothing, and copies nothing."""

from collections import Counter
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation

from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.kernels.triton_lookup import TritonLookup
from distembed.partitions.base import Digit
from distembed.sharding.groups.fused import FusedGroup, _storage, reason_against_settings, reason_not_fused
from distembed.sharding.groups.load import TableLoad
from distembed.sharding.table_slice import slice_table
from tests.cuda import rehearsal
from tests.cuda.must_wait import WAITS
from tests.cuda.one_pass import StandInStorage, one_pass
from tests.cuda.pretend import pretend_cuda
from tests.cuda.rehearsal import Cell, rehearsed

FUSED = (("kernel", "fused"),)
DEVICE, MANAGED = EmbeddingLocation.DEVICE, EmbeddingLocation.MANAGED
MANAGED_CACHING, ROW_WISE = EmbeddingLocation.MANAGED_CACHING, EmbOptimType.EXACT_ROWWISE_ADAGRAD


def slow(*arguments: object) -> Any:
    return pytest.param(*arguments, marks=pytest.mark.slow)


CELLS = [
    (Cell("quotient_remainder", "product", "table_wise", settings=FUSED), ("single", "ragged", "weighted")),
    (Cell("quotient_remainder", "product", "row_wise", settings=FUSED), ("ragged",)),
    slow(Cell("mixed_radix", "sum", "column_wise", settings=FUSED), ("ragged",)),
    slow(Cell("quotient_remainder", "concat", "table_wise", settings=FUSED), ("single",)),
    (Cell("quotient_remainder", "product", "table_wise", None, FUSED), ("single", "ragged")),
]


@pytest.mark.parametrize(("cell", "kinds"), CELLS, ids=lambda own: str(own)[:80])
def test_a_step_in_one_pass_waits_for_nothing(cell: Cell, kinds: tuple[str, ...]) -> None:
    launched: Counter[str] = Counter()
    with one_pass(launched), rehearsed(cell) as made:
        for bags in kinds:
            launched.clear()
            made.rehearse(bags)
            assert set(made.waited) <= set(WAITS)
            groups = [group for lookup in made.module._lookups for group in lookup._groups]
            assert groups and all(isinstance(group, FusedGroup) for group in groups)
            # twice, as a batch is rehearsed: forward, keys, and two kernels for each partition
            assert launched["compose"] == launched["write_keys"] == 2 * len(groups)
            assert launched["sum_runs"] == launched["join_runs"] and launched["sum_slices"] == launched["add_slices"]
            assert launched["sum_runs"] + launched["sum_slices"] >= 4 * len(groups)


@pytest.mark.parametrize("bags", ["single", "ragged"])
@pytest.mark.parametrize(("num_ids", "num_sorted", "num_launches"), [(10_000, 0, 6), (262_656, 1, 7), (400_000, 2, 10)])
def test_a_product_of_two_launches_as_many_operations_as_are_planned(
    num_ids: int, num_sorted: int, num_launches: int, bags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions of 100 and 100 rows are summed in slices, 633 and 632 are sorted, and of 513 and 512 rows the 513."""
    launched: Counter[str] = Counter()
    monkeypatch.setattr(rehearsal, "NUM_EMBEDDINGS", dict.fromkeys(rehearsal.FEATURES, num_ids))
    monkeypatch.setattr(rehearsal, "ROWS", 1024)
    with one_pass(launched), rehearsed(CELLS[0][0], world_size=1) as made:
        made.rehearse(bags)
        started = [made.watch.launches[name] for name in ("sort", "zeros", "asynchronous_complete_cumsum")]
    # one partition's sums are cleared where two are sorted; bags of one id need no offsets
    assert started == [num_sorted, max(0, num_sorted - 1), bags == "ragged"]
    assert launched.total() // 2 + sum(started) == num_launches + (bags == "ragged")

    own = slice_table(CELLS[0][0].module().tables()[0], (0, rehearsal.DIM), ["fused"] * 2)
    load = TableLoad(own, 1, 1024.0, 1024.0, [num_ids], bags == "ragged", finds_distinct=False)
    planned = FusedGroup.launches(load)
    assert planned.group + 2 * planned.partition == num_launches + (bags == "ragged")


@pytest.mark.parametrize("rows", [25, 1000])
def test_the_lookup_alone_waits_for_nothing_and_copies_nothing_after_its_first_step(rows: int) -> None:
    """As a capture by ``torch.cuda.graph`` asks for."""
    may_copy, launched = True, Counter[str]()
    with pretend_cuda(lambda origin: may_copy), one_pass(launched):
        storages = [Storage([torch.empty(n * 8, device="cuda")], "sgd", None, 1.0) for n in (rows, 4)]
        parts = [TablePart(Digit(1, rows), 0, rows), TablePart(Digit(rows, None), 0, 4)]
        lookup = TritonLookup(Formula([range(8)] * 2, True, True), [parts], [1], storages)
        ids, offsets = (
            torch.empty(99, dtype=torch.int64, device="cuda"),
            torch.empty(50, dtype=torch.int64, device="cuda"),
        )
        for may_copy in (True, False):  # noqa: B007  (the watch asks for it)
            outputs = lookup(ids, offsets, None, storages)
            outputs.backward(torch.empty_like(outputs))
    assert launched.total() == 2 * 6


def test_auto_stays_with_fbgemm() -> None:
    launched: Counter[str] = Counter()
    with one_pass(launched), rehearsed(Cell("quotient_remainder", "product", "table_wise")) as made:
        made.rehearse("ragged")
    assert not launched


@pytest.mark.parametrize(
    ("places", "precision", "reason"),
    [
        ((DEVICE, DEVICE), SparseType.FP32, None),
        ((MANAGED, MANAGED), SparseType.FP32, None),
        ((MANAGED_CACHING,), SparseType.FP32, "MANAGED_CACHING"),
        ((DEVICE, MANAGED), SparseType.FP32, "DEVICE and MANAGED"),
        ((DEVICE,), SparseType.FP16, None),
        ((DEVICE,), SparseType.INT8, "int8"),
    ],
)
def test_what_the_kernels_do_not_read_is_refused_by_name(
    places: tuple[EmbeddingLocation, ...], precision: SparseType, reason: str | None
) -> None:
    with one_pass(Counter()), pretend_cuda():
        tables = StandInStorage([(10, 8, place, ComputeDevice.CUDA) for place in places], weights_precision=precision)
        found = reason_against_settings([tables])
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(("optimizer", "states"), [(EmbOptimType.EXACT_ADAGRAD, "uvm"), (ROW_WISE, "dev")])
def test_rows_in_host_memory_have_their_states_there_but_for_states_of_rows(
    optimizer: EmbOptimType, states: str
) -> None:
    """As :func:`fbgemm_gpu.split_table_batched_embeddings_ops_training.construct_split_state` places them."""
    with one_pass(Counter()), pretend_cuda():
        tables = StandInStorage([(10, 8, MANAGED, ComputeDevice.CUDA)], optimizer=optimizer)
        tables.weights_uvm, tables.weights_dev = tables.weights_dev, torch.empty(0)
        tables.momentum1_uvm = torch.empty(0)
        if states == "uvm":
            tables.momentum1_uvm, tables.momentum1_dev = tables.momentum1_dev, torch.empty(0)
        storage = _storage(tables, False, None)
    assert storage.weights[0] is tables.weights_uvm and storage.states is getattr(tables, f"momentum1_{states}")


@pytest.mark.parametrize(("kernel", "is_read"), [("fused", True), ("fused_uvm", True), ("fused_uvm_caching", False)])
def test_rows_in_host_memory_are_read_but_not_through_a_cache(kernel: str, is_read: bool) -> None:
    table = Cell("quotient_remainder", "product", "table_wise", settings=FUSED).module().tables()[0]
    own = slice_table(table, (0, table.embedding_dim), [kernel, None])
    reason = reason_not_fused(own, "cuda", "adagrad")
    assert reason == (None if is_read else f"its compute kernel is {kernel}")
