"""The updates of Adam and LAMB, as FBGEMM has them, and a stand-in for its tables under these.

FBGEMM has them on CUDA only, and its tables on a processor refuse to be made with them. In a dry run the stand-in takes
their place, and shows that all lines around them run; that FBGEMM computes these formulas only a card can show.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import batched_embedding_kernel

from distembed.optim.kinds import fused_optimizer_name

BETA1, BETA2 = 0.9, 0.999


@dataclass(frozen=True)
class Formula:
    """One of the optimizers.

    Attributes:
        by_row: Whether a row has one second moment, of the mean of its squared gradients.
        scales: Whether a row's step is scaled by the norm of the row over that of the step (LAMB, You et al., 2020).
    """

    by_row: bool
    scales: bool

    def update(
        self, weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: int, lr: float, eps: float
    ) -> None:
        """Updates rows in place, with their moments, of which ``second`` has one column or all."""
        square = gradient.square()
        first.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        second.mul_(BETA2).add_(square.mean(1, keepdim=True) if self.by_row else square, alpha=1 - BETA2)
        moved = first / (1 - BETA1**step) / ((second / (1 - BETA2**step)).sqrt() + eps)
        ratio = weight.norm(dim=1, keepdim=True) / moved.norm(dim=1, keepdim=True) if self.scales else 1.0
        weight.sub_(lr * ratio * moved)


FORMULAS = {
    "adam": Formula(by_row=False, scales=False),
    "partial_row_wise_adam": Formula(by_row=True, scales=False),
    "lamb": Formula(by_row=False, scales=True),
    "partial_row_wise_lamb": Formula(by_row=True, scales=True),
}
"""By the names of ``distembed.optim.OPTIMIZERS``."""


class FormulaOptimizer(torch.optim.Optimizer):
    """A formula as one of torch's optimizers, for weights all of whose rows have gradients."""

    def __init__(self, params: Any, formula: Formula, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self._formula = formula

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    columns = 1 if self._formula.by_row else weight.shape[1]
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros(len(weight), columns)
                state["step"] += 1
                moments = state["exp_avg"], state["exp_avg_sq"]
                self._formula.update(weight, *moments, weight.grad, state["step"], group["lr"], group["eps"])


class TablesOnAProcessor(nn.Module):
    """Stands in for FBGEMM's batched tables under an optimizer of :data:`FORMULAS`, each feature with a table.

    What TorchRec and distembed ask FBGEMM's for has the same names here; weights and moments are real.
    """

    def __init__(
        self, embedding_specs: Sequence[tuple[Any, ...]], optimizer: EmbOptimType, eps: float, **settings: Any
    ) -> None:
        super().__init__()
        assert settings["feature_table_map"] == list(range(len(embedding_specs)))
        self.embedding_specs, self.optimizer, self.eps = list(embedding_specs), optimizer, eps
        name = fused_optimizer_name(optimizer)
        assert name is not None
        self.formula, self.learning_rate = FORMULAS[name], float(settings["learning_rate"])
        self.weights_precision = settings["weights_precision"]
        numbers = [rows * columns for rows, columns, *_ in embedding_specs]
        self.weights_physical_offsets = [sum(numbers[:i]) for i in range(len(numbers))]
        self.weights_host = nn.Parameter(torch.zeros(sum(numbers)))
        self.first = [torch.zeros(rows, columns) for rows, columns, *_ in embedding_specs]
        self.second = [
            torch.zeros(rows, 1 if self.formula.by_row else columns) for rows, columns, *_ in embedding_specs
        ]
        self.iter, self.iter_cpu = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Sums over bags; counts a step, as FBGEMM does."""
        assert per_sample_weights is None
        self.iter.add_(1), self.iter_cpu.add_(1)
        return _Lookup.apply(self.weights_host, self, indices.long(), offsets.long())  # type: ignore[no-any-return]

    def split_embedding_weights(self) -> list[Tensor]:
        starts = self.weights_physical_offsets
        return [
            self.weights_host.data[start : start + rows * columns].view(rows, columns)
            for start, (rows, columns, *_) in zip(starts, self.embedding_specs, strict=True)
        ]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        seconds = [second.view(-1) if self.formula.by_row else second for second in self.second]
        return [[first, second] for first, second in zip(self.first, seconds, strict=True)]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        return [{"exp_avg": first, "exp_avg_sq": second} for first, second in self.split_optimizer_states()]

    def get_learning_rate(self) -> float:
        return self.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        self.learning_rate = rate

    def flush(self) -> None:
        """Has no cache to write back."""

    def reset_cache_states(self) -> None:
        """Has no cache to empty."""

    def bags(self, offsets: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yields where the rows of each feature begin and end, and the bag of each of them."""
        num_bags = (len(offsets) - 1) // len(self.embedding_specs)
        for start in range(0, len(offsets) - 1, num_bags):
            own = offsets[start : start + num_bags + 1]
            yield int(own[0]), int(own[-1]), torch.arange(num_bags).repeat_interleave(own.diff())


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hook: Tensor, tables: TablesOnAProcessor, indices: Tensor, offsets: Tensor) -> Tensor:
        ctx.tables, ctx.indices, ctx.offsets = tables, indices, offsets
        num_bags = (len(offsets) - 1) // len(tables.embedding_specs)
        pooled = []
        for weight, (first, last, bags) in zip(tables.split_embedding_weights(), tables.bags(offsets), strict=True):
            vectors = weight[indices[first:last]]
            pooled.append(vectors.new_zeros(num_bags, weight.shape[1]).index_add_(0, bags, vectors))
        return torch.cat(pooled, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tables: TablesOnAProcessor = ctx.tables
        widths = [columns for _, columns, *_ in tables.embedding_specs]
        of_tables = zip(tables.split_embedding_weights(), tables.first, tables.second, strict=True)
        for held, gradient, (first, last, bags) in zip(
            of_tables, gradients[0].split(widths, dim=1), tables.bags(ctx.offsets), strict=True
        ):
            rows, place = ctx.indices[first:last].unique(return_inverse=True)
            summed = gradient.new_zeros(len(rows), gradient.shape[1]).index_add_(0, place, gradient[bags])
            parts = [own[rows] for own in held]
            tables.formula.update(*parts, summed, int(tables.iter_cpu), tables.learning_rate, tables.eps)
            for own, part in zip(held, parts, strict=True):
                own[rows] = part
        return None, None, None, None


@contextmanager
def kernels_on_a_processor() -> Iterator[None]:
    """Within the block TorchRec makes :class:`TablesOnAProcessor` in the place of FBGEMM's tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", TablesOnAProcessor)
        yield
