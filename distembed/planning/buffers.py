"""What one training step takes of a rank's memory beside weights and states: buffers and activations, in bytes.

Memory is taken and given back within a step, so what counts is the fullest of its moments. Each is the sum of what is
alive then; the networks are run on fake tensors, of which only shapes exist, and the lookups are counted:

=================== =============================================================================================
lookup              received ids, their rows, the vectors of all partitions, what has been composed so far
output              what the lookups keep for their gradients, vectors on their way to the rows' ranks
networks            the same, and the fullest moment of the networks' forward and backward
output gradients    the same, gradients of the networks, gradients of pooled vectors on their way back
lookup gradients    the same, gradients of all partitions' vectors
table gradients     the same, and gradients of replicated weights, in one piece
optimizer           gradients, and what torch's row-wise Adagrad takes for a replicated table
=================== =============================================================================================

Counted from :mod:`distembed.sharding.groups` and what it calls, from TorchRec's ``comm_ops`` and from its pipelines;
B is the rows of a step on all ranks, b on one, N the ids that a rank looks up. How often ids repeat is not known: as
many distinct ones are reckoned with as uniform ids would have, the most that any distribution has on average. What an
operator takes within itself, the sorting of ids in FBGEMM's CUDA backward for one, is not counted.
"""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType
from torchrec.sparse.jagged_tensor import KeyedTensor

from distembed.composition import Product
from distembed.composition.grouped import _BLOCK_BYTES, _chunk_size
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.models.config import DCNConfig, DLRMConfig, build_model
from distembed.planning.optimizer_states import IS_ROW_WISE
from distembed.sharding.bucket_pool import buckets_are_faster, count_codes
from distembed.sharding.groups import kind
from distembed.sharding.placement import Placement, width

_FLOAT, _LONG, _INT = 4, 8, 4
_STEP_BYTES = 4  # torch counts the steps of each parameter, but for SGD


@dataclass(frozen=True)
class StepBuffers:
    """What a rank has in memory at the fullest moment of a step, beside weights and states, in bytes.

    Attributes:
        moment: which of the moments it is.
        inputs: batches, and their ids on the way to the rank that owns their tables.
        outputs: pooled vectors, or their gradients, on the way between the ranks.
        lookups: rows, vectors of partitions and all else that composing takes.
        activations: of the networks, and their gradients; with one rank also those of their
            weights, as they come.
        gradients: of the networks' weights and of tables that are not updated within the backward pass; with several
            ranks, those that are averaged lie in buckets of DistributedDataParallel all the time.
    """

    moment: str
    inputs: int = 0
    outputs: int = 0
    lookups: int = 0
    activations: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "moment")


