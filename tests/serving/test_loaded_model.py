"""A run as a Python object gives what the commands give."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

import distembed
from distembed import LoadedModel
from distembed.base.errors import UserError
from distembed.data.reader import BatchOrder, BatchReader
from tests.criteo_runs import criteo_run
from tests.in_process import in_this_process as command
from tests.ranks import run_on_ranks
from tests.small_runs import train_small


@pytest.fixture(scope="module")
def run(criteo: Path) -> Path:
    return criteo / "run"


@pytest.fixture(scope="module")
def model(run: Path) -> LoadedModel:
    return distembed.load(run)


def batch_of(run: Path, split: str = "test", size: int = 8192) -> Any:
    return next(iter(BatchReader(run.parent / "dataset", split, BatchOrder(size, shuffle=False))))


@pytest.mark.thorough
def test_a_batch_is_predicted_to_the_bit_as_the_command_does(run: Path, model: LoadedModel, tmp_path: Path) -> None:
    command("predict", run, "--output", tmp_path / "predictions.parquet")
    expected = pq.read_table(tmp_path / "predictions.parquet")["prediction"].to_numpy()
    found = model.predict(batch_of(run))
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_an_evaluation_gives_the_metrics_of_the_command(run: Path, model: LoadedModel, dataset: Path) -> None:
    said = json.loads(command("evaluate", run, "--split", "validation", "--json").stdout)
    assert model.evaluate("validation") == said
    with pytest.raises(UserError, match="'autumn'"):
        model.evaluate("autumn")
    for missing in ("nope.csv", Path("nope")):
        with pytest.raises(UserError, match="there is no file 'nope"):
            model.evaluate(missing)
    with pytest.raises(UserError, match="It has no columns"):
        model.evaluate([])
    with pytest.raises(UserError, match="checkpoint .--checkpoint. is 'worst'"):
        distembed.load(run, checkpoint="worst")


def test_lists_of_ids_are_pooled_as_the_sharded_model_does(dataset: Path, tmp_path: Path) -> None:
    run = train_small(tmp_path, dataset, max_steps=3)
    said = json.loads(command("evaluate", run, "--json").stdout)
    found = distembed.load(run).evaluate()
    # sums of several ids are added up in another order
    assert found.pop("split") == said.pop("split") and found == pytest.approx(said, rel=1e-5)


def test_vectors_are_those_that_are_materialised(run: Path, model: LoadedModel, tmp_path: Path) -> None:
    command("materialise", run, "--output", tmp_path, "--table", "C3")
    stored = pq.read_table(tmp_path / "C3.parquet")["vector"].combine_chunks().flatten().to_numpy().reshape(-1, 8)
    ids = [5, 0, 5, len(stored) - 1]
    assert np.array_equal(model.embed("C3", ids=ids), stored[ids])
    assert np.array_equal(model.embed("C3", ids=np.array(ids)), stored[ids])
    assert model.embed("C3", ids=[]).shape == (0, 8)
    for ask, said in (
        (lambda: model.embed("C33", ids=[0]), "C3"),
        (lambda: model.embed("C3", ids=[len(stored)]), "at position 0"),
        (lambda: model.embed("C3", ids=["a"]), "'a'"),
    ):
        with pytest.raises(UserError, match=said):
            ask()


def test_it_says_what_it_is(run: Path, model: LoadedModel) -> None:
    found = json.loads(json.dumps(model.describe()))
    assert found["task"] == "click" and found["step"] == 3 and len(found["tables"]) == 26
    assert found["parameters"] == json.loads((run / "run.json").read_text())["parameters"]
    assert f"{run}, step 3, 26 tables" in repr(model)
    page = model._repr_html_()
    assert page.count("<tr>") == 27 and "C26" in page and str(run) in page


@pytest.mark.parametrize(
    ("expression", "said"), [("1", "1"), pytest.param("distembed.load(run).step", "3", marks=pytest.mark.slow)]
)
def test_the_package_is_light_and_one_import_is_enough(run: Path, expression: str, said: str) -> None:
    program = (
        f"import sys, distembed\nrun = {str(run)!r}\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        f"print({expression})\n"
        "try:\n    distembed.lode\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [said, "module 'distembed' has no attribute 'lode'"], done.stderr


def test_the_random_numbers_of_the_caller_are_left_alone(run: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    distembed.load(run)
    assert torch.equal(torch.rand(3), expected)


def test_several_threads_predict_at_once(run: Path, model: LoadedModel) -> None:
    batches = [batch_of(run, split) for split in ("train", "validation", "test")]
    expected = [model.predict(batch) for batch in batches]
    found: dict[int, list[bool]] = {}

    def work(number: int) -> None:
        found[number] = [
            np.array_equal(model.predict(batches[i % 3]), expected[i % 3]) for i in range(number, number + 20)
        ]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(all(equal) for equal in found.values())


def test_pickled_it_is_loaded_again(run: Path, model: LoadedModel) -> None:
    again = pickle.loads(pickle.dumps(model))
    assert again.checkpoint == model.checkpoint
    assert np.array_equal(again.predict(batch_of(run)), model.predict(batch_of(run)))


def in_fork(work: Callable[[], bool]) -> bool:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(work()))
    process.start()
    process.join(60)
    assert process.exitcode == 0, "the fork hangs, or has failed"
    return bool(queue.get())


def test_it_works_in_a_fork(run: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model, batch = distembed.load(run), batch_of(run, "train")
        expected = model.predict(batch)  # with threads that the fork will not have
        assert in_fork(lambda: np.array_equal(model.predict(batch), expected))
    finally:
        torch.set_num_threads(threads)


def load_on_one_rank(rank: int, world_size: int, run: str) -> None:
    if rank == 1:  # alone: a collective would wait for the other
        model = distembed.load(run)
        assert model.evaluate("test")["rows"] == 70
    assert dist.is_initialized()


@pytest.mark.thorough
@pytest.mark.distributed
def test_it_takes_no_part_in_a_process_group(run: Path) -> None:
    run_on_ranks(2, load_on_one_rank, os.fspath(run))


@pytest.mark.thorough
@pytest.mark.distributed
def test_weights_that_two_ranks_saved_are_read(tmp_path: Path) -> None:
    column_wise = "plan.tables={C1: {sharding_types: [column_wise]}, C2: {sharding_types: [row_wise]}}"
    run = criteo_run(tmp_path, column_wise, ranks=2)
    said = json.loads(command("evaluate", run, "--json").stdout)
    assert distembed.load(run).evaluate() == said


def test_a_checkpoint_is_named_by_its_number(run: Path, model: LoadedModel) -> None:
    for name in (model.step, str(model.step)):
        assert distembed.load(run, checkpoint=name).checkpoint == model.checkpoint


def test_what_is_no_run_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match="is no run"):
        distembed.load(tmp_path)
    with pytest.raises(UserError, match="CUDA"):
        distembed.load(run, device="cuda")
