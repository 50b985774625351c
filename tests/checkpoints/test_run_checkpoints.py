"""The checkpoints of a run: written beside training, whole or not at all, wherever they are kept."""

import dataclasses
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from distembed.base.errors import RunError, UserError
from distembed.base.ranks import Ranks
from distembed.checkpoints import checkpoint, load_checkpoint, run_checkpoints, save_checkpoint
from distembed.checkpoints.checkpoint import restore_run
from distembed.checkpoints.content import Progress
from distembed.checkpoints.run_checkpoints import Checkpoints, require_bytes
from distembed.checkpoints.store import CheckpointStore, checkpoint_place, newest_checkpoint
from distembed.commands import cli
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import KeyedHash, QuotientRemainder
from tests.checkpoints.test_damage import with_optimizer
from tests.processes import start_processes
from tests.ranks import run_on_ranks

PROGRESS = {"samples": 0, "seconds": 0.0, "reader": {}}


class Run:
    """A linear layer, its optimizer, and their checkpoints."""

    def __init__(self, url: Path | str, keep: int = 2, rank: int = 0, world_size: int = 1) -> None:
        self.model = nn.Linear(4, 3)
        self.optimizer = with_optimizer(self.model)
        self.said: list[str] = []
        self.checkpoints = Checkpoints(str(url), keep, Ranks(rank, world_size, world_size, torch.device("cpu")))

    def save(self, step: int) -> None:
        nn.init.constant_(self.model.weight, step)
        progress = {"step": step, **PROGRESS}
        self.checkpoints.save(step, self.model, self.optimizer, Progress(progress), self.said.append)

    def saved_weight(self, checkpoint: str) -> float:
        """Of a fresh model into which the checkpoint is loaded; asserts that its numbers are of one step."""
        fresh = nn.Linear(4, 3)
        step = restore_run(checkpoint, fresh, with_optimizer(fresh), self.checkpoints._collectives).values["step"]
        assert (fresh.weight == step).all()
        return float(step)


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Lets no checkpoint become whole until the event is set."""
    event, finish = threading.Event(), CheckpointStore.finish

    def finish_later(store: CheckpointStore, name: str, contents: dict[str, object], index: bytes) -> None:
        assert event.wait(60)
        finish(store, name, contents, index)

    monkeypatch.setattr(CheckpointStore, "finish", finish_later)
    return event


def test_training_goes_on_while_what_was_there_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = Run(tmp_path), CheckpointStore(str(tmp_path))
    released = hold(monkeypatch)
    run.save(1)
    nn.init.constant_(run.model.weight, 99)  # the next steps
    assert store.names() == [] and run.said == []
    second = threading.Thread(target=run.save, args=(2,))  # waits for the first
    second.start()
    time.sleep(0.2)
    assert second.is_alive() and store.names() == []
    released.set()
    second.join()
    run.checkpoints.wait()
    assert store.names() == ["step-00000001", "step-00000002"]
    assert [text.startswith("saved ") for text in run.said] == [True, True]
    assert run.saved_weight(store.checkpoint_path("step-00000001")) == 1
    assert run.saved_weight(store.checkpoint_path("step-00000002")) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_the_block_waits(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, released = Run(tmp_path), hold(monkeypatch)
    threading.Timer(0.3, released.set).start()
    with pytest.raises(RunError, match="not finite") if fails else nullcontext(), run.checkpoints:
        run.save(1)
        if fails:
            raise RunError("a loss is not finite")
    assert CheckpointStore(str(tmp_path)).names() == ["step-00000001"]


def test_an_error_in_the_block_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(CheckpointStore, "finish", fail)
    run = Run(tmp_path)
    with pytest.raises(RunError, match="not finite") as caught, run.checkpoints:
        run.save(1)
        raise RunError("a loss is not finite")
    assert "step-00000001 could not be written (OSError: no room)" in caught.value.__notes__[0]
    with pytest.raises(RunError, match="no room"), run.checkpoints:
        run.save(1)
    assert not list(tmp_path.iterdir())


def test_without_memory_for_copies_training_waits_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    monkeypatch.setattr(run_checkpoints, "available_memory_bytes", lambda: 2 * 2 * 15 * 4 - 1)  # weights and sums
    for step in (1, 2):
        run.save(step)
        assert len(CheckpointStore(str(tmp_path)).names()) == step
    assert [text.partition(" ")[0] for text in run.said] == ["training", "saved", "saved"]
    monkeypatch.setattr(run_checkpoints, "available_memory_bytes", lambda: 10**9)
    released = hold(monkeypatch)
    run.save(3)
    assert len(CheckpointStore(str(tmp_path)).names()) == 2
    released.set()
    run.checkpoints.wait()


def test_only_the_newest_are_kept_and_a_step_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    with run.checkpoints:
        for step in (1, 2, 3, 10, 10):
            run.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    assert run.checkpoints.newest() == f"{tmp_path}/step-00000010"


def test_what_is_not_whole_is_passed_over_and_cleared_away(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.checkpoints.wait()
    half = tmp_path / "step-00000002"
    half.mkdir()
    (half / "rank-0.blocks").write_bytes(b"half")
    (half / "progress.json.partial").write_text("{")
    assert run.checkpoints.newest() == f"{tmp_path}/step-00000001"
    run.save(2)
    run.checkpoints.wait()
    assert not (half / "progress.json.partial").exists()
    assert run.saved_weight(str(half)) == 2
    (tmp_path / "step-00000001" / "progress.json").unlink()  # as a removal that was cut short
    run.save(3)
    run.checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def limit_file_size(limit: int) -> None:
    """Makes larger files fail to be written, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def check_full_disk(rank: int, world_size: int, folder: Path) -> None:
    run = Run(folder, rank=rank, world_size=world_size)
    run.save(1)
    run.checkpoints.wait()
    if rank == 1:  # what one rank cannot do, all say
        limit_file_size(100)
    run.save(2)
    # the next one is tried at once, and fails too
    with pytest.raises(RunError, match=r"step-00000003 could not be written .*MiB were left.*--resume"):
        run.save(3)
    assert any("step-00000002 could not be written" in text for text in run.said)
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    with pytest.raises(RunError, match="step-00000004 could not be written"), run.checkpoints:
        run.save(4)
    if rank == 1:
        limit_file_size(resource.RLIM_INFINITY)
    assert run.saved_weight(run.checkpoints.newest() or "") == 1
    run.save(5)
    run.checkpoints.wait()
    assert run.saved_weight(run.checkpoints.newest() or "") == 5


