"""What optimizers keep of each weight, by the names of torch's states, and which of them a table declares.

The names are FBGEMM's, without the ``exact_`` that some of them begin with there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from distembed.embedding.tables import CompositionalTables
from distembed.errors import UserError

_ADAM = {"exp_avg": False, "exp_avg_sq": False}
_PARTIAL_ROW_WISE = {"exp_avg": False, "exp_avg_sq": True}
IS_ROW_WISE: Mapping[str, Mapping[str, bool]] = {
    "sgd": {},
    "adagrad": {"sum": False},
    "row_wise_adagrad": {"sum": True},
    "adam": _ADAM,
    "adamw": _ADAM,
    "amsgrad": {**_ADAM, "max_exp_avg_sq": False},
    "partial_row_wise_adam": _PARTIAL_ROW_WISE,
    "lamb": _ADAM,
    "partial_row_wise_lamb": _PARTIAL_ROW_WISE,
}
"""By kind of optimizer, its states in FBGEMM's order, and whether each has one number a row."""
_NOT_IN_FBGEMM = ("adamw", "amsgrad")


@dataclass(frozen=True)
class TableOptimizers:
    """What trains tables.

    Attributes:
        sparse: optimizer of vectors, a key of ``IS_ROW_WISE``.
        dense: optimizer of the functions of path-based tables, another key.
        is_fused: whether FBGEMM updates sharded vectors within the backward pass; else torch does, from gradients.
    """

    sparse: str = "row_wise_adagrad"
    dense: str = "adagrad"
    is_fused: bool = True


def declared_optimizer(table: str, unit: nn.Parameter) -> str | None:
    """Name of the fused optimizer of a table's vectors, a key of ``IS_ROW_WISE``.

    It is the same whether ``apply_optimizer_in_backward`` or the sharder's ``fused_params`` names it.

    Args:
        table: named in the error.
        unit: of the table, as a sharder's ``shardable_parameters`` gives it.

    Returns:
        None where nothing is declared: then FBGEMM takes SGD, which keeps nothing.

    Raises:
        UserError: for several optimizers, or one whose state is not known.
    """
    declared: list[Any] = getattr(unit, "_optimizer_classes", [])
    if not declared:
        return None
    names = [_name_in_fbgemm(optimizer) for optimizer in declared]
    if len(names) > 1 or names[0] not in IS_ROW_WISE:
        found = " and ".join(f"{optimizer.__module__}.{optimizer.__qualname__}" for optimizer in declared)
        known = ", ".join(name for name in IS_ROW_WISE if name not in _NOT_IN_FBGEMM)
        raise UserError(
            f"table {table!r} declares the optimizer {found}, and what it keeps of each weight is not known; known: "
            f"{known}. Declare one of these, once, by apply_optimizer_in_backward or the sharder's fused_params."
        )
    return names[0]


def declared_optimizers(model: nn.Module, sharders: Iterable[ModuleSharder[Any]]) -> dict[str, str | None]:
    """:func:`declared_optimizer` of every compositional table, by its name.

    Args:
        model: holds the tables.
        sharders: of its modules.

    Raises:
        UserError: as :func:`declared_optimizer`.
    """
    sharder_of = {sharder.module_type: sharder for sharder in sharders}
    return {
        name: declared_optimizer(name, unit)
        for module in model.modules()
        if isinstance(module, CompositionalTables) and type(module) in sharder_of
        for name, unit in sharder_of[type(module)].shardable_parameters(module).items()
    }


def _name_in_fbgemm(optimizer: Any) -> str:
    """As FBGEMM's own optimizers call it; empty where it has none such."""
    try:
        kind = optimizer_type_to_emb_opt_type(optimizer)
    except ValueError:
        return ""
    return "" if kind is None else kind.value.removeprefix("exact_")
