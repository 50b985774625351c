"""A whole model between stock and compositional: tables are fitted or composed, everything else is copied.

Both models have the same modules at the same paths, with a compositional collection where the other has TorchRec's::

    stock                                    compositional
    sparse.embedding_bags.C1.weight  ---->   sparse.embedding_bags.C1__p0.weight, ...C1__p1.weight    fitted
    over.0.weight                    ---->   over.0.weight                                            copied
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.names import nearest
from distembed.base.units import enumerate_lines
from distembed.embedding.collections import EmbeddingModule, embedding_modules, table_configs, weight_names_of_table
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.partition_state import partition_states
from distembed.embedding.tables import CompositionalTables
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.serving.convert.tables import FitError, fit_table, full_vectors, require_fit

_MOST_SHOWN = 10


@torch.no_grad()
def from_stock(
    model: nn.Module,
    stock: Mapping[str, Tensor] | Path | str,
    counts: Mapping[str, Tensor] | None = None,
    names: Mapping[str, str] | None = None,
    kept: Mapping[str, Callable[[], Sequence[Tensor]]] | None = None,
) -> list[FitError]:
    """Fills a compositional model from the weights of a stock one; its tables are fitted, all else is copied.

    Args:
        model: The compositional model, not sharded, with its weights on the CPU; wrap it in
            ``DistributedModelParallel`` afterwards. An error before the first table is fitted changes nothing of it.
        stock: The stock model's state dict with whole tensors, or the path of a checkpoint, as for
            :class:`~distembed.serving.convert.stock_checkpoint.StockCheckpoint`, which reads one table at a time. All
            names may have a common prefix, for example ``model.``.
        counts: How often each id occurs, by the name of the table; all ids of other tables have equal weights.
        names: Names of modules and tensors in the stock model, by their names in this model with full tables,
            for example ``{"sparse": "embeddings.ebc"}``: a name, or the beginning of one up to a dot.
        kept: Functions that return the weights of tables' partitions, by the name of the table: these tables are not
            fitted.

    Returns:
        How far each compositional table is from the full one, in the order of the model's tables.

    Raises:
        UserError: Tensors are missing or left over, have other shapes, or a table cannot be fitted; or ``counts`` names
            a table that is not there.
    """
    source = stock if isinstance(stock, Mapping) else StockCheckpoint(stock)
    collections = embedding_modules(model)
    tables = full_table_names(collections)
    table_names = [table.name for _, table in tables.values()]
    for name in counts or {}:
        if name not in table_names:
            raise UserError(
                f"counts names table {name!r}, which is no compositional table of the model.{_hint(name, table_names)}"
            )
    kept = kept or {}
    for _, table in tables.values():
        if table.name not in kept:
            require_fit(table)
    live = {name: value for name, value in model.state_dict().items() if name not in _weights_of_tables(collections)}
    stock_names = _stock_names([*tables, *live], source, names or {}, has_more=source is not stock)
    differing = [
        f"{name}: {tuple(source[stock_names[name]].shape)} there, {tuple(value.shape)} in this model"
        for name, value in live.items()
        if source[stock_names[name]].shape != value.shape
    ]
    if differing:
        raise UserError(f"tensors of the stock model have other shapes:{enumerate_lines(differing, _MOST_SHOWN)}")
    for name, value in live.items():
        value.copy_(source[stock_names[name]])
    errors = []
    for name, (path, table) in tables.items():
        if table.name in kept:
            weights, error = kept[table.name](), FitError.of_kept(table)
        else:
            fitted = fit_table(table, source[stock_names[name]], (counts or {}).get(table.name))
            weights, error = fitted.weights, fitted.error
        for weight, values in zip(_live_weights(collections[path], table), weights, strict=True):
            weight.copy_(values)
        errors.append(error)
    return errors


@torch.no_grad()
def to_stock(model: nn.Module) -> dict[str, Tensor]:
    """Returns a compositional model's state dict with full tables, as a stock model has them.

    A stock model with the same modules loads it by ``load_state_dict``, and gives the same outputs; in a unified table
    id x of feature f has row ``first_ids[f] + x``, so that a stock model's batches need ids of this form. A model that
    :func:`from_stock` filled with ``naive`` partitions is exact to the bit. Memory holds all full tables at once.

    Args:
        model: The compositional model, not sharded, with its weights on the CPU.

    Raises:
        UserError: A table gives several vectors an id (feature generation), which no stock table does.
    """
    collections = embedding_modules(model)
    table_weights = _weights_of_tables(collections)
    stock = {name: value.clone() for name, value in model.state_dict().items() if name not in table_weights}
    for name, (path, table) in full_table_names(collections).items():
        stock[name] = full_vectors(table, _live_weights(collections[path], table))
    return stock


def full_table_names(
    collections: Mapping[str, EmbeddingModule],
) -> dict[str, tuple[str, CompositionalEmbeddingConfig]]:
    """Returns the path and table of each compositional table of a model, by its full weight's name in a stock model."""
    tables = {}
    for path, module in collections.items():
        if isinstance(module, CompositionalTables):
            for table in table_configs(module):
                holder = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
                tables[f"{path}.{holder}.{table.name}.weight".lstrip(".")] = (path, table)
    return tables


