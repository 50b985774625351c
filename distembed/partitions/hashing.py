"""A keyed pre-hash, which gives ids to values that arrive as strings or as unbounded integers, before any partition.

Trade-off: no vocabulary to build or to keep, and values never seen before get an id at once; but distinct values can
share an id. With v values and n ids about ``v^2 / 2n`` pairs do, so n should be well above v, as compressed tables
allow. The key makes the ids differ between tables, and unforeseeable to whoever does not know it; for integers it is no
cryptographic protection, for strings it is one (BLAKE2b, to 64 bits).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxtyping import Int64

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.data.hashing import GOLDEN_GAMMA, MULTIPLIERS, SHIFTS
from distembed.partitions.base import require_positive

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SEED = 2**63 - 1
_NEGLIGIBLE_BITS = 64


def mix64(values: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Returns SplitMix64's output function of each value (Steele, Lea, Flood, OOPSLA 2014), one to one on 64 bits."""
    values = values + _signed(GOLDEN_GAMMA)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        values = (values ^ _shift_right(values, shift)) * _signed(multiplier)
    return values ^ _shift_right(values, SHIFTS[-1])


@dataclass(frozen=True)
class KeyedHash:
    """A uniform map from any 64-bit integer to ids, chosen by ``seed`` among very many."""

    seed: int  # an integer from 0 to 2^63-1; the same seed gives the same ids on every machine, device and version
    keys: tuple[int, int] = field(init=False, repr=False, compare=False)
    """Two 64-bit keys of the seed, by BLAKE2b, so that neighbouring seeds give unrelated keys."""

    def __post_init__(self) -> None:
        _require_seed(self.seed)
        digest = hashlib.blake2b(self.seed.to_bytes(8, "little"), digest_size=16).digest()
        object.__setattr__(self, "keys", (_as_int64(digest[:8]), _as_int64(digest[8:])))

    def ids(self, values: Int64[Tensor, "*shape"], num_embeddings: int) -> Int64[Tensor, "*shape"]:
        """Returns ids in ``[0, num_embeddings)`` for any int64 values, also negative ones, on the values' device.

        63 hashed bits u become ``u mod n``. The last, incomplete run of n numbers would favour small ids: a u within it
        is hashed again, a number of times that leaves a bias below 2^-64. The number depends on n alone, so no GPU is
        waited for.

        Raises:
            UserError: The values are not int64, or ``num_embeddings`` lies outside of 1 to 2^63-1.
        """
        n = require_positive("num_embeddings", num_embeddings, "Give the number of distinct ids.")
        if values.dtype != torch.int64:
            raise UserError(f"values are of type {values.dtype}; a keyed hash takes torch.int64. Convert them first.")
        return self.ids_of_int64(values, n)

    def ids_of_int64(self, values: Int64[Tensor, "*shape"], num_embeddings: int) -> Int64[Tensor, "*shape"]:
        """Returns the result of :meth:`ids` without checking the arguments, so that torch.fx can trace it."""
        # u is uniform in [0, 2^63). The last 2^63 mod n numbers would give small ids one u more than the others: a u
        # among them is replaced by the next hash. All rounds are computed for all values, so no branch needs data.
        n = num_embeddings
        before, after = self.keys
        state = mix64(mix64(values ^ before) + after)
        number = _shift_right(state, 1)
        incomplete = 2**63 % n
        for _ in range(_rounds(incomplete)):
            state = mix64(state)
            number = torch.where(number < 2**63 - incomplete, number, _shift_right(state, 1))
        return number % n


def rows_by_keys(
    values: Int64[Tensor, "*shape"],
    before: Int64[Tensor, "k *shape"],
    after: Int64[Tensor, "k *shape"],
    moduli: Int64[Tensor, "k *shape"],
) -> Int64[Tensor, "k *shape"]:
    """Returns :meth:`KeyedHash.ids` of k hashes at once, for moduli of at most 2^31; arguments broadcast.

    A modulus up to 2^31 needs one further hash (:func:`_rounds`). Where it divides 2^63, that hash changes nothing.
    """
    state = mix64(mix64(values ^ before) + after)
    number, again = _shift_right(state, 1), _shift_right(mix64(state), 1)
    incomplete = (_MAX_SEED % moduli + 1) % moduli  # 2^63 mod n, without 2^63
    return torch.where(number <= _MAX_SEED - incomplete, number, again) % moduli


def hash_strings(values: Sequence[str | bytes], seed: int) -> Int64[Tensor, "values"]:
    """Returns 64 uniform bits of each string, by BLAKE2b with a key; a text and its UTF-8 bytes are one value.

    :meth:`KeyedHash.ids` turns them into ids.

    Raises:
        UserError: A value is neither text nor bytes; the error names its position.
    """
    _require_seed(seed)
    if isinstance(values, str | bytes):
        raise UserError(f"values is the single string {values!r}; hash_strings takes a list of them.")
    key = seed.to_bytes(8, "little")
    hashes = [
        _as_int64(hashlib.blake2b(_bytes(value, position), digest_size=8, key=key).digest())
        for position, value in enumerate(values)
    ]
    return torch.tensor(hashes, dtype=torch.int64)


def _bytes(value: object, position: int) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", errors="surrogatepass")
    raise UserError(
        f"values[{position}] is {value!r}, of type {type(value).__name__}; hash_strings takes str or bytes. "
        "Give missing values a word of their own, and pass integers to KeyedHash.ids."
    )


def _require_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        raise UserError(f"seed is {seed!r}; it must be an integer between 0 and 2^63-1.")


def _rounds(incomplete: int) -> int:
    """Returns how many times to hash again until fewer than 2^-64 of all values lie in the last, incomplete run.

    A hash lies in the run with probability p = incomplete / 2^63 < 2^-b; r rounds leave p^(r + 1) <= 2^-64.
    """
    if incomplete == 0:
        return 0
    bits_per_round = 63 - incomplete.bit_length()  # b
    return -(-_NEGLIGIBLE_BITS // bits_per_round) - 1


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Returns the values shifted right, with zeros from the left; ``>>`` of an int64 tensor shifts its sign in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _as_int64(digest: bytes) -> int:
    """Returns 8 bytes as a little-endian int64."""
    return int.from_bytes(digest, "little", signed=True)
