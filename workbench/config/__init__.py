"""A run's configuration: typed sections, cross-checks, and loading from YAML."""

from workbench.config.run_config import (
    BatchConfig,
    DataConfig,
    EvaluateConfig,
    Every,
    MaskingConfig,
    ModelConfig,
    RunConfig,
    SaveConfig,
    Share,
    TrainConfig,
    load_config,
)

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
