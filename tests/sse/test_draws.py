"""How often ids are replaced, and by which: frequencies of very many draws against the paper's probabilities."""

import numpy as np
import pytest
import torch

from distembed.base.errors import UserError
from distembed.sse import SSE, FeaturePerturbation, IdPerturbation, IdStream
from tests.sse.draws import MANY, evenly, replaced
from tests.sse.reference import (
    FALSE_ALARM,
    independence_p_value,
    jagged,
    p_value,
    replacement_law,
    share_p_value,
    transitions,
)

# which ids are replaced


@pytest.mark.parametrize("p0", [1e-4, 0.01, 0.1, 0.5, 1])
def test_an_id_is_replaced_with_probability_p0(p0: float) -> None:
    new = replaced(torch.zeros(MANY, dtype=torch.long), 1000, SSE(p0))
    assert share_p_value((new != 0).sum(), MANY, p0) > FALSE_ALARM


@pytest.mark.parametrize("p0", [1e-300, 5e-324])
def test_a_probability_close_to_nothing_replaces_nothing(p0: float) -> None:
    ids = torch.zeros(1000, dtype=torch.long)
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        assert replaced(ids, 10, SSE(p0)) is ids


def test_features_of_a_batch_have_their_own_rates_and_lengths() -> None:
    rates = {"a": 0.5, "empty": 1.0, "b": 1e-3, "one": 1.0, "plain": None, "never": 0.0, "c": 0.1, "last": 0.3}
    lengths = {"a": 200_000, "empty": 0, "b": 300_000, "one": 1, "plain": 5, "never": 1000, "c": 400_000, "last": 0}
    streams = [IdStream(f"t_{f}", f, 1000, SSE(p0), seed=1) for f, p0 in rates.items() if p0 is not None]
    batch = jagged({f: torch.full((n,), 7) for f, n in lengths.items()})
    new = FeaturePerturbation(streams)(batch)
    for feature, p0 in rates.items():
        values = new[feature].values()
        assert len(values) == lengths[feature]
        assert share_p_value((values != 7).sum(), max(1, len(values)), p0 if len(values) and p0 else 0) > FALSE_ALARM


@pytest.mark.parametrize("p0", [0.05, 0.3, 0.9])
def test_ids_of_short_features_are_replaced_independently_of_each_other(p0: float) -> None:
    # of features of one, two and seven ids, all patterns of what is replaced: also the first and the last one's
    names = [str(i) for i in range(4_000)]
    lengths = [(1, 0, 2, 7)[i % 4] for i in range(len(names))]
    perturb = FeaturePerturbation([IdStream("t", name, 50, SSE(p0), seed=2) for name in names])
    batch = jagged({name: torch.zeros(n) for name, n in zip(names, lengths, strict=True)})
    changed = perturb(batch).values() != 0
    bags = changed.split(lengths)
    for length in (1, 2, 7):
        patterns = torch.stack(bags[(1, 0, 2, 7).index(length) :: 4]).long() @ 2 ** torch.arange(length)
        number = np.array([pattern.bit_count() for pattern in range(2**length)])
        law = p0**number * (1 - p0) ** (length - number)
        assert p_value(np.bincount(patterns, minlength=2**length), law) > FALSE_ALARM


def test_all_places_of_a_batch_are_as_likely_at_every_step() -> None:
    perturb = IdPerturbation(1000, SSE(0.05), rank=0, name="ids")
    ids, num_steps = torch.zeros(200, dtype=torch.long), 400
    changed = torch.stack([perturb(ids) != 0 for _ in range(num_steps)])
    for axis in (0, 1):
        counts = changed.sum(axis)
        assert p_value(counts, np.full(len(counts), 1 / len(counts))) > FALSE_ALARM
    assert share_p_value(changed.sum(), changed.numel(), 0.05) > FALSE_ALARM


