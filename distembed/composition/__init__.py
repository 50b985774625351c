"""Compositions: how the vectors of an id's k rows become one (Shi et al., KDD 2020, section 4).

=========== ============================= ========================= =====================
name        embedding of an id            dimension of partition j  commutes with pooling
=========== ============================= ========================= =====================
product     v_1 * v_2 * ... * v_k         D                         no
sum         v_1 + v_2 + ... + v_k         D                         yes
concat      [v_1, v_2, ..., v_k]          D/k, sums to D            yes
=========== ============================= ========================= =====================

A new composition is one file and one line in :data:`COMPOSITIONS`; law tests run over every entry.
"""

from distembed.composition.base import Composition
from distembed.composition.concat import Concat
from distembed.composition.elementwise import Product, Sum

COMPOSITIONS: dict[str, type[Composition]] = {"product": Product, "sum": Sum, "concat": Concat}
"""Composition by name. Each class is built without arguments."""

__all__ = ["COMPOSITIONS", "Composition", "Concat", "Product", "Sum"]
