"""The catalogue of devices, device files, and numbers that calibration finds again from the steps that they explain."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.planning.calibrate import BANDWIDTHS, SECONDS, calibrate, count_device_numbers, fit
from distembed.planning.devices import (
    DEVICES,
    Device,
    MeasuredDevice,
    device_here,
    find_device,
    read_device,
    write_device,
)
from distembed.planning.probes import ShardedTables, TimedStep, shortest_seconds
from distembed.planning.search import cluster_here
from tests.ranks import run_on_ranks

CPU = DEVICES["cpu-256gb"]
MEASURED = MeasuredDevice(dataclasses.replace(CPU, name="mine", error=0.1), ["row_seconds"], {"ranks": 2})


def test_numbers_are_found_again_from_steps_that_they_explain() -> None:
    generator = np.random.default_rng(0)
    numbers = {name: float(generator.uniform(1, 9)) * 1e-6 for name in SECONDS}
    numbers |= {name: float(generator.uniform(1, 9)) * 1e9 for name in BANDWIDTHS if name != "node_bandwidth"}
    counts = [{name: float(generator.integers(0, 100)) for name in numbers} for _ in range(40)]
    seconds = [
        sum(own[name] * (1e9 / numbers[name] if name in BANDWIDTHS else numbers[name]) for name in numbers)
        for own in counts
    ]
    # what no step counts is not found
    found = fit([{**own, "node_bandwidth": 0.0} for own in counts], seconds)
    assert found == pytest.approx(numbers)


def test_numbers_that_steps_speak_against_are_zero_or_left_out() -> None:
    counts = [{"row_seconds": float(n), "launch_seconds": 1.0, "lookup_bandwidth": float(20 - n)} for n in range(1, 20)]
    found = fit(counts, [3.0 * own["row_seconds"] for own in counts])
    assert found == {"row_seconds": pytest.approx(3.0), "launch_seconds": 0.0}


def test_a_device_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    write_device(file, MEASURED)
    assert read_device(file) == find_device(str(file)) == MEASURED.device
    changed = find_device(f"{file},memory=8GiB,launch_seconds=1e-6")
    assert changed == dataclasses.replace(MEASURED.device, memory_bytes=2**33, launch_seconds=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "plan"}, "is no device file"),
        ({"version": 2}, "version 2"),
        ({"device": 3}, "device is 3"),
        ({"device.kind": "tpu"}, "kind: .*'cpu'"),
        ({"device.name": "a\nb"}, r"name: .*got 'a\\nb'"),
        ({"device.memory_bytes": 1.5}, "memory_bytes: .* got 1.5"),
        ({"device.row_seconds": -1}, "row_seconds: .*greater than or equal to 0; got -1"),
        ({"device.lookup_bandwidth": 0}, "lookup_bandwidth: .*greater than 0; got 0"),
        ({"device.lookup_bandwidth": "fast"}, "lookup_bandwidth: .*got 'fast'"),
        ({"device.node_bandwidth": math.inf}, "node_bandwidth: .*finite"),
        ({"device.error": -0.1}, "error: .*or equal to 0; got -0.1"),
        ({"device.ranks_at_once": True}, "ranks_at_once: .*got True"),
        ({"device.lookup_bandwith": 1}, "did you mean lookup_bandwidth?"),
        ({"device.fp32_flops": None}, "fp32_flops: Field required"),
    ],
)
def test_files_that_are_damaged_or_others_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    write_device(file, MEASURED)
    content = json.loads(file.read_text())
    for path, value in changes.items():
        *parents, name = path.split(".")
        values = content[parents[0]] if parents else content
        values[name] = value
        if value is None:
            del values[name]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        find_device(str(file))


def test_a_file_that_is_missing_or_no_json_says_how_to_make_one(tmp_path: Path) -> None:
    for text in (None, "{", "[]"):
        file = tmp_path / f"{text is None}.json"
        if text is not None:
            file.write_text(text)
        with pytest.raises(UserError, match="distembed plan --calibrate FILE"):
            find_device(str(file))


def check_counts(rank: int, world_size: int) -> None:
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    quotient = QuotientRemainder(400, collisions=4)
    tables = [CompositionalEmbeddingBagConfig(name, 400, 8, [name], quotient) for name in ("a", "b", "c")]
    places: list[Any] = [table_wise(rank=1, compute_kernel="fused"), row_wise(compute_kernel="fused"), data_parallel()]
    sharded = ShardedTables(zip(tables, places, strict=True), ranks)
    step = TimedStep(sharded, num_rows=16)
    (seconds,) = shortest_seconds([step], rounds=1, num_steps=1, device=ranks.device)
    assert 0 < seconds < math.inf
    device = dataclasses.replace(CPU, host_bandwidth=math.inf)
    counts = count_device_numbers(lambda own: sharded.estimate(16, own)[1].total / 1e3, device)
    numbers = dataclasses.asdict(device)
    # an estimate is the sum of what it counts, but for the longer of two ways in which ids and vectors are sent
    total = sum(counts[name] * numbers[name] for name in SECONDS)
    total += sum(counts[name] * 1e9 / numbers[name] for name in BANDWIDTHS)
    assert total == pytest.approx(sharded.estimate(16, device)[1].total / 1e3)


@pytest.mark.distributed
def test_an_estimate_is_the_sum_of_what_it_counts() -> None:
    run_on_ranks(2, check_counts)


def check_order(ranks: Ranks, device: Device) -> None:
    """Of two placements of which one takes twice as long as the other, the estimate says which."""
    tables = [CompositionalEmbeddingBagConfig(f"t{i}", 60_000, 32, [f"f{i}"]) for i in range(6)]
    places: list[list[Any]] = [
        [table_wise(rank=i % 2, compute_kernel="fused") for i in range(6)],
        [row_wise(compute_kernel="fused")] * 6,
        [data_parallel()] * 6,
    ]
    steps = [TimedStep(ShardedTables(zip(tables, own, strict=True), ranks), num_rows=512) for own in places]
    taken = shortest_seconds(steps, rounds=8, num_steps=4, device=ranks.device)
    estimated = [step.estimated_seconds(device) for step in steps]
    for (fast, less), (slow, more) in itertools.permutations(zip(taken, estimated, strict=True), 2):
        assert less < more or slow < 2 * fast


def check_calibration(rank: int, world_size: int) -> None:
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    measured = calibrate(ranks)
    check_order(ranks, measured.device)
    assert {"local_bandwidth", "collective_seconds", "fp32_flops"} <= set(measured.measured)
    assert "node_bandwidth" not in measured.measured
    values = [value for value in dataclasses.asdict(measured.device).values() if isinstance(value, float)]
    assert all(0 <= value < math.inf for value in values)


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_measure_their_machine_together_and_then_know_what_takes_longer() -> None:
    run_on_ranks(2, check_calibration)


def test_devices_are_found_by_their_names_and_have_all_numbers() -> None:
    for name, device in DEVICES.items():
        assert find_device(name) is device or find_device(name) == device
        assert device.name == name and device.kind in ("cuda", "cpu")
        numbers, may_be_none = dataclasses.asdict(device), ("row_seconds", "ranks_at_once", "error")
        assert all(numbers[field] > 0 for field in numbers if field not in ("name", "kind", *may_be_none))
        # memory is nearer than other devices, and these are nearer than other nodes
        assert device.memory_bandwidth > device.local_bandwidth > device.node_bandwidth


def test_numbers_behind_the_name_replace_the_catalogues() -> None:
    own = find_device("h100-80gb,memory=96GiB,node_bandwidth=25GB,launch_seconds=4e-6")
    expected = dataclasses.replace(
        DEVICES["h100-80gb"], memory_bytes=96 * 2**30, node_bandwidth=25 * 10**9, launch_seconds=4e-6
    )
    assert own == expected
    other = find_device("memory=48GB,bf16_flops=90e12")
    nearest = dataclasses.replace(DEVICES["a100-40gb"], memory_bytes=48 * 10**9, bf16_flops=90 * 10**12)
    assert dataclasses.replace(other, name="a100-40gb") == nearest and "a100-40gb" in other.name
    for text, message in (
        ("h100-80gb,memory", "give NUMBER=SIZE"),
        ("h100-80gb,memory=much", "--gpu memory is 'much'"),
        ("h100-80gb,memory=0", "above 0"),
        ("h100-80gb,memroy=1GB", "Did you mean 'memory'"),
        ("h100-80gb,launch_seconds=5us", "number of 0 or more"),
        ("h100-80gb,row_seconds=-1", "number of 0 or more"),
        ("h100-80gb,utilisation=0", "utilisation is '0'; give a number above 0"),
        ("cpu-256gb,ranks_at_once=0", "ranks_at_once is '0'; give a number above 0"),
        ("h100-80gb,flops=1", "number of --gpu is 'flops'"),
        ("memory_bandwidth=1TB", "has no memory"),
        ("", "--gpu is ''"),
        ("h100", "Did you mean 'h100-80gb'"),
    ):
        with pytest.raises(UserError, match=message):
            find_device(text)


@pytest.mark.parametrize(
    ("driver", "memory_gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 79, "h100-80gb"),
        ("NVIDIA H200", 139, "h200-141gb"),
        ("NVIDIA B200", 178, "b200-180gb"),
        ("NVIDIA L4", 22, "l4-24gb"),
        ("NVIDIA L40S", 45, "a100-80gb"),  # unknown
    ],
)
def test_a_driver_says_which_device_it_is(
    driver: str, memory_gib: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: driver)
    found = device_here(torch.device("cuda"), memory_gib * 2**30)
    assert found == dataclasses.replace(DEVICES[name], memory_bytes=memory_gib * 2**30)


def test_a_machine_is_one_of_its_memory() -> None:
    found = device_here(torch.device("cpu"), 10**10)
    assert found.kind == "cpu" and found.memory_bytes == 10**10


def test_ranks_compute_like_the_device_that_a_config_names_and_keep_their_memory() -> None:
    ranks = Ranks(0, 2, 2, torch.device("cpu"))
    own, named = cluster_here(ranks).device, cluster_here(ranks, "cpu-256gb,lookup_bandwidth=1GB").device
    assert named.lookup_bandwidth == 10**9 != own.lookup_bandwidth
    assert named.memory_bytes == own.memory_bytes
    with pytest.raises(UserError, match="plan.device is 'h100-80gb', which is a cuda device, and the ranks are on cpu"):
        cluster_here(ranks, "h100-80gb")
    with pytest.raises(UserError, match="plan.device"):
        cluster_here(ranks, "h900")
