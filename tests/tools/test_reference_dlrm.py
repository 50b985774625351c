"""The reference DLRM that ``tools/bench_train.py`` holds this project's against: its arithmetic, and that it learns."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

TOOLS = Path(__file__).parents[2] / "tools"
OPTIMIZERS = {torch.optim.SGD: 0.01, torch.optim.Adagrad: 0.001}  # Adagrad's first step moves all by the whole rate
NUM_IDS = (7, 1, 1000)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    from peers import reference_dlrm

    return reference_dlrm


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import bench_train

    return bench_train


def draw_rows(peer: Any, lengths: list[list[int]], num_dense: int) -> Any:
    """Returns rows of ids drawn from all of each table, with bags of these lengths, a list a feature."""
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.randint(num_ids, (sum(counts),), generator=generator)
        for num_ids, counts in zip(NUM_IDS, lengths, strict=True)
    ]
    offsets = [torch.tensor([0, *itertools.accumulate(counts[:-1])]) for counts in lengths]
    num_rows = len(lengths[0])
    dense = torch.rand(num_rows, num_dense, generator=generator)
    return peer.Rows(dense, offsets, ids, (torch.arange(num_rows) % 3 == 0).float())


def expected_vectors(bag: Any, ids: Tensor, lengths: list[int], collisions: int) -> np.ndarray:
    """Computes what a table returns, bag by bag and id by id, in double precision."""
    large, small = (table.weight.detach().double().numpy() for table in (bag.quotients, bag.remainders))
    remaining = iter(ids.tolist())
    vectors = []
    for length in lengths:
        pairs = [divmod(x, collisions) for x in itertools.islice(remaining, length)]
        from_large = sum((large[q] for q, _ in pairs), np.zeros(large.shape[1]))
        from_small = sum((small[r] for _, r in pairs), np.zeros(small.shape[1]))
        vectors.append(from_large * from_small)
    return np.array(vectors)


@pytest.mark.parametrize("collisions", [1, 3, 4, 2000])
def test_a_lookup_multiplies_the_rows_of_quotient_and_remainder(peer: Any, collisions: int) -> None:
    torch.manual_seed(0)
    for lengths in ([1] * 9, [0, 3, 1, 0, 5, 0]):
        rows = draw_rows(peer, [lengths] * 3, num_dense=2)
        for num_ids, ids, offsets in zip(NUM_IDS, rows.ids, rows.offsets, strict=True):
            bag = peer.QuotientRemainderBag(num_ids, collisions, 5)
            expected = expected_vectors(bag, ids, lengths, collisions)
            np.testing.assert_allclose(bag(ids, offsets).detach().numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("collisions", [1, 4, 7])
def test_every_id_has_a_pair_of_rows_of_its_own(peer: Any, collisions: int) -> None:
    bag = peer.QuotientRemainderBag(50, collisions, 2)
    with torch.no_grad():  # distinct primes: a product tells its factors
        primes = [n for n in range(2, 400) if all(n % m for m in range(2, n))]
        numbers = iter(primes)
        for table in (bag.quotients, bag.remainders):
            table.weight.copy_(torch.tensor([[next(numbers)] for _ in table.weight]).expand(-1, 2))
    vectors = bag(torch.arange(50), torch.arange(50))
    assert len(set(vectors[:, 0].tolist())) == 50


def apply(network: nn.Sequential, inputs: np.ndarray) -> np.ndarray:
    """Computes a network's output in double precision."""
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(linear):
        weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
        inputs = inputs @ weight.T + bias
        if number < len(linear) - 1:
            inputs = np.maximum(inputs, 0)
    return inputs


