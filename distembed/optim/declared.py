"""The optimizers of a model's tables, whose states a plan counts, and the optimizers that tables themselves declare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.kinds import OPTIMIZERS, fused_optimizer_name, fused_type, stateless_name

if TYPE_CHECKING:
    from torch import nn
    from torchrec.distributed.types import ModuleSharder


@dataclass(frozen=True)
class TableOptimizers:
    """The optimizers that train tables."""

    sparse: str = "row_wise_adagrad"  # name of the optimizer of vectors, a key of ``OPTIMIZERS``
    dense: str = "adagrad"  # name of the optimizer of the functions of path-based tables, another key
    # whether FBGEMM updates sharded vectors within the backward pass; else torch does, from gradients
    is_fused: bool = True

    def for_table(self, table: CompositionalEmbeddingConfig) -> TableOptimizers:
        """Returns the optimizers that train one table: a table with ``dense_gradient`` has the dense one alone."""
        return self.for_dense_gradient() if table.dense_gradient else self

    def for_dense_gradient(self) -> TableOptimizers:
        """Returns the optimizers of a table with gradients in all rows: the dense optimizer trains all of it."""
        return TableOptimizers(self.dense, self.dense, is_fused=False)


def declared_optimizer(table: str, unit: nn.Parameter, shared: Any = None) -> str | None:
    """Returns the name of the fused optimizer of a table's vectors, a key of ``OPTIMIZERS``.

    A table's own declaration, by ``apply_optimizer_in_backward``, goes before the sharder's ``fused_params``.

    Args:
        table: Name of the table for the error.
        unit: The table's parameter, as a sharder's ``shardable_parameters`` gives it.
        shared: The class of the optimizer of all tables that declare none themselves.

    Returns:
        The name; None where the table is frozen or declares none, so that it has no optimizer state.

    Raises:
        UserError: The table declares several optimizers, or one whose states ``OPTIMIZERS`` does not tell.
    """
    declared: list[Any] = getattr(unit, "_optimizer_classes", [] if shared is None else [shared])
    if not declared or not unit.requires_grad:
        return None
    fused = fused_type(declared[0])
    name = None if fused is None else fused_optimizer_name(fused)
    if len(declared) > 1 or name is None:
        listed = " and ".join(f"{optimizer.__module__}.{optimizer.__qualname__}" for optimizer in declared)
        fused_names = ", ".join(name for name, kind in OPTIMIZERS.items() if kind.fused_class is not None)
        raise UserError(
            f"table {table!r} declares the optimizer {listed}, and what it keeps of each weight is not known; known: "
            f"{fused_names}. Declare one of these, once, by apply_optimizer_in_backward or the sharder's fused_params."
        )
    return name


def declared_optimizers(model: nn.Module, sharders: Iterable[ModuleSharder[Any]]) -> dict[str, str | None]:
    """Returns the :func:`declared_optimizer` of every table of a model that is sharded, by the table's name.

    Args:
        model: The model that holds the tables, not yet sharded.
        sharders: The sharders of its modules.
    """
    sharder_by_type = {sharder.module_type: sharder for sharder in sharders}
    return {
        name: declared_optimizer(name, unit, _shared_optimizer(sharder_by_type[type(module)]))
        for module in model.modules()
        if type(module) in sharder_by_type
        for name, unit in sharder_by_type[type(module)].shardable_parameters(module).items()
    }


def largest_optimizer(names: Iterable[str | None], undeclared: str | None = None) -> str:
    """Returns the optimizer, among the optimizers of several tables, whose states take the most memory.

    Args:
        names: Names of the optimizers; None for tables that declare none.
        undeclared: Name of the optimizer of tables that declare none; the one that FBGEMM takes unless given.
    """
    stateless = stateless_name()
    candidates = {stateless, *(name or undeclared or stateless for name in names)}
    # compared on one row of 100 weights, so that a state for each weight outweighs a state for each row
    return max(sorted(candidates), key=lambda name: OPTIMIZERS[name].fused_state_bytes(1, 100))


def _shared_optimizer(sharder: ModuleSharder[Any]) -> Any:
    """Returns the class of the optimizer that a sharder's ``fused_params`` name for all tables; None for none."""
    from torchrec.distributed.utils import emb_opt_type_to_optimizer_class

    return emb_opt_type_to_optimizer_class((getattr(sharder, "fused_params", None) or {}).get("optimizer"))
