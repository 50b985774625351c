"""Clustered: half of the partitions are hashes, half are stored rows that training learns (CCE).

Source: Tsang and Ahle, "Clustering the Sketch: Dynamic Compression for Embedding Tables", NeurIPS 2023.

With c blocks of columns, block i of an id's vector is ``T_i[a_i[x]] + T'_i[h_i(x)]`` (composition ``concat_sum``)::

    partitions   p_1 ... p_c   stored rows a_i    tables T_i
                 p_c+1 ... p_2c   hashes h_i      tables T'_i

At first ``a_i`` is a hash too, so that the table is one of ``multi_hash``. When the table is re-clustered
(:mod:`distembed.embedding.recluster`), ``a_i[x]`` becomes the cluster of the id's block, ``T_i`` the centroids,
``T'_i`` zeros, and ``h_i`` a new hash. Similar ids then share a row, and the hash separates them further.

Trade-off: c rows an id are stored in the bits that they need, and ids share vectors that have become alike, instead of
ids at random; but the number of ids is bounded by memory, and no kernel looks the table up in one pass.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from jaxtyping import Int64

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.partitions.base import Digit, Partition, num_first_half
from distembed.partitions.hashing import KeyedHash, rows_by_keys
from distembed.partitions.multi_hash import MultiHash
from distembed.partitions.packed import PackedRows, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

_IDS_AT_ONCE = 1 << 18
_MOST_ROWS = 2**31
"""The largest partition: :func:`rows_by_keys` is exact up to it, and a stored row has up to 32 bits."""
_BYTES_OF_HASH = 24


class Clustered(MultiHash):
    """``p_j(x) = a_j[x]`` for the first half of the partitions, ``h_j(x)`` for the second.

    It has the arguments of :class:`MultiHash`; of an odd number of partitions, the one in the middle is stored.

    Attributes:
        state: The stored rows of all ids, ``assignment``, packed id after id, and both keys and the
            modulus of each hash, ``keys``.

    Raises:
        UserError: As :class:`MultiHash`, or a partition has more than 2^31 rows.
    """

    name = "clustered"

    def __init__(self, num_embeddings: int, **sizes: Any) -> None:
        super().__init__(num_embeddings, **sizes)
        if max(self.num_rows) > _MOST_ROWS:
            raise UserError(
                f"clustered has a partition of {max(self.num_rows)} rows; give at most 2^31 by num_buckets or moduli."
            )
        self.num_stored = num_first_half(len(self.num_rows))
        self._copies: dict[torch.device, dict[str, Tensor]] = {}

    def unshared(self) -> Self:
        return copy.deepcopy(self)

    @cached_property
    def state(self) -> dict[str, Tensor]:
        hashed = list(zip(self.hashes, self.num_rows, strict=True))[self.num_stored :]
        keys = [(*keyed.keys, bound) for keyed, bound in hashed]
        rows = np.empty((self.num_embeddings, self.num_stored), np.uint32)
        for start in range(0, len(rows), _IDS_AT_ONCE):
            ids = torch.arange(start, min(start + _IDS_AT_ONCE, len(rows)))
            rows[start : start + len(ids)] = super().rows(ids)[: self.num_stored].T.numpy()
        return {
            "assignment": self._packed(rows).words,
            "keys": torch.tensor(keys, dtype=torch.int64).view(-1, 3).t().contiguous(),
        }

    def state_changed(self) -> None:
        self._copies.clear()
        self.__dict__.pop("_examined", None)

    def reassign(self, rows: Sequence[Int64[Tensor, " ids"]]) -> None:
        """Stores new rows of all ids in the first half of the partitions, and draws new hashes from the old keys."""
        by_id = np.stack([own.numpy().astype(np.uint32) for own in rows], axis=1)
        self.state["assignment"].copy_(self._packed(by_id).words)
        for place, (before, after, _) in enumerate(self.state["keys"].t().tolist()):
            digest = hashlib.blake2b(f"{before}/{after}".encode(), digest_size=8, person=b"clustered").digest()
            new = KeyedHash(int.from_bytes(digest, "little") >> 1)
            self.state["keys"][:2, place] = torch.tensor(new.keys)
        self.state_changed()

    def rows(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "k *shape"]:
        if not self._has_state:
            return super().rows(ids)
        state = self.state
        if isinstance(ids, torch.Tensor) and ids.device.type != "cpu":  # else torch.fx may trace it
            if ids.device not in self._copies:
                self._copies[ids.device] = {name: own.to(ids.device) for name, own in state.items()}
            state = self._copies[ids.device]
        packed = PackedRows(state["assignment"], self._bits, self.num_embeddings * self.num_stored)
        each = ids.unsqueeze(-1)
        stored = packed.take(each * self.num_stored + torch.arange(self.num_stored, device=ids.device))
        before, after, moduli = state["keys"].to(ids.device).unbind()
        return torch.cat([stored, rows_by_keys(each, before, after, moduli)], dim=-1).movedim(-1, 0)

    @property
    def _has_state(self) -> bool:
        """Whether rows are stored: at first they follow from the hashes, so that tables are planned without memory."""
        return "state" in self.__dict__

    @property
    def _bits(self) -> int:
        return max(bound - 1 for bound in self.num_rows[: self.num_stored]).bit_length()

    def _packed(self, rows: np.ndarray[Any, Any]) -> PackedRows:
        return PackedRows.of(rows.reshape(-1), self._bits)

    @property
    def assignment_bytes(self) -> int:
        """The bytes of the stored rows and of the hashes, also before the first re-clustering."""
        stored = packed_bytes(self.num_embeddings * self.num_stored, max(self.num_rows[: self.num_stored]))
        return stored + _BYTES_OF_HASH * (len(self.num_rows) - self.num_stored)

    def __eq__(self, other: object) -> bool:
        """Returns whether another scheme of this class gives equal rows, now and after the same clusterings."""
        is_equal = super().__eq__(other)
        if is_equal is not True or not isinstance(other, Clustered) or not (self._has_state or other._has_state):
            return is_equal
        return all(torch.equal(own, other.state[name]) for name, own in self.state.items())

    __hash__ = MultiHash.__hash__

    @property
    def description(self) -> str:
        """The equations, which re-clustering does not change, as checkpoints compare them."""
        named = [f"a_{j}[x]" if j <= self.num_stored else f"h_{j}(x)" for j in range(1, len(self.num_rows) + 1)]
        equations = [f"p_{j}(x) = {rule} of {self.num_rows[j - 1]} rows" for j, rule in enumerate(named, start=1)]
        return f"{', '.join(equations)}, keyed at first by {self.hash_key or ''!r} (not proved complementary)"

    @classmethod
    def constants(cls, partitions: Sequence[Partition]) -> None:
        """Returns None: stored rows follow from no numbers."""

    def digits(self) -> tuple[Digit, ...] | None:
        return None

    def grown_settings(self, num_embeddings: int) -> dict[str, Any]:
        """Raises a :class:`UserError` for more ids, which belong to no cluster."""
        if num_embeddings > self.num_embeddings:
            raise UserError(
                f"clustered has stored rows of {self.num_embeddings} ids, and cannot grow to {num_embeddings}; keep "
                "the vocabulary, or use multi_hash, which grows."
            )
        return super().grown_settings(num_embeddings)