def check_random_state(rank: int, world_size: int, folder: Path) -> None:
    run = Run(folder, rank=rank, world_size=world_size)
    torch.manual_seed(100 + rank)
    run.save(1)
    run.checkpoints.wait()
    drawn = torch.rand(3)
    for _ in range(2):
        run.saved_weight(run.checkpoints.newest() or "")
        assert torch.equal(torch.rand(3), drawn)
    saved = [torch.empty(3) for _ in range(world_size)]
    dist.all_gather(saved, drawn)
    if rank == 0:
        torch.save(torch.stack(saved), folder / "drawn.pt")


def check_two_ranks(rank: int, world_size: int, folder: Path) -> None:
    (folder / "full").mkdir(exist_ok=True)
    (folder / "random").mkdir(exist_ok=True)
    check_full_disk(rank, world_size, folder / "full")
    check_random_state(rank, world_size, folder / "random")
    check_url(rank, world_size, f"file://{folder}/url")
    # each process has a memory of its own
    with pytest.raises(UserError, match=r"rank\(s\) 1 wrote to memory://m is not seen by rank 0.*checkpoint_dir"):
        Run("memory://m", rank=rank, world_size=world_size).checkpoints.require_usable()


def check_random_state_of_other_ranks(rank: int, world_size: int, folder: Path) -> None:
    run = Run(folder / "random", rank=rank, world_size=world_size)
    drawn = []
    for _ in range(2):
        run.saved_weight(run.checkpoints.newest() or "")
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    for_ranks = [torch.empty(3) for _ in range(world_size)]
    dist.all_gather(for_ranks, drawn[0])
    streams = torch.cat([torch.stack(for_ranks), torch.load(folder / "random" / "drawn.pt")])
    assert len(streams.unique(dim=0)) == len(streams)  # none repeats another's


