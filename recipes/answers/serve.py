"""`evaluate`, `predict` and `generate`: what a finished run's adapter does with data, a file or a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import TextStreamer

from workbench import evaluation
from workbench.config import RunConfig
from workbench.config.model_heads import WRITING
from workbench.config.yaml_text import override
from workbench.data.batching import Indices
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.prompts import read_prompts
from workbench.errors import ConfigError, DataError
from workbench.evaluation.forward_passes import ModelResults, dealt_results
from workbench.models import exported
from workbench.recipes.embeddings import embed_verbs, rerank_verbs
from workbench.recipes.folds import crossval_verbs
from workbench.recipes.labels import classify_verbs
from workbench.recipes.preferences import prefer_verbs, reward_verbs
from workbench.recipes.reinforcement import reinforce_verbs
from workbench.recipes.single import streamed_rows
from workbench.recipes.text.sft import score
from workbench.runs import files, run_directory
from workbench.runs.ranks import joined
from workbench.runs.trust import Trust
from workbench.schema import parse
from workbench.training.preflight import longest_sequence

_SEEN = ("size", "depth", "prepare", "augment")
"""Settings of pictures that decide what an adapter has seen."""
_OF_TRAINING = (
    *("sweep", "search", "distill", "train", "regularise", "layer_drop", "token_drop", "grow", "optimizer", "schedule"),
    *("budget", "freeze", "average", "save", "distributed", "trackers"),
)
"""Sections that nothing reads once a run is over."""
_CLASSES = ", `workbench predict` names classes; "
_PREDICTS = {
    "classify": _CLASSES,
    "crossval": _CLASSES,
    "embed": ", `workbench predict` embeds texts; ",
    "rerank": ", `workbench predict` scores passages; ",
    "reward": ", `workbench predict` rates answers; ",
}
_EVALUATED = {
    "classify": classify_verbs.evaluate,
    "crossval": crossval_verbs.evaluate,
    "embed": embed_verbs.evaluate,
    "rerank": rerank_verbs.evaluate,
    "reward": reward_verbs.evaluate,
}
_PREDICTED = {
    "classify": classify_verbs.predict,
    "crossval": crossval_verbs.predict,
    "embed": embed_verbs.predict,
    "rerank": rerank_verbs.predict,
    "reward": reward_verbs.predict,
}
_ALONE = {
    "prefer": "compares answers with a reference, which one device reads",
    "reinforce": "has its answers judged by rewards, on one device",
}
"""Recipes whose runs are scored on one device, and why."""
WRITERS = {".jsonl", ".csv", ".parquet"}


def evaluate(run: Path, overrides: Sequence[str], *, trust: bool = False) -> dict[str, float]:
    """Score the saved adapter on `data.test` where the overrides name one, else on the held-out rows.

    Processes that were started together read a share of the rows each, and return the same scores; so `predict`.

    Args:
        trust: Execute the Python code that the run directory names; so for every verb here.
    """
    ranks = joined()
    config, scoring = asked_config(run, overrides, verb="evaluate", trust=trust), dealt_results(ranks)
    if scoring is not None and config.recipe in _ALONE:
        raise ConfigError(f"evaluate: a run of recipe {config.recipe} {_ALONE[config.recipe]}. Leave --devices out.")
    if config.data.test is None:
        config = streamed_rows.local(config, ranks)
    if config.recipe in _EVALUATED:
        return _EVALUATED[config.recipe](run, config, scoring)
    if config.recipe == "prefer":
        return prefer_verbs.evaluate(run, config)
    if config.recipe == "reinforce":
        return reinforce_verbs.evaluate(run, config, trust=Trust(trust))
    model = exported.load(run, config)
    split = tokenized.read_files(config.data.test_files, config.data, model.tokenizer, model.template)
    if split is None:
        split = tokenized.load(config.data, model.tokenizer, model.template, seed=config.seed).held_out
    scores, _ = score(model, split, config, scoring)
    return scores


def asked_config(run: Path, overrides: Sequence[str], *, verb: str, trust: bool) -> RunConfig:
    """The configuration of a run with overrides that leave what was trained as it is."""
    before = run_directory.shipped_config(run, Trust(trust))
    # Devices share no weights here, so that settings may ask for what the layout of the training could not.
    values = override(before.model_dump(mode="json", exclude={"distributed"}), list(overrides))
    config = parse(RunConfig, values, source="the command line")
    trained = (
        "model",
        "adapter",
        "prefer",
        "classes",
        "folds",
        "pseudo_label",
        "tta",
        "correction",
        "ensemble",
        "embed",
        "rerank",
        "reward",
    )
    changed = [name for name in trained if getattr(config, name) != getattr(before, name)]
    changed += [f"image.{name}" for name in _SEEN if getattr(config.image, name) != getattr(before.image, name)]
    changed += ["data.format"] if config.reads_pictures != before.reads_pictures else []
    if changed:
        raise ConfigError(
            f"{verb} cannot change {changed[0]}: the adapter was trained with it. Leave it out, or start a new run."
        )
    named = {word.partition("=")[0].partition(".")[0] for word in overrides}
    if unread := [name for name in _OF_TRAINING if name in named]:
        raise ConfigError(f"{verb} trains nothing, and {unread[0]} is about training alone. Leave it out.")
    return config


class Answered(NamedTuple):
    """Rows that were answered."""

    rows: int
    left_out: Sequence[str] = ()
    """Rows that could not be read, each with its reason, where `data.on_bad_row` is `skip`."""


def predict(
    run: Path, source: str, overrides: Sequence[str] = (), *, out: Path, max_new_tokens: int, trust: bool = False
) -> Answered:
    """Answer every row of `source` greedily, or name its class; the first of several processes writes `out`."""
    if out.suffix not in WRITERS:
        raise ConfigError(f"--out {out}: expected a name that ends in {', '.join(sorted(WRITERS))}.")
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another file, or delete it first.")
    config = asked_config(run, overrides, verb="predict", trust=trust)
    ranks = joined()
    scoring = dealt_results(ranks)
    if config.recipe in _PREDICTED:
        files.require_writable(out)
        table, left_out = _PREDICTED[config.recipe](run, source, config, scoring)
    else:
        require_text(config, run)
        table, left_out = _answers(run, source, config, out, max_new_tokens, scoring)
    if ranks.first:
        files.write_bytes(out, _serialised(table, out.suffix))
    return Answered(len(table), left_out)


def _answers(
    run: Path, source: str, config: RunConfig, out: Path, max_new_tokens: int, scoring: ModelResults | None
) -> tuple[pd.DataFrame, Sequence[str]]:
    """Greedy answers to every row of a file, and rows left out."""
    skipped: list[str] = []
    questions = list(read_prompts(source, config.data, skipped))
    files.require_writable(out)
    model = exported.load(run, config)
    prompts = [question_ids(model, question) for question in questions]
    written = evaluation.complete(
        model.model, prompts, model.tokenizer, stop=model.stop, max_new_tokens=max_new_tokens, scoring=scoring
    )
    table = pd.DataFrame(
        {
            "row": [question.place for question in questions],
            "prompt": [model.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts],
            "answer": written,
        }
    )
    return table, skipped


def generate(run: Path, prompt: str, *, max_new_tokens: int, trust: bool = False) -> None:
    """Print one greedy answer as it is written; rendered as the training rows were."""
    config = run_directory.shipped_config(run, Trust(trust))
    require_text(config, run)
    model = exported.load(run, config)
    raw = files.read_json(run / "manifest.json").get("data", {}).get("train", {}).get("chat") is False
    question = (
        Example("the prompt", text=((prompt, False),))
        if raw
        else Example("the prompt", messages=({"role": "user", "content": prompt},))
    )
    ids = torch.from_numpy(question_ids(model, question))[None].to(next(model.model.parameters()).device)
    evaluation.generate(
        model.model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        evaluation.generation_config(model.stop, max_new_tokens=max_new_tokens),
        streamer=TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True),
    )


def require_text(config: RunConfig, run: Path) -> None:
    """Raise ConfigError where a run trains no model that writes text."""
    if config.recipe not in WRITING:
        raise ConfigError(
            f"{run}: recipe {config.recipe} trains no model that writes text. `workbench evaluate` scores it"
            + _PREDICTS.get(config.recipe, "; ")
            + "answers come from recipes sft, prefer and reinforce."
        )


def question_ids(model: exported.ExportedModel, example: Example) -> Indices:
    """Token ids that an answer to `example` starts from; raises DataError where there are none, or too many to read."""
    assert isinstance(model.template, ChatEncoder)
    ids = np.asarray(model.template.question(example), dtype=np.int64)
    if not len(ids):
        raise DataError(f"{example.place} is empty. Write at least one word.")
    most = _longest_prompt(model.model)
    if most is not None and len(ids) > most:
        raise DataError(
            f"{example.place} has {len(ids):,} tokens, and the model reads prompts of {most:,} at most. Shorten it."
        )
    return ids


def _longest_prompt(model: nn.Module) -> int | None:
    """Tokens for which there are positions beside virtual ones and, where it follows the prompt, one of the answer."""
    from peft import PeftModel, PromptLearningConfig

    hub: Any = model.config
    limit = longest_sequence(hub)
    if limit is None:
        return None
    adapter = model.active_peft_config if isinstance(model, PeftModel) else None
    virtual = adapter.num_virtual_tokens if isinstance(adapter, PromptLearningConfig) else 0
    return limit - virtual - int(not hub.is_encoder_decoder)


def _serialised(table: pd.DataFrame, suffix: str) -> bytes:
    if suffix == ".jsonl":
        return str(table.to_json(orient="records", lines=True, force_ascii=False)).encode()
    if suffix == ".csv":
        return str(table.to_csv(index=False)).encode()
    content: bytes = table.to_parquet()
    return content
