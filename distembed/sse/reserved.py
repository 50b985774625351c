"""Ids that are never drawn: those of missing, unknown and padding values.

Mostly these are the first ids of a table, as ``distembed prepare`` gives them out. Such are passed over by a shift, and
each other one by a comparison.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

_NO_ID = torch.iinfo(torch.int64).max


class ReservedIds:
    """Reserved ids of several features.

    Args:
        num_first: how many of the first ids of each feature are reserved; a single number where it is that of all.
        others: for each feature the other reserved ids less ``num_first``, rising, ``[most, features]``; where there
            are fewer than the most, followed by numbers larger than any id.
    """

    def __init__(self, num_first: int | Int64[Tensor, " features"], others: Int64[Tensor, "most features"]) -> None:
        self._num_first = num_first
        self._others = list(others)

    @classmethod
    def of(cls, reserved: Sequence[Sequence[int]], device: torch.device) -> "ReservedIds | None":
        """Of the rising reserved ids of each feature; None where no feature has any."""
        if not any(reserved):
            return None
        num_first = [sum(i == expected for expected, i in enumerate(ids)) for ids in reserved]
        rest = [[i - first for i in ids[first:]] for ids, first in zip(reserved, num_first, strict=True)]
        most = max(len(ids) for ids in rest)
        padded = np.array([[*ids, *[_NO_ID] * most][:most] for ids in rest], dtype=np.int64).reshape(len(rest), most)
        of_features = num_first[0] if len(set(num_first)) == 1 else torch.tensor(num_first, device=device)
        return cls(of_features, torch.from_numpy(padded.T.copy()).to(device))

    def another(
        self,
        ids: Int64[Tensor, " drawn"],
        features: Int64[Tensor, " drawn"],
        among_others: Int64[Tensor, " drawn"],
        among_all: Int64[Tensor, " drawn"],
    ) -> tuple[Int64[Tensor, " drawn"], Bool[Tensor, " drawn"]]:
        """For each id one that is neither reserved nor the id itself, and whether the id is reserved.

        Args:
            ids: of any kind.
            features: of each id.
            among_others: below the number of ids that are not reserved, less one; it is used for such ids.
            among_all: below the number of ids that are not reserved; it is used for reserved ids.
        """
        num_first = self._num_first
        if isinstance(num_first, Tensor):
            num_first = num_first.index_select(0, features)
        shifted = ids - num_first
        is_reserved = shifted < 0
        others = [row.index_select(0, features) for row in self._others]
        position = shifted  # of the id among those that may be drawn
        for other in others:
            is_reserved = is_reserved | (shifted == other)
            position = position - (shifted > other).long()
        new = torch.where(is_reserved, among_all, among_others + (among_others >= position))
        for other in others:
            new = new + (new >= other)
        return new + num_first, is_reserved
