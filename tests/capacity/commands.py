"""``distembed plan`` within this process, and clusters of a given memory."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

from distembed.base.units import parse_bytes
from distembed.commands import cli
from distembed.planning.devices import Cluster, find_device

CONFIGS = Path(__file__).parents[2] / "configs"
KAGGLE, MLPERF = CONFIGS / "criteo_kaggle.yaml", CONFIGS / "mlperf_dlrm_dcnv2.yaml"
NAIVE, EARLY = "embedding.default.partition=naive", "plan.time_tolerance=0.5"
"""EARLY ends the search of a plan that need not be good."""


def plan(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.app(["plan", *map(str, arguments), "--json"], standalone_mode=False)
    return int(code or 0), json.loads(printed.getvalue())


def cluster(memory: str, nodes: int = 1, gpus: int = 1, host_memory: int = 0, device: str = "h100-80gb") -> Cluster:
    own = dataclasses.replace(find_device(device), memory_bytes=parse_bytes("memory", memory))
    return Cluster(own, nodes, gpus, host_memory)
