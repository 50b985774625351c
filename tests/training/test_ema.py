"""Averages of networks' weights: the recurrence in float64, their use, and runs that are resumed or have two ranks."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
import yaml

from distembed.base.errors import RunError, UserError
from distembed.checkpoints import load_checkpoint
from distembed.checkpoints.checkpoint import load_weights
from distembed.optim.averages import AveragedWeights
from distembed.optim.config import EMAConfig
from distembed.optim.optimizers import averaged_parameters
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.serving.whole_model import load_whole_model
from distembed.training.trained_run import find_trained_run
from tests.layouts import SeveralCollections, build, shard
from tests.ranks import run_on_ranks
from tests.small_runs import call, config_values, distembed, metrics, stopped_at

DECAY, START, STEPS = 0.25, 2, 6
FUNCTION = "functions.C2__p1"
"""Weights of a path-based table's functions."""
Arrays = dict[str, npt.NDArray[np.float64]]


def saved(checkpoint: Path, beginning: str) -> Arrays:
    """Tensors of a checkpoint by their names after ``beginning``, whose files are read by NumPy alone."""
    found: Arrays = {}
    for key, entry in json.loads((checkpoint / "index.json").read_text()).items():
        whole = np.empty(entry["size"], entry["dtype"])
        for file, start, length, _, offsets, sizes in entry["blocks"]:
            data = (checkpoint / file).read_bytes()[start : start + length]
            place = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            whole[place] = np.frombuffer(data, entry["dtype"]).reshape(sizes)
        if key.startswith(beginning):
            found[key.removeprefix(beginning)] = whole
    return found


def next_average(average: Any, weight: Any, num_updates: int) -> Any:
    decay = min(DECAY, (1 + num_updates) / (10 + num_updates))
    return decay * average + (1 - decay) * weight


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


def evaluation(run: Path, split: str, *options: object) -> dict[str, Any]:
    said = call("evaluate", run, "--split", split, "--json", *options)
    found: dict[str, Any] = json.loads(said[said.index("{") :])
    return found


