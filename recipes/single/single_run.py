"""A run of one adapter, from a backbone to scores of what was saved; subclasses say what differs between tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from workbench import adapters, report
from workbench.adapters import Full, Method
from workbench.config import RunConfig, model_heads
from workbench.config.model_heads import ModelHead
from workbench.data.batching import Examples, Indices, MicroBatch, first_rows
from workbench.data.text.media import MediaProcessor
from workbench.evaluation import GeneratedAnswer
from workbench.evaluation.forward_passes import ModelResults, stored_results
from workbench.evaluation.generation import AnswerSamples
from workbench.models import backbones, model_sizes, picture_features
from workbench.models.backbones import Backbone, Loader
from workbench.runs import (
    deadline,
    evaluation_request,
    files,
    freezing_cost,
    process_memory,
    run_directory,
    score_files,
)
from workbench.runs.run_directory import Run
from workbench.training import kernels
from workbench.training.callbacks import Callback
from workbench.training.distributed.placement import Placement, Reading
from workbench.training.freezing import freezer as freezing
from workbench.training.freezing.freezer import Freezer, LayerLog
from workbench.training.signal import ProgressClock, TrainingSignal
from workbench.training.trainer import Trainer

if TYPE_CHECKING:
    import pandas as pd

SAMPLE_TOKENS = 1024
"""Padded tokens of held-out rows that tell how long scoring takes, where nothing was scored before training."""
PLAIN = {"after": "plain", "test": "plain_test"}
"""Names in scores.json of what rows that are read once score, beside those that are read in views."""
Scores = dict[str, Any]


class Rows(Examples, Protocol):
    """Rows, of which some can be taken."""

    def subset(self, keep: Indices) -> Self:
        """Those that `keep` indexes."""


class Scorable(Protocol):
    """A backbone with what was trained on it, and what scoring needs."""

    @property
    def model(self) -> nn.Module:
        """The two together."""


class Scored(NamedTuple):
    """Scores of a split by name, and outputs for each of its rows."""

    scores: dict[str, float]
    outputs: Any


M = TypeVar("M", bound=Scorable)
R = TypeVar("R", bound=Rows)
Supervise = Callable[[M, Backbone, Callable[[], float]], TrainingSignal]
"""From the model that trains, the backbone under it, and the share of the run that is done."""


@dataclass(frozen=True)
class SingleRun(ABC, Generic[M, R]):
    """A run of one adapter, whose rows are read."""

    config: RunConfig
    run: Run
    callback: Callback
    loader: Loader = field(default=backbones.load, kw_only=True)
    reading: Callable[[nn.Module], Reading] | None = field(default=None, kw_only=True)
    """Reads the backbone before training in place of the layout: processes cut it once, and other runs score it too."""
    measured: Callable[[M], Mapping[str, Any]] | None = field(default=None, kw_only=True)
    """Entries of scores.json besides scores, measured with what was saved: what it costs to ask it."""

    def train(self, supervise: Supervise[M] | None = None, *, score_later: bool = False) -> None:
        """From a backbone to a saved adapter; everything live is freed on return.

        Args:
            supervise: What the model learns from; by default the labels of its rows.
            score_later: Leave the scores of the backbone, and its sample answers, to `finish`, so that the first step
                comes sooner, unless a clock has to know how long they take or processes cut the backbone to score it.
        """
        run, samples = self.run, AnswerSamples(self.run, self.sampled)
        later = score_later and not run.deadline.limited and not self.placement.cuts_weights
        backbone = self.backbone() if later else self.placement.unread(self.backbone, self.score_before)
        live, trainer = self.begun(backbone, supervise, samples)
        if run.ranks.first:
            LayerLog(run, trainer.freezer)
            if self.config.evaluate.every is not None and not any(run.checkpoints.glob("step-*")):
                samples.start_over() if later else samples.begin(live)
        with self.kept_outputs(backbone):
            trainer.work()
        evaluation_request.withdrawn(run.path)  # of a step that does not come: what is saved is scored now
        process_memory.settled()  # what the steps freed is given back before libraries of what is written come
        if trainer.visits is not None:
            from workbench.evaluation import (
                training_dynamics,  # with pandas, 0.2 s that the first step need not wait for
            )

            visits = trainer.visits.visits()
            if run.ranks.first:
                training_dynamics.write(run.path, visits, trainer.train, self.text)
        with trainer.final_values():
            if run.ranks.first:
                self.save(live, run.adapter)
        run.ranks.wait()

    def begun(
        self, backbone: Backbone, supervise: Supervise[M] | None = None, samples: AnswerSamples[M] | None = None
    ) -> tuple[M, Trainer]:
        """The frozen backbone under a trainable adapter, and its training before the first step.

        Args:
            supervise: See `train`.
            samples: Keeps what the model answers at each evaluation.
        """
        config = self.config
        layers = freezing.layers_of(backbone.model, config)
        model = self.adapted(backbone, blocks=len(layers.blocks))
        freezer = Freezer(model, backbone.model, layers, config.freeze, seed=config.seed)
        facts = model_sizes.model_facts(config, backbone, model)
        if isinstance(config.adapter, Full) and Path(config.model.id).parent == self.run.home.resolve():
            facts["id"] = str(self.run.adapter)  # where it stands once the run has ended, and its start is deleted
        self.run.note(model=facts)
        live = self.assemble(model, backbone)
        self.plan_time(live)
        return live, self.trainer(backbone, freezer, live, supervise, samples)

    def adapted(self, backbone: Backbone, *, blocks: int) -> nn.Module:
        """The frozen backbone, of so many blocks, under a fresh adapter."""
        config = self.config
        return adapters.attach(
            backbone.model,
            self.adapter,
            seed=config.seed,
            new_token_ids=self.new_token_ids,
            sample=lambda: first_rows(self.rows["train"], seed=config.seed),
            below=config.freeze.never(blocks),
        )

    def trainer(
        self,
        backbone: Backbone,
        freezer: Freezer,
        live: M,
        supervise: Supervise[M] | None = None,
        samples: AnswerSamples[M] | None = None,
    ) -> Trainer:
        """The training of a backbone with a fresh adapter, not begun; arguments as in `begun`."""
        clock, parts = ProgressClock(), dict[str, float]()

        def held_out_loss() -> float:
            with self.run.deadline.phase("evaluation"):
                loss, metrics = self.held_out_loss(live)
            parts.update(metrics)
            if samples is not None and self.run.ranks.first:
                samples.take(live, step=trainer.member.progress.step)
            return loss

        trainer = Trainer(
            model=freezer.model,
            signal=(supervise or self.supervise)(live, backbone, clock),
            freezer=freezer,
            width=self.width(live),
            held_out=[self.rows["held_out"]],
            held_out_loss=held_out_loss,
            held_out_parts=parts,
            config=self.config,
            compute=backbone.compute,
            run=self.run,
            callback=self.callback,
            clock=clock,
        )
        return trainer

    def finish(self, more: Mapping[str, Any] | None = None) -> Scores:
        """Score what was saved: reload it, do not trust the live one.

        Args:
            more: Further scores to stand in scores.json.
        """
        run = self.run
        if not self.placement.scores:
            return {}
        self.callback.say("Scoring what was saved ...")
        process_memory.settled()  # what training took and freed is given back before libraries of scores come
        if self.placement.cuts_weights or (self.run.path / "before.json").exists():
            under = None
        else:
            backbone = self._load_backbone()
            start = self.untrained(backbone)
            assert start is not None, "of other recipes before.json says what nothing was learnt scores"
            self.callback.say("Scoring the backbone without its adapter ...")
            if self.run.ranks.first and self.config.evaluate.every is not None:
                AnswerSamples(self.run, self.sampled).take_untrained(start)
            self.write_before(start)
            process_memory.settled()
            under = None if isinstance(self.config.adapter, Full) else backbone
        with run.deadline.phase("load"):
            saved = self.load() if under is None else self.load_over(under)
        kernels.tile_mlps(saved.model, self.config)
        read = self.placement.reading(saved.model)
        scoring = stored_results(self.config, run, self.callback.stop_requested)
        splits = {"after": self.rows["held_out"]} | ({"test": self.rows["test"]} if "test" in self.rows else {})

        def score_splits() -> dict[str, Scored]:
            return {name: read(partial(self.score, saved, rows, scoring)) for name, rows in splits.items()}

        plain: dict[str, Scored] = {}
        if self.config.tta.wanted:
            self._write_decision(None)
            plain = score_splits()
            self._write_decision(read(partial(self.decide_views, saved, scoring)))
        viewed = run_directory.reads_views(run.path, self.config)
        scored = score_splits() if viewed or not plain else plain
        if not run.ranks.first:
            return {}
        before = files.read_json(run.path / "before.json")
        scores = {"before": before["scores"]} | {name: each.scores for name, each in scored.items()} | dict(more or {})
        if viewed:
            scores |= {PLAIN[name]: each.scores for name, each in plain.items()}
        scores |= self.beside(scored["after"].outputs)
        if self.config.freeze.policy != "none" and (frozen := freezing_cost.of_run(run.path)):
            scores[score_files.FREEZING] = frozen
        process_memory.settled()  # what scoring freed is given back before costs are measured and pages are drawn
        if self.measured is not None and not self.placement.cuts_weights and not run.deadline.limited:
            scores |= self.measured(saved)
        with run.deadline.phase("report"):
            files.write_json(run.path / "scores.json", scores)
            self.write_predictions(saved, scored["after"].outputs, before)
            if "test" in scored:
                table = self.predictions(saved, self.rows["test"], scored["test"].outputs, {})
                files.write_bytes(run.path / "test_predictions.parquet", table.to_parquet())
            run.note(status="done")
            scoring.store.clear()
            report.write(run.path)
        return scores

    def _write_decision(self, views: Mapping[str, Any] | None) -> None:
        """Write how the shipped model reads rows in views (`decide_views`), for all processes that score."""
        if self.run.ranks.first:
            files.write_json(self.run.path / "decision.json", {"tta": views})
        if self.placement.cuts_weights:
            self.run.ranks.wait()

    def backbone(self) -> Backbone:
        """The backbone that trains; on the host where processes share it."""
        backbone = self._load_backbone()
        self.callback.say(model_sizes.storage_summary(backbone, self.config.adapter))
        return backbone

    def _load_backbone(self) -> Backbone:
        with self.run.deadline.phase("load"):
            backbone = self.loader(
                self.config.model,
                self.vocabulary,
                task=self.task,
                trainable=isinstance(self.config.adapter, Full),
                waiting=self.placement.waiting,
            )
        kernels.tile_mlps(backbone.model, self.config)
        return backbone

    def plan_time(self, live: M | None = None, *, peers: int = 1) -> None:
        """Tell a clock with a limit what the run will do, and how long scoring takes.

        Args:
            live: Scores some rows, where nothing was scored so far.
            peers: Models that train together, the best of which is shipped.
        """
        clock, held_out = self.run.deadline, self.rows["held_out"]
        if not clock.limited:
            return
        test = int(self.rows["test"].lengths.sum()) if "test" in self.rows else 0
        clock.plan(deadline.plan(self.config, held_out=int(held_out.lengths.sum()), test=test, peers=peers))
        if live is not None and not self.run.ranks.agreed(clock.knows("scoring")):
            chosen = np.random.default_rng(0).permutation(len(held_out))
            some = held_out.subset(chosen[: max(1, SAMPLE_TOKENS // int(held_out.lengths.max()))])
            for _ in range(2):  # the first time is slower
                self.score(live, some)

    def scoring_time(self, rows: Rows) -> Any:
        """Inside it, the time for rows is measured, as a multiple of that for the held-out ones."""
        units = int(rows.lengths.sum()) / int(self.rows["held_out"].lengths.sum())
        return self.run.deadline.phase("scoring", units)

    @property
    def placement(self) -> Placement:
        """Where weights and gradients live."""
        return Placement(self.config.distributed, self.run.ranks)

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, R]:
        """`train`, `held_out`, and where there are such rows `test`."""

    @property
    @abstractmethod
    def vocabulary(self) -> PreTrainedTokenizerBase | None:
        """Decides how large the vocabulary is; None for a backbone that reads no text."""

    @property
    def task(self) -> ModelHead:
        """Head of the backbone, and the class of model that has it."""
        return model_heads.of(self.config)

    @property
    def adapter(self) -> Method:
        """The method that trains, with what it takes from the rows."""
        return self.config.adapter

    @property
    def new_token_ids(self) -> Sequence[int]:
        """Tokens whose embeddings train."""
        return ()

    def text(self, row: int) -> str:
        """A training row in words; empty where it has none."""
        return ""

    def score_before(self, backbone: Backbone) -> bool:
        """Score the backbone as it came, once in a run; returns whether it was, and so cut where processes share it."""
        start = self.untrained(backbone) if self.unscored else None
        if start is None:
            return False
        self.callback.say("Scoring the backbone ...")
        self.write_before(start)
        return True

    @property
    def unscored(self) -> bool:
        """Whether this process is to score what training starts from, which nobody did yet."""
        return not self.run.ranks.agreed((self.run.path / "before.json").exists()) and self.placement.scores

    def untrained(self, backbone: Backbone) -> M | None:
        """The start that scores are compared with, a backbone by itself; None where that says nothing."""
        return None

    def write_before(self, start: M) -> None:
        """Write before.json: scores of the model that training starts from."""
        scoring = stored_results(self.config, self.run, self.callback.stop_requested, model="before")
        read = (self.reading or self.placement.reading)(start.model)
        scored = read(lambda: self.score_start(start, scoring))
        files.write_json(self.run.path / "before.json", {"scores": scored.scores} | self.keep_start(scored.outputs))
        scoring.store.clear()

    def score_start(self, start: M, scoring: ModelResults) -> Scored:
        """Scores of the model that training starts from."""
        return self.score(start, self.rows["held_out"], scoring)

    def keep_start(self, outputs: Any) -> dict[str, Any]:
        """Keep what is compared with the outputs after training; returns parts of before.json besides scores."""
        return {}

    @abstractmethod
    def assemble(self, model: nn.Module, backbone: Backbone) -> M:
        """The model that trains, with what scoring needs."""

    @abstractmethod
    def supervise(self, live: M, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        """The labels of the training rows, and the loss to them."""

    @abstractmethod
    def width(self, live: M) -> int:
        """Hidden size in front of the head."""

    @abstractmethod
    def held_out_loss(self, live: M) -> tuple[float, Mapping[str, float]]:
        """Mean loss of the held-out rows, and further figures by their names in metrics.jsonl."""

    def sampled(self, live: M) -> Sequence[GeneratedAnswer]:
        """Answers of the model that trains to a few held-out prompts, always the same; empty where it writes none."""
        return ()

    @abstractmethod
    def save(self, live: M, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
        """Write the folder that the run ships.

        Args:
            adapter: Writes the adapter, where it is one of a bank.
        """

    @abstractmethod
    def load(self) -> M:
        """Read the adapter that the run ships, over a fresh backbone."""

    def load_over(self, backbone: Backbone) -> M:
        """Read the adapter that the run ships, over a backbone as it came, where that spares loading another."""
        return self.load()

    @abstractmethod
    def score(self, model: M, rows: R, scoring: ModelResults | None = None) -> Scored:
        """Scores of a model on rows; their time is measured."""

    def decide_views(self, model: M, scoring: ModelResults) -> Mapping[str, Any] | None:
        """Facts about how `score` and the verbs merge views of a row, where held-out rows gain by it (`tta`); None
        where they read it once, as tasks without views always do."""
        return None

    # Members of a bank are runs with one model: what it computes, and each one's rows and loss (`TaskFacts.banked`).

    @property
    def sampled_rows(self) -> Examples:
        """The training rows as the steps of a member of a bank sample them."""
        return self.rows["train"]

    @property
    def splits(self) -> Any:
        """The rows as `Task.require` looks at them for a member with another adapter."""
        raise NotImplementedError

    @property
    def fresh_head(self) -> bool:
        """Whether the backbone gets a head that starts at random, of which each member has its own."""
        return self.config.task.head in ("classes", "tokens")

    def member_outputs(self, live: M, batch: MicroBatch) -> Tensor:
        """Outputs for each label of a micro-batch, inside the bank's `route`: what `member_loss` takes."""
        raise NotImplementedError

    def member_loss(self, live: M) -> Callable[[Tensor, Tensor, float], Tensor]:
        """The summed loss of a member: from its outputs, its labels and a factor."""
        raise NotImplementedError

    @property
    def media(self) -> MediaProcessor | None:
        """What reads the pictures or recordings of its rows; None where they have none."""
        return None

    def kept_outputs(self, backbone: Backbone, others: Sequence[Self] = ()) -> AbstractContextManager[None]:
        """Inside it, what a frozen tower of the backbone makes of the pictures of a row is computed once.

        Args:
            others: Runs whose rows the backbone reads too: other folds in its bank.
        """
        return picture_features.kept(backbone.model, [each.media for each in (self, *others)])

    def packs(self, live: M) -> bool:
        """Whether `member_outputs` finds its outputs in rows that are packed into one sequence."""
        return True

    def for_members(self) -> Self:
        """The same run as what all members of a bank share."""
        return self

    def as_member(self, config: RunConfig, run: Run) -> Self:
        """A member as a run of its own, with the same data."""
        return replace(self, config=config, run=run)

    def of_member(self, live: M) -> M:
        """The model of a bank as this member has it, with its own tokenizer, labels and the like."""
        return live

    def on_held_out(self, rows: Indices) -> Self:
        """The same run with these held-out rows alone."""
        raise NotImplementedError

    @abstractmethod
    def predictions(self, model: M, rows: R, outputs: Any, before: Mapping[str, Any]) -> pd.DataFrame:
        """Labelled rows and what the model says of each. `before`: what the untrained backbone said of them, by place;
        empty where it was not asked."""

    def beside(self, outputs: Any) -> dict[str, Any]:
        """Scores of a simpler model on the held-out rows, from the outputs of this one; told to the user."""
        return {}

    def write_predictions(self, model: M, outputs: Any, before: Mapping[str, Any]) -> None:
        """Write predictions.parquet, of the held-out rows."""
        table = self.predictions(model, self.rows["held_out"], outputs, before.get("answers", {}))
        files.write_bytes(self.run.path / "predictions.parquet", table.to_parquet())