@dataclass(frozen=True)
class NetworkStorage:
    """Bytes of the networks on a rank; every rank has all of them.

    Attributes:
        parameters: weights and biases.
        buffers: what is no parameter and is not trained, such as an order of pairs.
        gradients: of the parameters; they are views of the buckets of DistributedDataParallel, where there are some.
        optimizer_state: what the dense optimizer keeps.
        peak: the fullest moment of forward and backward, beside all the above where ranks average gradients in buckets;
            with one rank gradients count, as they come.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    peak: int


# --------------------------------------------------------------------------------------------------------- the networks


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators return for as long as these are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in tree_iter(returned):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


class _Arrived(torch.autograd.Function):
    """Pooled vectors out of nothing, which only autograd keeps, and whose gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, origin: Tensor, num_rows: int, num_columns: int) -> Tensor:
        return origin.new_empty(num_rows, num_columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        return None, None, None


class _Tables(nn.Module):
    """Gives a batch's pooled vectors without tables."""

    def __init__(self, names: Sequence[str], dim: int) -> None:
        super().__init__()
        self._names, self._dim = list(names), dim
        self._origin = torch.empty(0, requires_grad=True)

    def forward(self, num_rows: int) -> KeyedTensor:
        count = len(self._names)
        values = _Arrived.apply(self._origin, num_rows, count * self._dim)  # type: ignore[no-untyped-call]
        return KeyedTensor(self._names, [self._dim] * count, values)


def network_storage(
    config: DLRMConfig | DCNConfig,
    vector_names: Sequence[str],
    embedding_dim: int,
    num_dense: int,
    num_rows: int,
    optimizer: str,
    bf16: bool,
    averages: bool,
) -> NetworkStorage:
    """Runs a step of a model's networks on fake tensors, which take no memory.

    Args:
        config: of the model.
        vector_names: of the pooled vectors that it takes, as for :func:`build_model`.
        embedding_dim: D of each.
        num_dense: number of dense features.
        num_rows: b.
        optimizer: name of the dense one, a key of ``IS_ROW_WISE``.
        bf16: whether the networks compute in bf16.
        averages: whether gradients are averaged over ranks, in buckets.
    """
    with FakeTensorMode(), _LiveBytes() as live:
        model = build_model(config, _Tables(vector_names, embedding_dim), vector_names, embedding_dim, num_dense)
        parameters = list(model.parameters())
        if averages:
            # a gradient goes into its bucket as soon as it is there
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        batch = torch.empty(num_rows, num_dense), torch.empty(num_rows)
        before = live.peak = live.now
        _step(model, *batch, bf16)
        peak = live.peak - before
    trained = sum(map(_num_bytes, parameters))
    states = len(IS_ROW_WISE[optimizer])
    kept = states * trained + (_STEP_BYTES * len(parameters) if states else 0)
    return NetworkStorage(trained, sum(map(_num_bytes, model.buffers())), trained, kept, peak)


def _step(model: nn.Module, dense_features: Tensor, labels: Tensor, bf16: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = model(dense_features, len(labels))
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum")
    loss.backward()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# ---------------------------------------------------------------------------------------------------------- the lookups


@dataclass(frozen=True)
class _Cost:
    """Bytes of one lookup.

    Attributes:
        held: what it keeps from its forward to its backward.
        forward: what it takes beside in its forward.
        backward: what it takes beside in its backward, at most.
        at_end: the same when gradients reach the tables, and what was held is free again.
        own: gradients of tables that stay in memory from then on, and are in no bucket.
    """

    held: int
    forward: int
    backward: int
    at_end: int
    own: int = 0


@dataclass(frozen=True)
class _Lookup:
    """Tables of one rank that are looked up in one go, a ``Group`` of :mod:`distembed.sharding.groups`.

    Attributes:
        tables: of each feature.
        domains: of each feature, how many different ids can come to this rank.
        occurrences: of each feature, how many ids come to this rank.
        bags_per_feature: rows whose ids come to this rank.
        partitions: those whose vectors take part.
        dims: how many of each one's columns do.
        replicated: which partitions' weights are the same on every rank, of those that hold vectors.
        columns: of a composed vector that are composed here.
        has_bags: whether a row may have more than one id.
        copies_gradients: whether those of replicated weights go into buckets; else they become the weights' own.
    """

    tables: list[CompositionalEmbeddingConfig]
    domains: list[int]
    occurrences: list[float]
    bags_per_feature: int
    partitions: tuple[int, ...]
    dims: tuple[int, ...]
    replicated: tuple[int, ...]
    columns: int
    has_bags: bool
    copies_gradients: bool

    @property
    def num_ids(self) -> int:
        """N of all features."""
        return math.ceil(sum(self.occurrences))

    @property
    def num_bags(self) -> int:
        """Of all features."""
        return self.bags_per_feature * len(self.tables)

    @property
    def output_bytes(self) -> int:
        """Pooled vectors."""
        return self.num_bags * self.columns * _FLOAT

    def distinct(self) -> list[int]:
        """How many different ids each feature has, were they uniform."""
        return [
            math.ceil(-n * math.expm1(ids * math.log1p(-1 / n))) if n > 1 else 1
            for n, ids in zip(self.domains, self.occurrences, strict=True)
        ]

    def cost(self, device_kind: str) -> _Cost:
        """What it takes, replicated weights with it."""
        cost, stacked = self._cost_of_way(device_kind), self.stacked_bytes()
        at_end = cost.at_end + (stacked if self.copies_gradients else 0)
        # weights are stacked while they are looked up: of what is held only rows are there, and nothing is pooled yet
        indices = len(self.partitions) * self.num_ids * _LONG
        stacking = stacked + cost.at_end + indices - cost.held - self.output_bytes if self.stacks else 0
        own = 0 if self.copies_gradients else stacked
        return _Cost(cost.held, max(cost.forward, stacking), cost.backward, at_end, own)

    def _cost_of_way(self, device_kind: str) -> _Cost:
        table = self.tables[0]
        composes = len(table.scheme.num_rows) > 1
        if table.function_tables():
            return _add(_distinct_cost(self), _functions_cost(self, device_kind))
        if getattr(table, "pooling", None) == "max" or not (table.combine.commutes_with_sum or not composes):
            return self._per_id_cost(isinstance(table.combine, Product))
        return _pooled_cost(self)

    def _per_id_cost(self, is_product: bool) -> _Cost:
        if is_product and not self.has_bags:
            return _pooled_cost(self)
        num_rows = [max(rows) for rows in zip(*[table.scheme.num_rows for table in self.tables], strict=True)]
        takes_max = getattr(self.tables[0], "pooling", None) == "max"
        if is_product and not takes_max and buckets_are_faster(self.num_ids, self.num_bags, count_codes(num_rows)):
            return _bucket_cost(self, count_codes(num_rows))
        return _distinct_cost(self)

    def stacked_bytes(self, functions: bool = False) -> int:
        """Replicated weights of one kind, which are put together where several tables have them."""
        own = {table.name: table for table in self.tables}.values()
        parts = [[part for part in table.partition_tables() if part.is_function == functions] for table in own]
        return sum(
            part.num_parameters * _FLOAT
            for of_table in parts
            for j, part in enumerate(of_table)
            if functions or j in self.replicated
        )

    @property
    def stacks(self) -> bool:
        """Whether replicated weights are copied into one, in float32."""
        return len({table.name for table in self.tables}) > 1 or self.tables[0].data_type != DataType.FP32


def _add(lookup: _Cost, functions: _Cost) -> _Cost:
    """What functions take comes beside what is held, but not beside the gradients of what is looked up."""
    return _Cost(
        lookup.held + functions.held,
        max(lookup.forward, functions.forward),
        max(lookup.backward, functions.backward),
        lookup.at_end,
    )


def _pooled_cost(lookup: _Lookup) -> _Cost:
    """Sums over bags of every partition's vectors, which are then composed."""
    vectors = lookup.num_bags * sum(lookup.dims) * _FLOAT
    num_pieces, combine = len(lookup.dims), lookup.tables[0].combine
    keeps = num_pieces > 1 and isinstance(combine, Product)
    # rows of all partitions; where bags begin, of what came and in 64 bits
    indices = num_pieces * lookup.num_ids * _LONG + lookup.num_bags * _LONG
    # a product of three keeps that of the first two as well
    kept = vectors + max(0, num_pieces - 2) * lookup.output_bytes if keeps else 0
    # FBGEMM keeps the indices of the batch before
    forward = indices + lookup.num_ids * _LONG + (0 if keeps or num_pieces == 1 else vectors)
    return _Cost(indices + kept + _bags_bytes(lookup, lookup.num_bags), forward, vectors, vectors)


def _bags_bytes(lookup: _Lookup, num_bags: int) -> int:
    """What ``embedding_bag`` keeps where weights are replicated: each bag's number of ids and its largest."""
    return len(lookup.replicated) * num_bags * 2 * _LONG


def _bucket_cost(lookup: _Lookup, num_codes: int) -> _Cost:
    """Sums over buckets of the largest partition's vectors; their gradient is as large (``bucket_pool``)."""
    num_buckets = lookup.num_bags * num_codes
    vectors = num_buckets * lookup.dims[0] * _FLOAT
    indices = lookup.num_ids * _LONG + num_buckets * _LONG
    # all partitions' rows, keys, their order, the buckets and how many ids each has
    sorting = lookup.num_ids * _LONG * (len(lookup.dims) + 4) + num_buckets * _LONG
    largest_is_replicated = len(lookup.replicated) == len(lookup.dims)
    held = indices + vectors + (_bags_bytes(lookup, num_buckets) if largest_is_replicated else 0)
    # bags are split before there are vectors; those of replicated weights come in another order, and are copied
    splitting = indices + sorting - vectors - lookup.output_bytes
    forward = max(0, splitting, vectors if largest_is_replicated else 0)
    return _Cost(held, forward, vectors + lookup.output_bytes, vectors)


def _distinct_cost(lookup: _Lookup) -> _Cost:
    """Each distinct id is looked up, composed and then pooled (``distinct``)."""
    table, counts, num_ids = lookup.tables[0], lookup.distinct(), lookup.num_ids
    total, padded = sum(counts), max(counts) * len(counts)
    from_stacks = sum(lookup.dims[j] for j in range(len(lookup.dims)) if lookup.partitions[j] in lookup.replicated)
    from_tbes = sum(lookup.dims) - from_stacks
    # what TBEs give is padded, and taken out of that
    looked_up, vectors = padded * from_tbes * _FLOAT, total * sum(lookup.dims) * _FLOAT
    composed, pooled = total * lookup.columns * _FLOAT, lookup.output_bytes
    is_product = isinstance(table.combine, Product)
    kept = vectors if is_product or table.function_tables() else 0
    # rows, offsets of the padded lookup, where each id stands in it, its first occurrence, and the order of what came
    held = ((len(table.scheme.num_rows) + 2) * total + padded + num_ids + lookup.num_bags) * _LONG + kept
    if getattr(table, "pooling", None) == "max":
        # which id has each number of a maximum, which bag each id is in, and the ids
        held += lookup.num_bags * lookup.columns * _LONG + 2 * num_ids * _LONG
    forward = looked_up + composed + pooled + 2 * (num_ids + total) * _LONG + vectors - kept
    products = composed + (vectors if is_product else 0)
    taken_out = vectors + (padded * max(lookup.dims) * _FLOAT if from_tbes else 0) - kept
    backward = max(composed + pooled + 2 * num_ids * _LONG, products, taken_out)
    return _Cost(held, forward, backward, looked_up + total * from_stacks * _FLOAT)


def _functions_cost(lookup: _Lookup, device_kind: str) -> _Cost:
    """The functions of a path, in chunks of ids of one function (``grouped``)."""
    table, dim = lookup.tables[0], lookup.dims[0]
    hidden_sizes: tuple[int, ...] = getattr(table.combine, "hidden", ())
    counts = lookup.distinct()
    total = sum(counts)
    held = forward = backward = 0
    for function in table.function_tables():
        partition = [part.name for part in table.partition_tables()].index(function.name)
        buckets = [t.scheme.num_rows[partition] for t in lookup.tables]
        size, num_chunks = _chunk_size(torch.tensor(_spread(counts, buckets)))
        places = size * num_chunks
        widest = max(dim, *hidden_sizes, 1)
        step = max(1, _BLOCK_BYTES.get(device_kind, _BLOCK_BYTES["cpu"]) // (size * widest * _FLOAT))
        hidden = sum(hidden_sizes)
        in_block = min(step, num_chunks)
        is_one_block = step >= num_chunks
        of_block, of_chunks = in_block * size * _FLOAT, in_block * function.dim * _FLOAT
        # the inputs and functions of a block, and its hidden values
        block = of_block * (dim + hidden) + of_chunks
        held += places * _LONG + places + total * _LONG + (block if is_one_block else 0)
        # the first function's inputs are the vectors, which are counted there
        held += total * dim * _FLOAT if partition > 1 else 0
        forward = max(forward, (places + total) * dim * _FLOAT + block)
        # gradients of a block's outputs, of its values and of its functions, these apart and put together
        of_values = of_block * (dim + widest) + 2 * of_chunks
        if not is_one_block:
            # what a block starts from, and from the second on what the one before has given
            second = min(1.0, num_chunks / step - 1)
            before = of_block * dim + of_chunks
            of_values = max(of_values + block, math.ceil((of_values + block) * second) + before)
        of_functions = sum(buckets) * function.dim * _FLOAT
        backward = max(backward, total * dim * _FLOAT + places * dim * _FLOAT + of_functions + of_values)
    stacked = lookup.stacked_bytes(functions=True) if lookup.stacks else 0
    return _Cost(held + stacked, forward, backward, 0)


def _spread(counts: Sequence[int], buckets: Sequence[int]) -> list[int]:
    """Ids of each feature's buckets, that vary as the numbers of independent draws do, which are binomial."""
    cases = [(count / rows, 1 - 1 / rows) for count, rows in zip(counts, buckets, strict=True) for _ in range(rows)]
    deviations = cycle((-1.15, 0.32, -0.32, 1.15))  # the middles of a normal distribution's quarters
    return [
        max(0, round(mean + deviation * math.sqrt(mean * others)))
        for (mean, others), deviation in zip(cases, deviations, strict=False)
    ]


def _lookups(
    placements: Sequence[Placement], rank: int, world_size: int, num_rows: int, ids_per_row: Mapping[str, float]
) -> dict[str, list[_Lookup]]:
    """By sharding type, what a rank looks up."""
    groups: dict[str, dict[Any, _Lookup]] = {}
    for placement in placements:
        sharding_type = placement.unit.sharding_type
        of_type = groups.setdefault(sharding_type, {})
        is_local = sharding_type == ShardingType.DATA_PARALLEL.value
        share = world_size if placement.divided is not None else 1
        table = placement.table
        for start, stop in _columns_on(placement, rank):
            pieces = placement.pieces(start, stop)
            shape = tuple((p.partition, p.stop - p.start, p.part.name in placement.sharded) for p in pieces)
            key = (*kind(table), shape, stop - start, placement.unit.compute_kernel)
            if key not in of_type:
                of_type[key] = _Lookup(
                    [],
                    [],
                    [],
                    math.ceil(num_rows / world_size) if is_local else num_rows,
                    tuple(partition for partition, _, _ in shape),
                    tuple(dim for _, dim, _ in shape),
                    tuple(partition for partition, _, is_sharded in shape if not is_sharded),
                    stop - start,
                    any(ids_per_row.get(name, 1.0) > 1 for name in table.feature_names),
                    world_size > 1,
                )
            lookup = of_type[key]
            for name in table.feature_names:
                lookup.tables.append(table)
                lookup.domains.append(math.ceil(table.num_embeddings / share))
                lookup.occurrences.append(lookup.bags_per_feature * ids_per_row.get(name, 1.0) / share)
    return {sharding_type: list(of_type.values()) for sharding_type, of_type in groups.items()}


def _columns_on(placement: Placement, rank: int) -> Iterator[tuple[int, int]]:
    """Ranges of the output's columns that a rank composes."""
    if placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value or placement.divided is not None:
        yield 0, width(placement.table)
        return
    spec: Any = placement.unit.sharding_spec
    for shard in spec.shards:
        if shard.placement.rank() == rank:
            yield shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1]


# ------------------------------------------------------------------------------------------------------------- the step


def step_buffers(
    placements: Sequence[Placement],
    rank: int,
    world_size: int,
    global_batch_size: int,
    ids_per_row: Mapping[str, float],
    network: NetworkStorage,
    num_dense: int,
    pipeline_depth: int,
    device_kind: str = "cpu",
) -> StepBuffers:
    """The fullest moment of a step on one rank.

    Args:
        placements: of all tables.
        rank: which one.
        world_size: number of ranks.
        global_batch_size: B.
        ids_per_row: by feature, ids of a row on average; 1 for those that are not named.
        network: of this rank's share of B.
        num_dense: number of dense features.
        pipeline_depth: batches on the device at once: 3 for TorchRec's ``TrainPipelineSparseDist``, 2 for its
            ``TrainPipelineBase``.
        device_kind: ``cuda`` or ``cpu``.
    """
    return max(
        _moments(
            placements,
            rank,
            world_size,
            global_batch_size,
            ids_per_row,
            network,
            num_dense,
            pipeline_depth,
            device_kind,
        ),
        key=lambda moment: moment.total,
    )


@dataclass(frozen=True)
class _Traffic:
    """Bytes of one sharding's pooled vectors on a rank.

    Attributes:
        made: what its lookups give, one behind the other; and each by itself, where there are several.
        sent: a copy that is sent.
        received: vectors of this rank's rows.
        lookups: of the tables placed so.
    """

    made: int
    sent: int
    received: int
    lookups: list[_Cost]
    is_sent: bool


def _moments(
    placements: Sequence[Placement],
    rank: int,
    world_size: int,
    global_batch_size: int,
    ids_per_row: Mapping[str, float],
    network: NetworkStorage,
    num_dense: int,
    pipeline_depth: int,
    device_kind: str,
) -> Iterator[StepBuffers]:
    num_rows = math.ceil(global_batch_size / world_size)
    of_types = _lookups(placements, rank, world_size, global_batch_size, ids_per_row)
    traffic = [
        _traffic(kind_, lookups, placements, num_rows, world_size, device_kind) for kind_, lookups in of_types.items()
    ]
    batch = _batch_bytes(placements, num_rows, ids_per_row, num_dense)
    arriving = sum(_ids_bytes(lookups) for kind_, lookups in of_types.items() if _is_sent(kind_, world_size))
    sent_ids = _sent_ids_bytes(placements, num_rows, world_size, ids_per_row)
    buckets, gradients, unfused = _gradients(placements, rank, world_size, network)
    # logits and labels of the step before are still there
    inputs = pipeline_depth * batch + sent_ids + arriving + 2 * num_rows * _FLOAT
    held = sum(cost.held for of_type in traffic for cost in of_type.lookups)
    received = sum(of_type.received for of_type in traffic)
    waiting, fullest, kept = 0, 0, 0
    for of_type in traffic:
        kept += sum(cost.held for cost in of_type.lookups)
        most = max((cost.forward for cost in of_type.lookups), default=0)
        parts = 2 if len(of_type.lookups) > 1 else 1
        fullest = max(
            fullest,
            waiting + kept + most + parts * of_type.made,
            waiting + kept + of_type.made + of_type.sent + (of_type.received if of_type.is_sent else 0),
        )
        waiting += of_type.sent + of_type.received if of_type.is_sent else of_type.made
    # ids as received and sorted by feature; those that were sent, of this batch and of the next
    yield StepBuffers("lookup", inputs + arriving + sent_ids, 0, fullest, 0, buckets)
    yield StepBuffers("output", inputs, 2 * received + received * (len(traffic) > 1), held, 0, buckets)
    yield StepBuffers("networks", inputs, 0, held, network.peak, buckets)
    back = sum(of_type.made for of_type in traffic)
    copies = 1 + any(of_type.is_sent for of_type in traffic)
    costs = [cost for of_type in traffic for cost in of_type.lookups]
    own = sum(cost.own for cost in costs)
    yield StepBuffers("output gradients", inputs, copies * received + back, held, 0, gradients - own - unfused)
    # gradients of the tables that are looked up come after those of all that their vectors go through
    most = max((cost.backward - cost.own for cost in costs), default=0)
    to_come = unfused // max(1, len(costs))
    yield StepBuffers("lookup gradients", inputs, back, held + most, 0, gradients - to_come)
    most = max((cost.at_end - cost.held for cost in costs), default=0)
    # gradients of pooled vectors, in one piece, are needed until the last lookup's turn
    yield StepBuffers("table gradients", inputs, back if len(costs) > 1 else 0, held + most, 0, gradients)
    yield StepBuffers("optimizer", inputs, 0, _largest_replicated(placements), 0, gradients)


def _gradients(
    placements: Sequence[Placement], rank: int, world_size: int, network: NetworkStorage
) -> tuple[int, int, int]:
    """Bytes of gradients in buckets, which are there all the time; of all in the end; of sharded tables among these."""
    replicated = network.gradients + sum(
        part.num_parameters * (_FLOAT if part.is_function else _itemsize(placement))
        for placement in placements
        for part in placement.replicated
    )
    own = sum(
        math.prod(shard.shard_sizes) * _itemsize(placement)
        for placement in placements
        if placement.unit.compute_kernel == EmbeddingComputeKernel.DENSE.value
        for sharding in placement.sharded.values()
        for shard in sharding.sharding_spec.shards
        if shard.placement.rank() == rank
    )
    return (replicated if world_size > 1 else 0), replicated + own, own


def _itemsize(placement: Placement) -> int:
    return DATA_TYPE_NUM_BITS[placement.table.data_type] // 8


def _is_sent(sharding_type: str, world_size: int) -> bool:
    return world_size > 1 and sharding_type != ShardingType.DATA_PARALLEL.value


def _traffic(
    sharding_type: str,
    lookups: Sequence[_Lookup],
    placements: Sequence[Placement],
    num_rows: int,
    world_size: int,
    device_kind: str,
) -> _Traffic:
    placed = [placement.table for placement in placements if placement.unit.sharding_type == sharding_type]
    columns = sum(width(table) * len(table.feature_names) for table in placed)
    made = sum(lookup.output_bytes for lookup in lookups)
    is_sent = _is_sent(sharding_type, world_size)
    # a reduce-scatter sends what was made itself, an all-to-all a copy
    sent = made if is_sent and sharding_type != ShardingType.ROW_WISE.value else 0
    costs = [lookup.cost(device_kind) for lookup in lookups]
    return _Traffic(made, sent, num_rows * columns * _FLOAT, costs, is_sent)


def _batch_bytes(
    placements: Sequence[Placement], num_rows: int, ids_per_row: Mapping[str, float], num_dense: int
) -> int:
    """A rank's batch: ids, their lengths, dense features and labels."""
    names = [name for placement in placements for name in placement.table.feature_names]
    ids = math.ceil(num_rows * sum(ids_per_row.get(name, 1.0) for name in names))
    return ids * _LONG + len(names) * num_rows * _INT + (num_dense + 1) * num_rows * _FLOAT


def _ids_bytes(lookups: Sequence[_Lookup]) -> int:
    return sum(lookup.num_ids * _LONG + lookup.num_bags * _INT for lookup in lookups)


def _sent_ids_bytes(
    placements: Sequence[Placement], num_rows: int, world_size: int, ids_per_row: Mapping[str, float]
) -> int:
    """Copies of the next batch's ids in the order of their ranks; column shards each take one."""
    num_bytes = 0.0
    for placement in placements:
        if not _is_sent(placement.unit.sharding_type, world_size):
            continue
        spec: Any = placement.unit.sharding_spec
        is_divided = placement.divided is not None
        copies = 1 if is_divided else len(spec.shards)
        for name in placement.table.feature_names:
            ids = num_rows * ids_per_row.get(name, 1.0)
            # row-wise, where each goes is kept as well, and there is a length for each rank
            num_bytes += copies * (ids * _LONG * (2 if is_divided else 1))
            num_bytes += copies * num_rows * _INT * (world_size if is_divided else 1)
    return math.ceil(num_bytes)


def _largest_replicated(placements: Sequence[Placement]) -> int:
    sizes = [part.num_parameters for placement in placements for part in placement.replicated if not part.is_function]
    return max(sizes, default=0) * _FLOAT
