"""A run's configuration: typed sections, cross-checks, and loading from YAML."""

from workbench.config import task_facts
from workbench.config.run_config import RunConfig, accept, load_config
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

# Facts of the tasks stand in the layer above, so they are imported by name, once configurations are there to take them.
task_facts.load_all()
task_facts.on_register(accept)
