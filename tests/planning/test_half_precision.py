"""Settings of half precision: what is refused, and what a plan counts for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distembed.base.errors import UserError
from distembed.commands.cli import app
from distembed.embedding.exchange import QuantizedCommsConfig, VectorExchange
from distembed.sharding import default_sharders
from distembed.sharding.exchange import exchange_of
from distembed.training.config import load_config

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


def plan(*settings: str, gpu: str = "h100-80gb", code: int = 0) -> Any:
    arguments = ["plan", str(ROOT / "configs" / "criteo_kaggle.yaml"), "data.schema=criteo_kaggle", *settings]
    done = CliRunner().invoke(app, [*arguments, "--gpus", "2", "--gpu", gpu, *(["--json"] if code == 0 else [])])
    assert done.exit_code == code or isinstance(done.exception, UserError), done.output
    return json.loads(done.output) if code == 0 else str(done.exception) + done.output


def test_a_plan_counts_half_of_the_weights_and_of_what_is_sent() -> None:
    types = "plan.sharding_types=[table_wise]"
    whole, half = plan(types), plan(types, "embedding.default.data_type=fp16", "embedding.output_dtype=fp16")
    weights, states = (
        [sum(rank["memory"][item] for rank in made["ranks"]) for made in (whole, half)]
        for item in ("table_weights", "table_optimizer_state")
    )
    assert weights[0] == 2 * weights[1] and states[0] == states[1]
    assert sum(r["sent_bytes"]["vectors"] for r in whole["ranks"]) == 2 * sum(
        r["sent_bytes"]["vectors"] for r in half["ranks"]
    )


def test_what_cannot_be_is_refused_with_the_remedy() -> None:
    assert "fp16 or fp32" in plan("embedding.default.data_type=bf16", gpu="cpu-256gb", code=2)
    int8 = "train.quantized_comms.forward_precision=int8"
    assert "multiple of 32" in plan(int8, code=2)
    rows = "plan.sharding_types=[row_wise]"
    assert "no int8" in plan(int8, "embedding.default.embedding_dim=32", rows, code=2)
