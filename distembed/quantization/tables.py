"""The base of the quantised collections: raw ids to rows, rows to composed vectors in float32."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.ids import IdMapper
from distembed.embedding.tables import CompositionalTables, EmbeddedFeature
from distembed.errors import UserError
from distembed.quantization.lookups import dim_name, lookup_key, quantized_bytes, quantized_lookups

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

    def embed(self, features: KeyedJaggedTensor) -> Iterator[EmbeddedFeature[TableT]]:
        """Yields every feature that a table reads, looked up and composed in float32, in the tables' order.

        Raises:
            UserError: The batch lacks a feature, an id lies outside of its table, or features have batch sizes of their
                own.
        """
        features = maybe_td_to_kjt(features)
        raw = _by_feature(features)
        mapped = _by_feature(self._map_ids(features))
        rows = {
            name: table.scheme.rows(mapped[_require_feature(name, table, mapped)].values().long())
            for table in self._tables
            for name in table.feature_names
        }
        vectors = self._look_up(rows, {name: raw[name].lengths() for name in rows})
        for table in self._tables:
            for name in table.feature_names:
                own = [vectors[lookup_key(part, name)] for part in table.lookup_tables()]
                composed = self._compose(table, own, rows[name])
                jagged = raw[name]
                weights = jagged.weights_or_none()
                yield EmbeddedFeature(table, name, composed, jagged.values(), jagged.lengths(), weights)

    def _look_up(
        self, rows: dict[str, Int64[Tensor, "k ids"]], lengths: dict[str, Tensor]
    ) -> dict[str, Float[Tensor, "ids dim"]]:
        """Returns the vectors of every feature's rows in each partition that holds vectors, by the lookup's key."""
        batches: dict[str, dict[str, JaggedTensor]] = {name: {} for name in self.lookups}
        for table in self._tables:
            for name in table.feature_names:
                for part, own in zip(table.lookup_tables(), rows[name], strict=False):
                    batches[dim_name(part.dim)][lookup_key(part, name)] = JaggedTensor(own, lengths=lengths[name])
        found: dict[str, Tensor] = {}
        for name, batch in batches.items():
            outputs = self.lookups[name](KeyedJaggedTensor.from_jt_dict(batch))
            found |= {key: output.values() for key, output in outputs.items()}
        return found

    def _compose(
        self, table: TableT, vectors: Sequence[Float[Tensor, "ids dim"]], rows: Int64[Tensor, "k ids"]
    ) -> Float[Tensor, "ids width"]:
        """Returns the composed vectors of ids: those of their rows become tables, row i that of id i."""
        order = torch.arange(rows.shape[1], device=rows.device).expand(len(vectors), -1)
        functions = [self.functions[part.name] for part in table.function_tables()]
        return table.combine.embed([*vectors, *functions], torch.cat([order, rows[len(vectors) :]]))

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


def _by_feature(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """Returns the ids, lengths and weights of every feature.

    Raises:
        UserError: The features have batch sizes of their own.
    """
    if features.variable_stride_per_key():
        raise UserError(
            "the batch has a size for each feature, which TorchRec's quantised lookups do not take; give every feature "
            "a bag for each row."
        )
    counts = features.length_per_key()
    ids = features.values().split(counts)
    lengths = features.lengths().view(len(counts), features.stride()).unbind()
    weights = features.weights_or_none()
    split = [None] * len(counts) if weights is None else weights.split(counts)
    return {
        key: JaggedTensor(own, weights=weight, lengths=length)
        for key, own, length, weight in zip(features.keys(), ids, lengths, split, strict=True)
    }


def _require_feature(name: str, table: CompositionalEmbeddingConfig, features: dict[str, JaggedTensor]) -> str:
    """Returns the name of a feature.

    Raises:
        UserError: The batch lacks it.
    """
    if name not in features:
        raise UserError(f"feature {name!r} of table {table.name!r} is not among {list(features)}.")
    return name
