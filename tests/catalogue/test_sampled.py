"""Sampled softmax: in simulation against the sum over all items, with draws of the target, and without draws."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from distembed.embedding import CompositionalEmbeddingConfig
from distembed.models.queries import Catalogue, Items, Queries
from distembed.tasks.catalogue.softmax import drawn_cross_entropy, in_batch_cross_entropy, sampled_cross_entropy

NUM_ITEMS, DIM = 30, 4


@pytest.fixture
def scores() -> torch.Tensor:
    return torch.randn(NUM_ITEMS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_the_sum_of_exponentials_is_unbiased(scores: torch.Tensor, exponent: float) -> None:
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.arange(1.0, NUM_ITEMS + 1) ** exponent
    probabilities /= probabilities.sum()
    target, num_draws = 7, 5
    drawn = torch.multinomial(probabilities, 100_000 * num_draws, True, generator=generator).view(-1, num_draws)
    targets = scores[target].expand(len(drawn))
    losses = sampled_cross_entropy(targets, scores[drawn], probabilities.log()[drawn], drawn == target)
    sums = (losses + targets).double().exp()
    error = sums.std() / math.sqrt(len(sums))
    assert abs(sums.mean() - scores.double().exp().sum()) < 4 * error
    assert error < 0.01 * sums.mean()


def test_gradients_near_those_of_the_full_softmax_with_many_draws(scores: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(2)
    probabilities = torch.arange(1.0, NUM_ITEMS + 1) / sum(range(NUM_ITEMS + 1))
    drawn = torch.multinomial(probabilities, 200_000, True, generator=generator).unsqueeze(0)
    found, exact = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    sampled_cross_entropy(found[3:4], found[drawn], probabilities.log()[drawn], drawn == 3).sum().backward()
    nn.functional.cross_entropy(exact.unsqueeze(0), torch.tensor([3])).backward()
    torch.testing.assert_close(found.grad, exact.grad, rtol=0.05, atol=1e-3)


def test_nothing_drawn_and_only_the_target_drawn() -> None:
    targets = torch.tensor([1.5, -2.0], requires_grad=True)
    none = torch.empty(2, 0)
    losses = sampled_cross_entropy(targets, none, none, none.bool())
    hits = sampled_cross_entropy(targets, torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
    (losses + hits).sum().backward()
    assert losses.tolist() == hits.tolist() == [0, 0]
    assert targets.grad is not None and targets.grad.tolist() == [0, 0]
    assert sampled_cross_entropy(targets[:0], none[:0], none[:0], none[:0].bool()).shape == (0,)


def test_items_that_are_never_drawn_count_nothing() -> None:
    targets, negatives = torch.tensor([1.5]), torch.tensor([[0.5, 3.0]], requires_grad=True)
    log_q = torch.tensor([[-1.0, -torch.inf]])
    loss = sampled_cross_entropy(targets, negatives, log_q, torch.zeros(1, 2, dtype=torch.bool))
    loss.sum().backward()
    expected = math.log(math.exp(1.5) + math.exp(0.5) / (2 * math.exp(-1.0))) - 1.5
    assert loss.item() == pytest.approx(expected)
    assert negatives.grad is not None and negatives.grad[0, 0] > 0 and negatives.grad[0, 1] == 0


def make_queries(targets: torch.Tensor, negatives: torch.Tensor) -> Queries:
    generator = torch.Generator().manual_seed(3)
    owner = nn.Module()
    table = CompositionalEmbeddingConfig("item", NUM_ITEMS, DIM, ["item"])
    catalogue = Catalogue(owner, "embeddings", table, bias=True)
    nn.init.normal_(catalogue.bias, generator=generator)
    vectors = torch.randn(NUM_ITEMS, DIM, generator=generator)
    items = {
        name: Items(ids.flatten(), vectors[ids.flatten()])
        for name, ids in (("item_target", targets), ("item_negative", negatives))
    }
    return Queries(torch.randn(len(targets), DIM, generator=generator), catalogue, items)


def test_queries_with_their_own_draws() -> None:
    targets, negatives = torch.tensor([2, 5, 9]), torch.tensor([[4, 2], [7, 8], [9, 9]])
    queries = make_queries(targets, negatives)
    log_q = torch.randn(3, 2) - 3
    losses = drawn_cross_entropy(queries, "item_target", "item_negative", log_q)
    target, others = queries.scores("item_target").exp(), queries.scores("item_negative").exp() / (2 * log_q.exp())
    expected = [target[0] + others[0, 0], target[1] + others[1].sum(), target[2]]
    torch.testing.assert_close(losses, (torch.cat(expected) / target.squeeze(1)).log())


def test_the_other_rows_targets_as_draws() -> None:
    targets = torch.tensor([2, 5, 2, 9])
    queries = make_queries(targets, targets)
    log_q = torch.log(torch.tensor([0.5, 0.2, 0.5, 0.1]))
    losses = in_batch_cross_entropy(queries, "item_target", log_q)
    vectors, bias = queries.items["item_target"].vectors, queries.catalogue.bias
    for i, loss in enumerate(losses):
        scores = queries.vectors[i] @ vectors.T + bias[targets]
        total = scores[i].exp()
        for j in range(4):
            if targets[j] != targets[i]:
                total = total + scores[j].exp() / (3 * log_q[j].exp())
        torch.testing.assert_close(loss, total.log() - scores[i])
    one = make_queries(targets[:1], targets[:1])
    assert in_batch_cross_entropy(one, "item_target", log_q[:1]).tolist() == [0]


def test_many_queries_are_scored_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.tensor([2, 5, 2, 9, 1])
    log_q = torch.log(torch.tensor([0.5, 0.2, 0.5, 0.1, 0.3]))
    found = []
    for most_scores in (2**25, 10):
        monkeypatch.setattr("distembed.tasks.catalogue.softmax._MOST_SCORES", most_scores)
        queries = make_queries(targets, targets)
        vectors = queries.vectors.detach().requires_grad_()
        items = queries.items["item_target"].vectors.detach().requires_grad_()
        batch = {"item_target": Items(targets, items)}
        losses = in_batch_cross_entropy(
            dataclasses.replace(queries, vectors=vectors, items=batch), "item_target", log_q
        )
        bias = queries.catalogue.bias
        found.append([losses, *torch.autograd.grad(losses.sum(), [vectors, items, bias])])
    for whole, in_blocks in zip(*found, strict=True):
        torch.testing.assert_close(in_blocks, whole)