def values_of_config(dataset: Path, **train: Any) -> dict[str, Any]:
    values = config_values(dataset)
    values["data"]["validation"] = "validation"
    values["embedding"]["tables"] = {"C2": {"composition": "path_mlp", "force": True}}
    values["train"] |= {
        "ema": {"decay": DECAY, "start_step": START},
        "dense_optimizer": {"name": "adam", "learning_rate": 0.05},
        "max_steps": STEPS,
        "checkpoint_every": 1,
        "evaluate_every": 1,
        "keep_checkpoints": STEPS,
        "loggers": [],
        **train,
    }
    return values


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains with averages, with a checkpoint and an evaluation after each step."""
    folder = tmp_path_factory.mktemp("ema")
    (folder / "config.yaml").write_text(yaml.safe_dump(values_of_config(dataset)))
    call("train", folder / "config.yaml", "--run-dir", folder / "run")
    return folder / "run"


def test_averages_are_the_recurrence_of_the_weights(run: Path) -> None:
    expected: Arrays = {}
    for step in range(1, STEPS + 1):
        weights, averages = saved(checkpoint(run, step), "model."), saved(checkpoint(run, step), "average.")
        # networks and path functions, and no table
        assert averages.keys() == {name for name in weights if ".embedding_bags." not in name}
        assert any(name.endswith(FUNCTION) for name in averages)
        for name in averages:
            now = weights[name].astype(np.float64)
            expected[name] = now if step <= START else next_average(expected[name], now, step - START)
            np.testing.assert_allclose(averages[name], expected[name], rtol=1e-5, atol=1e-7)
    assert all((averages[name] != weights[name]).any() for name in averages)


def test_the_trained_model_is_the_averaged_one(run: Path) -> None:
    last = checkpoint(run, STEPS)
    weights, averages = saved(last, "model."), saved(last, "average.")
    used = load_whole_model(find_trained_run(run, None), torch.device("cpu")).module.state_dict()
    stock = StockCheckpoint(last)
    assert used.keys() >= weights.keys() and not any(name.startswith("average.") for name in stock)
    for name, values in (weights | averages).items():
        np.testing.assert_array_equal(used[name].numpy(), values)
        np.testing.assert_array_equal(stock[f"model.{name}"].numpy(), values)
    (name,) = (name for name in averages if name.endswith(FUNCTION))
    np.testing.assert_array_equal(load_weights(last, [FUNCTION])[0].numpy(), averages[name])
    # what was recorded while it trained is what later commands find, which never see the other weights
    lines = [line for line in metrics(run, "eval") if line["split"] == "validation"]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in (lines[START], lines[-1]):
        found = evaluation(run, "validation", "--checkpoint", line["step"])
        assert found["logloss"] == line["logloss"] and found["auc"] == line["auc"]


@pytest.mark.thorough
def test_training_is_not_changed_by_averages_or_evaluations(run: Path, dataset: Path, tmp_path: Path) -> None:
    without = values_of_config(dataset, ema=None, evaluate_every=0)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(without))
    call("train", tmp_path / "config.yaml", "--run-dir", tmp_path / "run")
    for step in (1, STEPS):
        ours, plain = (checkpoint(folder, step) for folder in (run, tmp_path / "run"))
        for beginning in ("model.", "optimizer."):
            found, expected = saved(ours, beginning), saved(plain, beginning)
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values)
        assert not saved(plain, "average.")


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_has_the_averages_of_one_that_was_not_stopped(run: Path, tmp_path: Path, step: int) -> None:
    stopped = stopped_at(step, run, tmp_path / "run")
    call("train", run / "config.yaml", "--run-dir", stopped, "--resume")
    found, expected = saved(checkpoint(stopped, STEPS), ""), saved(checkpoint(run, STEPS), "")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if not name.startswith("ranks."):  # the window of metrics has seconds
            np.testing.assert_array_equal(found[name], values)
    ours, whole = ([line["logloss"] for line in metrics(folder, "eval")] for folder in (stopped, run))
    assert ours == whole
    with pytest.raises(UserError, match=r"train.ema.decay: 0.25 before, 0.5 now"):
        call("train", run / "config.yaml", "train.ema.decay=0.5", "--run-dir", stopped, "--resume")
    with pytest.raises(UserError, match=r"train.ema"):
        call("train", run / "config.yaml", "train.ema=null", "--run-dir", stopped, "--resume")


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_have_the_averages_of_one(run: Path, tmp_path: Path) -> None:
    distembed("train", run / "config.yaml", "--run-dir", tmp_path / "two", ranks=2)
    for name, values in saved(checkpoint(tmp_path / "two", STEPS), "average.").items():
        np.testing.assert_allclose(values, saved(checkpoint(run, STEPS), "average.")[name], rtol=1e-3, atol=1e-5)
    two, one = ([line["logloss"] for line in metrics(folder, "eval")] for folder in (tmp_path / "two", run))
    assert two == pytest.approx(one, rel=1e-4)


def test_the_final_evaluation_is_of_the_best_averages(dataset: Path, tmp_path: Path) -> None:
    # at this rate the last evaluations are worse
    train = {"dense_optimizer": {"name": "adam", "learning_rate": 0.2}, "keep_best": True, "keep_checkpoints": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values_of_config(dataset, **train)))
    run = tmp_path / "run"
    call("train", tmp_path / "config.yaml", "--run-dir", run)
    lines = {line["step"]: line for line in metrics(run, "eval") if line["split"] == "validation"}
    final, best = json.loads((run / "evaluation.json").read_text()), max(lines, key=lambda step: lines[step]["auc"])
    assert best < STEPS and final["checkpoint_step"] == best
    for split, logloss in (("validation", lines[best]["logloss"]), ("test", final["logloss"])):
        assert evaluation(run, split)["logloss"] == logloss
    np.testing.assert_array_equal(
        load_weights(checkpoint(run, best), [FUNCTION])[0].numpy(),
        next(value for name, value in saved(checkpoint(run, best), "average.").items() if name.endswith(FUNCTION)),
    )


def test_a_run_that_continues_another_starts_from_its_weights(run: Path, tmp_path: Path) -> None:
    settings = [f"train.init_from={run}", "train.ema.start_step=0", "train.max_steps=1"]
    call("train", run / "config.yaml", *settings, "--run-dir", tmp_path / "run")
    before, after = saved(checkpoint(run, STEPS), "model."), saved(checkpoint(tmp_path / "run", 1), "model.")
    for name, average in saved(checkpoint(tmp_path / "run", 1), "average.").items():
        expected = next_average(before[name].astype(np.float64), after[name], 1)
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)


def check_ranks(rank: int, world_size: int) -> None:
    several = shard(SeveralCollections("meta"), "row_wise", "adagrad")
    functions = {"bags.functions.c__p1", "sequences.functions.d__p1"}
    assert averaged_parameters(several.model).keys() == {"linear.weight", "linear.bias", *functions}
    for layout in ("table_wise", "row_wise"):
        trained = build(layout, "adagrad")
        weights = averaged_parameters(trained.model)
        averages = AveragedWeights(weights, EMAConfig(decay=DECAY))
        expected = {name: weight.detach().double() for name, weight in weights.items()}
        for step in range(1, 4):
            trained.step(step)
            averages.update(step)
            for name, weight in weights.items():
                expected[name] = next_average(expected[name], weight.detach().double(), step)
        raw = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, average in averages.values.items():
            torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-7)
            of_ranks = [torch.empty_like(average) for _ in range(world_size)]
            dist.all_gather(of_ranks, average)
            assert all(torch.equal(other, average) for other in of_ranks)
        kept = {name: average.clone() for name, average in averages.values.items()}
        with averages.in_use():
            assert all(torch.equal(weight, kept[name]) for name, weight in averaged_parameters(trained.model).items())
        assert all(torch.equal(weight, raw[name]) for name, weight in averaged_parameters(trained.model).items())
        trained.step(4)  # after an exchange too


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_all_ranks_have_equal_averages(world_size: int) -> None:
    run_on_ranks(world_size, check_ranks)


@pytest.mark.parametrize("num_steps", [1, 20, 200])
@pytest.mark.parametrize("start_step", [0, 3])
def test_few_steps_forget_the_initial_weights(num_steps: int, start_step: int) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    averages = AveragedWeights({"weight": weight}, EMAConfig(decay=0.999, start_step=start_step))
    averages.update(start_step)
    weight.data.zero_()
    for step in range(num_steps):
        averages.update(start_step + 1 + step)
    # the product of (1 + n) / (10 + n) over n = 1 .. N; N steps with 0.999 would keep 0.999^N
    kept = math.factorial(10) / math.prod(range(num_steps + 2, num_steps + 11))
    torch.testing.assert_close(averages.values["weight"], torch.full_like(weight, kept).detach(), rtol=1e-12, atol=0)


def test_without_a_config_nothing_is_averaged() -> None:
    linear = torch.nn.Linear(2, 1)
    averages, before = AveragedWeights(dict(linear.named_parameters()), None), linear.weight.detach().clone()
    averages.update(1)
    with averages.in_use():
        assert torch.equal(linear.weight, before)
    assert averages.values == {}


@pytest.mark.parametrize("ema", [{"decay": 1.0}, {"decay": 0.0}, {"start_step": -1}, {"dekay": 0.9}])
def test_other_settings_are_refused(config: Path, ema: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"train\.ema"):
        call("describe", config, f"train.ema={json.dumps(ema)}")


def test_an_optimizer_gets_the_weights_that_are_trained(run: Path) -> None:
    used = load_whole_model(find_trained_run(run, None), torch.device("cpu")).module
    load_checkpoint(checkpoint(run, 1), used)
    first = saved(checkpoint(run, 1), "average.")
    for name, values in first.items():
        np.testing.assert_array_equal(used.state_dict()[name].numpy(), values)


@pytest.mark.thorough
def test_a_plan_counts_the_averages(run: Path) -> None:
    states = []
    for ema in ("null", "{}"):
        said = call("plan", run / "config.yaml", f"train.ema={ema}", "--json")
        states.append(json.loads(said[said.index("{") :])["ranks"][0]["memory"]["network_optimizer_state"])
    assert states[1] - states[0] == sum(values.nbytes for values in saved(checkpoint(run, 1), "average.").values())


def test_room_for_a_checkpoint_includes_the_averages(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def refuse(url: str, keep: int, num_bytes: int, say: object) -> None:
        asked.append(num_bytes)
        raise RunError("no room")

    monkeypatch.setattr("distembed.checkpoints.run_checkpoints.require_bytes", refuse)
    for ema in ("null", "{}"):
        with pytest.raises(RunError, match="no room"):
            call("train", run / "config.yaml", f"train.ema={ema}", "--run-dir", tmp_path / f"run{ema}")
    assert asked[1] - asked[0] == sum(values.nbytes for values in saved(checkpoint(run, 1), "average.").values())
