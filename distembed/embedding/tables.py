"""The base of the collections: their tables' parameters, the check of ids, and composed vectors id by id."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.base.tracing import is_traced
from distembed.embedding.batches import lengths_by_feature
from distembed.embedding.config import CompositionalEmbeddingConfig, PartitionTable, perturbation, vector_names
from distembed.embedding.ids import IdMapper
from distembed.embedding.partition_state import HasPartitionState
from distembed.embedding.share import ShareColumns, ShareIds, ShareWeight, TableShare
from distembed.embedding.torchrec_calls import KnowsTorchRec, LookupModules
from distembed.sse import require_forward_pass

TableT = TypeVar("TableT", bound=CompositionalEmbeddingConfig)


@dataclass(frozen=True)
class EmbeddedFeature(Generic[TableT]):
    """One feature of a batch, looked up and composed."""

    table: TableT  # the table in which it was looked up
    name: str  # the feature's name
    # the composed vector of each id; with feature generation the partitions' vectors side by side
    vectors: Float[Tensor, "ids width"]
    ids: Int[Tensor, " ids"]  # the raw ids, bag after bag
    lengths: Int[Tensor, " batch"]  # the number of ids of each bag
    weights: Float[Tensor, " ids"] | None  # the weight of each id, or None where the batch has none


class CompositionalTables(HasPartitionState, KnowsTorchRec, Generic[TableT]):
    """Base of the collections: parameters of all partitions, and the steps ids -> mapped ids -> composed vectors.

    Attributes:
        functions: The functions of path-based tables by name, ``<table>__p<j>``: float32, with a row for each function.
        sse: The module that replaces ids in training, for the tables that have a rule.
    """

    def __init__(self, tables: Sequence[TableT], device: torch.device | str | None) -> None:
        super().__init__()
        self._tables = _require_unique(tables)
        self._device = torch.device(device or "cpu")
        self._map_ids = IdMapper(tables)
        self.sse = perturbation(tables)
        self._parts = {table.name: table.partition_tables() for table in tables}
        self.functions = nn.ParameterDict(
            {
                part.name: nn.Parameter(empty_weight(part, self._device, torch.float32))
                for parts in self._parts.values()
                for part in parts
                if part.is_function
            }
        )

    @property
    @abstractmethod
    def _lookups(self) -> nn.ModuleDict:
        """The modules whose ``weight`` holds the vectors of one partition, by its name."""

    def _make_lookups(self, make: Callable[[Tensor], nn.Module]) -> nn.ModuleDict:
        """Returns a module for each partition that holds vectors; ``make`` builds it from its weight."""
        return LookupModules(
            {
                part.name: make(empty_weight(part, self._device, table.dtype))
                for table in self._tables
                for part in self._parts[table.name]
                if not part.is_function
            }
        )

    def reset_parameters(self) -> None:
        """Fills all weights with their initial values again; it does nothing on the meta device."""
        for table in self._tables:
            initialise(self._parts[table.name], self.weights(table.name))

    def weights(self, table_name: str) -> list[Tensor]:
        """Returns the weights of a table's partitions, in their order."""
        return [
            self.functions[part.name] if part.is_function else cast(Tensor, self._lookups[part.name].weight)
            for part in self._parts[table_name]
        ]

    def share(self, table_name: str) -> TableShare:
        """Returns all ids and vectors of a table as the share of this process."""
        tables = {table.name: table for table in self._tables}
        table = tables[one_of("table of a collection", table_name, tables)]
        weights = [
            ShareWeight(j, weight, is_function=part.is_function)
            for j, (part, weight) in enumerate(zip(self._parts[table_name], self.weights(table_name), strict=True))
        ]
        ids = ShareIds(0, table.num_embeddings)
        return TableShare(table, ids, len(ids), [ShareColumns(0, table.embedding_dim, weights)], self.device)

    def map_ids(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Maps raw ids into their tables, refusing damaged batches, and in training replaces ids of tables with SSE."""
        if is_traced():
            # length_per_key reads the batch's values: torch.compile breaks its graph here once, not in a loop later
            features.length_per_key()
        if self.training and self.sse.replaces_ids:
            require_forward_pass()
        return self.sse(self._map_ids(features, admits=self.training))

    def embed(self, features: KeyedJaggedTensor, mapped: KeyedJaggedTensor) -> Iterator[EmbeddedFeature[TableT]]:
        """Yields every feature that a table reads, looked up by ``mapped`` ids and composed, in the tables' order.

        Ids, lengths and weights are the ones of ``features``. Raises a UserError for a missing feature.
        """
        counts = features.length_per_key()
        ids, mapped_ids = features.values().split(counts), mapped.values().split(counts)
        lengths = lengths_by_feature(features)
        weights = features.weights_or_none()
        key_weights = [None] * len(counts) if weights is None else weights.split(counts)
        positions = {key: i for i, key in enumerate(features.keys())}
        for table in self._tables:
            for name in table.feature_names:
                if name not in positions:
                    raise UserError(f"feature {name!r} of table {table.name!r} is not among {list(positions)}.")
                i = positions[name]
                rows = table.scheme.rows(mapped_ids[i].long())
                vectors = table.combine.embed(self.weights(table.name), rows)
                yield EmbeddedFeature(table, name, vectors, ids[i], lengths[i], key_weights[i])

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses ``torch.jit.script``, which calls this first."""
        refuse_torchscript(self)

    def tables(self) -> list[TableT]:
        """Returns the compositional tables, in order."""
        return list(self._tables)

    @property
    def device(self) -> torch.device:
        """The device of the weights, which may have moved since they were made."""
        return next(self.parameters()).device


def refuse_torchscript(module: nn.Module) -> NoReturn:
    """Raises the error of ``torch.jit.script`` of a module, which names the ways that work."""
    raise UserError(f"torch.jit.script does not compile a {type(module).__name__}; use torch.export or torch.compile.")


def empty_weight(part: PartitionTable, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a weight of a partition's shape, without values."""
    return torch.empty(part.num_rows, part.dim, device=device, dtype=dtype)


def initialise(parts: Sequence[PartitionTable], weights: Iterable[Tensor]) -> None:
    """Fills the weights of partitions with their initial values, except weights on the meta device."""
    for part, weight in zip(parts, weights, strict=True):
        if not weight.is_meta:
            part.init(weight)


def torchrec_configs(
    make: Callable[..., Any], tables: Sequence[TableT], fields: Callable[[TableT], dict[str, Any]] = lambda table: {}
) -> list[Any]:
    """Returns a TorchRec config for each table, from which models size their other layers.

    Its feature names are the keys of the output, and its dimension is that of one vector.

    Args:
        make: TorchRec's class.
        tables: The tables.
        fields: Gives a table's values for further fields of that class.
    """
    return [
        make(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=vector_names([table]),
            data_type=DataType(table.data_type),
            **fields(table),
        )
        for table in tables
    ]


def lookup_table_configs(make: Callable[..., Any], tables: Sequence[TableT]) -> list[Any]:
    """Returns a TorchRec config of class ``make`` for each partition that holds vectors, for sharded modules."""
    return [
        make(
            name=part.name,
            num_embeddings=part.num_rows,
            embedding_dim=part.dim,
            feature_names=list(table.feature_names),
            data_type=DataType(table.data_type),
            init_fn=part.init,
        )
        for table in tables
        for part in table.lookup_tables()
    ]


def _require_unique(tables: Sequence[TableT]) -> list[TableT]:
    """Returns the tables as a list; raises a UserError if there are none, or names, features or output keys repeat."""
    if not tables:
        raise UserError("tables is empty; give at least one table.")
    features = [feature for table in tables for feature in table.feature_names]
    for kind, names in (("name", [table.name for table in tables]), ("feature", features)):
        for name in _repeated(names):
            raise UserError(f"tables: the {kind} {name!r} is used by more than one table; make it unique.")
    for key in _repeated(vector_names(tables)):
        raise UserError(
            f"tables: the feature {key!r} has the name of a vector that feature {key.rpartition('__p')[0]!r} gives "
            "(one a partition, <feature>__p<j>); rename one of the two."
        )
    return list(tables)


def _repeated(names: Sequence[str]) -> list[str]:
    """Returns the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]
