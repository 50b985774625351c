"""Models, which are unaware of ranks: each is a file with its config beside it, listed in a name table.

``base.py`` says what a model and its config are, and ``inputs.py`` what they are built from; ``embedded.py``,
``interaction.py`` and ``mlp.py`` are the layers that models share.

A model of one's own is a config with ``name`` and ``build``, registered by ``MODELS["mine"] = MyConfig``; see
:mod:`distembed.models.base`.
"""

from typing import Annotated

from distembed.models.base import Model, ModelConfig
from distembed.models.dcn import DCN, DCNConfig
from distembed.models.dlrm import DLRM, DLRMConfig
from distembed.models.inputs import ModelInputs
from distembed.names import ByName

MODELS: dict[str, type[ModelConfig]] = {"dlrm": DLRMConfig, "dcn": DCNConfig}
"""Config class by model name."""

ModelSection = Annotated[ModelConfig, ByName(MODELS, "model", default="dlrm")]
"""The ``model`` section of a config, whose key ``name`` says which model it configures."""

__all__ = ["DCN", "MODELS", "DCNConfig", "DLRM", "DLRMConfig", "Model", "ModelConfig", "ModelInputs", "ModelSection"]
