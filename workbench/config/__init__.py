"""A run's configuration: typed sections, cross-checks, and loading from YAML."""

from workbench.config.run_config import RunConfig, load_config
from workbench.config.sections.basic_sections import (
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
from workbench.config.sections.run_sections import TrainingSections

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
    "TrainingSections",
    "load_config",
]
