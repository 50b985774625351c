"""Path-based compositions: the first partition gives a vector, every other one a function (KDD 2020, section 4.1).

An id's vector is ``f_k(... f_3(f_2(v_1)))``, where f_j is the function in the id's row of partition j: each row is one
small function, learned like any weight. Functions are stored packed, a row each (see ``layers.py``).

Trade-off: a function holds more numbers than a vector (D^2 + D linear; 33 h + 16 with one hidden layer of h and D = 16)
and costs matrix products instead of a lookup, so partitions other than the first want few buckets; ids that share v_1
are told apart by whole functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pydantic.dataclasses
from jaxtyping import Float, Int64
from pydantic import field_validator

from distembed.base.errors import UserError
from distembed.base.lazy import torch
from distembed.base.names import STRICT, one_of
from distembed.base.validation import Widths
from distembed.composition.base import Composition, Distribution, Uniform, look_up
from distembed.composition.layers import ACTIVATIONS, Activation, PackedLayers, removable_offset, second_moment
from distembed.partitions.base import require_positive
from distembed.partitions.settings import SchemeSettings

if TYPE_CHECKING:
    from torch import Tensor


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class PathMLPSettings(SchemeSettings):
    """The settings of ``path_mlp``."""

    hidden: Widths = field(default_factory=lambda: [64])  # the hidden sizes of each function
    activation: str = "relu"  # the activation between the layers of a function

    @field_validator("activation")
    @classmethod
    def _known_activation(cls, value: str) -> str:
        return one_of("activation", value, ACTIVATIONS)


class PathComposition(Composition):
    """``f_k(... f_2(v_1))`` with functions of packed layers."""

    commutes_with_sum = False

    def __init__(self, layers: PackedLayers) -> None:
        self._layers = layers

    def partition_dims(self, embedding_dim: int, num_partitions: int) -> tuple[int, ...]:
        return (embedding_dim, *[self._layers.num_parameters(embedding_dim)] * (num_partitions - 1))

    def num_lookup_partitions(self, num_partitions: int) -> int:
        return 1

    def columns(self, embedding_dim: int, num_partitions: int) -> tuple[range, ...] | None:
        return (range(embedding_dim),) if num_partitions == 1 else None

    def compose(self, vectors: Sequence[Float[Tensor, "*batch dim_j"]]) -> Float[Tensor, "*batch dim"]:
        """Applies the packed functions ``vectors[1][i]``, ``vectors[2][i]``, ... to ``vectors[0][i]`` for each id i."""
        values, *functions = vectors
        for packed in functions:
            inputs = values.reshape(-1, 1, values.shape[-1])
            values = self._layers.forward(inputs, packed.reshape(-1, packed.shape[-1])).view(values.shape)
        return values

    def embed(
        self, weights: Sequence[Float[Tensor, "rows_j dim_j"]], rows: Int64[Tensor, "k ids"]
    ) -> Float[Tensor, "ids dim"]:
        return self.apply(look_up(weights[0], rows[0]), weights[1:], rows[1:])

    def apply(
        self,
        inputs: Float[Tensor, "ids dim"],
        functions: Sequence[Float[Tensor, "rows_j F"]],
        rows: Int64[Tensor, "k-1 ids"],
    ) -> Float[Tensor, "ids dim"]:
        """Returns each id's looked-up vector after the functions in its rows, partition by partition.

        The functions of several tables may be stacked; then rows count through the stack.
        """
        from distembed.composition.grouped import evaluate_grouped  # loads torch

        # rows[j], and no loop over rows: torch.export cannot save a program that iterates over a tensor of no rows
        for j, packed in enumerate(functions):
            inputs = evaluate_grouped(inputs, packed, rows[j], self._layers)
        return inputs

    def initial_weights(self, variance: float, num_partitions: int, embedding_dim: int) -> tuple[Distribution, ...]:
        functions = [self._initial_function(variance, embedding_dim)] * (num_partitions - 1)
        return (Uniform(variance), *functions)

    def _initial_function(self, variance: float, embedding_dim: int) -> Distribution:
        """Returns the distribution of a function whose outputs have the variance of its inputs."""
        # A layer of n inputs with mean square q gives variance n * q * Var(W). So Var(W) = variance / (n q), with
        # q = variance in the first layer, and q = E[(activation - offset)^2] in the later ones.
        offset = removable_offset(self._layers.activation, variance)
        variances, moment = [], variance
        layers = self._layers.layers(embedding_dim)
        for n_in, _ in layers:
            variances.append(variance / (n_in * moment))
            moment = second_moment(self._layers.activation, variance, offset)
        return _InitialFunction(tuple(layers), tuple(variances), offset)


@dataclass(frozen=True)
class _InitialFunction:
    """Uniform matrices of each layer's variance; biases ``-offset * sum_in W``, as if inputs had the offset removed."""

    layers: tuple[tuple[int, int], ...]
    variances: tuple[float, ...]
    offset: float

    def fill(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        offset = 0.0  # the first layer's inputs have none
        slices = iter(weight.split([size for n_in, n_out in self.layers for size in (n_in * n_out, n_out)], dim=1))
        for (n_in, n_out), variance in zip(self.layers, self.variances, strict=True):
            matrix, bias = next(slices), next(slices)
            Uniform(variance).fill(matrix, generator)
            bias.copy_(matrix.unflatten(1, (n_in, n_out)).sum(1).mul(-offset))
            offset = self.offset
        return weight


class PathLinear(PathComposition):
    """Paths of linear functions ``x W + b`` of D^2 + D numbers each."""

    name = "path_linear"

    def __init__(self) -> None:
        super().__init__(PackedLayers(hidden=(), activation=torch.clone))


class PathMLP(PathComposition):
    """Paths of functions with hidden layers, linear at the end.

    Args:
        hidden: The size of each hidden layer, in the order of evaluation.
        activation: A name of :data:`ACTIVATIONS`, or any elementwise function of a tensor that autograd supports.

    Raises:
        UserError: There are no hidden sizes, one is not a positive integer, or the activation is unknown.
    """

    name = "path_mlp"
    settings = PathMLPSettings

    def __init__(self, hidden: Sequence[int] = (64,), activation: str | Activation = "relu") -> None:
        if isinstance(hidden, (str, int)) or not hidden:
            raise UserError(
                f"hidden is {hidden!r}; give a list of one hidden size or more, such as [64]. Functions without a "
                f"hidden layer are composition path_linear."
            )
        for j, size in enumerate(hidden):
            require_positive(f"hidden[{j}]", size, "It is the size of a hidden layer; 64 is usual.")
        self.hidden = tuple(hidden)
        self.activation = activation
        if not callable(activation):
            activation = ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)]
        super().__init__(PackedLayers(self.hidden, activation))
