"""Small dense functions with all their numbers in one row: packed layers (Shi et al., KDD 2020, section 4.1).

A function of D numbers with hidden sizes h_1, ..., h_m is a row of F numbers, layer after layer, each layer's matrix
[in, out] row by row and then its bias [out]::

    | W_1: D x h_1 | b_1: h_1 | W_2: h_1 x h_2 | b_2: h_2 | ... | W: h_m x D | b: D |

The activation stands between two layers; the last one ends linear, so without hidden sizes the function is ``x W + b``.
Many functions are evaluated at once, each on inputs of its own, by batched products.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.composition.activations import activate, pull_back, save_for_backward


@dataclass(frozen=True)
class PackedLayers:
    """The shape of the functions, the same for all of them.

    Args:
        hidden: The size of each hidden layer; none for linear functions.
        activation: An elementwise function.
    """

    hidden: tuple[int, ...]
    activation: Callable[[Tensor], Tensor]

    def num_parameters(self, dim: int) -> int:
        """Returns F, how many numbers make one function that maps ``dim`` numbers to as many."""
        return sum(self._widths(dim))

    def layers(self, dim: int) -> list[tuple[int, int]]:
        """Returns the number of inputs and of outputs of each layer."""
        return list(pairwise((dim, *self.hidden, dim)))

    def forward(
        self,
        inputs: Float[Tensor, "functions inputs dim"],
        packed: Float[Tensor, "functions F"],
        hidden: list[Tensor] | None = None,
    ) -> Float[Tensor, "functions inputs dim"]:
        """Returns the outputs of each function for its own inputs.

        Args:
            inputs: The inputs of each function.
            packed: The numbers of each function, as the module's docstring draws them.
            hidden: A list to which the hidden values are appended that :meth:`backward` can start from.
        """
        (weight, bias), *others = self._unpack(packed, inputs.shape[2])
        values = torch.baddbmm(bias, inputs, weight)
        for weight, bias in others:
            saved = save_for_backward(self.activation, values)
            if hidden is not None:
                hidden.append(saved)
            values = torch.baddbmm(bias, activate(self.activation, saved), weight)
        return values

    def backward(
        self,
        inputs: Float[Tensor, "functions inputs dim"],
        packed: Float[Tensor, "functions F"],
        gradient: Float[Tensor, "functions inputs dim"],
        hidden: Sequence[Tensor] = (),
    ) -> tuple[Float[Tensor, "functions inputs dim"], Float[Tensor, "functions F"]]:
        """Returns the gradients of the inputs and of the functions.

        Args:
            inputs: The inputs of each function.
            packed: The numbers of each function.
            gradient: The gradient of the outputs.
            hidden: The values that :meth:`forward` appended; unless given, they are computed again.
        """
        layers = self._unpack(packed, inputs.shape[2])
        layer_inputs, pullbacks = [inputs], []
        for (weight, bias), saved in zip_longest(layers[:-1], hidden):
            if saved is None:
                saved = save_for_backward(self.activation, torch.baddbmm(bias, layer_inputs[-1], weight))
            values, pullback = pull_back(self.activation, saved)
            layer_inputs.append(values)
            pullbacks.append(pullback)
        pieces: list[Tensor] = []
        for (weight, _), values in zip(reversed(layers), reversed(layer_inputs), strict=True):
            pieces[:0] = [torch.bmm(values.mT, gradient).flatten(1), gradient.sum(1)]
            gradient = torch.bmm(gradient, weight.mT)
            if pullbacks:
                gradient = pullbacks.pop()(gradient)
        return gradient, torch.cat(pieces, dim=1)

    def _widths(self, dim: int) -> list[int]:
        """Returns how many numbers each matrix and each bias have, in the order in which they are packed."""
        return [width for n_in, n_out in self.layers(dim) for width in (n_in * n_out, n_out)]

    def _unpack(self, packed: Tensor, dim: int) -> list[tuple[Tensor, Tensor]]:
        """Returns the weight [functions, in, out] and the bias [functions, 1, out] of each layer, as views."""
        ends = list(accumulate(self._widths(dim)))
        # torch.fx traces it, for which a split has no known number of pieces
        pieces = [packed.narrow(1, start, end - start) for start, end in pairwise([0, *ends])]
        return [
            (weight.view(-1, n_in, n_out), bias.unsqueeze(1))
            for (n_in, n_out), weight, bias in zip(self.layers(dim), pieces[::2], pieces[1::2], strict=True)
        ]
