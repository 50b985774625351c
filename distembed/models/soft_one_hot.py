"""Soft one-hot vectors of continuous features (Li et al. 2017; de Souza Pereira Moreira et al., RecSys 2021, appendix).

A number x has a share in each of P bins, and its vector is that mixture of the bins' vectors::

    p = x W + b,    s = softmax(p),    g = s E            W, b in R^P and E in R^(P x D), a set for each feature

Bins are learnt, without a choice of buckets. A missing number, NaN, has a vector of its own.

Bins start on a grid. With ``W = c / h^2`` and ``b = -c^2 / (2 h^2)``, ``x W + b`` is ``-(x - c)^2 / (2 h^2)`` up to a
term common to all bins: the softmax gives each bin the share of a Gaussian around its centre c. With centres a distance
h apart over the expected values, each bin is the largest somewhere from the first step on. Of 10 bins drawn from N(0,
1), only 2.3 are the largest somewhere in [0, 10] (mean of 200 draws).

Trade-off: a feature takes P exponentials and P D multiplications where a network's first layer takes as many as it has
outputs; and beyond the outermost centres all numbers have the same vector.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.tracing import without_autocast
from distembed.models.config import LARGEST_NUMBER

_SHORT_DEVIATION = 0.01


class SoftOneHot(nn.Module):
    """Maps numbers [..., F] to vectors [..., F, D], each feature by bins of its own, all in one batched product.

    It computes in the dtype of the weights, also under autocast: where bins are narrow, large terms cancel. NaN is a
    missing number; magnitudes above ``LARGEST_NUMBER`` are cut to it.

    Args:
        num_features: Number F of features.
        num_bins: Number P of bins of each feature.
        embedding_dim: Dimension D of a vector.
        layer_norm: Whether each vector is normalised, with a scale and a shift of its feature's own.
        value_range: Where the centres of the bins start: evenly from the first number to the second.

    Raises:
        UserError: There is no bin, feature or dimension, or the range is empty or not finite.
    """

    def __init__(
        self,
        num_features: int,
        num_bins: int,
        embedding_dim: int,
        layer_norm: bool = False,
        value_range: Sequence[float] = (-3.0, 3.0),
    ) -> None:
        super().__init__()
        for name, size in (("num_features", num_features), ("num_bins", num_bins), ("embedding_dim", embedding_dim)):
            if size < 1:
                raise UserError(f"{name} of SoftOneHot is {size}: it must be 1 or more")
        self.num_features = num_features
        weights, biases = grid_bins(num_bins, *value_range)
        self.weights = nn.Parameter(weights.repeat(num_features, 1))
        self.biases = nn.Parameter(biases.repeat(num_features, 1))
        # vectors have a squared length of 1 on average, for every D
        scale = embedding_dim**-0.5
        self.vectors = nn.Parameter(torch.randn(num_features, num_bins, embedding_dim) * scale)
        self.missing = nn.Parameter(torch.randn(num_features, embedding_dim) * scale)
        self.norm = _FeatureNorm(num_features, embedding_dim) if layer_norm else None

    def forward(self, numbers: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows features dim"]:
        """Returns the vector of each number, in the dtype of the weights."""
        with without_autocast(numbers.device.type):
            shares, missing = self._shares(numbers)
            missing_vectors = missing.unsqueeze(2) * self.missing.unsqueeze(1)
            vectors = torch.baddbmm(missing_vectors, shares.transpose(1, 2), self.vectors).transpose(0, 1)
            if self.norm is not None:
                vectors = self.norm(vectors)
        return vectors.reshape(*numbers.shape, vectors.shape[-1])

    @torch.no_grad()
    def start_bins(self, feature: int, value_range: Sequence[float]) -> None:
        """Starts the centres of one feature's bins evenly from the first number of the range to the second."""
        self.weights[feature], self.biases[feature] = grid_bins(self.weights.shape[1], *value_range)

    def _shares(
        self, numbers: Float[Tensor, "*rows features"]
    ) -> tuple[Float[Tensor, "features bins rows"], Float[Tensor, "features rows"]]:
        """Returns the share of each number in each bin, 0 for missing numbers, and 1 where a number is missing, else 0.

        Rows are the last dimension: there are more rows than bins for the processor's vector instructions.
        """
        if numbers.shape[-1] != self.num_features:
            raise ValueError(f"numbers of {numbers.shape[-1]} features are given to SoftOneHot of {self.num_features}")
        by_feature = numbers.reshape(-1, self.num_features).to(self.weights.dtype).t().contiguous()
        is_missing = by_feature.isnan()
        values = by_feature.nan_to_num(nan=0.0).clamp(-LARGEST_NUMBER, LARGEST_NUMBER)
        shares: Tensor = _Shares.apply(values, is_missing, self.weights, self.biases)  # type: ignore[no-untyped-call]
        return shares, is_missing.to(shares.dtype)


