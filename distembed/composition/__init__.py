"""Compositions: how an id's k rows become its embedding (Shi et al., KDD 2020, section 4).

============ ============================= ============================= =====================
name         embedding of an id            columns of partition j        commutes with pooling
============ ============================= ============================= =====================
product      v_1 * v_2 * ... * v_k         D                             no
sum          v_1 + v_2 + ... + v_k         D                             yes
concat       [v_1, v_2, ..., v_k]          D/k or as set, sums to D      yes
feature      v_1, v_2, ..., v_k            D; the id gives k vectors     yes
path_linear  f_k(... f_2(v_1)), linear     D; j > 1: D^2 + D             no
path_mlp     f_k(... f_2(v_1)), MLPs       D; j > 1: numbers of an MLP   no
weighted_sum p_1 v_1 + p_2 v_2 + ...       D; j = k: the numbers p       no
tensor_train G_1 @ G_2 @ ... @ G_k         slice of a core, r_(j-1)d_jr_j no
concat_sum   [v_1 + v_c+1, v_2 + v_c+2...] D/c, c = ceil(k/2)            yes
============ ============================= ============================= =====================

A new composition is one file, with its settings, and one line in :data:`COMPOSITIONS`; law tests run over every entry.
"""

from typing import TYPE_CHECKING

from distembed.base.lazy import NameTable, imports_on_demand
from distembed.composition.layers import ACTIVATIONS

if TYPE_CHECKING:
    from distembed.composition.base import Composition
    from distembed.composition.concat import Concat, ConcatSum, Feature
    from distembed.composition.elementwise import Product, Sum
    from distembed.composition.path import PathComposition, PathLinear, PathMLP
    from distembed.composition.tensor_train import TensorTrain
    from distembed.composition.weighted import WeightedSum

COMPOSITIONS: "NameTable[type[Composition]]" = NameTable(
    {
        "product": "distembed.composition.elementwise:Product",
        "sum": "distembed.composition.elementwise:Sum",
        "concat": "distembed.composition.concat:Concat",
        "feature": "distembed.composition.concat:Feature",
        "path_linear": "distembed.composition.path:PathLinear",
        "path_mlp": "distembed.composition.path:PathMLP",
        "weighted_sum": "distembed.composition.weighted:WeightedSum",
        "tensor_train": "distembed.composition.tensor_train:TensorTrain",
        "concat_sum": "distembed.composition.concat:ConcatSum",
    }
)
"""The class of each name. Each can be built without arguments; ``settings`` names the arguments that it takes."""

__all__ = [
    "ACTIVATIONS",
    "COMPOSITIONS",
    "Composition",
    "Concat",
    "ConcatSum",
    "Feature",
    "PathComposition",
    "PathLinear",
    "PathMLP",
    "Product",
    "Sum",
    "TensorTrain",
    "WeightedSum",
]
__getattr__ = imports_on_demand(__name__)
