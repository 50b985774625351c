"""The bytes that a table keeps: weights, stored rows of ids and optimizer states, counted in one place.

``distembed describe``, plans and the record of a run all take :class:`TableSize`. *Compression* compares the bytes that
training keeps: the full fp32 table's vectors and optimizer states over the table's own weights, stored rows and states,
with the same optimizer. Gradients and caches live for a step or are chosen by a plan, and do not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from operator import add

from distembed.base.units import format_bytes
from distembed.embedding.config import CompositionalEmbeddingConfig, PartitionTable
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class TableStorage:
    """Bytes of one table on one rank; ``host_`` fields are in host memory, all others on the device."""

    weights: int = 0  # vectors, functions and stored rows of ids
    optimizer_state: int = 0
    gradients: int = 0  # of parameters that torch updates after the backward pass
    cache: int = 0  # device cache of vectors in host memory
    host_weights: int = 0  # vectors that lie in host memory
    host_optimizer_state: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device; a CPU's device memory is the machine's."""
        return self.weights + self.optimizer_state + self.gradients + self.cache

    @property
    def host(self) -> int:
        """Bytes in host memory, apart from the device."""
        return self.host_weights + self.host_optimizer_state

    def __add__(self, other: "TableStorage") -> "TableStorage":
        return total_storage([self, other])


def total_storage(storage: Iterable[TableStorage]) -> TableStorage:
    """Returns the storage of several tables, or parts of a table, together."""
    return TableStorage(*map(sum, zip(*[vars(part).values() for part in storage], strict=True)))


def replicated_storage(
    table: CompositionalEmbeddingConfig, parts: Iterable[PartitionTable], optimizers: TableOptimizers
) -> TableStorage:
    """Returns the storage of the given partitions and functions of a table on one rank, if torch trains them there."""
    optimizers = optimizers.for_table(table)
    return total_storage(
        parameter_storage([(part.num_rows, part.dim)], _FLOAT_BYTES, optimizers.dense, is_fused=False)
        if part.is_function
        else parameter_storage([(part.num_rows, part.dim)], table.bytes_per_number, optimizers.sparse, is_fused=False)
        for part in parts
    )


def whole_table_storage(table: CompositionalEmbeddingConfig, optimizers: TableOptimizers) -> TableStorage:
    """Returns the storage of a table that one rank holds whole: FBGEMM's if it has the optimizer, else torch's.

    Managed ids do not count, which are on ranks of their own, on a GPU in host memory.
    """
    functions = replicated_storage(table, table.function_tables(), optimizers)
    optimizer = optimizers.for_table(table)
    vectors = [
        parameter_storage([(part.num_rows, part.dim)], table.bytes_per_number, optimizer.sparse, optimizer.is_fused)
        for part in table.lookup_tables()
    ]
    return total_storage([functions, *vectors, TableStorage(weights=table.scheme.assignment_bytes)])


def parameter_storage(shards: Sequence[tuple[int, int]], itemsize: int, optimizer: str, is_fused: bool) -> TableStorage:
    """Returns one parameter's bytes, in shards of (rows, columns); torch has a gradient, FBGEMM (fused) has none."""
    rows, numbers = sum(rows for rows, _ in shards), sum(rows * columns for rows, columns in shards)
    kind, num_bytes = OPTIMIZERS[optimizer], numbers * itemsize
    if is_fused:
        return TableStorage(num_bytes, kind.fused_state_bytes(rows, numbers))
    return TableStorage(num_bytes, kind.torch_state_bytes(rows, numbers), num_bytes)


@dataclass(frozen=True)
class TableSize:
    """The bytes of a table, or of several, and of the full fp32 tables of the same ids with the same optimizers."""

    serving: int = 0  # weights, stored rows of ids and managed ids, which a trained model keeps
    training: int = 0  # the same, the optimizer's states, and the candidates and hash tables of managed ids
    full_serving: int = 0  # the full table's vectors
    full_training: int = 0  # the same and the optimizer's states

    @classmethod
    def of(cls, table: CompositionalEmbeddingConfig, optimizers: TableOptimizers) -> "TableSize":
        own, optimizer = whole_table_storage(table, optimizers), optimizers.for_table(table)
        vectors = [(table.num_embeddings, table.embedding_dim)]
        full = parameter_storage(vectors, _FLOAT_BYTES, optimizer.sparse, optimizer.is_fused)
        serving, training = own.weights, own.weights + own.optimizer_state
        if table.managed is not None:
            serving += table.managed.sizes.serving_bytes
            training += table.managed.sizes.memory_bytes
        return cls(serving, training, full.weights, full.weights + full.optimizer_state)

    @property
    def compression(self) -> float:
        """Training bytes of the full fp32 table over this table's; 1 without any tables."""
        return self.full_training / self.training if self.training else 1.0

    @property
    def text(self) -> str:
        """Text like ``10.00 MiB to serve, 12.50 MiB to train, 3.20x less than full fp32 tables``."""
        ratio = f"{self.compression:.2f}x less than full fp32 tables"
        return f"{format_bytes(self.serving)} to serve, {format_bytes(self.training)} to train, {ratio}"

    def as_json(self) -> dict[str, int | float]:
        """Returns the bytes and both ratios in plain values; ``bytes`` are the bytes that serving keeps."""
        return {
            "bytes": self.serving,
            "training_bytes": self.training,
            "full_bytes": self.full_serving,
            "full_training_bytes": self.full_training,
            "compression": self.compression,
            "serving_compression": self.full_serving / self.serving if self.serving else 1.0,
        }

    def __add__(self, other: "TableSize") -> "TableSize":
        return TableSize(*map(add, astuple(self), astuple(other)))
