"""The config of a run: sections beside what they configure, read from YAML and overrides."""

from distembed.config.config import Config, input_paths, load_config, require_plugins, validate, with_absolute_paths
from distembed.config.train import TrainConfig

__all__ = ["Config", "TrainConfig", "input_paths", "load_config", "require_plugins", "validate", "with_absolute_paths"]
