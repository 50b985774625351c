"""SSE on the embeddings of torch and on labels, within models as people write them."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distembed.base.errors import UserError
from distembed.sse import SSE, Graph, IdPerturbation, Walk, perturb_inputs, set_step, take_counts
from tests.sse.reference import FALSE_ALARM, p_value, replacement_law, transitions

NUM_IDS, DIM = 20, 3


def random_ids(*shape: int, num_ids: int = NUM_IDS) -> Tensor:
    return torch.randint(num_ids, shape, generator=torch.Generator().manual_seed(0))


# any tensor of ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (0,), (4, 5), (3, 0, 2), (2, 3, 4), (1, 1)])
def test_labels_keep_their_shape_and_type_and_become_other_labels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    labels = random_ids(*shape).to(dtype)
    before = labels.clone()
    new = IdPerturbation(NUM_IDS, SSE(1.0), name="ids")(labels)
    assert new.shape == labels.shape and new.dtype == dtype and torch.equal(labels, before)
    assert (new != labels).all() and ((new >= 0) & (new < NUM_IDS)).all()


def test_labels_that_do_not_lie_in_one_piece_become_the_same() -> None:
    labels = random_ids(40, 30)
    expected = IdPerturbation(NUM_IDS, SSE(0.5), name="ids")(labels)
    spread = labels.t().contiguous().t()
    assert not spread.is_contiguous()
    assert torch.equal(IdPerturbation(NUM_IDS, SSE(0.5), name="ids")(spread), expected)
    wide = torch.stack([labels, labels], dim=-1)
    assert torch.equal(IdPerturbation(NUM_IDS, SSE(0.5), name="ids")(wide[..., 0]), expected)
    assert torch.equal(wide[..., 0], labels)


def test_names_seeds_and_ranks_of_labels_tell_their_numbers_apart() -> None:
    labels = random_ids(1000)
    variants: list[dict[str, Any]] = [{"name": "a"}, {"name": "b"}, {"name": "a", "seed": 1}, {"name": "a", "rank": 1}]
    drawn = [IdPerturbation(NUM_IDS, SSE(0.5), **variant)(labels) for variant in variants]
    for i, one in enumerate(drawn):
        assert not any(torch.equal(one, other) for other in drawn[:i])
        assert torch.equal(one, IdPerturbation(NUM_IDS, SSE(0.5), **variants[i])(labels))


def test_labels_are_counted_by_name() -> None:
    model = nn.ModuleDict({name: IdPerturbation(NUM_IDS, SSE(0.5), name=name) for name in ("inputs", "targets")})
    labels = random_ids(4, 100)
    changed = {name: int((perturb(labels) != labels).sum()) for name, perturb in model.items()}
    assert take_counts(model) == {name: (count, 400) for name, count in changed.items()}


# embeddings


def make_embedding(**settings: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(NUM_IDS, DIM, **settings)


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "embedding": (make_embedding, lambda e, ids: e(ids)),
    "keyword": (make_embedding, lambda e, ids: e(input=ids)),
    "bag of rows": (lambda: nn.EmbeddingBag(NUM_IDS, DIM), lambda e, ids: e(ids)),
    "bag of offsets": (
        lambda: nn.EmbeddingBag(NUM_IDS, DIM, mode="sum"),
        lambda e, ids: e(ids.flatten(), torch.tensor([0, 3, 3, 50])),
    ),
    "bag by keywords": (
        lambda: nn.EmbeddingBag(NUM_IDS, DIM, mode="sum"),
        lambda e, ids: e(
            input=ids.flatten(), offsets=torch.tensor([0, 9]), per_sample_weights=torch.linspace(0, 1, ids.numel())
        ),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_embedding_gives_vectors_and_gradients_of_the_replaced_ids(name: str) -> None:
    make, call = CALLS[name]
    torch.manual_seed(0)
    embedding = make()
    plain = copy.deepcopy(embedding)
    perturb_inputs(embedding, SSE(0.5), name="tokens", seed=7)
    ids = random_ids(20, 5)
    for step in range(3):
        replaced = IdPerturbation(NUM_IDS, SSE(0.5), name="tokens", seed=7)
        set_step(replaced, step)
        new = replaced(ids)
        assert not torch.equal(new, ids)
        output, expected = call(embedding, ids), call(plain, new)
        assert torch.equal(output, expected)
        slope = torch.randn_like(output)
        output.backward(slope)
        expected.backward(slope)
        assert torch.equal(embedding.weight.grad, plain.weight.grad)
    embedding.eval()
    assert torch.equal(call(embedding, ids), call(plain, ids)) and embedding.sse.step == 3


def test_gradients_reach_the_rows_that_were_looked_up() -> None:
    embedding = make_embedding()
    perturb_inputs(embedding, SSE(0.7), name="ids")
    ids = random_ids(500)
    new = IdPerturbation(NUM_IDS, SSE(0.7), name="ids")(ids)
    embedding(ids).sum().backward()
    assert torch.equal(embedding.weight.grad[:, 0], torch.bincount(new, minlength=NUM_IDS).float())


@pytest.mark.parametrize("padding_idx", [0, 5, NUM_IDS - 1, -2])
def test_padding_is_neither_replaced_nor_drawn(padding_idx: int) -> None:
    embedding = make_embedding(padding_idx=padding_idx)
    seen: list[Tensor] = []
    perturb_inputs(embedding, SSE(0.8, reserved=(3,)), name="ids")
    embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = torch.arange(NUM_IDS).repeat(2000)
    embedding(ids).sum().backward()
    padding = padding_idx % NUM_IDS
    law = replacement_law(NUM_IDS, 0.8, reserved=(3, padding), keep_reserved=True)
    assert p_value(transitions(ids, seen[0], NUM_IDS), law) > FALSE_ALARM
    assert not embedding.weight.grad[padding].any()


def test_an_embedding_of_other_ids_than_the_graph_is_refused() -> None:
    embedding = make_embedding()
    with pytest.raises(UserError, match=f"graph has 5 ids and the table {NUM_IDS}"):
        perturb_inputs(embedding, SSE(0.5, 2.0, Graph.from_edges(5, [0], [1])), name="ids")
    assert list(embedding.children()) == []
    with pytest.raises(UserError, match="reserved id 20 lies outside"):
        perturb_inputs(embedding, SSE(0.5, reserved=(NUM_IDS,)), name="ids")


def test_an_embedding_is_perturbed_once() -> None:
    embedding = make_embedding()
    perturb_inputs(embedding, SSE(0.5), name="ids")
    with pytest.raises(UserError, match="replaced already"):
        perturb_inputs(embedding, SSE(0.5), name="ids")
    ids = random_ids(100)
    assert torch.equal(embedding(ids), embedding.weight[IdPerturbation(NUM_IDS, SSE(0.5), name="ids")(ids)])


def test_a_meta_embedding_works() -> None:
    embedding = nn.Embedding(NUM_IDS, DIM, device="meta")
    perturb_inputs(embedding, SSE(1.0), name="ids")
    assert embedding(torch.zeros(4, 5, dtype=torch.long, device="meta")).shape == (4, 5, DIM)


# models


class Tagger(nn.Module):
    """Maps tokens to labels by one layer of attention."""

    def __init__(self, sse: SSE | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(NUM_IDS, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(8, NUM_IDS)
        if sse is not None:
            perturb_inputs(self.tokens, sse, name="tokens", seed=3, rank=0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(tokens), src_key_padding_mask=tokens == 0))


def train(model: nn.Module, num_steps: int, labels: IdPerturbation | None = None) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(num_steps):
        tokens = torch.randint(1, NUM_IDS, (8, 6), generator=torch.Generator().manual_seed(step))
        tokens[:, 4:] = 0
        targets = tokens if labels is None else labels(tokens)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def keeping_padding() -> SSE:
    return SSE(0.3, reserved=(0,), keep_reserved=True)


def test_a_transformer_trains_on_replaced_tokens_and_labels() -> None:
    model, plain = Tagger(SSE(0.3)), Tagger(None)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    labels = IdPerturbation(NUM_IDS, keeping_padding(), name="labels", seed=3, rank=0)
    # by hand: the same tokens, replaced in front of a model that replaces nothing
    by_hand, tokens_of = Tagger(None), IdPerturbation(NUM_IDS, keeping_padding(), name="tokens", seed=3, rank=0)
    by_hand.tokens.register_forward_pre_hook(lambda _, args: (tokens_of(args[0]),))
    labels_again = IdPerturbation(NUM_IDS, keeping_padding(), name="labels", seed=3, rank=0)
    losses = train(model, 5, labels)
    assert losses == train(by_hand, 5, labels_again)
    assert losses != train(plain, 5)
    assert take_counts(model)["tokens"][1] == 5 * 8 * 6
    # the weights go into a model without SSE, and out of training both give the same
    plain.load_state_dict(model.state_dict())
    tokens = random_ids(8, 6)
    assert torch.equal(model.eval()(tokens), plain.eval()(tokens))


def test_probability_0_is_training_without() -> None:
    model, plain = Tagger(SSE(0.0)), Tagger(None)
    assert train(model, 3) == train(plain, 3)
    assert take_counts(model) == {"tokens": (0, 3 * 8 * 6)}


def test_a_resumed_model_trains_as_without_a_break() -> None:
    whole, first, second = (Tagger(SSE(0.5)) for _ in range(3))
    train(whole, 4)
    expected = train(whole, 2)
    train(first, 4)
    second.load_state_dict(first.state_dict())
    set_step(second, 4)
    assert train(second, 2) == expected


def test_a_compiled_model_draws_the_same() -> None:
    model = nn.Sequential(make_embedding(), nn.Linear(DIM, 1))
    perturb_inputs(model[0], SSE(0.5), name="ids")
    replica = copy.deepcopy(model)
    compiled = torch.compile(replica, backend="eager")
    ids = random_ids(8, 6)
    for _ in range(3):
        torch.testing.assert_close(compiled(ids), model(ids))
    assert replica[0].sse.step == 3
    assert take_counts(compiled) == take_counts(model)
    torch.testing.assert_close(compiled.eval()(ids), model.eval()(ids))
    assert replica[0].sse.step == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_the_embedding_is_refused(use_reentrant: bool) -> None:
    model = Tagger(SSE(0.5))
    # reentrant checkpoints only notice inputs that need gradients
    anchor = torch.zeros((), requires_grad=True)
    output = checkpoint(
        lambda tokens, zero: model(tokens) + zero, random_ids(8, 6), anchor, use_reentrant=use_reentrant
    )
    with pytest.raises(UserError, match="activation checkpointing"):
        output.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_follows_the_embedding_may_be_checkpointed(use_reentrant: bool) -> None:
    model, plain = Tagger(SSE(0.5)), Tagger(SSE(0.5))
    tokens = random_ids(8, 6)
    checkpoint(
        lambda x: model.head(model.encoder(x)), model.tokens(tokens), use_reentrant=use_reentrant
    ).sum().backward()
    plain.head(plain.encoder(plain.tokens(tokens))).sum().backward()
    torch.testing.assert_close(model.tokens.weight.grad, plain.tokens.weight.grad)
    assert model.tokens.sse.step == 1


def test_a_checkpointed_model_can_be_evaluated_with_gradients() -> None:
    model = Tagger(SSE(0.5)).eval()
    checkpoint(model, random_ids(8, 6), use_reentrant=False).sum().backward()
    assert model.tokens.weight.grad is not None and model.tokens.sse.step == 0


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("replicate", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_copy_of_a_model_draws_on_as_the_model_does(
    replicate: Callable[[nn.Module], nn.Module], steps_before: int
) -> None:
    graph = Graph.from_edges(NUM_IDS, range(1, 19), range(2, 20), [1.0 + i for i in range(18)])
    model = Tagger(SSE(0.5, 20.0, graph, Walk(0.4, 3), schedule=((0, 0.5), (4, 1.0)), reserved=(0,)))
    train(model, steps_before)
    replica = replicate(model)
    assert replica.tokens.sse.step == steps_before
    first = [train(replica, 1), train(replica, 1)]
    assert model.tokens.sse.step == steps_before
    assert first == [train(model, 1), train(model, 1)]


@pytest.mark.gpu
def test_an_embedding_on_a_gpu_looks_up_what_it_does_on_the_cpu() -> None:
    embedding = make_embedding(padding_idx=4)
    on_gpu = copy.deepcopy(embedding).cuda()
    for module in (embedding, on_gpu):
        perturb_inputs(module, SSE(0.5, 9.0, Graph.from_edges(NUM_IDS, [0, 1, 2], [1, 2, 3])), name="ids")
    ids = random_ids(1000)
    for _ in range(3):
        assert torch.equal(on_gpu(ids.cuda()).cpu(), embedding(ids))
    assert take_counts(on_gpu) == take_counts(embedding)


@pytest.mark.parametrize("with_graph", [False, True])
def test_ids_outside_of_the_table_stay(with_graph: bool) -> None:
    graph = Graph.from_edges(NUM_IDS, [0, 1, 2], [1, 2, 3]) if with_graph else None
    perturb = IdPerturbation(NUM_IDS, SSE(0.9, 50.0 if with_graph else 1.0, graph), name="targets")
    ids = random_ids(3000)
    ids[::3], ids[1::3] = -100, NUM_IDS  # what a loss ignores, and a mistake that the lookup has to meet
    new = perturb(ids)
    assert torch.equal(new[::3], ids[::3]) and torch.equal(new[1::3], ids[1::3])
    inside = new[2::3]
    assert ((inside >= 0) & (inside < NUM_IDS)).all() and (inside != ids[2::3]).float().mean() > 0.85
    assert perturb.take_counts() == {"targets": (int((new != ids).sum()), 3000)}
    embedding = nn.Embedding(NUM_IDS, 2)
    perturb_inputs(embedding, SSE(1.0), name="ids")
    with pytest.raises(IndexError):
        embedding(torch.tensor([NUM_IDS]))


@pytest.mark.parametrize("rank", [-1, 1.0, "0", torch.tensor(0), True])
def test_a_rank_that_is_none_is_named(rank: Any) -> None:
    with pytest.raises(UserError, match="rank is"):
        IdPerturbation(NUM_IDS, SSE(0.5), name="ids", rank=rank)


def test_batches_are_written_to_only_where_that_is_allowed() -> None:
    first, second = (IdPerturbation(NUM_IDS, SSE(0.5), name="ids") for _ in range(2))
    ids = random_ids(1000)
    before = ids.clone()
    new = first(ids)
    assert torch.equal(ids, before)
    second.in_place = True
    again = second(ids)
    assert torch.equal(again, new) and again.data_ptr() == ids.data_ptr()
