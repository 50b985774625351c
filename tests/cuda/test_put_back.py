"""Each wait that was once in a step is put back, and the rehearsal refuses it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import grouped
from distembed.sharding.bucket_pool import split_bags
from distembed.sharding.groups import base, per_id
from distembed.sharding.groups.base import LookupRequest
from distembed.sharding.ids import FeatureRows, IdCounts, distinct_ids
from distembed.sse import SSE, replacement
from distembed.sse.draws import Drawer
from tests.cuda.pretend import Refused
from tests.cuda.rehearsal import Cell, rehearsed

QR = "quotient_remainder"


def constants_each_step(patch: pytest.MonkeyPatch) -> None:
    def rows(own: FeatureRows, ids: Tensor, counts: IdCounts) -> Tensor:
        return own._scheme.rows_of_tables(own._partitions, ids.view(len(own._partitions), -1)).flatten(1)

    patch.setattr(FeatureRows, "__call__", rows)


def counts_from_the_host(patch: pytest.MonkeyPatch) -> None:
    def on_device(counts: IdCounts) -> Tensor:
        return torch.tensor(counts.on_host, device=counts._lengths.device)

    patch.setattr(IdCounts, "on_device", property(on_device))


def lengths_are_looked_at(patch: pytest.MonkeyPatch) -> None:
    def looks(group: Any, features: KeyedJaggedTensor) -> bool:
        lengths = features.lengths()
        return features.values().numel() <= lengths.numel() and bool((lengths <= 1).all())

    patch.setattr(base.Group, "has_at_most_one_id_each", looks)


def ids_are_told_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(per_id, "every_id", lambda ids, counts: distinct_ids(ids, counts.on_host, 10**6))


def chunks_are_counted(patch: pytest.MonkeyPatch) -> None:
    def group(rows: Tensor, num_buckets: int) -> Any:
        counts = torch.bincount(rows, minlength=num_buckets)
        return grouped.group_in_chunks(rows, counts, grouped.chunk_sizes(counts)[0])

    patch.setattr(grouped, "group", group)


def chunks_are_counted_without_bincount(patch: pytest.MonkeyPatch) -> None:
    def group(rows: Tensor, num_buckets: int) -> Any:
        counts = rows.new_zeros(num_buckets).index_add_(0, rows, torch.ones_like(rows))
        return grouped.group_in_chunks(rows, counts, grouped.chunk_sizes(counts)[0])

    patch.setattr(grouped, "group", group)


def bags_are_split_in_buckets(patch: pytest.MonkeyPatch) -> None:
    def request(group: Any, features: KeyedJaggedTensor) -> LookupRequest:
        rows = group.rows(features.values().long(), IdCounts.of_batch(features))
        lengths = features.lengths().view(group.num_features, -1)
        buckets = split_bags(rows, lengths, group._num_rows, group._shifts)
        return LookupRequest(buckets.rows, buckets.offsets, [None] * group.num_slices, features, buckets=buckets)

    patch.setattr(per_id.ProductGroup, "request_distinct", request)


def draws_are_copied_from_pageable_memory(patch: pytest.MonkeyPatch) -> None:
    def sent(values: Any, device: torch.device) -> Any:
        return torch.from_numpy(values).to(device, non_blocking=True)

    patch.setattr(replacement, "sent_to_device", sent)


PUT_BACK: dict[Callable[[pytest.MonkeyPatch], None], tuple[Cell, str, str]] = {
    constants_each_step: (Cell(QR, "product", "table_wise"), "single", "copies to the device"),
    counts_from_the_host: (Cell(QR, "product", "table_wise"), "ragged", "a list is copied"),
    lengths_are_looked_at: (Cell(QR, "product", "table_wise"), "single", "waits for the device"),
    ids_are_told_apart: (Cell(QR, "product", "table_wise"), "ragged", ""),
    chunks_are_counted: (Cell(QR, "path_mlp", "table_wise"), "single", "bincount"),
    chunks_are_counted_without_bincount: (Cell(QR, "path_mlp", "table_wise"), "single", ""),
    bags_are_split_in_buckets: (Cell(QR, "product", "table_wise"), "ragged", "mask"),
    draws_are_copied_from_pageable_memory: (
        Cell(QR, "product", "table_wise", settings=(("sse", SSE(p0=0.5)),)),
        "single",
        "copies to the device",
    ),
}


@pytest.mark.parametrize("put_back", PUT_BACK, ids=lambda put_back: put_back.__name__)
def test_what_is_put_back_is_refused(put_back: Callable[[pytest.MonkeyPatch], None]) -> None:
    cell, bags, reason = PUT_BACK[put_back]
    with rehearsed(cell) as made:
        made.rehearse(bags)
        made.strict = False
        features = made.batch(bags)
        with pytest.MonkeyPatch.context() as patch:
            put_back(patch)
            made.strict = True
            with pytest.raises(Refused, match=reason):
                made.step(features)


def test_numbers_for_a_gpu_are_drawn_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    stock = Drawer.__call__

    def draw(drawer: Drawer, *arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return stock(drawer, *arguments)

    monkeypatch.setattr(Drawer, "__call__", draw)
    with rehearsed(Cell(QR, "product", "table_wise", settings=(("sse", SSE(p0=0.5)),))) as made:
        made.rehearse("single")
    assert threads
    assert all(name.startswith("distembed-sse") for name in threads)