@pytest.mark.distributed
def test_on_two_ranks_and_after_them_on_three(tmp_path: Path) -> None:
    run_on_ranks(2, check_two_ranks, tmp_path)
    run_on_ranks(3, check_random_state_of_other_ranks, tmp_path)


def check_url(rank: int, world_size: int, url: str) -> None:
    run = Run(url, keep=1, rank=rank, world_size=world_size)
    assert run.checkpoints.newest() is None
    run.checkpoints.require_usable()
    with run.checkpoints:
        run.save(1)
        run.save(2)
    files, root = fsspec.core.url_to_fs(url)
    assert [path.rpartition("/")[2] for path in files.ls(root, detail=False)] == ["step-00000002"]  # and no probes
    assert run.checkpoints.newest() == f"{url}/step-00000002"
    assert run.saved_weight(f"{url}/step-00000002") == 2


@pytest.mark.parametrize("url", ["memory://somewhere/below", "file://{}/new", "{}/new/folder"])
def test_any_url_of_fsspec_will_do(url: str, tmp_path: Path) -> None:
    check_url(0, 1, url.format(tmp_path))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense://place", "nonsense"),
        ("gcs://bucket/folder", "gcsfs"),
        ("{}/file/below", "checkpoints cannot be kept in .*/file/below"),
        ("http://127.0.0.1:9/nothing", "needs a package|cannot be kept"),
    ],
)
def test_a_place_that_cannot_be_used_is_said_before_training(url: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=message):
        Run(url.format(tmp_path)).checkpoints.require_usable()


def test_after_a_passing_failure_the_next_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, finish = Run(tmp_path), CheckpointStore.finish

    def fail_once(*_: object) -> None:
        monkeypatch.setattr(CheckpointStore, "finish", finish)
        raise OSError("connection reset")

    monkeypatch.setattr(CheckpointStore, "finish", fail_once)
    run.save(1)
    run.save(2)
    assert CheckpointStore(str(tmp_path)).names() == ["step-00000002"]
    assert any("step-00000001 could not be written (OSError: connection reset)" in text for text in run.said)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-mine").mkdir()
    (tmp_path / "step-mine" / "precious.txt").write_text("")
    run = Run(tmp_path)
    for step in range(4):
        run.save(step)
    run.checkpoints.wait()
    assert (tmp_path / "step-mine" / "precious.txt").exists()
    with pytest.raises(UserError, match="step-mine is there and holds files that are no checkpoint's"):
        save_checkpoint(tmp_path / "step-mine", nn.Linear(1, 1))
    for path in ("..", ".", "/", "memory://m", "s3://bucket"):
        with pytest.raises(UserError, match="names no checkpoint"):
            save_checkpoint(path, nn.Linear(1, 1))


def test_a_place_belongs_to_one_run(tmp_path: Path) -> None:
    ranks = Ranks(0, 1, 1, torch.device("cpu"))
    Checkpoints(str(tmp_path), 2, ranks, "runs/a").require_usable()
    Checkpoints(str(tmp_path), 2, ranks, "runs/a").require_usable()
    with pytest.raises(UserError, match="keeps the checkpoints of runs/a, not of runs/b"):
        Checkpoints(str(tmp_path), 2, ranks, "runs/b").require_usable()


@pytest.mark.parametrize("change", [{"composition": "sum"}, {"pooling": "mean"}, {"pre_hash": KeyedHash(3)}])
def test_weights_that_mean_something_else_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    table = CompositionalEmbeddingBagConfig("t", 100, 8, ["f"], QuotientRemainder(100, collisions=4))
    save_checkpoint(tmp_path / "it", CompositionalEmbeddingBagCollection([table]))
    load_checkpoint(tmp_path / "it", CompositionalEmbeddingBagCollection([table]))
    other = CompositionalEmbeddingBagCollection([dataclasses.replace(table, **change)])
    with pytest.raises(UserError, match="(?s)is of another model; .*table t: .*in the checkpoint"):
        load_checkpoint(tmp_path / "it", other)


