"""A run that trains a reward model, whatever it learns from: rows are a subclass's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from workbench.adapters import anatomy
from workbench.config import RunConfig
from workbench.data.held_out_split import Splits
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.media import MediaProcessor
from workbench.models import reward_model
from workbench.models.backbones import Backbone
from workbench.models.reward_model import RewardModel
from workbench.recipes.single.single_run import Rows, SingleRun
from workbench.recipes.tasks.sft.text_run import conversations
from workbench.runs import files, provenance
from workbench.runs.run_directory import Run

SPLITS = ("train", "held_out", "test")


class DescribedRows(Rows, Protocol):
    """Rows with facts for the manifest."""

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""


R = TypeVar("R", bound=DescribedRows)


@dataclass(frozen=True)
class RatingRun(SingleRun[RewardModel, R], ABC):
    """A run whose model has a head of one output."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatEncoder

    def note_rows(self) -> None:
        """Note facts about the rows, and the scores of the baseline."""
        provenance.note_data(
            self.run, dict.fromkeys(SPLITS) | {name: split.facts() for name, split in self.rows.items()}
        )
        files.write_json(self.run.path / "before.json", {"scores": self.baseline()})

    @abstractmethod
    def baseline(self) -> dict[str, float]:
        """Scores of a model that rates all held-out rows alike."""

    @property
    def vocabulary(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    def assemble(self, model: nn.Module, backbone: Backbone) -> RewardModel:
        return reward_model.make(model, backbone.model, self.tokenizer, self.template, self.config)

    def width(self, live: RewardModel) -> int:
        return anatomy.hidden_size(live.classifier.backbone.config)

    def save(self, live: RewardModel, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
        reward_model.save(live, folder, adapter=adapter)

    @property
    def splits(self) -> Any:
        return Splits(*(self.rows.get(name) for name in SPLITS))

    def packs(self, live: RewardModel) -> bool:
        return live.classifier.reads_packed(self.config.adapter) and (self.media is None or self.media.packs)

    @property
    def media(self) -> MediaProcessor | None:
        return self.template.processor if self.pictured else None

    @property
    @abstractmethod
    def pictured(self) -> bool:
        """Whether any training row has pictures."""

    def as_member(self, config: RunConfig, run: Run) -> Self:
        own = super().as_member(config, run)
        own.note_rows()
        return own

    def load(self) -> RewardModel:
        return load(self.run.home, self.config, waiting=self.placement.waiting)


def load(run: Path, config: RunConfig, *, waiting: bool = False) -> RewardModel:
    """The reward model that the run at `run` shipped."""
    return reward_model.load(run, config, lambda tokenizer: conversations(config, tokenizer), waiting=waiting)
