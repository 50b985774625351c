"""Checkpoints that are damaged or made to do harm: nothing is executed, and what is read is what was written."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from distembed.base.checksums import checksum_of, with_checksum
from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints import blocks, load_checkpoint, save_checkpoint, shards
from distembed.checkpoints.checkpoint import restore_run
from distembed.checkpoints.content import Progress
from distembed.checkpoints.run_checkpoints import Checkpoints


def with_optimizer(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.Adagrad(params))


def saved(folder: Path) -> Path:
    """A checkpoint of a layer whose weights are all 1."""
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    save_checkpoint(folder / "it", model, with_optimizer(model), {"step": 1})
    return folder / "it"


def load(checkpoint: Path) -> nn.Module:
    model = nn.Linear(4, 3)
    load_checkpoint(checkpoint, model, with_optimizer(model))
    return model


def change_index(checkpoint: Path, change: Callable[[Any], object]) -> None:
    """Changes the index of a checkpoint, and its checksum with it."""
    index = json.loads((checkpoint / "index.json").read_text())
    change(index)
    data = json.dumps(index).encode()
    (checkpoint / "index.json").write_bytes(data)
    values = json.loads((checkpoint / "progress.json").read_text()) | {"index_checksum": checksum_of(data)}
    del values["checksum"]
    (checkpoint / "progress.json").write_text(json.dumps(with_checksum(values)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(x=index.pop("model.weight")), "weight: absent in"),
        (lambda index: index["model.weight"]["blocks"][0].__setitem__(0, "../rank-0.blocks"), "reads from '../rank"),
        (lambda index: index["model.weight"]["blocks"][0].__setitem__(0, 7), "reads from 7"),
        (lambda index: index["model.weight"]["blocks"][0].__setitem__(1, -1), "bytes at -1"),
        (lambda index: index["model.weight"]["blocks"][0].__setitem__(2, 7), "reads 7 bytes for a block"),
        (lambda index: index["model.weight"]["blocks"][0].__setitem__(3, None), "no checksums of some blocks"),
        (lambda index: index["model.weight"]["blocks"][0].__setitem__(4, [1, 0]), "outside of its tensor"),
        (lambda index: index["model.weight"]["blocks"].clear(), "12 numbers of model.weight are in none"),
        (lambda index: index["model.weight"].update(dtype="nn"), "without a type"),
        (lambda index: index["model.weight"].update(size=5), "damaged"),
        (lambda index: index["model.weight"].update(blocks=[3]), "damaged"),
        (lambda index: index["random.cpu.0"].update(size=[2**50]), "says that random.cpu.0 has"),
        (lambda index: index.pop("optimizer.weight.sum"), "has no tensor optimizer.weight.sum"),
    ],
)
def test_an_index_that_no_checkpoint_has_is_refused(
    change: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    checkpoint = saved(tmp_path)
    change_index(checkpoint, change)
    model = nn.Linear(4, 3)
    with pytest.raises(UserError, match=message):
        restore_run(str(checkpoint), model, with_optimizer(model), Collectives())


def test_mapped_weights_are_the_copied_ones_and_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of several blocks; a change of a mapped weight does not reach the file."""
    monkeypatch.setattr(shards, "MAX_BLOCK_BYTES", 160)
    model = nn.Linear(8, 33)
    save_checkpoint(tmp_path / "it", model)
    content = (tmp_path / "it" / "rank-0.blocks").read_bytes()
    for _ in range(2):
        mapped = nn.Linear(8, 33)
        before = mapped.weight.data_ptr()
        load_checkpoint(tmp_path / "it", mapped, maps_weights=True)
        assert mapped.weight.data_ptr() != before
        assert mapped.weight.equal(model.weight) and mapped.bias.equal(model.bias)
        with torch.no_grad():
            mapped.weight += 1
        assert (tmp_path / "it" / "rank-0.blocks").read_bytes() == content
    for place in (0, 500, 1000):
        (tmp_path / "it" / "rank-0.blocks").write_bytes(
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        )
        with pytest.raises(DamagedCheckpoint, match="does not have the checksum"):
            load_checkpoint(tmp_path / "it", nn.Linear(8, 33), maps_weights=True)


