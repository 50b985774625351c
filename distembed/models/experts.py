"""Mixtures of experts for several labels: MMoE (Ma et al., KDD 2018) and PLE (Tang et al., RecSys 2020).

An expert is a network over the vectors x of all features. Label k has a gate, which mixes the experts' outputs E(x) by
``softmax(W_k x)``, and a tower, a network that turns the mixture into the label's logit (MMoE, equations 5 to 7)::

    logit_k = tower_k(sum_i softmax(W_k x)_i E_i(x))

PLE gives each label experts of its own too, which its gate alone sees beside the shared ones, and stacks these levels
(section 4). Of two labels A and B::

    inputs of a level     experts         gate of A mixes     shared gate mixes     gate of B mixes
    A's                   A's own         x                   x
    shared                shared          x                   x                     x
    B's                   B's own                             x                     x

The three mixtures are the inputs of the next level; the inputs of the first level are all x. The last level has no
shared gate. One level without own experts is MMoE. Trade-off: each expert costs a network; in exchange labels that
contradict one another disturb each other less than in one shared network.
"""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distembed.models.experts_config import ExpertsConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP, LabelTowers
from distembed.models.vectors import FeatureVectorModel


class Level(nn.Module):
    """A level of experts: maps an input for each label, and one for the shared experts, to their mixtures.

    Args:
        in_features: Numbers of each input.
        num_labels: Number of labels.
        config: Sizes and dropout of an expert.
        num_shared: Number of experts that all labels share.
        num_specific: Number of experts of each label alone.
        is_last: Whether no level follows, for whose shared experts a mixture would be made.
    """

    def __init__(
        self,
        in_features: int,
        num_labels: int,
        config: ExpertsConfig,
        num_shared: int,
        num_specific: int,
        is_last: bool,
    ) -> None:
        super().__init__()

        def make_experts(number: int) -> nn.ModuleList:
            return nn.ModuleList(MLP(in_features, config.deep, dropout=config.dropout) for _ in range(number))

        self.shared = make_experts(num_shared)
        self.specific = nn.ModuleList(make_experts(num_specific) for _ in range(num_labels))
        num_seen = [num_specific + num_shared] * num_labels
        num_seen += [] if is_last else [num_labels * num_specific + num_shared]
        gates = [nn.Linear(in_features, number, bias=False) for number in num_seen]
        for gate in gates:
            nn.init.xavier_normal_(gate.weight)
        self.gates = nn.ModuleList(gates)

    def forward(self, inputs: Sequence[Float[Tensor, "batch in"]]) -> list[Float[Tensor, "batch out"]]:
        """Returns the mixture of each label, then, unless it is the last level, the mixture for shared experts."""
        shared = [expert(inputs[-1]) for expert in self.shared]
        specific = [
            [expert(own) for expert in cast(nn.ModuleList, experts)]
            for experts, own in zip(self.specific, inputs[:-1], strict=True)
        ]
        seen = [[*own, *shared] for own in specific]
        seen.append([*(output for own in specific for output in own), *shared])
        # without a gate for shared experts, the last inputs and outputs are left over
        return [mix(gate(own), outputs) for gate, own, outputs in zip(self.gates, inputs, seen, strict=False)]


def mix(
    gate_logits: Float[Tensor, "batch experts"], outputs: Sequence[Float[Tensor, "batch out"]]
) -> Float[Tensor, "batch out"]:
    """Returns the mean of the experts' outputs, weighted by the softmax of a gate."""
    return torch.bmm(gate_logits.softmax(dim=1).unsqueeze(1), torch.stack(list(outputs), dim=1)).squeeze(1)


class ExpertNetwork(nn.Module):
    """Levels of experts and a tower for each label: maps vectors [batch, in] to logits [batch, labels]."""

    def __init__(self, levels: Sequence[Level], towers: LabelTowers) -> None:
        super().__init__()
        self.levels, self.towers = nn.ModuleList(levels), towers

    def forward(self, vectors: Float[Tensor, "batch in"]) -> Float[Tensor, "batch labels"]:
        inputs = [vectors] * (len(self.towers) + 1)
        for level in self.levels:
            inputs = level(inputs)
        logits: Tensor = self.towers(inputs)
        return logits


class Experts(FeatureVectorModel):
    """Experts over the vectors of all features, with gates and a tower for each label of the dataset."""

    def __init__(
        self,
        inputs: ModelInputs,
        config: ExpertsConfig,
        num_shared: int,
        num_specific: int = 0,
        num_levels: int = 1,
    ) -> None:
        super().__init__(inputs, config.soft_one_hot)
        num_labels, width = inputs.num_labels, config.deep[-1]
        levels = [
            Level(
                width if number else self.num_inputs,
                num_labels,
                config,
                num_shared,
                num_specific,
                is_last=number == num_levels - 1,
            )
            for number in range(num_levels)
        ]
        self.network = ExpertNetwork(levels, LabelTowers(width, num_labels, config.tower, config.dropout))

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch labels"]:
        logits: Tensor = self.network(vectors.flatten(1))
        return logits
