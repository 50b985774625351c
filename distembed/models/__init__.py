"""Models, which are unaware of ranks: each is a network and its section of a config, listed in a name table.

A model of your own is a config with ``name`` and ``build``, which a plugin registers by ``MODELS["mine"] = MyConfig``;
see :class:`distembed.models.ModelConfig`.
"""

from typing import TYPE_CHECKING, Annotated

from distembed.base.lazy import NameTable, imports_on_demand
from distembed.base.names import ByName
from distembed.models.config import ModelConfig, SoftOneHotConfig
from distembed.models.dcn_config import DCNConfig
from distembed.models.dcnv2_config import DCNv2Config, GDCNConfig
from distembed.models.deepfm_config import DeepFMConfig
from distembed.models.din_config import DINConfig
from distembed.models.dlrm_config import DLRMConfig
from distembed.models.esmm_config import ESMMConfig
from distembed.models.experts_config import MMoEConfig, PLEConfig
from distembed.models.finalmlp_config import FinalMLPConfig
from distembed.models.gru_config import GRUConfig
from distembed.models.hstu_config import HSTUConfig
from distembed.models.mf_config import MFConfig
from distembed.models.sasrec_config import SASRecConfig
from distembed.models.two_tower_config import TwoTowerConfig

if TYPE_CHECKING:
    from distembed.models.base import Model
    from distembed.models.dcn import DCN
    from distembed.models.dlrm import DLRM
    from distembed.models.inputs import ModelInputs
    from distembed.models.mf import MF
    from distembed.models.next_items import NextItems
    from distembed.models.soft_one_hot import SoftOneHot, SoftOneHotSum
    from distembed.models.two_tower import TwoTower

MODELS: NameTable[type[ModelConfig]] = NameTable(
    {
        "dlrm": DLRMConfig,
        "dcn": DCNConfig,
        "dcnv2": DCNv2Config,
        "gdcn": GDCNConfig,
        "deepfm": DeepFMConfig,
        "finalmlp": FinalMLPConfig,
        "din": DINConfig,
        "mmoe": MMoEConfig,
        "ple": PLEConfig,
        "esmm": ESMMConfig,
        "mf": MFConfig,
        "sasrec": SASRecConfig,
        "gru": GRUConfig,
        "hstu": HSTUConfig,
        "two_tower": TwoTowerConfig,
    }
)
"""Config class by model name."""

ModelSection = Annotated[ModelConfig, ByName(MODELS, "model", default="dlrm")]
"""The ``model`` section of a config, whose key ``name`` says which model it configures."""

__all__ = [
    "DCN",
    "DCNConfig",
    "DCNv2Config",
    "DINConfig",
    "DLRM",
    "DLRMConfig",
    "DeepFMConfig",
    "ESMMConfig",
    "FinalMLPConfig",
    "GDCNConfig",
    "GRUConfig",
    "HSTUConfig",
    "MF",
    "MFConfig",
    "MMoEConfig",
    "MODELS",
    "Model",
    "ModelConfig",
    "ModelInputs",
    "ModelSection",
    "NextItems",
    "PLEConfig",
    "SASRecConfig",
    "SoftOneHot",
    "SoftOneHotConfig",
    "SoftOneHotSum",
    "TwoTower",
    "TwoTowerConfig",
]
__getattr__ = imports_on_demand(__name__)
