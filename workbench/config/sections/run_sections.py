"""All sections of a run. Every field says its unit; every default is what a good first run would use."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, SerializeAsAny
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from workbench.adapters import Lora, Method
from workbench.config import (
    freeze_policies,  # noqa: F401 - makes freeze.policy known
    task_facts,
)
from workbench.config.freeze_config import FreezeConfig
from workbench.config.sections.audio_config import AudioConfig
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
from workbench.config.sections.embed_config import EmbedConfig, RerankConfig
from workbench.config.sections.fleet_config import FleetConfig
from workbench.config.sections.folds_config import DuplicatesConfig, EnsembleConfig, FoldsConfig
from workbench.config.sections.grow_config import GrowConfig
from workbench.config.sections.image_config import ImageConfig, MediaConfig
from workbench.config.sections.layer_and_token_drop_config import LayerDropConfig, TokenDropConfig
from workbench.config.sections.optimizer_config import OptimizerConfig
from workbench.config.sections.prefer_config import PreferConfig
from workbench.config.sections.pseudo_label_config import PseudoLabelConfig
from workbench.config.sections.regularise_config import RegulariseConfig
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.config.sections.rewards_config import RewardConfig, RewardSource
from workbench.config.sections.rounds_config import RoundsConfig
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.config.sections.search_config import SearchConfig, SweepConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.config.task_facts import OverFacts, TaskFacts
from workbench.schema import CodeFile, Section, did_you_mean

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]
"""Services of metrics."""


S = TypeVar("S", bound=Section)


class _Names:
    """Known names as the values of a field in the JSON schema, which is made when every task has registered."""

    def __init__(self, *, over: bool) -> None:
        self._over = over

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        names = [*task_facts.TASKS, *(task_facts.OVER if self._over else ())]
        schema = handler(core_schema)
        return {**schema, "enum": names} if self._over else {**schema, "anyOf": [{"enum": names}, {"type": "null"}]}


def _known(recipe: str) -> str:
    known = [*task_facts.TASKS, *task_facts.OVER]
    if recipe not in known:
        raise ValueError(f"unknown recipe {recipe!r}." + did_you_mean(recipe, known))
    return recipe


def _known_task(of: str | None) -> str | None:
    if of is not None and of not in task_facts.TASKS:
        raise ValueError(f"unknown task {of!r}." + did_you_mean(of, list(task_facts.TASKS)))
    return of


class CommonSections(Section):
    """Sections that every part of a run reads: its recipe, model, adapter and rows."""

    recipe: Annotated[str, AfterValidator(_known), _Names(over=True)]
    """What is done: a task that one adapter learns, or a recipe over a task, which `of` names."""
    of: Annotated[str | None, AfterValidator(_known_task), _Names(over=False)] = None
    """The task of a recipe over tasks (folds, sweeps, searches, fleets, students); null: the recipe's usual one."""
    plugins: tuple[CodeFile, ...] = ()
    """Python files of yours, run first, that add adapter methods or tasks. Only files you trust."""
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
    audio: AudioConfig = AudioConfig()

    @property
    def over(self) -> OverFacts | None:
        """Facts about the recipe, where it is one over tasks."""
        return task_facts.OVER.get(self.recipe)

    @property
    def task(self) -> TaskFacts:
        """Facts about what is learnt."""
        over = self.over
        return task_facts.TASKS[self.recipe if over is None else self.of or over.of]

    @property
    def reader(self) -> TaskFacts:
        """Facts about the task that reads the files, which of a recipe over tasks may be another one."""
        over = self.over
        return self.task if over is None or over.read_by is None else task_facts.TASKS[over.read_by]

    @property
    def sections_of_others(self) -> dict[str, list[str]]:
        """Sections that only other recipes read, with their names; all values in them are defaults."""
        readers: dict[str, list[str]] = {}
        for recipe, sections in task_facts.sections():
            for name in sections:
                readers.setdefault(name, []).append(recipe)
        for facts in task_facts.TASKS.values():
            if facts.section is not None:
                readers[facts.name] = [facts.name]
        own = {self.task.name, *self.task.sections, *(self.over.sections if self.over else ())}
        return {name: recipes for name, recipes in readers.items() if name not in own}

    @property
    def rows_seed(self) -> int:
        """Start of the random numbers that decide how rows are read."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def crossvalidates(self) -> bool:
        """Whether every labelled row is held out once, and stages that are judged by these rows follow."""
        return self.over is not None and self.over.folds and self.task.labelled

    @property
    def has_members(self) -> bool:
        """Whether the run consists of others, each of which is one that could be started by itself."""
        return self.over is not None and self.over.members is not None and not self.crossvalidates

    def as_task(self) -> dict[str, Any]:
        """Values of `recipe` and `of` with which one member is a run of its own."""
        return {"recipe": self.task.name, "of": None}

    def given(self, key: str) -> bool:
        """Whether a setting by its dotted key, or any of a section's, is not its default."""
        *sections, last = key.split(".")
        section: Section = functools.reduce(getattr, sections, self)
        return section.differs(last)

    def section(self, kind: type[S]) -> S:
        """The section that a task declares in its own file."""
        return next(value for _, value in self if isinstance(value, kind))

    @property
    def reads_pictures(self) -> bool:
        """Whether rows are labelled pictures rather than text."""
        return self.data.format == "image"

    @property
    def reads_sound(self) -> bool:
        """Whether rows are recordings rather than text."""
        return self.data.format == "audio"

    @property
    def media(self) -> MediaConfig | None:
        """How files are read that rows hold in place of texts; None where rows are texts."""
        return self.image if self.reads_pictures else self.audio if self.reads_sound else None


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
    rounds: RoundsConfig = RoundsConfig()
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
    def steps_on_rows(self) -> int:
        """Optimizer steps one after another on the same rows."""
        return self.task.steps_on_rows(self)

    @property
    def rows_of_draw(self) -> int:
        """Rows that the model reads for each example that a step draws."""
        return self.task.rows_of_draw(self)

    @property
    def refits(self) -> bool:
        """Whether a cross-validation ends with an adapter on all rows."""
        if self.over is None or not self.over.folds:
            return False
        alone = not self.task.labelled and not self.task.averages(self)
        return alone if self.folds.refit is None else self.folds.refit
