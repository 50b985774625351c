"""Checkpoints that are damaged or made to do harm: nothing is executed, and what is read is what was written."""

import errno
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.ranks import Ranks
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.checkpoints.content import Progress
from distembed.checkpoints.run_checkpoints import Checkpoints
from distembed.checkpoints.verified_files import VerifyingReader

# without a process group torch says that it takes this for one process, which it is
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


class Harm:
    """Unpickled as it comes, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.canary),)


def without_checksums(checkpoint: Path) -> None:
    """Makes a checkpoint one of an early version, whose files anyone may change."""
    file = checkpoint / "progress.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: values[key] for key in values if "checksum" not in key}))
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        del info.checksum
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("place", ["alone", "planner_data", "beside a tensor", "as a dtype"])
def test_metadata_executes_nothing(place: str, tmp_path: Path) -> None:
    checkpoint, canary = saved(tmp_path), tmp_path / "canary"
    without_checksums(checkpoint)
    metadata: Any = pickle.loads((checkpoint / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["model.weight"]
    if place == "alone":
        metadata = Harm(canary)
    elif place == "planner_data":  # all else stays as it was
        metadata.planner_data = Harm(canary)
    elif place == "beside a tensor":
        entry.harm = Harm(canary)
    else:
        entry.properties.dtype = Harm(canary)
    harmful = pickle.dumps(metadata)
    (checkpoint / ".metadata").write_bytes(harmful)
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata: it names posix\.mkdir, which no checkpoint has"):
        load(checkpoint)
    assert not canary.exists()
    pickle.loads(harmful)
    assert canary.exists()  # it was harmful


def test_a_block_executes_nothing(tmp_path: Path) -> None:
    checkpoint, canary = saved(tmp_path), tmp_path / "canary"
    without_checksums(checkpoint)
    metadata: Any = pickle.loads((checkpoint / ".metadata").read_bytes())
    torch.save(Harm(canary), checkpoint / "__0_0.distcp")
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, (checkpoint / "__0_0.distcp").stat().st_size
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match="a block holds something else than a tensor"):
        load(checkpoint)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda metadata: metadata.state_dict_metadata.update(x=metadata.state_dict_metadata.pop("model.weight")),
            "weight: absent in",
        ),
        (
            lambda metadata: vars(next(iter(metadata.storage_data.values()))).update(relative_path="../x.distcp"),
            "reads",
        ),
        (lambda metadata: vars(next(iter(metadata.storage_data.values()))).update(relative_path=7), "reads from 7"),
        (lambda metadata: vars(next(iter(metadata.storage_data.values()))).update(length=-1), "reads -1 bytes"),
        (lambda metadata: vars(metadata).update(storage_data=None), "lists no tensors"),
        (lambda metadata: vars(metadata.state_dict_metadata["model.bias"]).update(size=5), "'model.bias' is no tensor"),
        (lambda metadata: vars(metadata.state_dict_metadata["model.bias"]).update(chunks=[3]), "is no tensor"),
    ],
)
def test_metadata_that_no_checkpoint_has_is_refused(
    change: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    checkpoint = saved(tmp_path)
    without_checksums(checkpoint)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=message):
        load(checkpoint)


@pytest.mark.parametrize("file", [".metadata", "progress.json", "__0_0.distcp"])
def test_a_damaged_file_is_named(file: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    whole = (checkpoint / file).read_bytes()
    place = whole.index(b"\x80?\x00\x00\x80?" if file.endswith("distcp") else b"weight")
    (checkpoint / file).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(DamagedCheckpoint, match=f"{file}.* does not have the checksum that it was written with"):
        load(checkpoint)
    (checkpoint / file).write_bytes(whole[:100])
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        load(checkpoint)
    (checkpoint / file).unlink()
    with pytest.raises(DamagedCheckpoint, match=file):
        load(checkpoint)


def test_no_single_change_hides_the_checksums(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    values = json.loads((checkpoint / "progress.json").read_text())
    for key in ("checksum", "metadata_checksum"):
        changed = {name if name != key else "x" + name: value for name, value in values.items()}
        (checkpoint / "progress.json").write_text(json.dumps(changed))
        with pytest.raises(DamagedCheckpoint, match=r"progress\.json has not the fields"):
            load(checkpoint)


def test_checkpoints_of_early_versions_are_read(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    without_checksums(checkpoint)
    assert all((parameter == 1).all() for parameter in load(checkpoint).parameters())


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
        file = self.folder / f"step-{step:08d}" / "__0_0.distcp"
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
    assert f"{tmp_path}/step-00000003 is damaged: __0_0.distcp, bytes" in damage
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
    (tmp_path / "step-00000004" / "__0_0.distcp").write_bytes(b"half")
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

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(VerifyingReader, "_slice_file", fail)
    with pytest.raises(RunError, match=r"step-00000003 cannot be reached \("):
        run.restore()
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert run.restore() == 3


@pytest.mark.parametrize("file", ["progress.json", ".metadata"])
def test_a_pipe_is_not_waited_for(file: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)
    with pytest.raises(RunError, match="it is no regular file"):
        load(checkpoint)


def test_keys_of_progress_may_be_numbers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "it", nn.Linear(1, 1), progress={"best": {2: 1.0, 10: 2.0}})
    assert load_checkpoint(tmp_path / "it", nn.Linear(1, 1)) == {"best": {"2": 1.0, "10": 2.0}}