def test_probabilities_and_loss_equal_those_computed_pair_by_pair(peer: Any) -> None:
    torch.manual_seed(0)
    model = peer.ReferenceDLRM(peer.Size(NUM_IDS, 4, 5, 2, bottom=(6,), top=(8, 3)))
    lengths = [[1, 1, 1, 1], [1, 0, 2, 0], [3, 0, 0, 1]]
    rows = draw_rows(peer, lengths, num_dense=2)

    dense = np.maximum(apply(model.bottom, rows.dense.double().numpy()), 0)
    vectors = [dense]
    for bag, ids, counts in zip(model.bags, rows.ids, lengths, strict=True):
        vectors.append(expected_vectors(bag, ids, counts, 4))
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    logits = apply(model.top, np.column_stack([dense, *pairs]))[:, 0]
    labels = rows.labels.double().numpy()
    expected_loss = np.mean(np.log1p(np.exp(logits)) - labels * logits)

    np.testing.assert_allclose(model(rows).detach().numpy(), 1 / (1 + np.exp(-logits)), rtol=1e-5)
    assert model.loss(rows).item() == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_the_loss_of_a_batch_is_finite_and_falls(peer: Any, bench: Any, optimizer_type: Any) -> None:
    torch.manual_seed(0)
    model = peer.ReferenceDLRM(peer.Size([bench.NUM_IDS] * 26, bench.COLLISIONS, bench.DIM, bench.NUM_DENSE))
    rows = bench.reference_rows(bench.draw_batches(64, bench.NUM_IDS)[0])
    optimizer = optimizer_type(model.parameters(), lr=OPTIMIZERS[optimizer_type])
    losses = []
    for _ in range(6):
        loss = model.loss(rows)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(bag.quotients.weight.grad.is_sparse for bag in model.bags)
        optimizer.step()
    assert np.isfinite(losses).all()
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


def test_the_bench_gives_it_the_ids_of_each_feature_by_themselves(bench: Any) -> None:
    batch = bench.draw_batches(5, bench.NUM_IDS)[0]
    rows = bench.reference_rows(batch)
    assert torch.equal(torch.cat(list(rows.ids)), batch["sparse_features"].values())
    assert all(torch.equal(offsets, torch.arange(5)) for offsets in rows.offsets)
    assert len(rows.ids) == len(rows.offsets) == 26


def test_it_has_as_many_parameters_as_ours(peer: Any, bench: Any) -> None:
    from bench_common import compositional_collection

    from distembed.models import DLRM
    from distembed.partitions import QuotientRemainder

    with torch.device("meta"):
        theirs = peer.ReferenceDLRM(peer.Size([bench.NUM_IDS] * 26, bench.COLLISIONS, bench.DIM, bench.NUM_DENSE))
    partition = QuotientRemainder(bench.NUM_IDS, collisions=bench.COLLISIONS)
    ours = DLRM(compositional_collection(partition), bench.NAMES, bench.DIM, bench.NUM_DENSE)
    counts = [sorted(p.numel() for p in model.parameters()) for model in (theirs, ours)]
    assert counts[0] == counts[1]


def test_chosen_contenders_stand_beside_what_ratios_are_to(bench: Any) -> None:
    by_name = {"a, fp32": 1, bench.BASELINE: 2, "a, bf16": 3, bench.REFERENCE: 4}
    assert bench.choose(by_name, []) == by_name
    assert bench.choose(by_name, ["bf16"]) == {bench.BASELINE: 2, "a, bf16": 3, bench.REFERENCE: 4}
    assert bench.choose(by_name, ["a, "]) == by_name
    with pytest.raises(ValueError, match="'fp8' is in no contender's name"):
        bench.choose(by_name, ["bf16", "fp8"])


def test_a_ratio_is_how_many_times_as_fast_a_contender_is(bench: Any) -> None:
    seconds = {bench.BASELINE: [2.0, 4.0, 8.0], bench.REFERENCE: [3.0, 6.0, 12.0], "ours": [1.0, 1.0, 4.0]}
    rows = {row.contender: row for row in bench.summarise(seconds, 10)}
    assert (rows["ours"].ratio_to_torchrec, rows["ours"].ratio_to_reference) == (2.0, 3.0)
    assert (rows[bench.BASELINE].ratio_to_torchrec, rows[bench.REFERENCE].ratio_to_reference) == (1.0, 1.0)
    assert rows["ours"].samples_per_second == 10.0
