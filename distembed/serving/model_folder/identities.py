"""Identities of managed ids in programs and deltas: which raw id has which slot of a table.

A program finds the slots of raw ids by a binary search, so it has the ids in ascending order. A new id moves all larger
ids, so a delta has the ids by slot, in which one id changes one number::

    program    sorted_ids    0   0   0  17  42      delta    slot         4
               sorted_slots  0   1   3   4   2               ids_by_slot  5     (17 has lost its slot, 5 has it now)

A slot that is free or reserved has the id 0. Raw id 0 is a missing value, which a program does not search.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Int64
from torch import Tensor

SORTED_IDS, SORTED_SLOTS, IDS_BY_SLOT = "sorted_ids", "sorted_slots", "ids_by_slot"
"""Names of the tensors, after the path of their module in a program."""


def sort_ids(ids_by_slot: Int64[Tensor, " slots"]) -> tuple[Int64[Tensor, " slots"], Int64[Tensor, " slots"]]:
    """Returns the ids in ascending order, and the slot of each; slots of equal ids, which are 0, ascend."""
    ids, slots = torch.sort(ids_by_slot, stable=True)
    return ids, slots


def ids_of_slots(weights: Mapping[str, Tensor], path: str) -> Int64[Tensor, " slots"]:
    """Returns the id of each slot of the identities at a path in a program, given the program's tensors by name."""
    ids, slots = weights[f"{path}.{SORTED_IDS}"], weights[f"{path}.{SORTED_SLOTS}"]
    return torch.zeros_like(ids).index_copy_(0, slots, ids)
