"""Which optimizers train the tables of a model, as a plan counts their states; what the tables themselves declare."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.types import ModuleSharder

from distembed.embedding.tables import CompositionalTables
from distembed.errors import UserError
from distembed.optim.kinds import OPTIMIZERS, fused_optimizer_name, fused_type


@dataclass(frozen=True)
class TableOptimizers:
    """The optimizers that train tables.

    Attributes:
        sparse: Name of the optimizer of vectors, a key of ``OPTIMIZERS``.
        dense: Name of the optimizer of the functions of path-based tables, another key.
        is_fused: Whether FBGEMM updates sharded vectors within the backward pass; else torch does, from gradients.
    """

    sparse: str = "row_wise_adagrad"
    dense: str = "adagrad"
    is_fused: bool = True


def declared_optimizer(table: str, unit: nn.Parameter) -> str | None:
    """Returns the name of the fused optimizer of a table's vectors, a key of ``OPTIMIZERS``.

    It is the same whether ``apply_optimizer_in_backward`` or the sharder's ``fused_params`` names it.

    Args:
        table: Name of the table for the error.
        unit: The table's parameter, as a sharder's ``shardable_parameters`` gives it.

    Returns:
        The name; None where the table declares none, so that FBGEMM takes SGD, which keeps no state.

    Raises:
        UserError: The table declares several optimizers, or one whose states are not known.
    """
    declared: list[Any] = getattr(unit, "_optimizer_classes", [])
    if not declared:
        return None
    fused = fused_type(declared[0])
    name = None if fused is None else fused_optimizer_name(fused)
    if len(declared) > 1 or name is None:
        found = " and ".join(f"{optimizer.__module__}.{optimizer.__qualname__}" for optimizer in declared)
        known = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.fused_class is not None)
        raise UserError(
            f"table {table!r} declares the optimizer {found}, and what it keeps of each weight is not known; known: "
            f"{known}. Declare one of these, once, by apply_optimizer_in_backward or the sharder's fused_params."
        )
    return name


def declared_optimizers(model: nn.Module, sharders: Iterable[ModuleSharder[Any]]) -> dict[str, str | None]:
    """Returns what :func:`declared_optimizer` says of every compositional table of a model, by the table's name.

    Args:
        model: The model that holds the tables, not yet sharded.
        sharders: The sharders of its modules.

    Raises:
        UserError: A table declares several optimizers, or one whose states are not known.
    """
    sharder_by_type = {sharder.module_type: sharder for sharder in sharders}
    return {
        name: declared_optimizer(name, unit)
        for module in model.modules()
        if isinstance(module, CompositionalTables) and type(module) in sharder_by_type
        for name, unit in sharder_by_type[type(module)].shardable_parameters(module).items()
    }
