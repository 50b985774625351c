"""Entire Space Multi-task Model (ESMM, Ma et al., SIGIR 2018): clicks, and conversions after clicks.

A conversion follows a click and is observed only in clicked rows. A tower trained on clicked rows alone is biased,
because it predicts for all rows. ESMM has two towers over shared vectors, with logits a and b, and trains both on all
rows, by a click and by a click with a conversion (equation 3)::

    pCTR = sigmoid(a)      pCVR = sigmoid(b)      pCTCVR = pCTR pCVR

A model's outputs are logits. Of pCTCVR it is, with no probability that rounds to 0 or 1::

    log pCTCVR - log(1 - pCTCVR) = -log((1 + exp(-a)) (1 + exp(-b)) - 1) = -log(exp(-a) + exp(-b) + exp(-a - b))

pCVR of a row is the quotient of the two predicted probabilities.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.schema import Schema
from distembed.models.esmm_config import ESMMConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import LabelTowers
from distembed.models.vectors import FeatureVectorModel


class ESMM(FeatureVectorModel):
    """Two towers: logits of pCTR and pCTCVR, each in the place of its label."""

    def __init__(self, inputs: ModelInputs, config: ESMMConfig) -> None:
        super().__init__(inputs, config.soft_one_hot)
        names = _two_labels(inputs.schema)
        self.clicks_first = config.click is None or one_of("model.click", config.click, names) == names[0]
        self.towers = LabelTowers(self.num_inputs, 2, config.deep, config.dropout)

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, "batch labels"]:
        inputs = vectors.flatten(1)
        towers = self.towers([inputs, inputs])
        towers = towers.to(torch.promote_types(towers.dtype, torch.float32))  # the sums below are not rounded to bf16
        click = towers[:, 0]
        both = logit_of_both(click, towers[:, 1])
        return torch.stack([click, both] if self.clicks_first else [both, click], dim=1)


def logit_of_both(first: Float[Tensor, " batch"], second: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Returns the logit of the product of two probabilities, given their logits."""
    return -torch.stack([-first, -second, -first - second]).logsumexp(0)


def _two_labels(schema: Schema) -> tuple[str, ...]:
    """Returns the names of the labels: of a click and a conversion.

    Raises:
        UserError: There are not two labels, or one is a number.
    """
    kinds = {label.name: label.kind for label in schema.all_labels}
    if len(kinds) != 2 or "number" in kinds.values():
        shown = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(
            f"model.name is 'esmm', which takes two binary labels, of a click and of a conversion, and the labels are "
            f"{shown or 'none'}; choose two by task.labels, such as task.labels={{click: {{}}, conversion: {{}}}}."
        )
    return tuple(kinds)
