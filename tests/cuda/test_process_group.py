"""What nccl and the CUDA allocator are told before the first step."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distembed.base import ranks
from distembed.base.ranks import process_group


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the arguments of each process group that is joined, on a device that is not there."""
    calls: list[dict[str, Any]] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *ranks._ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **named: calls.append({"backend": backend, **named})
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return calls


def test_a_process_alone_tells_nccl_its_device(joined: list[dict[str, Any]]) -> None:
    with process_group("cuda", device_index=2) as own:
        assert own.device == torch.device("cuda", 2)
    assert [(call["backend"], call["device_id"]) for call in joined] == [("nccl", torch.device("cuda", 2))]


def test_a_launched_process_tells_nccl_its_device(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with process_group("auto"):
        pass
    assert [(call["backend"], call["device_id"]) for call in joined] == [("nccl", torch.device("cuda", 1))]


def test_gloo_is_told_no_device(joined: list[dict[str, Any]]) -> None:
    with process_group("cpu"):
        pass
    assert [(call["backend"], call["device_id"]) for call in joined] == [("gloo", None)]


def test_segments_of_the_allocator_grow_unless_the_user_says_otherwise(
    joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with process_group("cuda"):
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for name in ranks._ALLOCATOR_VARIABLES:
        for other in ranks._ALLOCATOR_VARIABLES:
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:64")
        with process_group("cuda"):
            assert {own: os.environ.get(own) for own in ranks._ALLOCATOR_VARIABLES if own in os.environ} == {
                name: "max_split_size_mb:64"
            }