def test_no_single_change_hides_the_checksums(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    values = json.loads((checkpoint / "progress.json").read_text())
    for key in ("checksum", "index_checksum"):
        changed = {name if name != key else "x" + name: value for name, value in values.items()}
        (checkpoint / "progress.json").write_text(json.dumps(changed))
        with pytest.raises(DamagedCheckpoint, match=r"progress\.json has not the fields"):
            load(checkpoint)


class Run:
    """Three checkpoints of a layer, whose weights are the number of the step, and its run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Linear(4, 3)
        self.optimizer = with_optimizer(self.model)
        self.checkpoints = Checkpoints(str(folder), 3, Ranks(0, 1, 1, torch.device("cpu")))
        self.said: list[str] = []
        for step in (1, 2, 3):
            nn.init.constant_(self.model.weight, step)
            values = {"step": step, "samples": 0, "seconds": 0.0, "reader": {}}
            tensors = {"own": torch.tensor([step])}
            self.checkpoints.save(step, self.model, self.optimizer, Progress(values, tensors), lambda text: None)
        self.checkpoints.wait()

    def restore(self) -> int:
        nn.init.constant_(self.model.weight, -1)
        self.said.clear()
        before = self.names()
        resumed = self.checkpoints.restore(self.model, self.optimizer, self.said.append)
        assert self.names() == before  # nothing is changed before the run owns the place
        self.checkpoints.tidy(self.said.append)
        assert resumed is not None
        step = resumed.values["step"]
        assert (self.model.weight == step).all() and [int(own) for own in resumed.tensors["own"]] == [step]
        return int(step)

    def damage(self, step: int, seed: int) -> None:
        """Changes a byte of the weights."""
        file = self.folder / f"step-{step:08d}" / "rank-0.blocks"
        whole = bytearray(file.read_bytes())
        place = whole.index(torch.full([4], float(step)).numpy().tobytes())
        whole[place + random.Random(seed).randrange(16)] ^= 1
        file.write_bytes(whole)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def test_resuming_falls_back_to_the_newest_that_is_not_damaged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.restore() == 3 and run.said == []
    run.damage(3, seed=0)
    assert run.restore() == 2
    assert run.names() == ["damaged-step-00000003", "step-00000001", "step-00000002"]
    damage, kept = run.said
    assert f"{tmp_path}/step-00000003 is damaged: rank-0.blocks, bytes" in damage
    assert f"Going on from {tmp_path}/step-00000002." in damage
    assert kept == f"{tmp_path}/step-00000003, which is damaged, is kept as {tmp_path}/damaged-step-00000003"
    run.damage(2, seed=1)
    shutil.rmtree(tmp_path / "damaged-step-00000003")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "damaged-step-00000002")
    assert run.restore() == 1
    assert run.names() == ["damaged-step-00000002", "damaged-step-00000002-again", "step-00000001"]
    before = run.names()
    run.damage(1, seed=2)
    for _ in range(2):  # nothing is moved, so that the next attempt does not start anew
        with pytest.raises(UserError, match=r"(?s)no checkpoint in .* is whole:.*step-00000001 is damaged"):
            run.restore()
    assert run.names() == before


def test_resuming_removes_what_a_killed_process_had_no_time_to(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoints._keep = 2
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / "step-00000004" / "rank-0.blocks").write_bytes(b"half")
    assert run.restore() == 3
    assert run.names() == ["step-00000002", "step-00000003"]


class EndpointConnectionError(Exception):
    """As botocore has it, which is no OSError."""


@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError("no route"),
        TimeoutError("too late"),
        OSError(errno.EMFILE, "too many open files"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
    ],
)
def test_what_cannot_be_read_just_now_is_not_damaged(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = Run(tmp_path), sorted(tmp_path.iterdir())

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(blocks.BlockRead, "run", fail)
    with pytest.raises(RunError, match=r"step-00000003 cannot be reached \("):
        run.restore()
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert run.restore() == 3


@pytest.mark.parametrize("file", ["progress.json", "index.json"])
def test_a_pipe_is_not_waited_for(file: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)
    with pytest.raises(RunError, match="it is no regular file"):
        load(checkpoint)


def test_keys_of_progress_may_be_numbers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "it", nn.Linear(1, 1), progress={"best": {2: 1.0, 10: 2.0}})
    assert load_checkpoint(tmp_path / "it", nn.Linear(1, 1)) == {"best": {"2": 1.0, "10": 2.0}}


BLOCK_BYTES = 256 << 10


class Weights(nn.Module):
    """Weights of several types, sizes and layouts: none, one number, part of a block, several blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows = BLOCK_BYTES // (4 * 64)
        for name, size, dtype in (
            ("several_blocks", (2 * rows + 77, 64), torch.float32),
            ("halves", (999, 65), torch.bfloat16),
            ("small", (3, 5), torch.float32),
            ("one", (), torch.float32),
            ("none", (0, 4), torch.float32),
        ):
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=generator).to(dtype)))
        self.register_buffer("counts", torch.randint(2**40, (20_000,), generator=generator))
        transposed = torch.randn(300, 200, generator=generator).T
        self.register_buffer("transposed", transposed)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kinds") / "weights"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "MAX_BLOCK_BYTES", BLOCK_BYTES)
        save_checkpoint(path, Weights(1), progress={"step": 7})
    return path


@pytest.mark.parametrize("place", ["{}", "file://{}", "weights", "memory"])
def test_weights_of_all_kinds_are_read_to_the_bit(weights: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(weights.parent)
    path = place.format(weights)
    if place == "memory":
        path = "memory://kinds/weights"
        fsspec.filesystem("memory").put(str(weights), "/kinds/weights", recursive=True)
    found = Weights(2)
    assert load_checkpoint(path, found) == {"step": 7}
    expected = Weights(1).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.state_dict().items())


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(weights: Path) -> None:
    other = Weights(2)
    other.small = nn.Parameter(torch.zeros(4, 5))
    before = other.halves.clone()
    with pytest.raises(UserError, match=r"small: \(3, 5\) float32 in the checkpoint, \(4, 5\) float32 in the model"):
        load_checkpoint(weights, other)
    assert torch.equal(other.halves, before)
