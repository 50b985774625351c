"""The bytes that graphs are said to take, against the arrays of the live module, to the byte."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distembed.sse import SSE, FeaturePerturbation, Graph, IdStream, Walk, graph_bytes
from distembed.sse.replacement import Replacer

SIZES = {"a": 50, "b": 50, "c": 50, "d": 7, "e": 1000, "f": 50, "g": 1000}


def graph(num_ids: int, num_edges: int, weighted: bool, seed: int = 0) -> Graph:
    rng = np.random.default_rng(seed)
    sources = rng.integers(0, num_ids, num_edges)
    targets = (sources + rng.integers(1, num_ids, num_edges)) % num_ids
    return Graph.from_edges(num_ids, sources, targets, rng.uniform(0.5, 2, num_edges) if weighted else None)


def rules(folder: Path | None) -> dict[str, SSE]:
    """Returns rules of tables that share a graph under several walks, have one of their own, or make no use of one."""
    shared, small, large = graph(50, 300, True), graph(7, 3, False), graph(1000, 5000, True)
    if folder is not None:
        for name, of_name in (("shared", shared), ("small", small), ("large", large)):
            of_name.write(folder / name)
        shared, small, large = (Graph.open(folder / name) for name in ("shared", "small", "large"))
    return {
        "f": SSE(0.1),
        "a": SSE(0.1, rho=1.0, graph=shared),  # draws all alike
        "g": SSE(0.0, rho=5.0, graph=large),  # never draws
        "b": SSE(0.1, rho=5.0, graph=shared, walk=Walk(0.5, 4)),
        "c": SSE(0.2, rho=9.0, graph=shared),
        "d": SSE(0.1, rho=5.0, graph=small),
        "e": SSE(0.1, rho=2.0, graph=large, reserved=()),
    }


def held(value: Any, seen: set[int]) -> Iterable[Any]:
    """Yields all arrays and tensors within an object and what it refers to, each once."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor | np.ndarray):
        yield value
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in [*parts, *getattr(value, "__dict__", {}).values()]:
        yield from held(part, seen)


def replacer(module: FeaturePerturbation, device: str) -> Replacer:
    """Returns the replacer of a device, as the first batch there makes it."""
    return Replacer(module._streams, torch.device(device), torch.int64, may_be_outside=False)


def live_bytes(of_replacer: Replacer) -> int:
    """Returns the bytes of the graphs' arrays; what else a graph's draw holds is a number a stream."""
    arrays = held([draw._neighbors for draw in of_replacer._graphs], set())
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_device_holds_each_graph_once_and_whole(device: str, in_folder: bool, tmp_path: Path) -> None:
    sse = rules(tmp_path if in_folder else None)
    module = FeaturePerturbation([IdStream(name, f"of_{name}", SIZES[name], rule, 0) for name, rule in sse.items()])
    of_device = replacer(module, device)
    counted = graph_bytes(sse, "cuda")
    assert list(counted) == list(sse)
    assert {name for name, num_bytes in counted.items() if num_bytes} == {"b", "d", "e"}
    assert sum(counted.values()) == live_bytes(of_device)
    of_graph = sse["e"].graph
    assert of_graph is not None
    assert counted["e"] == 8 * 1001 + (4 + 8 + 4) * of_graph.num_edges
    # all else on the device is a few numbers a stream
    everything = sum(tensor.nbytes for tensor in held(of_device, set()) if isinstance(tensor, Tensor))
    assert 0 <= everything - live_bytes(of_device) <= 8 * len(sse) * 8


def test_on_a_cpu_files_are_looked_into_and_arrays_are_held(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        sse = rules(folder)
        streams = [IdStream(name, name, SIZES[name], rule, 0) for name, rule in sse.items()]
        arrays = list(held([draw._neighbors for draw in replacer(FeaturePerturbation(streams), "cpu")._graphs], set()))
        in_memory = [array for array in arrays if not isinstance(array, np.memmap)]
        # the graph's own arrays, not copies
        own = {id(array) for rule in sse.values() if rule.graph is not None for array in held(rule.graph, set())}
        assert {id(array) for array in arrays} <= own and len(arrays) == 4 + 2 + 4
        assert sum(graph_bytes(sse, "cpu").values()) == sum(array.nbytes for array in in_memory)
        assert bool(in_memory) == (folder is None)


def test_a_graph_that_several_walks_share_draws_what_one_of_its_own_would() -> None:
    of_all = graph(50, 300, True)
    ids = torch.arange(50).repeat(400)
    walks = (Walk(0.3, 5), None, Walk(0.9, 2))
    together = [IdStream("t", f"f{i}", 50, SSE(0.9, 500.0, of_all, walk), 0) for i, walk in enumerate(walks)]
    counts, starts = (len(ids),) * 3, tuple(len(ids) * i for i in range(3))
    live = Replacer(together, torch.device("cpu"), torch.int64, may_be_outside=False)
    replaced = live(ids.repeat(3), counts, starts, step=0, rank=0).ids.split(len(ids))
    for i, stream in enumerate(together):
        alone = Replacer([stream], torch.device("cpu"), torch.int64, may_be_outside=False)
        assert torch.equal(alone(ids, (len(ids),), (0,), step=0, rank=0).ids, replaced[i])
    assert not torch.equal(replaced[0], replaced[1])


def test_no_rules_and_none_with_a_graph_take_nothing() -> None:
    assert graph_bytes({}) == {}
    assert graph_bytes({"a": SSE(0.5), "b": SSE(0.0)}) == {"a": 0, "b": 0}


def test_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_folder = graph(50, 300, True)
    of_folder.write(tmp_path / "graph")
    sse = SSE(0.1, 5.0, Graph.open(tmp_path / "graph"))
    for file in (tmp_path / "graph").glob("*.bin"):
        file.unlink()  # what is mapped stays
    monkeypatch.setattr(np.memmap, "__getitem__", lambda *_: pytest.fail("an array was looked at"))
    assert graph_bytes({"a": sse})["a"] == of_folder.nbytes
