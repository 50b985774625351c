"""``embedding.kernel`` in a config: how tables are looked up, and nothing else of what they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distembed.base.errors import UserError
from distembed.commands.cli import app
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.config import meaning_of_weights
from distembed.embedding.settings import KERNELS
from distembed.training.config import load_config

CRITEO = [str(Path(__file__).parents[2] / "configs" / "criteo_kaggle.yaml"), "data.schema=criteo_kaggle"]


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_an_unknown_kernel_is_refused_with_the_nearest_name() -> None:
    for wrong, nearest in (("fuse", "fused"), ("fbgem", "fbgemm"), ("Auto", "auto")):
        with pytest.raises(UserError, match=rf"embedding.kernel.*did you mean '{nearest}'.*got '{wrong}'"):
            load_config(None, [f"embedding.kernel={wrong}"])
        with pytest.raises(UserError, match=f"table 't': kernel.*{nearest}"):
            CompositionalEmbeddingBagConfig("t", 10, 4, ["f"], kernel=wrong)  # type: ignore[arg-type]


def test_unless_given_it_is_auto() -> None:
    assert load_config(None, []).embedding.kernel == "auto"
    assert CompositionalEmbeddingBagConfig("t", 10, 4, ["f"]).kernel == "auto"


def test_weights_mean_the_same_by_every_kernel() -> None:
    tables = [CompositionalEmbeddingBagConfig("t", 10, 4, ["f"], kernel=kernel) for kernel in KERNELS]
    assert len({meaning_of_weights(table) for table in tables}) == 1
    assert len({str(run("describe", *CRITEO, f"embedding.kernel={kernel}")) for kernel in KERNELS}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(("gpu", "same_as_auto"), [("cpu-256gb", "fused"), ("h100-80gb", "fbgemm")])
def test_a_plan_counts_what_auto_takes_on_the_device(gpu: str, same_as_auto: str) -> None:
    settings = ["embedding.default.partition=quotient_remainder", "embedding.default.force=true"]
    settings += ["plan.sharding_types=[row_wise]", "--gpus", "2", "--gpu", gpu]  # other types take longer to plan
    plans = {
        kernel: run("plan", *CRITEO, f"embedding.kernel={kernel}", *settings)
        for kernel in ("auto", "fused", "fbgemm")
        if gpu.startswith("cpu") or kernel != "fused"
    }
    assert plans["auto"] == plans[same_as_auto]
    for item in ("table_weights", "table_optimizer_state", "network_weights"):
        totals = {sum(rank["memory"][item] for rank in plan["ranks"]) for plan in plans.values()}
        assert len(totals) == 1, item
    lookups = {kernel: max(rank["memory"]["lookups"] for rank in plan["ranks"]) for kernel, plan in plans.items()}
    assert lookups.get("fused", 0) < lookups["fbgemm"]
