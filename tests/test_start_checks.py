"""What is told before the first step, by the setting's name, where it was found hours later or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from distembed.base.errors import RunError, UserError
from distembed.commands import cli
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import build_tables
from distembed.models import ModelInputs
from distembed.planning.devices import MAX_RANKS, Cluster, find_device
from distembed.planning.networks import require_networks_fit
from distembed.training.config import load_config
from tests.small_runs import distembed

HUGE = 2**62


def call(*arguments: object) -> None:
    """Runs the command in this process, which has loaded torch."""
    cli.app([str(argument) for argument in arguments], standalone_mode=False)


@pytest.mark.distributed
def test_all_ranks_end_where_a_split_is_missing(config: Path, tmp_path: Path) -> None:
    done = distembed("train", config, "data.test=tset", "--run-dir", tmp_path / "run", ranks=2, code=2)
    assert "data.test is 'tset'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.batch_size", HUGE),
        ("train.batch_size", 2**31),
        ("train.epochs", HUGE),
        ("train.max_steps", HUGE),
        ("train.log_every", HUGE),
        ("train.evaluate_every", HUGE),
        ("train.checkpoint_every", HUGE),
        ("train.keep_checkpoints", HUGE),
        ("train.seed", 2**31),
        ("embedding.default.embedding_dim", 10**9),
        ("embedding.tables.C3.dims", [10**9]),
        ("embedding.default.hidden", [10**9]),
        ("embedding.default.hidden", [1] * 1001),
        ("model.top", [10**9]),
        ("model.bottom", [8] * 1001),
        ("model", {"name": "dcn", "num_cross_layers": 10**6}),
        ("model", {"name": "dcn", "deep": [HUGE]}),
        ("plan.min_partition", HUGE),
    ],
)
def test_absurd_sizes_are_refused_by_the_name_of_the_setting(setting: str, value: Any) -> None:
    for given in (value, -1, 0) if isinstance(value, int) and setting not in ("train.seed",) else (value,):
        if given == 0 and setting.endswith(("evaluate_every", "checkpoint_every")):
            continue
        with pytest.raises(UserError) as error:
            load_config(None, [f"{setting}={json.dumps(given)}"])
        assert f"\n  {setting}" in str(error.value)


@pytest.mark.parametrize("rows", [HUGE, 2**63 - 1])
def test_a_table_that_no_machine_holds_is_refused_by_its_name(rows: int) -> None:
    feature = CategoricalFeature("C2", rows)
    for partition in ("naive", "quotient_remainder"):
        config = load_config(None, [f"embedding.default.partition={partition}"]).embedding
        with pytest.raises(UserError, match=r"table 'C2' would have [\d,]+ rows of 16 numbers"):
            build_tables([feature], config)
    config = load_config(None, ["embedding.default.partition=mixed_radix"]).embedding
    (table,) = build_tables([feature], config)
    assert table.memory_bytes < 2**42


def test_networks_that_this_machine_cannot_hold_are_refused_without_making_them() -> None:
    config = load_config(None, ["model.top=[1048576, 1048576, 1048576]"])
    inputs = ModelInputs.from_config(Schema("label", ("I1",), (CategoricalFeature("C1", 5),)), config.embedding)
    with pytest.raises(RunError, match="model.name='dlrm' take 8.00 TiB for their weights alone.*Lower the sizes"):
        require_networks_fit(config.model, inputs, num_copies=1)
    small = load_config(None, []).model
    require_networks_fit(small, inputs, num_copies=8)
    with pytest.raises(RunError, match="in 1000000000 processes"):
        require_networks_fit(small, inputs, num_copies=10**9)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(100_000, 100_000), (2**70, 1), (1, MAX_RANKS + 1)])
def test_more_ranks_than_can_be_planned_are_refused_with_the_limit(nodes: int, ranks_per_node: int) -> None:
    with pytest.raises(UserError, match=r"--nodes \d+ with --gpus \d+ are [\d,]+ ranks; a plan has 65,536 at most"):
        Cluster(find_device("h100-80gb"), nodes, ranks_per_node)
    assert Cluster(find_device("h100-80gb"), MAX_RANKS // 8, 8).world_size == MAX_RANKS
