"""A run's configuration: typed sections, cross-checks, and loading from YAML."""

from workbench.config.basic_sections import (
    BatchConfig,
    DataConfig,
    EvaluateConfig,
    Every,
    MaskingConfig,
    ModelConfig,
    SaveConfig,
    Share,
    TrainConfig,
)
from workbench.config.run_config import RunConfig, load_config

__all__ = [
    "BatchConfig",
    "DataConfig",
    "EvaluateConfig",
    "Every",
    "MaskingConfig",
    "ModelConfig",
    "RunConfig",
    "SaveConfig",
    "Share",
    "TrainConfig",
    "load_config",
]
