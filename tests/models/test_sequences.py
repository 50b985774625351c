"""Models of sequences against plain ones that pad on the left, with the same weights."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from distembed.models import sasrec
from distembed.models.gru import RecurrentStates
from distembed.models.hstu import PointwiseTransformer, gap_buckets
from distembed.models.layers import drop
from distembed.models.sasrec import CausalTransformer, attend
from distembed.models.sequences import QueriedRows, _one_group, lay_out, pack

RAGGED = [5, 1, 0, 3, 7, 7, 2, 0, 1]
DIM, MAX_LENGTH = 8, 7


def asked(lengths: Sequence[int], num_queries: Sequence[int] | None = None) -> QueriedRows:
    """All tokens of rows are asked for, unless fewer or more are."""
    wanted = torch.tensor(lengths if num_queries is None else num_queries)
    return QueriedRows(torch.tensor(lengths), wanted, int(wanted.sum()))


def padded_states(model: CausalTransformer, rows: Sequence[Tensor]) -> list[Tensor]:
    """The states of rows that are padded on the left to the greatest length, attended to with a mask, in float32."""
    states = []
    for row in rows:
        pads = MAX_LENGTH - len(row)
        slots = functional.pad(row, (0, 0, pads, 0)) + model.positions.flip(0)
        slots = slots.unsqueeze(0)
        hidden = torch.ones(MAX_LENGTH, MAX_LENGTH, dtype=torch.bool).triu(1)
        hidden[:, :pads] = True
        hidden.fill_diagonal_(False)
        for block in model.blocks:
            attention = block.attention
            plain = nn.MultiheadAttention(DIM, attention.num_heads, batch_first=True)
            plain.in_proj_weight, plain.in_proj_bias = attention.project.weight, attention.project.bias
            plain.out_proj = attention.output
            normed = block.attention_norm(slots)
            slots = slots + plain(normed, normed, normed, attn_mask=hidden, need_weights=False)[0]
            slots = slots + block.network(block.network_norm(slots))
        states.append(model.norm(slots)[0, pads:])
    return states


@pytest.mark.parametrize("lengths", [RAGGED, [1], [7, 7], [0, 0], []])
def test_sasrec_equals_a_padded_transformer_with_the_same_weights(lengths: list[int]) -> None:
    model = CausalTransformer(DIM, MAX_LENGTH, num_blocks=2, num_heads=2, dropout=0.0)
    rows = [torch.randn(length, DIM) for length in lengths]
    tokens = torch.cat([*rows, torch.zeros(0, DIM)]).requires_grad_()
    states = model(tokens, asked(lengths))
    again = [own.requires_grad_() for own in tokens.detach().split(lengths)] if lengths else []
    expected = torch.cat([*padded_states(model, again), torch.zeros(0, DIM)])
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(states)
    gradients = torch.autograd.grad((states * weights).sum(), [tokens, *model.parameters()], allow_unused=False)
    if lengths and sum(lengths):
        wanted = torch.autograd.grad((expected * weights).sum(), [*again, *model.parameters()], allow_unused=True)
        torch.testing.assert_close(gradients[0], torch.cat([w for w in wanted[: len(again)] if w is not None]))
        for own, other in zip(gradients[1:], wanted[len(again) :], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        CausalTransformer(DIM, MAX_LENGTH, 2, 2, 0.0),
        RecurrentStates(DIM, 6, MAX_LENGTH, 2, 0.0),
        PointwiseTransformer(DIM, MAX_LENGTH, 2, 2, 0.0),
    ],
    ids=["sasrec", "gru", "hstu"],
)
def test_states_do_not_depend_on_later_tokens_nor_on_other_rows(model: nn.Module) -> None:
    tokens, changed = torch.randn(12, DIM), torch.randn(12, DIM)
    changed[[0, 1, 2, 5, 6]] = tokens[[0, 1, 2, 5, 6]]
    before, after = model(tokens, asked([5, 7])), model(changed, asked([5, 7]))
    torch.testing.assert_close(before[[0, 1, 2, 5, 6]], after[[0, 1, 2, 5, 6]])
    assert not torch.isclose(before[[3, 4, 7, 11]], after[[3, 4, 7, 11]]).all(dim=1).any()
    torch.testing.assert_close(model(tokens[5:], asked([7])), before[5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        CausalTransformer(DIM, 4, 1, 1, 0.0),
        RecurrentStates(DIM, 6, 4, 1, 0.0),
        PointwiseTransformer(DIM, 4, 1, 1, 0.0),
    ],
)
def test_rows_are_cut_to_their_most_recent_tokens_and_rows_without_any_have_zeros(model: nn.Module) -> None:
    tokens = torch.randn(9, DIM)
    states = model(tokens, asked([0, 6, 3], num_queries=[1, 1, 2]))
    torch.testing.assert_close(states[0], torch.zeros(DIM))
    torch.testing.assert_close(states[1:2], model(tokens[2:6], asked([4], num_queries=[1])))
    torch.testing.assert_close(states[2:], model(tokens[6:], asked([3], num_queries=[2])))


@pytest.mark.parametrize(
    "model",
    [
        CausalTransformer(DIM, 4, 1, 1, 0.1),
        RecurrentStates(DIM, 6, 4, 2, 0.1),
        PointwiseTransformer(DIM, 4, 1, 2, 0.1),
    ],
)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_batches_without_tokens_have_gradients_of_all_weights(model: nn.Module, lengths: list[int]) -> None:
    states = model(torch.zeros(0, DIM), asked(lengths))
    assert states.shape == (0, DIM)
    tokens = torch.zeros(0, DIM, requires_grad=True)
    gradients = torch.autograd.grad(model(tokens, asked(lengths)).sum(), [tokens, *model.parameters()])
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def hstu_states(model: PointwiseTransformer, row: Tensor, times: Tensor) -> Tensor:
    """Returns the states of a row by the equations of the paper, place by place, in the dtype of the row."""
    length, heads = len(row), model.layers[0].num_heads
    x = row + model.positions[:length].flip(0)
    for layer in model.layers:
        u, v, q, k = functional.silu(layer.project(layer.norm(x))).chunk(4, dim=1)
        attended = []
        for i in range(length):
            by_head = [torch.zeros(DIM // heads, dtype=row.dtype) for _ in range(heads)]
            for j in range(i + 1):
                bias = layer.distances[i - j] + layer.gaps[int(math.log2(1 + abs(float(times[i] - times[j]))))]
                for head, (own_q, own_k, own_v) in enumerate(
                    zip(q[i].chunk(heads), k[j].chunk(heads), v[j].chunk(heads), strict=True)
                ):
                    score = own_q @ own_k / math.sqrt(DIM / heads) + bias
                    by_head[head] = by_head[head] + functional.silu(score) / MAX_LENGTH * own_v
            attended.append(torch.cat(by_head))
        x = x + layer.output(layer.attended_norm(torch.stack(attended)) * u)
    return model.norm(x)


def test_hstu_equals_its_equations() -> None:
    model = PointwiseTransformer(DIM, MAX_LENGTH, 2, 2, 0.0, has_times=True).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    rows = [torch.randn(length, DIM, dtype=torch.float64, requires_grad=True) for length in RAGGED]
    times = [torch.randint(0, 100, (length,)).double().cumsum(0) for length in RAGGED]
    found = model(torch.cat(rows), asked(RAGGED), torch.cat(times))
    full = [(row, own) for row, own in zip(rows, times, strict=True) if len(row)]
    expected = torch.cat([hstu_states(model, row, own) for row, own in full])
    torch.testing.assert_close(found, expected)
    weights, leaves = torch.randn_like(found), [*(row for row, _ in full), *model.parameters()]
    gradients = torch.autograd.grad(found, leaves, weights)
    for own, other in zip(gradients, torch.autograd.grad(expected, leaves, weights), strict=True):
        torch.testing.assert_close(own, other)


def test_gaps_of_times_have_few_buckets() -> None:
    gaps = torch.tensor([0.0, 0.9, 1.0, 2.9, 3.0, -3.0, 2.0**62, 3e38, math.nan])
    assert gap_buckets(gaps).tolist() == [0, 0, 1, 1, 2, 2, 62, 62, 63]
    edges = [2**k - 1 for k in range(1, 24)]
    assert gap_buckets(torch.tensor(edges).float()).tolist() == list(range(1, 24))
    assert gap_buckets(torch.tensor(edges[1:16]).float() - 1).tolist() == list(range(1, 16))


def test_gru_equals_a_loop_over_cells() -> None:
    model = RecurrentStates(DIM, 6, MAX_LENGTH, 1, 0.0)
    cell = nn.GRUCell(DIM, 6)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(model.gru, f"{name}_l0"))
    rows = [torch.randn(length, DIM) for length in RAGGED]
    expected = []
    for row in rows:
        state = torch.zeros(6)
        for token in row:
            state = cell(token, state)
            expected.append(model.output(state))
    torch.testing.assert_close(model(torch.cat(rows), asked(RAGGED)), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_rows_of_similar_length_share_a_group_and_all_tokens_have_a_slot() -> None:
    lengths = torch.randint(0, 51, (300,), generator=torch.Generator().manual_seed(0))
    layout = lay_out(QueriedRows(lengths, lengths, int(lengths.sum())), 50)
    assert sorted(layout.tokens[layout.queries].tolist()) == list(range(int(lengths.sum())))
    num_slots = sum(rows * length for rows, length in layout.groups)
    assert len(layout.tokens) == num_slots < 1.1 * lengths.sum()
    packed = pack(QueriedRows(lengths, lengths, int(lengths.sum())), 50)
    assert sorted(packed.tokens.tolist()) == list(range(int(lengths.sum())))
    assert int(packed.batch_sizes.sum()) == len(packed.tokens)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.999])
def test_numbers_are_dropped_at_their_rate_and_keep_their_mean(probability: float) -> None:
    torch.manual_seed(0)
    values = torch.full((200, 501), 2.0, requires_grad=True)
    dropped = drop(values, probability)
    share = (dropped == 0).double().mean().item()
    assert abs(share - probability) < 5 * (probability * (1 - probability) / values.numel()) ** 0.5
    kept = dropped[dropped != 0]
    assert len(kept.unique()) == 1 and kept[0].item() == pytest.approx(2 / (1 - probability), rel=0.02)
    dropped.sum().backward()
    torch.testing.assert_close(values.grad, (dropped / 2).detach())
    # neighbours share a random number, and are dropped independently all the same
    is_dropped = (dropped.flatten() == 0).double()
    assert abs(np.corrcoef(is_dropped[:-1], is_dropped[1:])[0, 1]) < 0.02


def test_attention_with_dropped_weights_is_torchs_without_them() -> None:
    queries, keys, values = (torch.randn(3, 2, 5, 4) for _ in range(3))
    expected = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    torch.testing.assert_close(attend(queries, keys, values, 0.0), expected)
    assert attend(queries[:0], keys[:0], values[:0], 0.5).shape == (0, 2, 5, 4)


@pytest.mark.parametrize("lengths", [RAGGED, [0, 3, 0], [0, 0], []])
def test_one_group_of_all_rows_gives_the_same_states(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where lengths are not looked at; rows are cut, and some have fewer tokens than queries."""
    model = CausalTransformer(DIM, 4, num_blocks=2, num_heads=2, dropout=0.0)
    tokens = torch.randn(sum(lengths), DIM)
    queries = [min(length, 2) + (length % 2) for length in lengths]
    expected = model(tokens, asked(lengths, queries))
    monkeypatch.setattr(sasrec, "lay_out", _one_group)
    torch.testing.assert_close(model(tokens, asked(lengths, queries)), expected, rtol=1e-4, atol=1e-5)
