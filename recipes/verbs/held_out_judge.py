"""One loaded model that scores sums of the LoRA adapters of several runs on held-out rows that all of them share."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.adapters import combine, soups
from workbench.adapters.combine import Saved, Updates
from workbench.adapters.soups import Chooser, Weights
from workbench.config import RunConfig
from workbench.data.batching import evenly_spaced
from workbench.errors import ConfigError, DataError, Stopped
from workbench.recipes.single import streamed_rows
from workbench.recipes.single.single_run import SingleRun
from workbench.recipes.task import implementation
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

_FACTOR = re.compile(r"(?:.*base_model\.model\.)?(.+)\.lora_([AB])\.default\.weight")
_AT_ONCE = 64


class WeightChoice(NamedTuple):
    """Weights of a sum that were tried, and those that were kept."""

    score: str
    """Name of the score, such as `loss`."""
    rows: int
    """Held-out rows."""
    trials: list[tuple[Weights, float]]
    """In their order."""
    kept: Weights
    held_out: float
    """Score of the adapter that is written."""
    test: dict[str, float]
    """Scores on test rows, where there are some: of what is written, of the best run alone, and of the mean."""
    best_alone: int
    """Number of the run that scored best by itself."""
    chosen: bool
    """Whether the scores decided the weights."""
    updates: Updates
    """What is written."""
    heads: dict[str, Tensor]
    """The mean of trained heads beside them."""
    total: Updates
    """The sum, of which a rank keeps less."""

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        trials = [{"weights": weights, self.score: score} for weights, score in self.trials]
        written = {"held_out": self.held_out} | ({"test": self.test} if self.test else {})
        return {"score": self.score, "held_out_rows": self.rows, "trials": trials, "scores": written}


class HeldOutJudge:
    """Scores updates, and trained heads beside them, on the rows of `config`, over a backbone that is loaded once.

    Args:
        config: The first run, whose section adapter is that of the sum of all.
        folder: Run directory whose adapter is the sum of all, which is loaded; every layer's rank is the most it takes.
    """

    def __init__(self, config: RunConfig, folder: Path, callback: Callback) -> None:
        evaluate = config.evaluate
        if config.task.score == "loss":  # which answers leave as it is
            evaluate = evaluate.model_copy(update={"answers": 0})
        self.config = config.model_copy(update={"evaluate": evaluate})
        self.single = _begun(self.config, folder, callback)
        self.model = self.single.load()
        self.factors: dict[tuple[str, str], Tensor] = {}
        self.heads: dict[str, Tensor] = {}
        for name, parameter in self.model.model.named_parameters():
            if found := _FACTOR.fullmatch(name):
                self.factors[found[1], found[2]] = parameter
            else:
                self.heads[combine.head_name(name)] = parameter

    @torch.no_grad()
    def score(self, updates: Updates, heads: Mapping[str, Tensor], split: str = "held_out") -> float:
        """The main score of the task, of the backbone with these updates alone, and these heads by their names in a
        file."""
        for name, head in heads.items():
            self.heads[combine.head_name(name)].copy_(head)
        assert updates.keys() <= {layer for layer, _ in self.factors}
        for (layer, part), factor in self.factors.items():
            if layer not in updates:
                factor.zero_()
                continue
            down, up = updates[layer]
            missing = factor.shape[0 if part == "A" else 1] - len(down)
            factor.copy_(pad(down, (0, 0, 0, missing)) if part == "A" else pad(up, (0, missing)))
        return float(self.single.score(self.model, self.single.rows[split]).scores[self.config.task.score])


def choose(
    chooser: Chooser,
    judge: HeldOutJudge,
    saved: Sequence[Saved],
    *,
    rank: int | None,
    trials: int,
    callback: Callback,
) -> WeightChoice:
    """Weights of the sum of adapters by their scores on held-out rows, and the scores of what is written.

    Raises:
        Stopped: On request, between two trials.
    """
    facts, count = judge.config.task, len(saved)
    names = [each.folder.parent.name for each in saved]
    tried: list[tuple[Weights, float]] = []

    def total(weights: Weights) -> Updates:
        used = [(each, weight) for each, weight in zip(saved, weights, strict=True) if weight]
        return combine.weighted_sum([each for each, _ in used], [weight for _, weight in used])

    def worth(weights: Weights) -> float:
        if callback.stop_requested():
            raise Stopped(f"Stopped after {len(tried)} trials; nothing was written.")
        score = judge.score(total(weights), combine.mean_heads(saved, weights))
        tried.append((weights, score))
        parts = ", ".join(f"{weight:.3g} {name}" for weight, name in zip(weights, names, strict=True) if weight)
        callback.say(f"  {len(tried)}: {facts.score} {score:.4f} of {parts}")
        return -math.inf if math.isnan(score) else score if facts.higher_is_better else -score

    rows = len(judge.single.rows["held_out"])
    callback.say(f"Scoring sums on the {rows} held-out rows that the runs share ...")
    kept = chooser(worth, count, seed=judge.config.seed, trials=trials)
    whole = total(kept)
    updates = whole if rank is None else combine.nearest(whole, rank)
    scores = dict(tried)
    heads = combine.mean_heads(saved, kept)
    held_out = scores[kept] if rank is None else judge.score(updates, heads)
    sign = 1 if facts.higher_is_better else -1
    alone = [soups.mean([number], count) for number in range(count)]
    best = max(range(count), key=lambda number: sign * scores[alone[number]])
    test = {}
    if "test" in judge.single.rows:
        compared = {"written": kept, "best run": alone[best], "mean": soups.mean(range(count), count)}
        for name, weights in compared.items():
            compared_updates = updates if weights is kept else total(weights)
            test[name] = judge.score(compared_updates, combine.mean_heads(saved, weights), "test")
    return WeightChoice(
        facts.score, rows, tried, kept, held_out, test, best, chooser is not soups.uniform, updates, heads, whole
    )


def require_same_rows(sources: Sequence[Path], configs: Sequence[RunConfig], callback: Callback) -> None:
    """Refuse runs whose held-out rows differ from those of the first, read as the first reads them."""
    first = _asked(configs[0])
    digest = ""
    for source, config in zip(sources[1:], configs[1:], strict=True):
        data = config.data.model_copy(update={"seed": config.rows_seed, "max_tokens": first.data.max_tokens})
        other = _asked(first.model_copy(update={"data": data}))
        if other.data == first.data:
            continue
        digest = digest or _digest(first, callback)
        if _digest(other, callback) != digest:
            raise ConfigError(
                f"{source} and {sources[0]} have other held-out rows, so that one may have learnt what the other is "
                "scored on. Train them with one data.held_out=FILE, or one data.train and data.seed; or name rows that "
                "none of them saw: data.held_out=FILE."
            )


def require_unseen(sources: Sequence[Path], configs: Sequence[RunConfig], held_out: str, callback: Callback) -> None:
    """Refuse held-out rows that one of the runs learnt from."""
    for source, config in zip(sources, configs, strict=True):
        data = config.data.model_copy(update={"held_out": held_out, "overlap": "auto", "test": None})
        try:
            with TemporaryDirectory() as aside:
                _begun(config.model_copy(update={"data": data}), Path(aside), callback)
        except DataError as error:
            raise ConfigError(
                f"{source}: {str(error).partition('  Write data.overlap')[0].strip()} Name rows as data.held_out that "
                "none of the runs learnt."
            ) from None


def _asked(config: RunConfig) -> RunConfig:
    """The same rows without what is chosen from them for training."""
    plain = {name: type(getattr(config.data, name))() for name in ("select", "curriculum", "sampling")}
    data = config.data.model_copy(update={**plain, "seed": config.rows_seed})
    return streamed_rows.local(config.model_copy(update={"data": data}))


def _begun(config: RunConfig, folder: Path, callback: Callback) -> SingleRun[Any, Any]:
    begun: SingleRun[Any, Any] = implementation(config).begin(
        _asked(config), Run(folder, None, resumed=False), callback
    )
    return replace(begun, run=Run(folder, None, resumed=True))


def _digest(config: RunConfig, callback: Callback) -> str:
    """Of the tokens of all held-out rows."""
    with TemporaryDirectory() as aside:
        rows = _begun(config, Path(aside), callback).rows["held_out"]
    digest, order = hashlib.sha256(), evenly_spaced(len(rows), len(rows))
    for start in range(0, len(rows), _AT_ONCE):
        batch = rows.batch(order[start : start + _AT_ONCE])
        for tensor in (*(batch.inputs[name] for name in sorted(batch.inputs)), batch.labels_N):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
