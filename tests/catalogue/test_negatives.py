"""Drawn negatives: distributed as said, never excluded, and the same on any number of ranks."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.tasks.catalogue.negatives import NegativeDraws, _cumulative_units, item_weights
from distembed.tasks.catalogue.user_items import UserItems

NUM_ITEMS, RESERVED = 12, (0, 1)
PAIRS = [(0, 2), (0, 11), (2, 5), (2, 4), (2, 5), (2, 3), (3, 0), (4, 1), *((5, item) for item in range(3, 12))]
OWN: dict[int, set[int]] = {user: {i for u, i in PAIRS if u == user} for user in range(7)}


def some_items() -> UserItems:
    users, items = zip(*PAIRS, strict=True)
    return UserItems.from_pairs(users, items, len(OWN), NUM_ITEMS)


@pytest.mark.parametrize("reserved", [(), (0,), (3,), (11,), (0, 1, 11)])
def test_any_ids_may_be_reserved(reserved: tuple[int, ...]) -> None:
    drawn = NegativeDraws(item_weights(torch.ones(NUM_ITEMS), 0.0, reserved), None, 0).draw_for_all(0, 0, 200, 5)
    assert set(drawn.unique().tolist()) == set(range(NUM_ITEMS)) - set(reserved)


def draws(exponent: float, seed: int = 0, excluded: UserItems | None = None) -> NegativeDraws:
    counts = torch.arange(NUM_ITEMS) ** 2 * 1000
    return NegativeDraws(item_weights(counts, exponent, RESERVED), excluded, seed)


@pytest.mark.parametrize("exponent", [0.0, 0.75, 1.0])
def test_each_user_draws_the_items_that_it_does_not_have_by_their_weights(exponent: float) -> None:
    drawn = draws(exponent, excluded=some_items()).draw(3, 0, torch.arange(7).repeat(2000), 5).view(2000, 7, 5)
    weights = np.maximum(np.arange(NUM_ITEMS) ** 2 * 1000.0, 1) ** exponent
    for user, own in OWN.items():
        allowed = [item for item in range(2, NUM_ITEMS) if item not in own]
        seen = np.bincount(drawn[:, user].flatten().numpy(), minlength=NUM_ITEMS)
        assert seen[allowed].sum() == 10_000  # none that is excluded or reserved
        expected = weights[allowed] / weights[allowed].sum() * 10_000
        assert len(allowed) == 1 or chisquare(seen[allowed], expected).pvalue > 1e-4


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_log_probabilities_are_those_of_the_draws(exponent: float) -> None:
    users, every = torch.arange(7), torch.arange(NUM_ITEMS).repeat(7, 1)
    weights = np.maximum(np.arange(NUM_ITEMS) ** 2 * 1000.0, 1) ** exponent * (np.arange(NUM_ITEMS) > 1)
    for_all = draws(exponent).log_probabilities(every).exp()
    np.testing.assert_allclose(for_all[0], weights / weights.sum(), rtol=1e-5)
    found = draws(exponent, excluded=some_items()).log_probabilities(every, users).exp()
    for user, own in OWN.items():
        allowed = [item for item in range(NUM_ITEMS) if item not in own]
        np.testing.assert_allclose(found[user, allowed], weights[allowed] / weights[allowed].sum(), rtol=1e-5)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**63), step=st.integers(0, 2**40), cut=st.integers(0, 9))
def test_ranks_together_draw_what_one_draws(seed: int, step: int, cut: int) -> None:
    negatives, users = draws(0.5, seed, some_items()), torch.arange(9) % 7
    whole = negatives.draw(step, 100, users, 3)
    parts = negatives.draw(step, 100, users[:cut], 3), negatives.draw(step, 100 + cut, users[cut:], 3)
    assert torch.equal(torch.cat(parts), whole)
    assert not some_items().contains(users.repeat_interleave(3), whole.flatten()).any()


def test_steps_seeds_and_names_draw_different_items() -> None:
    weights = item_weights(torch.ones(1_000_000), 0.0, RESERVED)
    negatives = NegativeDraws(weights, None, 0)
    first = negatives.draw_for_all(0, 0, 100, 1)
    others = [
        negatives.draw_for_all(1, 0, 100, 1),
        NegativeDraws(weights, None, 1).draw_for_all(0, 0, 100, 1),
        NegativeDraws(weights, None, 0, "validation").draw_for_all(0, 0, 100, 1),
    ]
    assert all((first != other).sum() > 98 for other in others)
    assert len(first.unique()) > 98


def test_a_row_has_other_items_in_each_slot_whatever_its_user() -> None:
    negatives = draws(0.0, excluded=UserItems.from_pairs([], [], 7, NUM_ITEMS))
    drawn = negatives.draw(0, 0, torch.zeros(1000, dtype=torch.long), 2)
    pairs = np.bincount((drawn[:, 0] * NUM_ITEMS + drawn[:, 1]).numpy(), minlength=NUM_ITEMS**2)
    pairs = pairs.reshape(NUM_ITEMS, NUM_ITEMS)[2:, 2:]
    assert pairs.sum() == 1000
    assert chisquare(pairs.flatten()).pvalue > 1e-4


def test_no_rows_have_no_items() -> None:
    negatives = draws(0.0, excluded=some_items())
    assert negatives.draw(0, 0, torch.zeros(0, dtype=torch.long), 3).shape == (0, 3)
    assert negatives.draw_for_all(0, 0, 0, 3).shape == (0, 3)


@pytest.mark.parametrize("num_users", [1, 2**20, 2**30])
def test_keys_fit_into_62_bits_however_many_users_there_are(num_users: int) -> None:
    units = _cumulative_units(torch.rand(2**20, dtype=torch.float64) + 1e-12, num_users)
    assert int(units[-1]) * num_users < 2**62 and bool((units.diff() > 0).all())


@pytest.mark.parametrize("exponent", [0.0, 0.5])
@pytest.mark.parametrize("reserved", [(), (0, 1), (11,)])
def test_users_who_have_all_items_draw_none_and_change_nothing_for_others(
    exponent: float, reserved: tuple[int, ...]
) -> None:
    weights = item_weights(torch.arange(NUM_ITEMS) ** 2, exponent, reserved)
    whole = [(user, item) for user in (1, 6) for item in range(NUM_ITEMS)]
    users, items = zip(*(pair for pair in PAIRS if pair[0] not in (1, 6)), strict=True)
    found, expected = (
        NegativeDraws(weights, UserItems.from_pairs(*pairs, len(OWN), NUM_ITEMS), 0)
        for pairs in (zip(*whole, *zip(users, items, strict=True), strict=True), (users, items))
    )
    asked = torch.arange(7).repeat(50)
    is_whole = (asked == 1) | (asked == 6)
    assert found.users_without_items.tolist() == [1, 6] and not len(expected.users_without_items)
    assert torch.equal(found.has_items(asked), ~is_whole)
    drawn = found.draw(2, 0, asked, 4)
    assert torch.equal(drawn[~is_whole], expected.draw(2, 0, asked, 4)[~is_whole]) and not drawn[is_whole].any()
    logarithms = found.log_probabilities(drawn, asked)
    assert bool((logarithms[is_whole] == -torch.inf).all()) and bool((logarithms[~is_whole] > -torch.inf).all())


def test_of_one_item_only_users_without_it_draw_it() -> None:
    found = NegativeDraws(item_weights(torch.ones(3), 0.0, RESERVED), UserItems.from_pairs([1], [2], 3, 3), 0)
    assert found.draw(0, 0, torch.arange(3), 4).tolist() == [[2] * 4, [0] * 4, [2] * 4]
    assert found.users_without_items.tolist() == [1]


def test_draws_without_any_item_are_refused() -> None:
    with pytest.raises(UserError, match="no item to draw"):
        NegativeDraws(torch.zeros(3), None, 0)


def test_items_of_users_are_those_of_the_pairs() -> None:
    items = some_items()
    users = torch.tensor([2, 6, 0, 2, 1])
    found = items.of(users)
    assert [part.tolist() for part in found.to_dense()] == [sorted(OWN[int(user)]) for user in users]
    grid = torch.cartesian_prod(torch.arange(7), torch.arange(NUM_ITEMS))
    expected = [int(item) in OWN[int(user)] for user, item in grid]
    assert items.contains(grid[:, 0], grid[:, 1]).tolist() == expected
    assert items.users_of_items().tolist() == [sum(i in own for own in OWN.values()) for i in range(NUM_ITEMS)]
    nothing = UserItems.from_pairs([], [], 3, 5)
    assert not nothing.contains(torch.tensor([1]), torch.tensor([4])).any()
    assert nothing.of(torch.tensor([0, 2])).lengths().tolist() == [0, 0]


@pytest.mark.parametrize("is_sequence", [False, True])
def test_items_are_read_from_a_datasets_files(tmp_path: Path, is_sequence: bool) -> None:
    kind = pa.list_(pa.int32()) if is_sequence else pa.int32()
    rows = {"train": [(0, 3), (1, 2), (0, 3)], "test": [(0, 1)]}
    for split, pairs in rows.items():
        items = [[item, 4] if is_sequence else item for _, item in pairs]
        columns = {"user": pa.array([user for user, _ in pairs], pa.int32()), "item": pa.array(items, kind)}
        (tmp_path / split).mkdir()
        pq.write_table(pa.table({**columns, "y": [1.0] * len(pairs)}), tmp_path / split / "a.parquet", row_group_size=2)
    features = CategoricalFeature("user", 2), CategoricalFeature("item", 5, is_sequence, 2.0 if is_sequence else 1.0)
    create_manifest(tmp_path, Schema("y", (), features), {split: [f"{split}/a.parquet"] for split in rows})
    found = UserItems.of_splits(tmp_path, ["train"]).of(torch.arange(2)).to_dense()
    assert [part.tolist() for part in found] == ([[3, 4], [2, 4]] if is_sequence else [[3], [2]])
    both = UserItems.of_splits(tmp_path, ["train", "test"]).of(torch.arange(2)).to_dense()
    assert [part.tolist() for part in both] == ([[1, 3, 4], [2, 4]] if is_sequence else [[1, 3], [2]])


def test_pairs_outside_of_the_tables_are_refused() -> None:
    with pytest.raises(UserError, match="item 5: ids are 0 to 4"):
        UserItems.from_pairs([0], [5], 2, 5)
