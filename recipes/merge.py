"""`workbench merge`: one stock model out of backbone and adapter, and how far it is from the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from workbench import adapters
from workbench.adapters import Full, stock
from workbench.config import ModelConfig, RunConfig, tasks
from workbench.config.tasks import HIDDEN, Task
from workbench.data.embedding import pair_data
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.encoded_rows import RowEncoder
from workbench.data.text.prompt_encoder import PromptEncoder
from workbench.errors import ConfigError
from workbench.evaluation import reward_scores
from workbench.evaluation.agreement import Agreement, agreement, hidden_states
from workbench.models import backbones, classifier, embedder, exported, output_heads, reward_model
from workbench.models.backbones import DTYPES, QUANTISED
from workbench.recipes import classify_verbs, embed_verbs, reward_verbs
from workbench.recipes.classify_verbs import Gap
from workbench.recipes.embed_verbs import Angle
from workbench.runs import files, run_directory
from workbench.runs.trust import Trust

ROWS = 64
"""Held-out examples that the two are compared on."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Keys of a generation_config.json that only sampling reads; Llama 2's has them, and does not sample."""


@dataclass(frozen=True)
class Merged:
    """Outcome of a merge, and its measured error."""

    agreement: Agreement | Gap | Angle
    sentence: str


def merge(run: Path, *, out: Path, weights: str, trust: bool = False) -> Merged:
    """Write the merged model of `run` into `out` and compare it, reloaded, with the unmerged one.

    A quantised backbone is dequantised first: the merged weights are those that the adapter was trained on.

    Args:
        trust: Execute the Python code that the run directory names.
    """
    if weights not in DTYPES:
        raise ConfigError(f"--weights {weights}: expected {', '.join(DTYPES)}.")
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another folder, or delete it first.")
    config = run_directory.shipped_config(run, Trust(trust))
    adapters.require_mergeable(config.adapter)
    files.require_writable(out)
    if config.recipe == "crossval" and not config.folds.refit:
        raise ConfigError(
            f"{run}: an ensemble of {config.folds.k} folds is no single model. Run again with folds.refit=true, whose "
            "adapter trains on all rows."
        )
    if config.recipe in ("classify", "crossval"):
        return _merge_classifier(run, config, out=out, weights=weights)
    if config.recipe == "embed":
        return _merge_embedder(run, config, out=out, weights=weights)
    if config.recipe == "reward":
        return _merge_rewards(run, config, out=out, weights=weights)
    unmerged = exported.load(run, config)
    template: RowEncoder = unmerged.template
    if config.recipe == "reinforce" and isinstance(template, ChatEncoder):
        template = PromptEncoder(template, config.data.columns)
    held_out = tokenized.load(config.data, unmerged.tokenizer, template, seed=config.seed).held_out
    wanted = hidden_states(unmerged.model, unmerged.head, held_out, rows=ROWS)

    model = _merged(run, config, unmerged.tokenizer, tasks.of(config))
    model.to(DTYPES[weights])  # type: ignore[arg-type]
    if model.can_generate():
        _settle(model.generation_config, unmerged.stop)
    with files.new_folder(out) as folder:
        model.config.dtype = DTYPES[weights]
        stock.save(model, folder)
        unmerged.tokenizer.save_pretrained(folder)
    del model

    section = ModelConfig(id=str(out.resolve()), weights=_weights(weights))
    backbone = backbones.load(section, backbones.tokenizer(section), task=tasks.of(config))
    head = output_heads.find(backbone.model, backbone.model)
    found = hidden_states(backbone.model, head, held_out, rows=ROWS)
    return Merged(agreement(unmerged.head, wanted, head, found), _sentence(config, weights))


