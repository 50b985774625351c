"""Schemes that grow: known ids keep their rows, and new ones are told apart where the scheme is complementary."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.partitions import PARTITIONS, Explicit, Naive
from tests.partitions.test_laws import SETTINGS, STORED, UNPROVED, build, tuples_of

ARITHMETIC = [name for name in PARTITIONS if name not in STORED]


@pytest.mark.parametrize("name", ARITHMETIC)
@settings(max_examples=40)
@given(data=st.data())
def test_known_ids_keep_their_rows_and_new_ones_are_told_apart(name: str, data: st.DataObject) -> None:
    before, now = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 700))
    choices = [each for each in SETTINGS[name] if max(each.get("moduli", [1])) < 2**32]
    partition = build(name, before, data.draw(st.sampled_from(choices)))
    now = max(before, now)
    try:
        grown = partition.grown(now)
    except UserError:
        # by the product alone, since other moduli would move known ids
        assert name == "chinese_remainder" and torch.tensor(partition.num_rows).prod() < now
        return
    known, every = torch.arange(before), torch.arange(now)
    assert grown.num_embeddings == now
    assert torch.equal(grown.rows(known), partition.rows(known))
    for row, num_rows in zip(grown.rows(every), grown.num_rows, strict=True):
        assert int(row.max()) < num_rows
    num_tuples = len(set(tuples_of(grown.rows(every))))
    assert grown.is_complementary() == (num_tuples == now)
    if name == "remainder":
        assert num_tuples == min(now, grown.num_rows[0])
    assert grown.is_complementary() or name in UNPROVED


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_scheme_that_grows_twice_is_the_one_that_grows_once(name: str) -> None:
    moduli = {"chinese_remainder": {"moduli": [16, 15]}, "mixed_radix": {"moduli": [5, 3, 2]}}
    first = PARTITIONS[name](30, **moduli.get(name, {}))
    twice, once = first.grown(80).grown(230), first.grown(230)
    ids = torch.arange(230)
    assert torch.equal(twice.rows(ids), once.rows(ids)) and twice.num_rows == once.num_rows


def test_what_cannot_grow_says_so() -> None:
    with pytest.raises(UserError, match=r"\[8, 7\] has at most 56 ids and cannot grow to 57.*mixed_radix"):
        PARTITIONS["chinese_remainder"](50, moduli=[8, 7]).grown(57)
    with pytest.raises(UserError, match="assignments of 3 ids, and cannot grow to 4"):
        Explicit(3, [[0, 1, 2]]).grown(4)
    with pytest.raises(UserError, match="rows of 3 ids, and cannot grow to 4.*multi_hash"):
        PARTITIONS["clustered"](3).grown(4)

    class Unruled(Naive):
        name = "unruled"

        def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
            return super(Naive, self).grown_settings(num_embeddings)

    with pytest.raises(UserError, match="unruled has no rule by which it grows from 3 to 4 ids; define Unruled"):
        Unruled(3).grown(4)


def test_the_first_id_whose_assignments_changed() -> None:
    before = Explicit(4, [[0, 1, 0, 1], [0, 0, 1, 1]])
    assert before.first_changed_id(before) is None
    # rows that need more bytes each are the same rows
    assert Explicit(5, [[0, 1, 0, 1, 999], [0, 0, 1, 1, 2]]).first_changed_id(before) is None
    assert Explicit(4, [[0, 1, 1, 0], [0, 0, 1, 1]]).first_changed_id(before) == 2
    with pytest.raises(UserError, match="1 partitions of 4 ids, and had 2 of 4"):
        Explicit(4, [[0, 1, 2, 3]]).first_changed_id(before)
