"""All sections of a run. Every field says its unit; every default is what a good first run would use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from workbench.adapters import Lora, Method
from workbench.config import (
    freeze_policies,  # noqa: F401 - makes freeze.policy known
    plugins,
)
from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.average_config import AverageConfig
from workbench.config.sections.basic_sections import (
    BatchConfig,
    DataConfig,
    EvaluateConfig,
    MaskingConfig,
    ModelConfig,
    SaveConfig,
    TrainConfig,
)
from workbench.config.sections.budget_config import BudgetConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.correction_config import CorrectionConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.config.sections.embed_config import EmbedConfig
from workbench.config.sections.fleet_config import FleetConfig
from workbench.config.sections.folds_config import DuplicatesConfig, EnsembleConfig, FoldsConfig
from workbench.config.sections.grow_config import GrowConfig
from workbench.config.sections.image_config import ImageConfig
from workbench.config.sections.layer_drop_config import LayerDropConfig
from workbench.config.sections.optimizer_config import OptimizerConfig
from workbench.config.sections.prefer_config import PreferConfig
from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.config.sections.regularise_config import RegulariseConfig
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.config.sections.rerank_config import RerankConfig
from workbench.config.sections.reward_config import RewardConfig
from workbench.config.sections.rewards_config import RewardSource
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.config.sections.search_config import SearchConfig
from workbench.config.sections.sweep_config import SweepConfig
from workbench.config.sections.token_drop_config import TokenDropConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.schema import Section

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]
"""Services of metrics."""


class CommonSections(Section):
    """Sections that every part of a run reads: its recipe, model, adapter and rows."""

    recipe: Literal[
        "sft",
        "mlm",
        "prefer",
        "classify",
        "crossval",
        "sweep",
        "search",
        "fleet",
        "distill",
        "embed",
        "rerank",
        "reward",
        "reinforce",
    ]
    """Which file of `recipes/` runs this."""
    plugins: tuple[Path, ...] = ()
    """Python files of yours, run first, that add adapter methods. Only files you trust."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Start of every random number: order of rows, fresh weights, dropout, folds."""
    model: ModelConfig = ModelConfig()
    adapter: SerializeAsAny[Method] = Lora()
    """Parameters that train over the backbone: a method, with settings of its own."""
    data: DataConfig
    masking: MaskingConfig = MaskingConfig()
    prefer: PreferConfig = PreferConfig()
    classes: ClassesConfig = ClassesConfig()
    image: ImageConfig = ImageConfig()

    @property
    def reads_pictures(self) -> bool:
        """Whether rows are labelled pictures rather than text."""
        return self.data.format == "image"

    @model_validator(mode="before")
    @classmethod
    def _plugins_first(cls, values: Any) -> Any:
        """The methods that a plugin adds must be known before the adapter section is read."""
        paths = values.get("plugins") if isinstance(values, dict) else None
        if isinstance(paths, (list, tuple)) and all(isinstance(path, (str, Path)) for path in paths):
            plugins.load(paths)
        return values


class TrainingSections(CommonSections):
    """Sections that a training reads. Trainers get no more: none of them asks about folds, teachers or rewards."""

    batch: BatchConfig = BatchConfig()
    train: TrainConfig = TrainConfig()
    regularise: RegulariseConfig = RegulariseConfig()
    """Noise and penalties while training: NEFTune, stochastic depth, label smoothing, mixout, R-Drop and more."""
    layer_drop: LayerDropConfig = LayerDropConfig()
    """Blocks that are left out of a step at random."""
    token_drop: TokenDropConfig = TokenDropConfig()
    """Tokens that the blocks in the middle do not compute."""
    grow: GrowConfig = GrowConfig()
    """A backbone that begins with its first blocks and is stacked to all of them."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    budget: BudgetConfig = BudgetConfig()
    freeze: SerializeAsAny[FreezeConfig] = FreezeConfig()
    """Layers that train in a step: a policy, with settings of its own."""
    average: AverageConfig = AverageConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    save: SaveConfig = SaveConfig()
    distributed: DistributedConfig = DistributedConfig()
    trackers: tuple[Tracker, ...] = ()
    """Where metrics are sent besides metrics.jsonl; nothing is sent anywhere unless named here."""

    @property
    def steps_on_rows(self) -> int:
        """Optimizer steps one after another on the same rows."""
        return 1

    @property
    def rows_of_draw(self) -> int:
        """Rows that the model reads for each example that a step draws."""
        return 1

    @property
    def by_block(self) -> bool:
        """Whether something depends on which block of the backbone comes after which."""
        ordered = self.freeze.policy != "none" or self.optimizer.layer_decay < 1
        thinned = self.layer_drop.is_on or self.token_drop.is_on or self.regularise.stochastic_depth > 0
        return ordered or thinned or self.grow.is_on


class TaskSections(CommonSections):
    """Sections of what recipes do with trainings: folds, stages, members of a sweep or fleet, a student, rewards."""

    duplicates: DuplicatesConfig = DuplicatesConfig()
    folds: FoldsConfig = FoldsConfig()
    pseudo_label: PseudoLabelConfig = PseudoLabelConfig()
    tta: TtaConfig = TtaConfig()
    correction: CorrectionConfig = CorrectionConfig()
    ensemble: EnsembleConfig = EnsembleConfig()
    sweep: SweepConfig = SweepConfig()
    search: SearchConfig = SearchConfig()
    fleet: FleetConfig = FleetConfig()
    distill: DistillConfig = DistillConfig()
    embed: EmbedConfig = EmbedConfig()
    rerank: RerankConfig = RerankConfig()
    reward: RewardConfig = RewardConfig()
    rewards: tuple[SerializeAsAny[RewardSource], ...] = ()
    """How good answers are: the weighted sum of these. Each has a kind: function, number, regex, json, unit_tests or
    model."""
    reinforce: ReinforceConfig = ReinforceConfig()


class RunSections(TrainingSections, TaskSections):
    """The sections of a run, each valid by itself; `RunConfig` adds that they go together."""

    @property
    def labelled(self) -> bool:
        """Whether the run, or each member of several, learns the labels of rows rather than tokens."""
        named = {
            "sweep": self.sweep.of,
            "search": self.search.of,
            "fleet": self.fleet.of,
            "distill": self.distill.of,
        }
        return named.get(self.recipe, self.recipe) in ("classify", "crossval")

    @property
    def steps_on_rows(self) -> int:
        """Optimizer steps one after another on the same rows."""
        return self.reinforce.updates if self.recipe == "reinforce" else 1

    @property
    def rows_of_draw(self) -> int:
        """Rows that the model reads for each example that a step draws."""
        return self.reinforce.answers if self.recipe == "reinforce" and not self.reinforce.pairs else 1
