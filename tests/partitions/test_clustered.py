"""Clustered: stored rows beside hashes; before a re-clustering, the rows of ``multi_hash``."""

import numpy as np
import pytest
import torch

from distembed.base.errors import UserError
from distembed.embedding import CompositionalEmbeddingConfig
from distembed.partitions import Clustered, MultiHash


@pytest.mark.parametrize("sizes", [{}, {"num_partitions": 3}, {"moduli": [7, 3, 5, 70_000, 1]}])
@pytest.mark.parametrize("n", [1, 33, 3000])
def test_it_starts_as_hashes_and_stores_what_it_is_given(sizes: dict[str, object], n: int) -> None:
    scheme, hashed = (kind(n, **sizes).for_table("t") for kind in (Clustered, MultiHash))
    ids = torch.arange(n)
    before = scheme.rows(ids)
    assert torch.equal(before, hashed.rows(ids)) and scheme.num_rows == hashed.num_rows
    description, num_bytes = scheme.description, scheme.assignment_bytes
    rng = np.random.default_rng(0)
    given = [torch.from_numpy(rng.integers(0, bound, n)) for bound in scheme.num_rows[: scheme.num_stored]]
    scheme.reassign(given)
    after = scheme.rows(ids)
    assert torch.equal(after[: scheme.num_stored], torch.stack(given))
    for row, old, bound in zip(after, before, scheme.num_rows, strict=True):
        assert 0 <= int(row.min()) and int(row.max()) < bound
        if n == 3000 and bound > 2:  # new hashes: about n / bound ids keep their row
            assert int((row == old).sum()) < 2 * n / bound + 30
    assert (scheme.description, scheme.assignment_bytes) == (description, num_bytes)
    assert "(not proved complementary)" in scheme.description
    assert num_bytes == sum(tensor.nbytes for tensor in scheme.state.values())


def test_a_state_that_is_loaded_gives_the_rows_that_it_was_saved_with() -> None:
    saved, live = (Clustered(500, num_partitions=4, num_buckets=9) for _ in range(2))
    ids = torch.arange(500).view(5, 100)
    saved.reassign([torch.arange(500) % 9, torch.arange(500) % 8])
    assert not torch.equal(saved.rows(ids), live.rows(ids)) and saved != live
    live.load_state(saved.state)
    assert torch.equal(saved.rows(ids), live.rows(ids)) and saved == live
    # the next hashes follow from the present ones
    for scheme in (saved, live):
        scheme.reassign([torch.zeros(500, dtype=torch.int64)] * 2)
    assert torch.equal(saved.rows(ids), live.rows(ids))


def test_hashes_spread_evenly_after_every_draw() -> None:
    scheme, n = Clustered(20_000, num_buckets=50), 20_000
    for _ in range(3):
        scheme.reassign([torch.zeros(n, dtype=torch.int64)])
        counts = torch.bincount(scheme.rows(torch.arange(n))[1], minlength=50).double()
        # chi-square of 49 degrees of freedom: below 100 but for one draw in 40,000
        assert float(((counts - n / 50) ** 2 / (n / 50)).sum()) < 100


def test_rows_that_the_hash_does_not_reach_are_refused() -> None:
    with pytest.raises(UserError, match=r"has a partition of 2147483649 rows; give at most 2\^31"):
        Clustered(10, num_buckets=2**31 + 1)


def test_more_stored_rows_than_machines_hold_are_refused() -> None:
    with pytest.raises(UserError, match="'t' would store rows of num_embeddings=4,611,686,018,427,387,904 ids in 2,3"):
        CompositionalEmbeddingConfig("t", 2**62, 8, ["f"], Clustered(2**62, num_buckets=10), "concat_sum")