def test_adam_needs_the_number_of_steps(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), torch.optim.Adam)
    with pytest.raises(UserError, match="without the number of steps done, on which adam depends"):
        save_checkpoint(tmp_path / "it", model, optimizer)


def test_where_the_checkpoints_of_a_run_are(tmp_path: Path) -> None:
    assert checkpoint_place(tmp_path, None) == f"{tmp_path}/checkpoints"
    assert checkpoint_place(tmp_path, "kept") == f"{tmp_path}/kept"
    assert checkpoint_place(tmp_path, "/elsewhere") == "/elsewhere"
    assert checkpoint_place(tmp_path, "s3://bucket/folder") == "s3://bucket/folder"
    with pytest.raises(UserError, match="has no checkpoint in memory://nobody-wrote-here"):
        newest_checkpoint(tmp_path, "memory://nobody-wrote-here")


KILLED_AT = ("write_blocks", "finish", "rm")
"""Before the data, before the last file, and between the removal of an old one's last file and of its others."""


def save_and_be_killed(number: int, folder: Path) -> None:
    moment = KILLED_AT[number]
    run = Run(folder / moment, keep=1)
    run.save(1)
    run.checkpoints.wait()

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "rm":
        files = run.checkpoints._store._files
        remove = files.rm
        files.rm = lambda path, **how: die() if how else remove(path)
    else:
        setattr(checkpoint if moment == "write_blocks" else CheckpointStore, moment, die)
    run.save(2)
    run.checkpoints.wait()


def test_killed_while_writing_or_removing_it_leaves_whole_checkpoints_alone(tmp_path: Path) -> None:
    killed = start_processes(len(KILLED_AT), save_and_be_killed, tmp_path).processes
    for process in killed:
        process.join()
    assert [process.exitcode for process in killed] == [-signal.SIGKILL] * len(KILLED_AT)
    for moment in KILLED_AT:
        folder = tmp_path / moment
        run, step = Run(folder, keep=1), 2 if moment == "rm" else 1
        assert len(list(folder.iterdir())) == 2  # a whole one and another
        assert run.checkpoints.newest() == f"{folder}/step-{step:08d}"
        assert run.saved_weight(run.checkpoints.newest() or "") == step
        run.save(3)
        run.checkpoints.wait()
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_room_is_asked_for_one_checkpoint_and_warned_of_for_all(tmp_path: Path) -> None:
    place, said = tmp_path / "not" / "yet" / "there", list[str]()
    free = shutil.disk_usage(tmp_path).free
    for url in (str(place), f"file://{place}"):
        with pytest.raises(
            RunError, match=f"{place} would not fit.*at least .* needed.*are free; that is one checkpoint"
        ):
            require_bytes(url, 1, 2 * free, said.append)
        assert not said
        require_bytes(url, 2, free // 100, said.append)
        assert not said
        require_bytes(url, 2, free // 2, said.append)
        assert f"{place} will not hold train.keep_checkpoints=2" in said.pop() and not said
    require_bytes("memory://bucket/place", 2, 2**62, said.append)
    assert not said and not place.exists()


def test_a_run_without_room_for_a_checkpoint_ends_before_its_first_step(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def larger_than_the_disk(url: str, keep: int, num_bytes: int, say: Callable[[str], None]) -> None:
        asked.append(num_bytes)
        require_bytes(url, keep, 2**62, say)

    monkeypatch.setattr("distembed.checkpoints.run_checkpoints.require_bytes", larger_than_the_disk)
    run = tmp_path / "run"
    with pytest.raises(RunError, match="checkpoints would not fit on its disk: at least 4194304.00 TiB"):
        cli.app(["train", str(config), "train.max_steps=1", "--run-dir", str(run)], standalone_mode=False)
    assert not (run / "metrics.jsonl").read_text()
    monkeypatch.undo()
    cli.app(
        ["train", str(config), "train.max_steps=1", "--run-dir", str(run), "--resume-or-start"], standalone_mode=False
    )
    (checkpoint,) = (run / "checkpoints").iterdir()
    written = sum(file.stat().st_size for file in checkpoint.glob("*.blocks"))
    assert asked[0] <= written <= 1.5 * asked[0]
