"""Training rows that the backbone chooses before it trains, as `data.select` by loss, difficulty or gradient says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.model_heads import TEXT
from workbench.config.sections.basic_sections import EvaluateConfig, SaveConfig
from workbench.config.sections.curriculum_config import CurriculumConfig
from workbench.config.sections.optimizer_config import OptimizerConfig
from workbench.config.sections.sampling_config import SamplingConfig, SelectConfig
from workbench.data import selection
from workbench.data.batching import Indices
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.evaluation import perplexity
from workbench.evaluation.forward_passes import ResultStore
from workbench.evaluation.perplexity import Floats
from workbench.models import backbones, output_heads
from workbench.recipes.single.single_run import Rows, SingleRun
from workbench.runs import files, metrics_log
from workbench.runs.run_directory import Run
from workbench.training import influence
from workbench.training.callbacks import Callback
from workbench.training.influence import Members

EPOCHS = 4
"""Passes over the rows of the warm-up, after each of which gradients are compared, as in the paper."""
FOLDER = "warm_up"
"""In a run directory, while rows are being chosen: the warm-up, a run of its own."""


class KnownRows(Rows, Protocol):
    """Rows that are known by their place and content."""

    def places(self) -> Iterator[str]:
        """File and row that each came from."""

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """A hash of what each row teaches."""

    def subset(self, keep: Indices, note: str | None = None) -> Self:
        """Those that `keep` indexes; `note` says why the others are left out."""


R = TypeVar("R", bound=KnownRows)
Begin = Callable[[RunConfig, Run, Callback, R, R], SingleRun[Any, R]]
"""From a configuration, a run, its callback, training and held-out rows to a training with a fresh adapter."""


@dataclass(frozen=True)
class Unseen:
    """A callback that shows nothing of the warm-up, and asks it to stop where its run is asked to."""

    run: Callback

    def step(self, record: dict[str, Any], *, total: int) -> None:
        """Ignore a step."""

    def say(self, text: str) -> None:
        """Ignore a sentence."""

    def stop_requested(self) -> bool:
        """Whether the run is asked to stop."""
        return self.run.stop_requested()


def gradient_scores(
    rows: R,
    target: R,
    parts_TG: Members,
    config: RunConfig,
    run: Run,
    callback: Callback,
    begin: Begin[R],
    store: ResultStore,
) -> Floats:
    """Influence (N, G) of each row on the loss of each part of the target, a mean over the warm-up by learning rates.

    Each process computes a share of the rows; all get all scores.

    Args:
        parts_TG: Which rows of the target each of its parts has, each part a task of its own.
    """
    chance_N = np.zeros(len(rows))
    count = max(config.batch.size, round(config.data.select.warm_up * len(rows)))
    drawn = np.sort(selection.gumbel_order(chance_N, seed=config.rows_seed)[:count])
    warm_up, ranks = run.child(FOLDER), run.ranks
    plain = {"select": SelectConfig(), "sampling": SamplingConfig(), "curriculum": CurriculumConfig()}
    optimizer, classes = config.optimizer, {"sampling": "none", "weights": "none", "logit_adjustment": 0.0}
    single = begin(
        RunConfig(
            recipe=config.task.name,
            seed=config.seed,
            model=config.model,
            adapter=config.adapter,
            data=config.data.model_copy(update=plain),
            classes=config.classes.model_copy(update=classes) if config.task.labelled else config.classes,
            image=config.image,
            audio=config.audio,
            batch=config.batch,
            train=config.train.model_copy(update={"steps": None, "epochs": float(EPOCHS)}),
            optimizer=OptimizerConfig(name="adamw", betas=optimizer.betas, eps=optimizer.eps),
            schedule=config.schedule,
            evaluate=EvaluateConfig(every=None, answers=0, dynamics=False),
            save=SaveConfig(every=1 / EPOCHS, keep=EPOCHS),
            distributed=config.distributed,
        ),
        warm_up,
        Unseen(callback),
        rows.subset(drawn),
        target,
    )
    _, trainer = single.begun(single.backbone())
    trainer.work()
    ranks.wait()
    own = range(ranks.rank, len(rows), ranks.world)
    rates = [record["learning_rate"] for record in metrics_log.read(warm_up.path)]
    paths = sorted(warm_up.checkpoints.glob("step-*"))
    ends = [int(path.name.removeprefix("step-")) for path in paths]
    spans = zip(paths, [0, *ends], ends, strict=False)
    points = ranks.agreed([(path, float(np.mean(rates[start:end]))) for path, start, end in spans])
    total_NG = np.zeros((len(own), parts_TG.shape[1]))
    for checkpoint, rate in points:
        known = store.by(f"influence {checkpoint.name}").results([rows.digests, target.digests])
        left = [row for row in own if row not in known]
        callback.say(f"Comparing gradients at {checkpoint.name} of the warm-up ...")
        influences = influence.at_checkpoint(
            trainer, checkpoint, rows=rows, target=target, parts_TG=parts_TG, chosen=left
        )
        for row, value_G in influences:
            known[row] = value_G
            store.stop_if_asked()
        total_NG += rate * np.array([known[row] for row in own]).reshape(total_NG.shape)
    score_NG = np.empty((len(rows), parts_TG.shape[1]))
    for rank, share in enumerate(ranks.gathered(total_NG / sum(rate for _, rate in points))):
        score_NG[rank :: ranks.world] = share
    return score_NG


FILE = "selection.parquet"
"""In a run directory: place, score and fate of every row that there was to choose from."""


def chosen(rows: R, config: RunConfig, run: Run, callback: Callback, *, score: Callable[[ResultStore], Floats]) -> R:
    """The rows that the backbone chooses; a resumed run reads its choice from `FILE`.

    Args:
        score: Asks the backbone about all rows, each for every part of a target (N, G), with the same answer in all
            processes; what is known so far is in the store.

    Raises:
        ConfigError: The budget holds all rows.
        DataError: No row is wanted, or none fits into the budget.
    """
    known = (run.home / FILE).exists()
    run.ranks.wait()
    store = ResultStore(run.path if run.ranks.alone else None, callback.stop_requested, run.deadline)
    if known:
        table = pd.read_parquet(run.home / FILE)
    else:
        selection.most_kept(config.data.select, rows.lengths)  # a wrong budget is told before anything is asked
        callback.say(f"Reading {len(rows):,} rows with the backbone, to choose by {config.data.select.by} ...")
        score_NG = score(store)
        kept_N = np.isin(np.arange(len(rows)), selection.chosen(config.data.select, rows.lengths, score_NG))
        table = pd.DataFrame({"place": list(rows.places()), "score": score_NG.max(1), "kept": kept_N})
        if run.ranks.first:
            files.write_bytes(run.path / FILE, table.to_parquet())
            shutil.rmtree(run.path / FOLDER, ignore_errors=True)
            store.clear()
    run.ranks.wait()
    kept_K = np.flatnonzero(table["kept"])
    note = selection.note(config.data.select, table["score"].to_numpy(), kept_K)
    callback.say(f"Training on {len(kept_K):,} of {len(rows):,} rows; left out: {note}.")
    return rows.subset(kept_K, note)


def backbone_scores(
    by: Literal["perplexity", "ifd"],
    rows: TokenizedSet,
    config: RunConfig,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    store: ResultStore,
) -> Floats:
    """Scores of all rows by their losses before training, the same in all processes, each of which computes a share.

    Raises:
        ConfigError: The backbone does not read and write one text.
    """
    backbone = backbones.load(config.model, tokenizer, task=TEXT)
    if by == "ifd" and backbone.model.config.is_encoder_decoder:
        raise ConfigError(
            f"data.select.by=ifd reads answers without their prompts, and {config.model.id} is an encoder-decoder, "
            "which has to read something.\n  Write data.select.by=perplexity."
        )
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ranks = run.ranks
    local_scores = perplexity.row_scores(
        by,
        backbone.model,
        output_heads.find(backbone.model, backbone.model),
        rows.subset(np.arange(ranks.rank, len(rows), ranks.world)),
        start=0 if start is None else start,
        scoring=lambda name: store.by(f"{by} {name}"),
    )
    score_N = np.empty(len(rows))
    for rank, share in enumerate(ranks.gathered(local_scores)):
        score_N[rank :: ranks.world] = share
    return score_N