def _merge_classifier(run: Path, config: RunConfig, *, out: Path, weights: str) -> Merged:
    unmerged = classifier.load(run, config)
    labels, task = unmerged.labels, classifier.task(unmerged.labels, seed=config.seed)
    rows, wanted = classify_verbs.some_outputs(unmerged, config, rows=ROWS)
    model = _merged(run, config, unmerged.reader.tokenizer, task)
    classifier.classification_model(model, model, unmerged.reader, labels)
    model.to(DTYPES[weights])  # type: ignore[arg-type]
    with files.new_folder(out) as folder:
        model.config.dtype = DTYPES[weights]
        classify_verbs.save_merged(model, unmerged, folder)
    del model
    section = ModelConfig(id=str(out.resolve()), weights=_weights(weights))
    stock = backbones.load(section, unmerged.reader.tokenizer and backbones.tokenizer(section), task=task).model
    sentence = _sentence(config, weights)
    if labels.kind == "number":
        sentence += f" Its output times {labels.scale:g} plus {labels.mean:g} is the number."
    return Merged(classify_verbs.gap(labels, wanted, classify_verbs.stock_outputs(stock, rows)), sentence)


def _merge_rewards(run: Path, config: RunConfig, *, out: Path, weights: str) -> Merged:
    unmerged = reward_verbs.load(run, config)
    rows = reward_verbs.held_out(unmerged, config).answers
    rows = rows.subset(np.arange(min(ROWS, len(rows))))
    wanted = reward_scores.read(unmerged, rows)[:, None]
    model = _merged(run, config, unmerged.tokenizer, tasks.of(config))
    own = unmerged.classifier
    classifier.classification_model(model, model, own.reader, own.labels)
    model.to(DTYPES[weights])  # type: ignore[arg-type]
    with files.new_folder(out) as folder:
        model.config.dtype = DTYPES[weights]
        classify_verbs.save_merged(model, own, folder)
    del model
    section = ModelConfig(id=str(out.resolve()), weights=_weights(weights))
    backbone = backbones.load(section, backbones.tokenizer(section), task=tasks.of(config)).model
    again = reward_model.make(backbone, backbone, unmerged.tokenizer, unmerged.template, config)
    found = reward_scores.read(again, rows)[:, None]
    return Merged(classify_verbs.gap(own.labels, wanted, found), _sentence(config, weights))


def _merge_embedder(run: Path, config: RunConfig, *, out: Path, weights: str) -> Merged:
    unmerged = embedder.load(run, config)
    rows = pair_data.load(config, unmerged.tokenizer).held_out
    wanted = embed_verbs.some_embeddings(unmerged, rows, texts=ROWS)
    model = _merged(run, config, unmerged.tokenizer, HIDDEN)
    model.to(DTYPES[weights])  # type: ignore[arg-type]
    with files.new_folder(out) as folder:
        model.config.dtype = DTYPES[weights]
        embed_verbs.save_merged(model, unmerged, folder, config)
    del model
    section = ModelConfig(id=str(out.resolve()), weights=_weights(weights))
    found = embed_verbs.some_embeddings(
        embed_verbs.reloaded(config.model_copy(update={"model": section})), rows, texts=ROWS
    )
    return Merged(embed_verbs.angle(wanted, found), _sentence(config, weights))


def _merged(run: Path, config: RunConfig, tokenizer: PreTrainedTokenizerBase | None, task: Task) -> PreTrainedModel:
    """Backbone plus update, both in float32."""
    folder = run / "adapter"
    weights = config.model.weights if config.model.weights in QUANTISED else "float32"
    section = config.model.model_copy(update={"weights": weights, "compute": "float32"})
    plain = config.model_copy(update={"model": section})
    backbone = exported.load_backbone(plain, folder, tokenizer, task=task).model
    if weights in QUANTISED:
        backbone = backbone.dequantize(torch.float32)
    if isinstance(config.adapter, Full):
        return backbone
    return adapters.merge(adapters.load(backbone, folder), config.adapter)


def _settle(generation: GenerationConfig, stop: list[int]) -> None:
    """Let text end where the run's does, and leave out what transformers refuses to write."""
    generation.eos_token_id = stop
    for name in () if generation.do_sample else SAMPLING:
        setattr(generation, name, None)


def _sentence(config: RunConfig, weights: str) -> str:
    if isinstance(config.adapter, Full):
        return f"Fully trained model written in {weights}."
    backbone = f"{config.model.weights} backbone, dequantised," if config.model.weights in QUANTISED else "Backbone"
    return f"{backbone} plus adapter added in float32, written in {weights}."


def _weights(name: str) -> Literal["float32", "bfloat16", "float16"]:
    assert name in DTYPES
    return name  # type: ignore[return-value]