class SoftOneHotSum(SoftOneHot):
    """Maps numbers [..., F] to the sum of their vectors [..., D]; arguments and errors as :class:`SoftOneHot`.

    Without norms the vectors of single features are never made: the sum is one product of all shares.
    """

    def forward(self, numbers: Float[Tensor, "*rows features"]) -> Float[Tensor, "*rows dim"]:
        """Returns the sum of the vectors of each row, in the dtype of the weights."""
        if self.norm is not None:
            return super().forward(numbers).sum(-2)
        with without_autocast(numbers.device.type):
            shares, missing = self._shares(numbers)
            sums = self.vectors.flatten(0, 1).t() @ shares.flatten(0, 1) + self.missing.t() @ missing
        return sums.t().reshape(*numbers.shape[:-1], sums.shape[0])


def start_short(encoder: SoftOneHot) -> None:
    """Draws the vectors of an encoder from N(0, 0.01^2), as short as a table's, to be added to a table's vectors."""
    for vectors in (encoder.vectors, encoder.missing):
        nn.init.normal_(vectors, std=_SHORT_DEVIATION)


def grid_bins(num_bins: int, low: float, high: float) -> tuple[Float[Tensor, " bins"], Float[Tensor, " bins"]]:
    """Returns W and b of bins with centres evenly from ``low`` to ``high``, Gaussians as wide as centres are apart."""
    if not -LARGEST_NUMBER <= low < high <= LARGEST_NUMBER:
        raise UserError(f"value_range is [{low}, {high}]: it must be two numbers, the smaller one first")
    centres = torch.linspace(low, high, num_bins, dtype=torch.float64)
    width = (high - low) / max(1, num_bins - 1)
    weights, biases = centres / width**2, -(centres**2) / (2 * width**2)
    return weights.to(torch.get_default_dtype()), biases.to(torch.get_default_dtype())


class _FeatureNorm(nn.Module):
    """Normalises vectors [rows, F, D] to mean 0 and variance 1, then scales and shifts each feature's numbers."""

    def __init__(self, num_features: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, embedding_dim))
        self.bias = nn.Parameter(torch.zeros(num_features, embedding_dim))

    def forward(self, vectors: Float[Tensor, "rows features dim"]) -> Float[Tensor, "rows features dim"]:
        return nn.functional.layer_norm(vectors, vectors.shape[-1:]) * self.weight + self.bias


class _Shares(torch.autograd.Function):
    """Computes ``softmax(x W + b)`` over bins, and 0 in every bin for missing numbers, which get no gradient.

    Autograd would keep the sums besides the shares, and go over all of them twice more for the products with numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Float[Tensor, "features rows"],
        is_missing: Bool[Tensor, "features rows"],
        weights: Float[Tensor, "features bins"],
        biases: Float[Tensor, "features bins"],
    ) -> Float[Tensor, "features bins rows"]:
        # not addcmul, which takes 2.5 times as long on a CPU where all of its operands are broadcast
        sums = (values.unsqueeze(1) * weights.unsqueeze(2)).add_(biases.unsqueeze(2))
        shares = torch.softmax(sums, dim=1).mul_(~is_missing.unsqueeze(1))  # a missing number has no share in any bin
        ctx.save_for_backward(values, shares, weights)
        return shares

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, Tensor, Tensor]:
        (gradient,) = gradients
        values, shares, weights = ctx.saved_tensors
        # missing numbers have shares of 0, so the softmax's gradient s * (g - sum(g s)) is 0 too
        sum_gradients = torch.ops.aten._softmax_backward_data(gradient, shares, 1, shares.dtype)
        value_gradients = torch.bmm(weights.unsqueeze(1), sum_gradients).squeeze(1) if ctx.needs_input_grad[0] else None
        weight_gradients = torch.bmm(sum_gradients, values.unsqueeze(2)).squeeze(2)
        return value_gradients, None, weight_gradients, sum_gradients.sum(2)
