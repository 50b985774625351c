"""The base of the quantised collections: raw ids to rows, rows to composed vectors in float32."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.ids import IdMapper
from distembed.embedding.tables import CompositionalTables, EmbeddedFeature
from distembed.embedding.traced_features import FeatureIds, trace_features
from distembed.serving.quantization.features import as_batch, read_features
from distembed.serving.quantization.lookups import dim_name, lookup_key, quantized_bytes, quantized_lookups

torch.fx.wrap("as_batch")

TableT = TypeVar("TableT", bound=CompositionalEmbeddingConfig)


class QuantizedTables(nn.Module, Generic[TableT]):
    """Base of the quantised collections.

    Attributes:
        lookups: The quantised partitions, in a collection of TorchRec for each dimension among them.
        functions: The functions of path-based tables by name, in float32.

    Args:
        module: The float collection, whose ``qconfig`` gives dtypes of weights and outputs.
    """

    def __init__(self, module: CompositionalTables[TableT]) -> None:
        super().__init__()
        self._tables = module.tables()
        self._map_ids = IdMapper(self._tables)
        self._output_dtype: torch.dtype = cast(Any, module.qconfig).activation().dtype
        self.lookups = quantized_lookups(module)
        self.functions = nn.ParameterDict(
            {
                name: nn.Parameter(function.detach().clone(), requires_grad=False)
                for name, function in module.functions.items()
            }
        )

    @classmethod
    @abstractmethod
    def from_float(cls, module: Any) -> "QuantizedTables[TableT]":
        """Returns a float collection quantised as its ``qconfig`` says; ``torch.ao.quantization`` calls it."""

    def embed(self, features: KeyedJaggedTensor, is_weighted: bool = False) -> Iterator[EmbeddedFeature[TableT]]:
        """Yields every feature that a table reads, looked up and composed in float32, in the tables' order.

        Args:
            features: The batch, or what torch.fx traces in its place.
            is_weighted: Whether the weights of ids are asked for.

        Raises:
            UserError: The batch lacks a feature, an id lies outside of its table, features have batch sizes of their
                own, or the batch has no weights where they are asked for.
        """
        features = maybe_td_to_kjt(features)
        is_traced = isinstance(features, torch.fx.Proxy)
        if is_traced:
            found = trace_features(features, self._tables, is_weighted)
        else:
            found = read_features(features, self._map_ids, is_weighted)
        rows = {
            name: table.scheme.rows(found[_require_feature(name, table, found)].mapped)
            for table in self._tables
            for name in table.feature_names
        }
        vectors = self._look_up(rows, {name: found[name].lengths for name in rows})
        for table in self._tables:
            for name in table.feature_names:
                looked_up = [vectors[lookup_key(part, name)] for part in table.lookup_tables()]
                composed = self._compose(table, looked_up, rows[name], is_traced)
                own = found[name]
                yield EmbeddedFeature(table, name, composed, own.ids, own.lengths, own.weights)

    def _look_up(
        self, rows: dict[str, Int64[Tensor, "k ids"]], lengths: dict[str, Tensor]
    ) -> dict[str, Float[Tensor, "ids dim"]]:
        """Returns the vectors of every feature's rows in each partition that holds vectors, by the lookup's key."""
        batches: dict[str, list[tuple[str, Tensor, Tensor]]] = {name: [] for name in self.lookups}
        for table in self._tables:
            for name in table.feature_names:
                for j, part in enumerate(table.lookup_tables()):
                    batches[dim_name(part.dim)].append((lookup_key(part, name), rows[name][j], lengths[name]))
        found: dict[str, Tensor] = {}
        for name, batch in batches.items():
            keys, own_rows, own_lengths = map(list, zip(*batch, strict=True))
            outputs = self.lookups[name](as_batch(keys, own_rows, own_lengths))
            found |= {key: outputs[key].values() for key in keys}
        return found

    def _compose(
        self, table: TableT, vectors: Sequence[Float[Tensor, "ids dim"]], rows: Int64[Tensor, "k ids"], is_traced: bool
    ) -> Float[Tensor, "ids width"]:
        """Returns the composed vectors of ids.

        Ids are grouped by function, which depends on them; a trace takes the function of each id instead.
        """
        functions = [self.functions[part.name] for part in table.function_tables()]
        function_rows = [rows[len(vectors) + j] for j in range(len(functions))]
        if not functions or is_traced:
            own = [
                function.index_select(0, row).float() for function, row in zip(functions, function_rows, strict=True)
            ]
            return table.combine.compose([*vectors, *own])
        # the vectors of ids become tables, row i that of id i
        order = torch.arange(rows.shape[1], device=rows.device).expand(len(vectors), -1)
        return table.combine.embed([*vectors, *functions], torch.cat([order, torch.stack(function_rows)]))

    def tables(self) -> list[TableT]:
        """Returns the compositional tables, in order."""
        return list(self._tables)

    def output_dtype(self) -> torch.dtype:
        """Returns the dtype of the outputs; vectors are composed and pooled in float32 whatever it is."""
        return self._output_dtype

    def memory_bytes(self) -> int:
        """Returns the bytes of quantised rows, with the padding that FBGEMM aligns them by, and of functions."""
        functions = sum(function.nbytes for function in self.functions.values())
        return functions + sum(quantized_bytes(lookups) for lookups in self.lookups.values())

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return next(iter(self.buffers())).device


def _require_feature(name: str, table: CompositionalEmbeddingConfig, features: Mapping[str, FeatureIds]) -> str:
    """Returns the name of a feature.

    Raises:
        UserError: The batch lacks it.
    """
    if name not in features:
        raise UserError(f"feature {name!r} of table {table.name!r} is not among {list(features)}.")
    return name
