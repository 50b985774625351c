"""Whole runs of the command: what they leave, on one rank and on two, resumed, interrupted and killed."""

import json
import os
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from sklearn.metrics import log_loss, roc_auc_score

from distembed.base.errors import UserError
from distembed.training.run_folder.lock import owned
from tests.processes import start_processes
from tests.ranks import free_port
from tests.small_runs import (
    ROWS,
    call,
    distembed,
    losses,
    metrics,
    run_command,
    stopped_at,
    train_small,
    write_dataset,
)

OUTPUTS = ("output", "errors")


@pytest.fixture(scope="module")
def finished(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ("train.epochs=2", "train.checkpoint_every=10")
    return train_small(tmp_path_factory.mktemp("finished"), dataset, 62, *settings)


@pytest.mark.thorough
def test_a_run_leaves_all_that_is_needed_to_trust_and_to_use_it(finished: Path, tmp_path: Path) -> None:
    info = json.loads((finished / "run.json").read_text())
    assert info["status"] == "finished" and info["world_size"] == 1 and info["seed"] == 0
    assert {"python", "torch", "torchrec"} <= info["versions"].keys()
    steps = [line["step"] for line in metrics(finished, "train")]
    assert steps == list(range(1, 63))  # 2 epochs of ceil(1951 / 64) batches
    assert metrics(finished, "train")[-1]["samples"] == 2 * ROWS["train"]
    assert losses(finished)[-1] < losses(finished)[0]
    assert len(metrics(finished, "eval")) == 3  # after each epoch, and the test
    assert {p.name for p in (finished / "checkpoints").iterdir()} == {"step-00000060", "step-00000062"}
    assert list((finished / "tensorboard").iterdir())

    output = tmp_path / "predictions.parquet"
    distembed("predict", finished, "--output", output)
    predictions = pq.read_table(output)
    labels = pq.read_table(file_of_split(finished, "test"))["label"].to_numpy()
    assert np.array_equal(predictions["label"].to_numpy(), labels)  # in the split's order
    evaluation = json.loads((finished / "evaluation.json").read_text())
    assert evaluation["rows"] == ROWS["test"]
    assert evaluation["auc"] == pytest.approx(roc_auc_score(labels, predictions["prediction"]), abs=1e-6)
    assert evaluation["logloss"] == pytest.approx(log_loss(labels, predictions["prediction"]), abs=1e-6)
    again = json.loads(distembed("evaluate", finished, "--json").stdout)
    assert again["logloss"] == pytest.approx(evaluation["logloss"], abs=1e-9)


def file_of_split(run: Path, split: str) -> Path:
    return Path(yaml.safe_load((run / "config.yaml").read_text())["data"]["path"]) / split / "part-0.parquet"


@pytest.mark.distributed
def test_two_ranks_give_the_losses_of_one_and_predict_in_order(config: Path, tmp_path: Path) -> None:
    # 65 rows a batch cannot be halved, and of the last batch's one row a rank has none
    overrides = ["train.batch_size=65", "train.evaluate_every=20"]
    one, two = tmp_path / "one", tmp_path / "two"
    distembed("train", config, *overrides, "--run-dir", one)
    distembed("train", config, *overrides, "--run-dir", two, ranks=2)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert [line["samples"] for line in metrics(two, "train")] == [line["samples"] for line in metrics(one, "train")]
    for split in ("validation", "test"):
        first, second = ([m for m in metrics(r, "eval") if m["split"] == split] for r in (one, two))
        for a, b in zip(first, second, strict=True):
            assert (a["step"], a["rows"]) == (b["step"], b["rows"])
            assert b["logloss"] == pytest.approx(a["logloss"], rel=1e-5)
    outputs = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    distembed("predict", one, "--output", outputs[0])
    distembed("predict", two, "--output", outputs[1], ranks=2)
    first, second = (pq.read_table(output) for output in outputs)
    assert first["label"].equals(second["label"])
    np.testing.assert_allclose(first["prediction"], second["prediction"], rtol=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dense", "sparse"), [("adam", "amsgrad"), pytest.param("sgd", "adagrad", marks=pytest.mark.slow)]
)
def test_a_resumed_run_repeats_the_one_that_was_not_stopped(
    config: Path, tmp_path: Path, dense: str, sparse: str
) -> None:
    overrides = [
        "train.epochs=2",
        "train.checkpoint_every=15",
        "train.keep_checkpoints=9",
        f"train.dense_optimizer.name={dense}",
        "train.dense_optimizer.learning_rate=0.01",
        "train.dense_optimizer.schedule.decay=linear",
        f"train.sparse_optimizer.name={sparse}",
        "train.sparse_optimizer.learning_rate=0.1",
        "train.sparse_optimizer.eps=0.01",
    ]
    whole = tmp_path / "whole"
    distembed("train", config, *overrides, "--run-dir", whole)
    # from the middle of the second epoch, on the same number of ranks and on another
    for ranks in (1, 2):
        part = stopped_at(45, whole, tmp_path / f"part{ranks}")
        distembed("train", config, *overrides, "--run-dir", part, "--resume", ranks=ranks)
        assert [line["step"] for line in metrics(part, "train")] == list(range(1, 63))
        if ranks == 1:
            assert losses(part) == losses(whole)
        else:
            assert losses(part) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.thorough
@pytest.mark.distributed
def test_checkpoints_that_are_kept_elsewhere_are_found_by_every_command(config: Path, tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere = f"train.checkpoint_dir=file://{place}"
    distembed("train", config, elsewhere, "train.max_steps=20", "--run-dir", run, ranks=2)
    assert not (run / "checkpoints").exists()
    assert sorted(path.name for path in place.iterdir()) == [".run", "step-00000020"]
    assert (place / ".run").read_text() == str(run)
    call("predict", run, "--output", tmp_path / "predictions.parquet")
    call("materialise", run, "--output", tmp_path / "vectors", "--table", "C1")
    said = call("train", config, elsewhere, "train.max_steps=20", "--run-dir", run, "--resume")
    assert "resuming at step 20 of 20" in said
    other = tmp_path / "other"
    with pytest.raises(UserError, match="holds checkpoints of another run"):
        call("train", config, elsewhere, "--run-dir", other)
    assert not other.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be kept in"):
        call("train", config, f"train.checkpoint_dir={tmp_path}/file/below", "--run-dir", other)


def start_ranks(ranks: int, config: Path, run: Path, *overrides: str) -> list[BaseProcess]:
    """Starts a long run in processes that have torch already."""
    arguments = ("train", config, "train.epochs=400", *overrides, "--run-dir", run)
    return list(start_processes(ranks, run_command, arguments, run.parent, ranks, free_port()).processes)


def start(config: Path, run: Path, *overrides: str) -> BaseProcess:
    return start_ranks(1, config, run, *overrides)[0]


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def wait_for_steps(run: Path, process: BaseProcess, steps: int) -> None:
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < steps:
        assert process.is_alive(), [file.read_text() for file in run.parent.iterdir() if file.name in OUTPUTS]
        time.sleep(0.05)


def check_interrupted(run: Path) -> None:
    """That a checkpoint of the last step is there, whether or not one was due."""
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    (checkpoint,) = (run / "checkpoints").glob(f"step-{metrics(run, 'train')[-1]['step']:08d}*")
    assert (checkpoint / "progress.json").exists()
    assert "logloss" in call("evaluate", run)


@pytest.mark.thorough
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM], ids=lambda by: by.name)
def test_a_signal_leaves_a_checkpoint_to_go_on_from(
    by: signal.Signals, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM comes from a launcher, and several times; errors are noted for that alone."""
    if by == signal.SIGTERM:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)  # what launching leaves before the run starts
    process = start(config, run, "--resume-or-start")
    wait_for_steps(run, process, 20)
    for _ in range(5 if by == signal.SIGTERM else 1):
        os.kill(process.pid, by)  # type: ignore[arg-type]
    process.join()
    said = "".join((tmp_path / name).read_text() for name in OUTPUTS)
    assert process.exitcode == 75 and "interrupted" in said and "Traceback" not in said
    check_interrupted(run)
    assert not list(tmp_path.glob("error.json*"))
    if by == signal.SIGTERM:
        distembed("train", config, "--run-dir", run, code=2)
        noted = json.loads((tmp_path / "error.json.0").read_text())["message"]
        assert "UserError" in noted["message"] and "holds a run already" in noted["message"]
        assert "Traceback" in noted["extraInfo"]["py_callstack"]


@pytest.mark.thorough
@pytest.mark.distributed
def test_ctrl_c_stops_all_ranks_at_the_same_step(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    processes = start_ranks(2, config, run)
    wait_for_steps(run, processes[0], 20)
    for process in processes[::-1]:
        os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [75, 75]
    check_interrupted(run)


def test_a_run_that_was_killed_before_it_had_recorded_itself_starts_again(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    process = start(config, run)
    while not (run / ".lock").exists():
        assert process.is_alive()
        time.sleep(0.005)
    kill(process)
    # and one that was killed within the moment of recording it
    (run / "config.yaml").write_text("half")
    (run / ".run.json-abc").write_text("")
    again = ("train", config, "--run-dir", run, "--resume-or-start")
    assert "training 31 steps" in call(*again)
    assert "resuming at step 31 of 31" in call(*again)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(UserError, match="other files and no run"):
        call("train", config, "--run-dir", tmp_path / "full", "--resume-or-start")


def test_a_loss_that_is_not_finite_stops_the_run(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = write_dataset(tmp_path / "wild", dense_scale=1e30)
    done = distembed("train", config, f"data.path={data}", "--run-dir", run, code=1)
    step = int(re.search(r"loss is (?:nan|inf) at step (\d+) \(epoch 0, batch \d+, rank 0\)", done.stderr)[1])
    rows = np.load(run / f"not-finite-step-{step}-rank-0.npz")
    assert rows["dense_features"].shape == (64, 2) and np.abs(rows["dense_features"]).max() > 1e29
    assert len(rows["ids"]) == rows["lengths"].sum()
    assert "learning_rate" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


def test_what_does_not_fit_ends_with_3_on_every_rank(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the error that each leaves for the launcher has this code, by which no rank is started again."""
    errors = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(errors))
    for ranks, override, said in (
        (2, "train.batch_size=2000000000", "No plan fits: besides tables each rank needs"),
        (1, "model.top=[1048576, 1048576, 1048576]", "The networks of model.name='dlrm' take"),
    ):
        done = distembed("train", config, override, "--run-dir", tmp_path / "large", ranks=ranks, code=3)
        assert done.stderr.count(said) == ranks and "Traceback" not in done.stderr
        for rank in range(ranks):
            noted = json.loads(Path(f"{errors}.{rank}").read_text())["message"]
            assert noted["message"].startswith(f"InsufficientMemory: {said}") and noted["extraInfo"]["exit_code"] == 3
            Path(f"{errors}.{rank}").unlink()
    monkeypatch.setenv("DISTEMBED_LAUNCHER_TELLS", "1")
    done = distembed("train", config, "model.top=[1048576, 1048576, 1048576]", "--run-dir", tmp_path / "large", code=3)
    assert "The networks" not in done.stderr and Path(f"{errors}.0").exists()


@pytest.mark.thorough
def test_other_ids_and_unknown_tables_are_refused(config: Path, tmp_path: Path, finished: Path) -> None:
    other = write_dataset(tmp_path / "other", num_ids=401)
    with pytest.raises(UserError, match="stand for other values"):
        call("evaluate", finished, "--data", other)
    with pytest.raises(UserError, match="plan.tables is 'C7'"):
        call("train", config, "plan.tables={C7: {}}", "--run-dir", tmp_path / "new")


def test_two_runs_in_one_folder_are_refused(config: Path, finished: Path) -> None:
    with owned(finished), pytest.raises(UserError, match="in use by another process"):
        call("train", config, "train.epochs=3", "train.checkpoint_every=10", "--run-dir", finished, "--resume")
