"""Vectors and gradients that are rounded while they are sent, on gloo ranks, against what nothing rounds.

Each direction by itself rounds what goes that way, by no more than its precision, and leaves the other alone.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from distembed.embedding.settings import QuantizedCommsConfig, VectorExchange
from tests.composability.test_dtypes import whole_weights
from tests.ranks import run_cases
from tests.sharding import test_sharded_equals_unsharded as bags

ROUNDS_BY = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""By how much, of itself, rounding to the nearest changes a number at most."""
MOST_ROUNDINGS = 6
"""Numbers of the largest size whose roundings add up in a sum: of a rank each, the sum's, and that of a bag's ids."""
FLOAT_SLACK = 1e-5
"""Of the largest number: sums of float32 in another order."""
NUM_ROWS = 6
Case = tuple[str, VectorExchange]
PAIRS = [("fp16", "fp16"), ("bf16", "bf16"), ("fp16", "bf16"), ("fp16", "fp32"), ("fp32", "bf16")]
EXCHANGES = [VectorExchange(comms=QuantizedCommsConfig(*pair)) for pair in PAIRS]  # type: ignore[arg-type]
EXCHANGES += [VectorExchange("fp16"), VectorExchange("bf16")]
ALL = list(itertools.product(bags.SHARDING_TYPES, EXCHANGES))
SOME = [("table_wise", EXCHANGES[2]), ("column_wise", EXCHANGES[3]), ("row_wise", EXCHANGES[0]), ALL[-1]]
SOME += [("row_wise", EXCHANGES[4]), ("table_wise", EXCHANGES[6])]


def precisions(exchange: VectorExchange) -> tuple[float, float]:
    """By how much vectors and gradients are rounded at most, of themselves."""
    if exchange.output_dtype != "fp32":
        return (ROUNDS_BY[exchange.output_dtype],) * 2
    return ROUNDS_BY[exchange.comms.forward_precision], ROUNDS_BY[exchange.comms.backward_precision]


def require_close(found: Tensor, expected: Tensor, precision: float, what: str) -> float:
    """Requires numbers that differ by rounding alone; returns by how much they do, of the largest."""
    size = float(expected.abs().max())
    differs = float((found - expected).abs().max())
    assert differs <= (MOST_ROUNDINGS * precision + FLOAT_SLACK) * size, f"{what}: {differs} of {size}"
    return differs / size if size else 0.0


def check(rank: int, world_size: int, sharding_type: str, exchange: VectorExchange) -> None:
    reference = bags.Head("cpu")
    model = bags.shard(bags.Head("meta"), torch.optim.SGD, {"lr": 1.0}, sharding_type, exchange)
    generator = torch.Generator().manual_seed(3)
    features = bags.draw(NUM_ROWS, "ragged", generator)
    start, stop = rank * NUM_ROWS // world_size, (rank + 1) * NUM_ROWS // world_size
    output, values = model(bags.part(features, start, stop))
    expected_output, expected = reference(features)
    # replicated tables are looked up by whoever needs their vectors, and nothing is sent
    forward, backward = precisions(exchange) if sharding_type != "data_parallel" else (0.0, 0.0)
    assert values.dtype == torch.float32
    vectors = [
        require_close(own, exact[start:stop], forward, f"vectors of {name}")
        for name, own, exact in by_feature(reference, features.keys(), values, expected)
    ]
    # gradients of vectors that do not depend on these
    given = torch.randn(expected.shape, generator=generator)
    ((values * given[start:stop]).sum() * world_size + 0 * output.sum()).backward()
    ((expected * given).sum() + 0 * expected_output.sum()).backward()
    after = whole_weights(model)
    gradients, functions = [], dict(model.named_parameters())
    for name, weight in reference.named_parameters():
        assert weight.grad is not None
        if "embedding_bags" in name:
            update = weight.detach().double() - after[name].double()
            gradients.append(require_close(update.float(), weight.grad, backward, f"update of {name}"))
        elif name in functions and functions[name].grad is not None:
            require_close(functions[name].grad, weight.grad, backward, f"gradient of {name}")
    for precision, differences in ((forward, vectors), (backward, gradients)):
        assert precision == 0 or max(differences) > precision / 8, "nothing has been rounded"


def by_feature(
    model: nn.Module, keys: list[str], values: Tensor, expected: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields each feature's columns of two tensors that have those of all features side by side."""
    names = [name for table in model.get_submodule("embeddings").tables() for name in table.feature_names]
    widths = [
        table.num_vectors * table.embedding_dim
        for table in model.get_submodule("embeddings").tables()
        for _ in table.feature_names
    ]
    assert sorted(names) == sorted(keys) and sum(widths) == values.shape[1]
    yield from zip(names, values.split(widths, dim=1), expected.split(widths, dim=1), strict=True)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"), [(2, SOME), *(pytest.param(n, ALL, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_each_way_is_rounded_by_its_precision_and_no_more(world_size: int, cases: list[Case]) -> None:
    run_cases(world_size, check, cases)
