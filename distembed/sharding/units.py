"""Units of placement: one parameter for each table, which is all that TorchRec sees of a collection.

TorchRec's sharded modules read tables, features and optimizers from the module that they replace, and their input and
output dists need each table's features, columns and rank. They see the units and so work unchanged; only the lookup
knows the partition tables.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

from distembed.base.errors import UserError
from distembed.embedding.collections import CompositionalEmbeddingBagCollection, CompositionalEmbeddingCollection
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.tables import CompositionalTables
from distembed.sharding.table_slice import unit_size, width


def unit_parameters(module: CompositionalTables[Any]) -> dict[str, nn.Parameter]:
    """Returns, by table, a meta parameter of the unit's size that declares the optimizer of the table's vectors.

    The parameter of a frozen table requires no gradient and declares no optimizer.
    """
    return {table.name: _unit_parameter(module, table) for table in module.tables()}


def _unit_parameter(module: CompositionalTables[Any], table: CompositionalEmbeddingConfig) -> nn.Parameter:
    trained = _requires_gradient(module, table)
    unit = nn.Parameter(torch.empty(unit_size(table), device="meta", dtype=table.dtype), requires_grad=trained)
    if not trained:
        return unit
    _require_one_optimizer(module, table)
    # the planner counts optimizer state, and plans by hand choose the kernel, from these attributes alone
    for attribute in ("_optimizer_classes", "_optimizer_kwargs", "_in_backward_optimizers"):
        if hasattr(module.weights(table.name)[0], attribute):
            setattr(unit, attribute, getattr(module.weights(table.name)[0], attribute))
    return unit


def _requires_gradient(module: CompositionalTables[Any], table: CompositionalEmbeddingConfig) -> bool:
    """Returns whether a table's vectors (not path functions) require gradients; refuses tables where only some do."""
    trained = {
        part.name: weight.requires_grad
        for part, weight in zip(table.partition_tables(), module.weights(table.name), strict=True)
        if not part.is_function
    }
    if len(set(trained.values())) > 1:
        listed = "; ".join(f"{name}: requires_grad={is_trained}" for name, is_trained in trained.items())
        raise UserError(
            f"table {table.name!r} is placed and trained as one, but only some of its partitions are frozen: {listed}. "
            "Call requires_grad_(False) on all vectors of a table, or on none."
        )
    return all(trained.values())


def _require_one_optimizer(module: CompositionalTables[Any], table: CompositionalEmbeddingConfig) -> None:
    """Raises if a table's partitions declare different optimizers or settings; path functions need not declare any."""
    declared = {
        part.name: optimizers
        for part, weight in zip(table.partition_tables(), module.weights(table.name), strict=True)
        if (optimizers := _declared_optimizers(weight)) or not part.is_function
    }
    first = next(iter(declared.values()))
    if all(optimizers == first for optimizers in declared.values()):
        return
    listed = "; ".join(f"{name}: {_optimizers_text(optimizers)}" for name, optimizers in declared.items())
    raise UserError(
        f"table {table.name!r} is placed and trained as one, but its partitions declare different optimizers: "
        f"{listed}. Give all vectors of a table the same one with the same settings, by one call of "
        "apply_optimizer_in_backward, and its functions, where it has some, none."
    )


def _declared_optimizers(weight: torch.Tensor) -> list[tuple[type, dict[str, Any]]]:
    """Returns the classes and settings of the optimizers that a weight was given by apply_optimizer_in_backward."""
    classes, settings = getattr(weight, "_optimizer_classes", []), getattr(weight, "_optimizer_kwargs", [])
    return list(zip(classes, settings, strict=True))


def _optimizers_text(optimizers: Sequence[tuple[type, dict[str, Any]]]) -> str:
    """Returns optimizers as text: ``Adagrad(lr=0.1)``."""
    texts = [
        f"{kind.__name__}({', '.join(f'{name}={value}' for name, value in sorted(settings.items()))})"
        for kind, settings in optimizers
    ]
    return " and ".join(texts) or "none"


class _Units(nn.Module):
    """A module with units in the place of its tables, in the order of ``tables``."""

    device = torch.device("meta")

    def __init__(
        self, attribute: str, module: CompositionalTables[Any], tables: Sequence[CompositionalEmbeddingConfig]
    ) -> None:
        super().__init__()
        self._units = tables
        parameters = unit_parameters(module)
        lookups = nn.ModuleDict()
        for table in tables:
            lookups[table.name] = nn.Module()
            lookups[table.name].register_parameter("weight", parameters[table.name])
        self.add_module(attribute, lookups)

    def _configs(self, make: Any, **fields: Any) -> list[Any]:
        return [
            make(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=width(table),
                feature_names=list(table.feature_names),
                data_type=DataType(table.data_type),
                **fields,
            )
            for table in self._units
        ]


class BagUnits(_Units):
    """The units of a :class:`CompositionalEmbeddingBagCollection`."""

    def __init__(
        self, module: CompositionalEmbeddingBagCollection, tables: Sequence[CompositionalEmbeddingConfig]
    ) -> None:
        super().__init__("embedding_bags", module, tables)
        self._is_weighted = module.is_weighted()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns one config a unit."""
        # means too: the sharded module divides the sums of all ranks
        return self._configs(EmbeddingBagConfig, pooling=PoolingType.SUM)

    def is_weighted(self) -> bool:
        return self._is_weighted


class SequenceUnits(_Units):
    """The units of a :class:`CompositionalEmbeddingCollection`."""

    def __init__(
        self, module: CompositionalEmbeddingCollection, tables: Sequence[CompositionalEmbeddingConfig]
    ) -> None:
        super().__init__("embeddings", module, tables)
        self._need_indices = module.need_indices()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns one config a unit."""
        return self._configs(EmbeddingConfig)

    def embedding_names_by_table(self) -> list[list[str]]:
        return [list(table.feature_names) for table in self._units]

    def embedding_dim(self) -> int:
        return width(self._units[0])

    def need_indices(self) -> bool:
        return self._need_indices

    def use_gather_select(self) -> bool:
        """Returns TorchRec's default for how the vectors of ids are put back in order."""
        return False

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """Returns TorchRec's default: no setting for single sharding types."""
        return None
