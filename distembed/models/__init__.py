"""Click-through models, unaware of ranks: any module that maps a KeyedJaggedTensor to a KeyedTensor feeds them."""

from distembed.models.config import MODELS, ModelConfig, build_model
from distembed.models.dcn import DCN
from distembed.models.dlrm import DLRM

__all__ = ["DCN", "DLRM", "MODELS", "ModelConfig", "build_model"]
