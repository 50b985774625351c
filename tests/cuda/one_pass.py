"""Stand-ins for what a lookup in one pass needs of CUDA: FBGEMM's tables with their storage, and Triton's kernels."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor
from torchrec.distributed import batched_embedding_kernel

from distembed.kernels import triton_tables
from distembed.kernels.triton_tables import TritonKernels
from distembed.sharding.groups import fused
from tests.cuda.pretend import Refused, origin_module
from tests.cuda.stand_ins import StandInTables


class StandInStorage(StandInTables):
    """Has the storage of FBGEMM's tables on CUDA, where the weights are no parameters."""

    def __init__(
        self,
        embedding_specs: Sequence[tuple[Any, ...]],
        optimizer: EmbOptimType = EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weights_precision: SparseType = SparseType.FP32,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        **settings: Any,
    ) -> None:
        super().__init__(embedding_specs, weights_precision=weights_precision, **settings)
        self.optimizer, self.weights_precision, self.pooling_mode = optimizer, weights_precision, pooling_mode
        self.use_cpu, self.stochastic_rounding = False, True
        numbers = [rows * columns for rows, columns in self.sizes]
        self.weights_dev = torch.empty(sum(numbers), dtype=weights_precision.as_dtype(), device=self.device)
        self.momentum1_dev = torch.empty(sum(numbers), device=self.device)
        self.weights_physical_offsets = [sum(numbers[:i]) for i in range(len(numbers))]
        self.momentum1_physical_offsets = self.weights_physical_offsets
        names = ("weight_decay", "weight_decay_mode", "max_norm", "gradient_clipping")
        self.optimizer_args = SimpleNamespace(eps=1e-8, **dict.fromkeys(names, 0))
        self.step, self.iter_cpu = 0, torch.ones(1, dtype=torch.int64)
        self.iter = torch.empty(1, dtype=torch.int64, device=self.device)


class DeviceOf:
    """Stands for ``torch.cuda.device_of``: the device of a tensor is the current one within the block."""

    num_entered = 0

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.device.type == "cuda"

    def __enter__(self) -> None:
        DeviceOf.num_entered += 1

    def __exit__(self, *error: object) -> None:
        DeviceOf.num_entered -= 1


class StandInKernel:
    """Stands for a kernel of Triton's: refuses tensors elsewhere, or with gaps, and counts its launches."""

    def __init__(self, name: str, launched: "Counter[str]") -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int]) -> Any:
        (num_programs,) = grid

        def launch(*arguments: Any, **constants: Any) -> None:
            if not isinstance(num_programs, int) or num_programs < 1:
                raise Refused(f"{self._name} is launched for {num_programs} programs; {origin_module()}")
            if DeviceOf.num_entered == 0:
                raise Refused(f"{self._name} is launched on whichever device is the current one; {origin_module()}")
            for own in arguments:
                for tensor in own if isinstance(own, tuple) else (own,):
                    if isinstance(tensor, Tensor) and tensor.device.type != "cuda":
                        raise Refused(f"{self._name} gets a tensor on {tensor.device}; {origin_module()}")
                    if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                        raise Refused(f"{self._name} gets a tensor with strides {tensor.stride()}; {origin_module()}")
            for name, value in constants.items():
                hash(value)  # of what a kernel is compiled for
                assert not isinstance(value, Tensor), name
            self._launched[self._name] += 1

        return launch


@contextmanager
def one_pass(launched: "Counter[str]") -> Iterator[None]:
    """Within the block, which is around :func:`.rehearsal.rehearsed`'s, lookups in one pass find stand-ins.

    Args:
        launched: Gets the number of launches of each kernel by its name.
    """
    kernels = TritonKernels(*[StandInKernel(name, launched) for name in TritonKernels._fields])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTEMBED_CHECK_ROWS", "0")  # as in training: the check waits for the device
        patch.setattr(triton_tables, "triton_kernels", lambda: kernels)
        patch.setattr(torch.cuda, "device_of", DeviceOf)
        patch.setattr(fused, "SplitTableBatchedEmbeddingBagsCodegen", StandInStorage)
        patch.setattr("tests.cuda.stand_ins.StandInTables", StandInStorage)
        patch.setattr(batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", StandInStorage)
        yield
