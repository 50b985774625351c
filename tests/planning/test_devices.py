"""The catalogue, other numbers than its own, and the device that a process has."""

import dataclasses

import pytest
import torch

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.planning.devices import DEVICES, device_here, find_device
from distembed.planning.search import cluster_here


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
