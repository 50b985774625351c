"""The section of the model ``mf``."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.errors import UserError
from distembed.base.names import STRICT
from distembed.data.dataset.schema import ITEM, USER

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MFConfig:
    """The section of :class:`distembed.models.MF`; the dimension of the vectors is that of the embeddings.

    Attributes:
        biases: Whether users and items have biases, which are the last numbers of their vectors.
        dropout: Share of a vector's numbers, biases excepted, that are dropped in training.
    """

    returns: ClassVar[str] = "pairs"
    name: Literal["mf"] = "mf"
    biases: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over users and items, without features of other columns.

        Raises:
            UserError: The dataset has no users or no items, an id has several vectors, or a vector has a bias alone.
        """
        from distembed.embedding.share import require_one_vector
        from distembed.models.mf import MF

        for name in (USER, ITEM):
            if name not in inputs.schema.categorical_names:
                raise UserError(
                    f"MF takes the categorical features {USER!r} and {ITEM!r}, and this dataset has "
                    f"{', '.join(inputs.schema.categorical_names) or 'none'}; make one with `distembed prepare "
                    "ratings`."
                )
            require_one_vector(inputs.table(name))
        if self.biases and inputs.embedding_dim < 2:
            raise UserError(
                "embedding.default.embedding_dim is 1, and with model.biases the last number of a vector is its bias; "
                "set at least 2, or model.biases to false."
            )
        several = {feature.name for feature in inputs.schema.categorical if feature.multi_hot}
        looked_up = {*inputs.table(USER).feature_names, *inputs.table(ITEM).feature_names}
        # with one id a row a pooled lookup gives the same vectors, and does less
        is_pooled = not several & looked_up
        embeddings, _ = (inputs.pooled_embeddings if is_pooled else inputs.sequence_embeddings)([USER, ITEM])
        return MF(embeddings, is_pooled, inputs.table(ITEM), self.biases, self.dropout)
