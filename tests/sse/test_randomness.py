"""Random numbers are independent where one thing differs, and the same where nothing does."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.sse import SSE, FeaturePerturbation, Graph, IdPerturbation, IdStream, Walk, set_step, take_counts
from distembed.sse.random_words import below, stream_key, unit, word
from tests.sse.reference import FALSE_ALARM, independence_p_value, jagged, share_p_value

# words


def split_mix(seed: int, number: int) -> int:
    """Returns the output of this number, from 0, of SplitMix64, by Python's integers."""
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def uint64s(*values: int) -> Any:
    return np.array(values, dtype=np.uint64)


def test_words_are_those_of_splitmix64() -> None:
    # as published for the seed 1234567
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [int(word(uint64s(1234567), i)[0]) for i in range(4)] == published
    assert [split_mix(1234567, i) for i in range(4)] == published
    for state, number in itertools.product([0, 1, 2**63, 2**64 - 1], [0, 1, 7, 62]):
        assert int(word(uint64s(state), number)[0]) == split_mix(state, number)


@given(data=st.data())
@settings(max_examples=30)
def test_integers_below_a_bound_are_of_words_that_favour_none(data: st.DataObject) -> None:
    sizes = st.one_of(
        st.integers(1, 20), st.integers(2**32 - 9, 2**32 + 9), st.integers(1, 2**63), st.just(3 * 2**61), st.just(2**63)
    )
    bounds = data.draw(st.lists(sizes, min_size=1, max_size=8))
    words = [data.draw(st.integers(2**64 - 2 * bound, 2**64 - 1) | st.integers(0, 2**64 - 1)) for bound in bounds]
    # those of small bounds are near a multiple of 2^32 / bound, where words are rejected
    shifts = [data.draw(st.integers(0, bound - 1)) for bound in bounds]
    words = [
        (min(-(-(shift << 32) // bound), 2**32 - 1) << 32) + word % 2**32 if bound < 2**32 and shift % 2 else word
        for word, bound, shift in zip(words, bounds, shifts, strict=True)
    ]
    expected = [expected_below(word, bound) for word, bound in zip(words, bounds, strict=True)]
    assert below(uint64s(*words), uint64s(*bounds)).tolist() == expected


def expected_below(word: int, bound: int) -> int:
    """Returns which of ``bound`` equal shares of all words holds the word, or else its first successor in one."""
    bits = 32 if bound < 2**32 else 64
    number = word >> (64 - bits)
    if bits == 64:
        return number % bound if number < 2**64 - 2**64 % bound else expected_below(split_mix(word, 0), bound)
    result, rest = divmod(number * bound, 2**32)
    return result if rest >= 2**32 % bound else expected_below(split_mix(word, 0), bound)


def test_uniform_numbers_lie_inside_0_and_1() -> None:
    numbers = unit(uint64s(0, 1, 2**11 - 1, 2**63 - 1, 2**63, 2**64 - 2**12, 2**64 - 1))
    assert (numbers > 0).all() and (numbers < 1).all() and (np.diff(numbers) >= 0).all()


# unlike numbers where one thing differs

NUM_VALUES = 8
PLACES: dict[str, dict[str, Any]] = {
    "base": {},
    "seed 1": {"seed": 1},
    "seed -1": {"seed": -1},
    "seed 2^70": {"seed": 2**70},
    "step 1": {"step": 1},
    "step 2^40": {"step": 2**40},
    "rank 1": {"rank": 1},
    "rank 511": {"rank": 511},
    "step 5, rank 3": {"step": 5, "rank": 3},
    "step 3, rank 5": {"step": 3, "rank": 5},
    "table u": {"table": "u"},
    "feature g": {"feature": "g"},
    "swapped": {"table": "f", "feature": "t"},
    "run together": {"table": "tf", "feature": ""},
    "run together otherwise": {"table": "", "feature": "tf"},
}


def numbers_of(place: dict[str, Any], count: int, num_ids: int = NUM_VALUES + 1) -> Tensor:
    """Returns what the last id became, again and again: 0 to 7 if another, 8 if it was not replaced."""
    chosen = {"seed": 0, "step": 0, "rank": 0, "table": "t", "feature": "f", **place}
    stream = IdStream(chosen["table"], chosen["feature"], num_ids, SSE(0.5), chosen["seed"])
    perturb = FeaturePerturbation([stream], rank=chosen["rank"])
    set_step(perturb, chosen["step"])
    return perturb(jagged({chosen["feature"]: torch.full((count,), num_ids - 1)})).values()


def test_seeds_steps_ranks_tables_and_features_draw_independently() -> None:
    count, pairs = 60_000, list(itertools.combinations(PLACES, 2))
    drawn = {name: numbers_of(place, count).numpy() for name, place in PLACES.items()}
    for one, other in pairs:
        assert independence_p_value(drawn[one], drawn[other]) > FALSE_ALARM / len(pairs), (one, other)
    for name, values in drawn.items():
        # also of what comes next, and of the same numbers shifted to where others stand
        assert independence_p_value(values[1:], values[:-1]) > FALSE_ALARM / len(drawn), name
        assert independence_p_value(values[1:], drawn["base"][:-1]) > FALSE_ALARM / len(drawn), name


def test_successive_steps_and_ranks_draw_independently() -> None:
    for axis in ("step", "rank"):
        rows = np.stack([numbers_of({axis: i}, 600).numpy() for i in range(120)])
        for distance in (1, 2):
            first, second = rows[:-distance].ravel(), rows[distance:].ravel()
            assert independence_p_value(first, second) > FALSE_ALARM
        same = (rows[:-1] == rows[1:]) & (rows[1:] < NUM_VALUES)
        assert share_p_value(same.sum(), same.size, 0.25 / NUM_VALUES) > FALSE_ALARM


def test_tables_of_other_sizes_draw_independently() -> None:
    # one of twice the size: not the same number scaled
    small = numbers_of({}, 100_000).numpy()
    large = numbers_of({"table": "u"}, 100_000, num_ids=2 * NUM_VALUES + 1).numpy()
    assert independence_p_value(small, large) > FALSE_ALARM


# the same numbers where nothing differs

GRAPH = Graph.from_edges(100, np.arange(99), np.arange(1, 100))
RULES = {
    "se": SSE(0.5),
    "reserved": SSE(0.4, reserved=(0, 50), keep_reserved=True),
    "graph": SSE(0.6, 30.0, GRAPH),
    "walk": SSE(0.9, 300.0, GRAPH, Walk()),
    "rare": SSE(0.03, schedule=((0, 0.5), (10, 1.0))),
}


def streams() -> list[IdStream]:
    return [IdStream(f"table_{name}", name, 100, sse, seed=3) for name, sse in RULES.items()]


def random_ids(count: int) -> Tensor:
    return torch.randint(100, (count,), generator=torch.Generator().manual_seed(count))


@given(data=st.data())
@settings(max_examples=30)
def test_a_feature_draws_the_same_whatever_else_is_in_the_batch(data: st.DataObject) -> None:
    step = data.draw(st.integers(0, 20))
    names = data.draw(st.lists(st.sampled_from([*RULES, "plain", "other"]), unique=True, min_size=1))
    ids = {name: random_ids(data.draw(st.integers(0, 60))) for name in names}
    together = FeaturePerturbation(streams(), rank=2)
    set_step(together, step)
    batch = together(jagged(ids))
    assert list(batch.keys()) == names
    for name in names:
        alone = FeaturePerturbation([s for s in streams() if s.feature == name], rank=2)
        set_step(alone, step)
        assert torch.equal(batch[name].values(), alone(jagged({name: ids[name]})).values())


@pytest.mark.parametrize("name", RULES)
def test_the_first_ids_become_the_same_in_a_longer_batch(name: str) -> None:
    ids = random_ids(5000)
    longest = FeaturePerturbation(streams())(jagged({name: ids})).values()
    for length in (0, 1, 2, 3, 10, 100, 1234, 4999):
        shorter = FeaturePerturbation(streams())(jagged({name: ids[:length]})).values()
        assert torch.equal(shorter, longest[:length])


def test_one_of_many_features_draws_the_same_as_alone() -> None:
    # so many that some of them need more random numbers than are made at first
    many = [IdStream("t", str(i), 100, SSE(0.02), seed=0) for i in range(3000)]
    ids = {stream.feature: random_ids(30) for stream in many}
    together = FeaturePerturbation(many)(jagged(ids))
    values = dict(zip(together.keys(), together.values().split(30), strict=True))
    changed = [stream for stream in many if not torch.equal(values[stream.feature], ids[stream.feature])]
    most = sorted(changed, key=lambda s: -int((values[s.feature] != ids[s.feature]).sum()))
    for stream in most[:50] + many[:50]:
        alone = FeaturePerturbation([stream])(jagged({stream.feature: ids[stream.feature]}))
        assert torch.equal(alone.values(), values[stream.feature])


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.5])
def test_what_is_replaced_does_not_hinge_on_how_many_numbers_are_made_at_first(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distembed.sse import random_words as positions

    counts, rates = (1000, 0, 1, 5000, 17), (rate, rate, rate, rate / 3, 1.0)
    starts = (0, 1000, 1000, 1001, 6001)
    keys_of_steps = [np.array([stream_key(step, str(i)) for i in range(5)]) for step in range(10)]
    drawn = [positions.draw_places(counts, starts, rates, keys) for keys in keys_of_steps]
    plan, tried = positions._gap_layout, []

    def sparing(*shape: Any) -> Any:
        tried.append(shape[-1])
        return plan(*shape[:-1], shape[-1] - 2.99)

    monkeypatch.setattr(positions, "_gap_layout", sparing)
    again = [positions.draw_places(counts, starts, rates, keys) for keys in keys_of_steps]
    assert len(tried) > len(again)
    for one, other in zip(drawn, again, strict=True):
        assert all(np.array_equal(vars(one)[name], vars(other)[name]) for name in vars(one))


@pytest.mark.parametrize("name", RULES)
def test_a_step_drawn_again_is_the_same(name: str) -> None:
    perturb = nn.Sequential(FeaturePerturbation(streams(), rank=1))
    batch = jagged({name: random_ids(1000)})
    run = [perturb(batch).values() for _ in range(8)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(run, 2))
    for step in (5, 0, 7, 3):
        set_step(perturb, step)
        assert torch.equal(perturb(batch).values(), run[step])
        assert perturb[0].step == step + 1
    # and a new object, as after a resume
    resumed = FeaturePerturbation(streams(), rank=1)
    set_step(resumed, 6)
    assert torch.equal(resumed(batch).values(), run[6]) and torch.equal(resumed(batch).values(), run[7])


def test_torchs_own_random_numbers_are_neither_used_nor_touched() -> None:
    ids = random_ids(1000)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = IdPerturbation(100, SSE(0.5), name="ids")(ids)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    np.random.seed(3)
    assert torch.equal(IdPerturbation(100, SSE(0.5), name="ids")(ids), first)


# batches


def test_evaluation_replaces_nothing_and_is_no_step() -> None:
    perturb = FeaturePerturbation(streams())
    batch = jagged({name: random_ids(100) for name in RULES})
    expected = [perturb(batch).values() for _ in range(4)]
    perturb = FeaturePerturbation(streams())
    for step in range(4):
        assert perturb.eval()(batch) is batch and perturb.step == step
        assert torch.equal(perturb.train()(batch).values(), expected[step])
    assert take_counts(perturb.eval()) == {
        f"table_{name}": (sum(_changed(batch, values, name) for values in expected), 400) for name in RULES
    }


def _changed(batch: KeyedJaggedTensor, values: Tensor, name: str) -> int:
    first, last = batch.offset_per_key()[batch.keys().index(name) :][:2]
    return int((batch.values()[first:last] != values[first:last]).sum())


def test_a_batch_keeps_all_but_its_ids_and_is_not_written_to() -> None:
    names, rows = [*RULES, "plain"], 50
    lengths = torch.randint(4, (len(names) * rows,), generator=torch.Generator().manual_seed(0))
    count = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    for given_as in ({"lengths": lengths}, {"offsets": offsets}, {"lengths": lengths, "weights": torch.rand(count)}):
        batch = KeyedJaggedTensor(names, random_ids(count), **given_as)
        old = batch.values().clone()
        new = FeaturePerturbation(streams())(batch)
        assert new is not batch and torch.equal(batch.values(), old) and not torch.equal(new.values(), old)
        assert new.keys() == names and new.stride() == rows and new.values().dtype == old.dtype
        assert torch.equal(new.lengths(), lengths) and torch.equal(new.offsets(), offsets)
        assert new.length_per_key() == batch.length_per_key() and new.offset_per_key() == batch.offset_per_key()
        weights = given_as.get("weights")
        assert new.weights_or_none() is weights
        assert torch.equal(new["plain"].values(), batch["plain"].values())


def test_a_batch_of_another_number_of_rows_for_each_feature_keeps_them() -> None:
    lengths = torch.tensor([1, 2, 3, 0, 4, 5])
    batch = KeyedJaggedTensor(
        ["se", "plain"],
        random_ids(15),
        lengths=lengths,
        stride_per_key_per_rank=[[2], [4]],
        inverse_indices=(["se", "plain"], torch.tensor([[0, 1, 1, 0], [0, 1, 2, 3]])),
    )
    new = FeaturePerturbation(streams())(batch)
    assert not torch.equal(new.values(), batch.values())
    assert new.stride_per_key() == [2, 4] and new.variable_stride_per_key()
    assert new["se"].lengths().tolist() == [1, 2] and new["plain"].lengths().tolist() == [3, 0, 4, 5]
    assert torch.equal(new["plain"].values(), batch["plain"].values())
    assert new.inverse_indices() == batch.inverse_indices()


def test_int32_ids_of_a_batch_stay_int32() -> None:
    batch = jagged({name: random_ids(50) for name in RULES})
    narrow = KeyedJaggedTensor(batch.keys(), batch.values().int(), lengths=batch.lengths())
    new = FeaturePerturbation(streams())(narrow)
    assert new.values().dtype == torch.int32
    assert torch.equal(new.values().long(), FeaturePerturbation(streams())(batch).values())


def test_ids_without_values_come_back_as_they_are() -> None:
    batch = jagged({name: random_ids(10) for name in RULES})
    on_meta = KeyedJaggedTensor(batch.keys(), batch.values().to("meta"), lengths=batch.lengths())
    perturb = FeaturePerturbation(streams())
    assert perturb(on_meta) is on_meta and perturb.step == 0
    ids = torch.zeros(4, 5, dtype=torch.long, device="meta")
    assert IdPerturbation(100, SSE(1.0), name="ids")(ids) is ids


# counts


def test_counts_are_what_is_seen() -> None:
    rules = {
        "a": ("shared", SSE(0.3)),
        "b": ("shared", SSE(0.7, reserved=(1, 3), keep_reserved=True)),
        "c": ("own", SSE(0.2)),
    }
    perturb = FeaturePerturbation([IdStream(table, f, 6, sse, seed=0) for f, (table, sse) in rules.items()])
    expected = {"shared": [0, 0], "own": [0, 0]}
    model = nn.Sequential(perturb)
    for layout in (["a", "b", "c"], ["c", "a"], ["b"], ["plain", "b", "a"]):
        ids = {name: random_ids(200 + len(name)) % 6 for name in layout}
        new = model(jagged(ids))
        for name in set(layout) & set(rules):
            expected[rules[name][0]][0] += int((new[name].values() != ids[name]).sum())
            expected[rules[name][0]][1] += len(ids[name])
    assert take_counts(model) == {table: tuple(count) for table, count in expected.items()}
    assert take_counts(model) == {"shared": (0, 0), "own": (0, 0)}


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws() -> None:
    for name in RULES:
        ids = random_ids(100_000)
        on_cpu, on_gpu = FeaturePerturbation(streams()), FeaturePerturbation(streams())
        for _ in range(3):
            batch = jagged({name: ids, "plain": ids})
            expected, new = on_cpu(batch), on_gpu(batch.to(torch.device("cuda")))
            assert new.values().is_cuda and torch.equal(new.values().cpu(), expected.values())
            assert torch.equal(new.lengths().cpu(), expected.lengths())
        assert take_counts(on_gpu) == take_counts(on_cpu)
