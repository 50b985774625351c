"""Settings of half precision: what is refused, and what a plan counts for them."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distembed.base.errors import UserError
from distembed.commands.cli import app
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.exchange import QuantizedCommsConfig, VectorExchange
from distembed.optim.declared import TableOptimizers
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.devices import Cluster, find_device
from distembed.planning.search import find_plan
from distembed.sharding import default_sharders
from distembed.sharding.exchange import exchange_of
from distembed.training.config import load_config
from tests.planning.drawn_requests import model_of

ROOT = Path(__file__).parents[2]
EXCHANGES = [VectorExchange(dtype) for dtype in ("fp32", "fp16", "bf16")]  # type: ignore[arg-type]
EXCHANGES += [VectorExchange(comms=QuantizedCommsConfig(*pair)) for pair in (("fp16", "bf16"), ("int8", "fp32"))]  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_sharders_say_what_they_were_made_with(exchange: VectorExchange) -> None:
    pooled, sequences, *stock = default_sharders(exchange=exchange)
    assert exchange_of(pooled) == exchange_of(sequences) == exchange
    assert {exchange_of(sharder) for sharder in stock} == {VectorExchange(comms=exchange.comms)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("embedding.default.data_type=fp8", "embedding.default.data_type"),
        ("embedding.output_dtype=half", "embedding.output_dtype"),
        ("train.quantized_comms.forward_precision=fp8", "train.quantized_comms.forward_precision"),
    ],
)
def test_unknown_precisions_are_refused_by_path(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, [override])


def test_vectors_are_not_rounded_twice() -> None:
    with pytest.raises(UserError, match="leave one of the two out"):
        load_config(None, ["embedding.output_dtype=fp16", "train.quantized_comms.backward_precision=bf16"])


def test_a_plan_counts_half_of_the_weights_and_of_what_is_sent() -> None:
    def planned(data_type: Any, dtype: Any) -> list[int]:
        tables = [CompositionalEmbeddingBagConfig(n, 4000, 64, [n], data_type=data_type) for n in ("a", "b", "c")]
        sharders, cluster = default_sharders(exchange=VectorExchange(dtype)), Cluster(find_device("h100-80gb"), 1, 2)
        config, optimizers = PlanConfig(["table_wise"]), TableOptimizers("adagrad")
        request = PlanRequest(model_of(tables), sharders, cluster, Workload(1024), config, optimizers)
        ranks = find_plan(request).ranks
        items = [sum(rank.memory[item] for rank in ranks) for item in ("table_weights", "table_optimizer_state")]
        return [*items, sum(rank.sent.vectors for rank in ranks)]

    (weights, states, sent), (half_weights, same_states, half_sent) = planned("FP32", "fp32"), planned("FP16", "fp16")
    assert (weights, states, sent) == (2 * half_weights, same_states, 2 * half_sent)


def test_what_cannot_be_is_refused_with_the_remedy() -> None:
    int8, rows = "train.quantized_comms.forward_precision=int8", "plan.sharding_types=[row_wise]"
    for gpu, settings, message in (
        ("cpu-256gb", ["embedding.default.data_type=bf16"], "fp16 or fp32"),
        ("h100-80gb", [int8], "multiple of 32"),
        ("h100-80gb", [int8, "embedding.default.embedding_dim=32", rows], "no int8"),
    ):
        arguments = ["plan", str(ROOT / "configs" / "criteo_kaggle.yaml"), "data.schema=criteo_kaggle", *settings]
        done = CliRunner().invoke(app, [*arguments, "--gpus", "2", "--gpu", gpu])
        assert done.exit_code == 2 or isinstance(done.exception, UserError), done.output
        assert message in str(done.exception) + done.output