def _stock_names(
    model_names: Sequence[str], stock: Mapping[str, Any], names: Mapping[str, str], has_more: bool
) -> dict[str, str]:
    """Returns each tensor's name in the stock model, by its name in this model with full tables.

    With ``names`` {"sparse": "ebc"} and a stock model whose names begin with ``model.``, the name changes twice::

        sparse.t.weight  ->  ebc.t.weight  ->  model.ebc.t.weight

    Args:
        model_names: The names of this model's tensors.
        stock: The stock model's tensors, whose names may all begin with one more prefix, for example ``model.``.
        names: Names in the stock model of renamed modules and tensors.
        has_more: Whether ``stock``, a checkpoint, may hold tensors of other modules, for example of an optimizer.

    Raises:
        UserError: A tensor is missing in ``stock``, or left over there, or ``names`` has an unknown name.
    """
    for module in names:
        if not any(_begins(name, module) for name in model_names):
            hint = _hint(module, model_names)
            raise UserError(f"names has {module!r}, with which no tensor of this model begins.{hint}")
    renamed = {name: _renamed(name, names) for name in model_names}
    # candidates for the prefix: the beginnings of keys that end in the first name; the shortest that fits all names
    prefixes = {key.removesuffix(name) for name in list(renamed.values())[:1] for key in stock if _ends(key, name)}
    fitting = [prefix for prefix in prefixes if all(prefix + name in stock for name in renamed.values())]
    prefix = min(fitting or prefixes or {""}, key=len)
    stock_names = {name: prefix + new_name for name, new_name in renamed.items()}
    missing = [stock_name for stock_name in stock_names.values() if stock_name not in stock]
    if missing:
        lines = []
        for stock_name in missing:
            near = nearest(stock_name, stock)
            lines.append(stock_name + (f", which may be {near} there" if near else ""))
        raise UserError(
            f"the stock model has no{enumerate_lines(lines, _MOST_SHOWN)}\nGive both models the same modules at the "
            "same paths and their tables the same names, or say what is called otherwise there (names)."
        )
    left_over = [key for key in set(stock).difference(stock_names.values()) if key.startswith(prefix)]
    if has_more:  # a checkpoint holds the optimizer too, which a name alone does not tell from a module
        modules = {new_name.partition(".")[0] for new_name in renamed.values()}
        left_over = [key for key in left_over if key.removeprefix(prefix).partition(".")[0] in modules]
    if left_over:
        raise UserError(
            "the stock model has tensors for which this model has no place:"
            f"{enumerate_lines(sorted(left_over), _MOST_SHOWN)}\nGive both models the same modules."
        )
    return stock_names


def _begins(name: str, module: str) -> bool:
    """Returns whether a name is a module's path, or begins with it up to a dot."""
    return name == module or name.startswith(f"{module}.")


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Replaces the longest module path in ``names`` with which a name begins."""
    modules = [module for module in names if _begins(name, module)]
    if not modules:
        return name
    longest = max(modules, key=len)
    return names[longest] + name[len(longest) :]


def _hint(name: str, candidates: Sequence[str]) -> str:
    near = nearest(name, candidates)
    return f" Did you mean {near!r}?" if near else ""


def _ends(key: str, name: str) -> bool:
    return key == name or key.endswith(f".{name}")


def _weights_of_tables(collections: Mapping[str, EmbeddingModule]) -> set[str]:
    """Returns the names of all weights and partitions' states of compositional tables in the model's state dict."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in collections.items()
        if isinstance(module, CompositionalTables)
        for table in table_configs(module)
        for name in [*weight_names_of_table(module, table), *partition_states(table)]
    }


def _live_weights(module: EmbeddingModule, table: CompositionalEmbeddingConfig) -> list[Tensor]:
    """Returns the weights of a table's partitions."""
    assert isinstance(module, CompositionalTables)
    return module.weights(table.name)
