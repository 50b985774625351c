"""Stand-ins for what a rehearsal cannot run: FBGEMM's tables, and a process group of ranks that are not there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.permute_pooled_embedding_modules_split import PermutePooledEmbeddingsSplit
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from distembed.base.ranks import Collectives, Ranks
from distembed.sharding.collection import ShardedCompositionalEmbeddingCollection
from tests.cuda.pretend import Refused, origin_module


class StandInTables(nn.Module):
    """Has the shapes, dtypes and devices of FBGEMM's batched tables, summed over bags, and refuses wrong inputs.

    Its backward pass hands out no gradient, since FBGEMM updates weights there itself.
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[Any, ...]],
        feature_table_map: Sequence[int] | None = None,
        weights_precision: SparseType = SparseType.FP32,
        output_dtype: SparseType = SparseType.FP32,
        device: torch.device | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.embedding_specs = list(embedding_specs)
        self.sizes = [spec[:2] for spec in embedding_specs]
        self.features = list(feature_table_map or range(len(self.sizes)))
        self.output_dtype = output_dtype.as_dtype()
        self.device = device or torch.device("cuda", 0)
        dtype = weights_precision.as_dtype()
        self.tables = [torch.empty(rows, columns, dtype=dtype, device=self.device) for rows, columns in self.sizes]
        self.states = [torch.empty(rows, device=self.device) for rows, _ in self.sizes]
        self.learning_rate = settings.get("learning_rate", 0.01)
        self.is_cached = any(EmbeddingLocation.MANAGED_CACHING in spec for spec in embedding_specs)
        self.prefetched: list[Tensor] = []

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns the sums over bags, ``[bags of a feature, columns of all features]``."""
        num_bags = self._bags_of_a_feature(indices, offsets, per_sample_weights)
        width = sum(self.sizes[table][1] for table in self.features)
        hook = torch.zeros((), device=self.device, requires_grad=True)
        weights = per_sample_weights
        shape = (num_bags, width)
        return _Lookup.apply(hook, indices, offsets, weights, shape, self.output_dtype)  # type: ignore[no-any-return]

    def prefetch(self, indices: Tensor, offsets: Tensor, forward_stream: Any = None) -> None:
        """Notes what is brought into the cache."""
        self._bags_of_a_feature(indices, offsets, None)
        self.prefetched.append(indices)

    def _bags_of_a_feature(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> int:
        for name, tensor in {"indices": indices, "offsets": offsets, "per_sample_weights": weights}.items():
            if tensor is not None and tensor.device.type != self.device.type:
                raise Refused(f"FBGEMM's tables on {self.device} get {name} on {tensor.device}; {origin_module()}")
        if indices.dtype != offsets.dtype or indices.dtype not in (torch.int64, torch.int32):
            raise Refused(f"FBGEMM's tables get indices of {indices.dtype} and offsets of {offsets.dtype}")
        num_bags, rest = divmod(len(offsets) - 1, len(self.features))
        if rest or (weights is not None and weights.shape != indices.shape):
            raise Refused(f"{len(self.features)} features have {len(offsets) - 1} bags of {len(indices)} rows")
        return num_bags

    def split_embedding_weights(self) -> list[Tensor]:
        """Returns each table's weight."""
        return self.tables

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Returns each table's state, one number a row."""
        return [{"sum": state} for state in self.states]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Returns each table's states."""
        return [[state] for state in self.states]

    def get_learning_rate(self) -> float:
        """Returns the learning rate."""
        return self.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        """Sets the learning rate."""
        self.learning_rate = rate

    def flush(self) -> None:
        """Has no cache to write back."""

    def reset_cache_states(self) -> None:
        """Has no cache to empty."""


class _Lookup(torch.autograd.Function):
    """Counts as one launch forward and one backward, which reads the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hook: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.shape = shape
        return torch.zeros(shape, dtype=dtype, device=indices.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if tuple(gradient.shape) != ctx.shape or gradient.device.type != "cuda":
            raise Refused(f"FBGEMM's tables get a gradient of {tuple(gradient.shape)} on {gradient.device}")
        gradient.contiguous().clone()  # stands for the update, which reads it
        return None, None, None, None, None, None


class StandInDenseTables(StandInTables):
    """Has the shapes of FBGEMM's dense tables, whose weights are one parameter."""

    def __init__(self, embedding_specs: Sequence[tuple[int, int]], **settings: Any) -> None:
        super().__init__(embedding_specs, **{key: own for key, own in settings.items() if key != "use_cpu"})
        numbers = [rows * columns for rows, columns in self.sizes]
        self.weights = nn.Parameter(torch.empty(sum(numbers), device=self.device))
        self.weights_physical_offsets = [sum(numbers[:i]) for i in range(len(numbers) + 1)]
        self.tables = [
            own.detach().view(size) for own, size in zip(self.weights.split(numbers), self.sizes, strict=True)
        ]

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns the sums over bags, through which gradients of all weights flow."""
        return super().forward(indices, offsets, per_sample_weights) + self.weights[:1].sum()


@contextmanager
def stand_in_tables() -> Iterator[None]:
    """Within the block TorchRec makes stand-ins in the place of FBGEMM's tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", StandInTables)
        patch.setattr(batched_embedding_kernel, "DenseTableBatchedEmbeddingBagsCodegen", StandInDenseTables)
        # a state dict is made by asking the other ranks, which TorchRec's bags leave out where there are none
        patch.setattr(ShardedCompositionalEmbeddingCollection, "_initialize_torch_state", lambda *given, **named: None)
        # column ranges are put in order by a kernel that the meta device does not have: as large a copy
        patch.setattr(PermutePooledEmbeddingsSplit, "forward", lambda module, pooled: pooled.clone())
        yield


@contextmanager
def absent_ranks(world_size: int) -> Iterator[None]:
    """Within the block this process is rank 0 of so many, whose collectives send nothing and end at once.

    Where ranks tell one another something on their hosts, all say what this one says. Nothing averages the gradients of
    networks, since ``DistributedDataParallel`` is made for a device that is there.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "any", lambda ranks, flag, group=None: flag)
            patch.setattr(Collectives, "in_own_group", lambda: Collectives(dist.group.WORLD))
            patch.setattr(Collectives, "gather_counts", lambda own, count: [count] * world_size)
            patch.setattr(DefaultDataParallelWrapper, "wrap", lambda *given: None)
            yield
    finally:
        dist.destroy_process_group()
