"""The section of the model ``esmm``."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Widths
from distembed.models.config import FeatureVectorConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.inputs import ModelInputs


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ESMMConfig(FeatureVectorConfig):
    """The section of :class:`distembed.models.esmm.ESMM`; dropout is in both towers.

    Attributes:
        name: The model's name, ``esmm``.
        click: Name of the label of clicks; the other of the two labels is the conversion. Null for the label that the
            conversion's ``task.labels.NAME.after`` names; for a model built without a task, the first label.
        deep: Hidden sizes of each tower.
    """

    returns: ClassVar[str] = "multi_logits"
    name: Literal["esmm"] = "esmm"
    click: Annotated[str, Field(min_length=1)] | None = None
    deep: Widths = field(default_factory=lambda: [512, 256])

    def build(self, inputs: "ModelInputs") -> "Model":
        """Builds the model over all features of the dataset, which needs two labels of 0 and 1."""
        from distembed.models.esmm import ESMM

        return ESMM(inputs, self)