@pytest.mark.parametrize("p0", [0.01, 0.3, 0.8])
def test_gaps_between_replaced_ids_are_geometric_and_independent(p0: float) -> None:
    new = replaced(torch.zeros(MANY, dtype=torch.long), 1000, SSE(p0), seed=3)
    places = np.flatnonzero(new != 0)
    assert p_value(np.bincount(places // 10_000, minlength=100), np.full(100, 0.01)) > FALSE_ALARM
    gaps = np.diff(places)
    longest = int(np.ceil(np.log(1e-5) / np.log(1 - p0)))
    law = p0 * (1 - p0) ** np.arange(longest)
    counts = np.bincount(np.minimum(gaps, longest + 1) - 1, minlength=longest + 1)
    assert p_value(counts, np.append(law, 1 - law.sum())) > FALSE_ALARM
    gaps = gaps[:100_000]
    sizes = np.searchsorted(np.unique(np.quantile(gaps, [0.25, 0.5, 0.75, 0.95])), gaps)
    for distance in (1, 2, 3):
        assert independence_p_value(sizes[:-distance], sizes[distance:]) > FALSE_ALARM


NOTHING_TO_DRAW: list[tuple[int, SSE]] = [
    (1000, SSE(0.0)),
    (1, SSE(1.0)),
    (3, SSE(1.0, reserved=(0, 1, 2))),
    (3, SSE(1.0, reserved=(0, 2), keep_reserved=True)),
    (1000, SSE(1.0, schedule=((0, 0.0), (10, 1.0)))),
]


@pytest.mark.parametrize("num_ids, sse", NOTHING_TO_DRAW)
def test_where_nothing_is_to_be_drawn_the_same_object_comes_back(num_ids: int, sse: SSE) -> None:
    ids = evenly(num_ids, 100)
    assert replaced(ids, num_ids, sse) is ids
    batch = jagged({"f": ids})
    assert FeaturePerturbation([IdStream("t", "f", num_ids, sse, seed=0)])(batch) is batch


# which ids take their place


@pytest.mark.parametrize("num_ids", [2, 3, 10, 100])
@pytest.mark.parametrize("p0", [0.4, 1.0])
def test_every_other_id_is_as_likely(num_ids: int, p0: float) -> None:
    old = evenly(num_ids, 300_000)
    counts = transitions(old, replaced(old, num_ids, SSE(p0)), num_ids)
    assert p_value(counts, replacement_law(num_ids, p0)) > FALSE_ALARM


LARGE = [1000, 2**24 + 1, 10**10, 3 * 2**60 + 1, 2**62 + 2, 2**63 - 1]


@pytest.mark.parametrize(
    ("num_ids", "where"),
    [*zip(LARGE, ["first", "middle", "last"] * 2, strict=True), (LARGE[0], "last"), (LARGE[-1], "first")],
)
def test_ids_of_a_large_table_are_as_likely_in_every_region_and_residue(num_ids: int, where: str) -> None:
    old = {"first": 0, "middle": num_ids // 2, "last": num_ids - 1}[where]
    count, num_bins = 100_000, 250
    new = replaced(torch.full((count,), old), num_ids, SSE(1.0)).numpy()
    assert (new != old).all() and new.min() >= 0 and new.max() < num_ids
    edges = [num_ids * i // num_bins for i in range(num_bins + 1)]
    counts = np.bincount(np.searchsorted(np.array(edges[1:], dtype=np.uint64), new.view(np.uint64), side="right"))
    sizes = np.array([last - first - (first <= old < last) for first, last in zip(edges, edges[1:], strict=False)])
    assert p_value(counts, sizes.astype(float) / (num_ids - 1)) > FALSE_ALARM
    for modulus in (2, 3, 16):
        sizes = np.array([(num_ids - 1 - r) // modulus + 1 - (old % modulus == r) for r in range(modulus)])
        counts = np.bincount(new % modulus, minlength=modulus)
        assert p_value(counts, sizes.astype(float) / (num_ids - 1)) > FALSE_ALARM


def test_the_lowest_and_the_highest_ids_are_drawn() -> None:
    num_ids, width = 2**24 + 1, 2**10
    new = replaced(torch.full((MANY,), 2**23), num_ids, SSE(1.0), seed=4)
    for seen in (new < width, new >= num_ids - width):
        assert share_p_value(seen.sum(), MANY, width / (num_ids - 1)) > FALSE_ALARM
    few = replaced(torch.full((10_000,), 500), 1000, SSE(1.0))
    assert set(few.tolist()) == set(range(1000)) - {500}


@pytest.mark.parametrize("num_ids", [2, 1000, 2**31])
def test_int32_ids_become_the_same_as_int64_ids(num_ids: int) -> None:
    old = torch.randint(num_ids, (1000,), generator=torch.Generator().manual_seed(0))
    sse = SSE(0.5, reserved=(0,))
    narrow = replaced(old.int(), num_ids, sse)
    assert narrow.dtype == torch.int32 and torch.equal(narrow.long(), replaced(old, num_ids, sse))


def test_ids_of_a_type_too_narrow_for_the_table_are_refused() -> None:
    with pytest.raises(UserError, match="int32"):
        replaced(torch.zeros(100, dtype=torch.int32), 10**10, SSE(1.0))


# reserved ids

RESERVED: list[tuple[int, tuple[int, ...]]] = [
    (20, (0,)),
    (20, (0, 1, 2)),
    (20, (19,)),
    (20, (7,)),
    (20, (0, 3, 4, 11, 18)),
    (20, (1, 2, 19)),
    (20, tuple(range(18))),
    (100, tuple(sorted({0, 1, 99} | set(range(3, 97, 3)) | set(range(5, 90, 3))))),
]


@pytest.mark.parametrize(
    ("num_ids", "reserved", "keep_reserved"),
    [*((*table, place % 2 == 0) for place, table in enumerate(RESERVED)), (*RESERVED[0], False), (*RESERVED[-1], True)],
)
def test_reserved_ids_are_never_drawn_and_kept_if_wished(
    num_ids: int, reserved: tuple[int, ...], keep_reserved: bool
) -> None:
    old = evenly(num_ids, 200_000)
    new = replaced(old, num_ids, SSE(0.8, reserved=reserved, keep_reserved=keep_reserved))
    law = replacement_law(num_ids, 0.8, reserved=reserved, keep_reserved=keep_reserved)
    assert p_value(transitions(old, new, num_ids), law) > FALSE_ALARM


def test_the_most_reserved_ids_that_there_can_be() -> None:
    reserved = RESERVED[-1][1][:32] + tuple(range(500, 532))
    assert len(set(reserved)) == 64
    old = evenly(600, 200_000)
    new = replaced(old, 600, SSE(1.0, reserved=reserved, keep_reserved=True))
    is_reserved = torch.isin(old, torch.tensor(reserved))
    assert torch.equal(new[is_reserved], old[is_reserved])
    law = np.ones(600)
    law[list(reserved)] = 0
    assert p_value(np.bincount(new[~is_reserved], minlength=600), law / law.sum()) > FALSE_ALARM


@pytest.mark.parametrize("num_ids", [2**24 + 1, 2**63 - 1])
def test_reserved_ids_of_a_large_table(num_ids: int) -> None:
    reserved = (0, 1, 5, num_ids // 2, num_ids - 1)
    sse = SSE(1.0, reserved=reserved, keep_reserved=True)
    old = torch.tensor([*reserved, *[2, num_ids // 2 + 1] * 50_000])
    new = replaced(old, num_ids, sse)
    assert torch.equal(new[:5], old[:5])
    assert (new[5:] != old[5:]).all() and not torch.isin(new[5:], torch.tensor(reserved)).any()
    bins = np.minimum(new[5:].numpy() // (num_ids // 100), 99)
    assert p_value(np.bincount(bins, minlength=100), np.full(100, 0.01)) > FALSE_ALARM


def test_features_of_a_batch_have_their_own_reserved_ids() -> None:
    rules = {
        "none": SSE(0.9),
        "first": SSE(0.9, reserved=(0, 1)),
        "kept": SSE(0.9, reserved=(0, 4, 9), keep_reserved=True),
        "last": SSE(0.9, reserved=(8, 9)),
    }
    old = evenly(10, 100_000)
    perturb = FeaturePerturbation([IdStream(name, name, 10, sse, seed=5) for name, sse in rules.items()])
    new = perturb(jagged(dict.fromkeys([*rules, "plain"], old)))
    for name, sse in rules.items():
        law = replacement_law(10, 0.9, reserved=tuple(sse.reserved), keep_reserved=sse.keep_reserved)
        assert p_value(transitions(old, new[name].values(), 10), law) > FALSE_ALARM
    assert torch.equal(new["plain"].values(), old)
