"""The reference model of `data.sampling.by=tokens`: found, compared with the run, and asked about the training rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.distill_config import TeacherConfig
from workbench.config.tasks import TEXT
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import teacher_sources, teachers
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, WorkbenchError
from workbench.evaluation import reference_reading
from workbench.models import backbones, model_files
from workbench.runs import provenance, units
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback
from workbench.training.reference_losses import ReferenceLosses

KEY = "data.sampling.reference"


@dataclass(frozen=True)
class Reference:
    """A model whose losses are compared with those of the one that trains."""

    source: TeacherSource

    @property
    def files(self) -> dict[str, str]:
        """Digests of all files that its losses depend on."""
        found = model_files.digests(self.source.model)
        for adapter in self.source.adapters:
            found |= provenance.digests(adapter, title=str(adapter))
        return found

    @property
    def identity(self) -> list[object]:
        """All that its losses depend on besides the rows."""
        model, device = self.source.model, backbones.device().type
        return [sorted(self.files.values()), model.weights, model.compute, model.attention, device]


def wanted(config: RunConfig) -> bool:
    """Whether the run compares its tokens with a reference."""
    return config.data.sampling.by == "tokens"


def find(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Reference:
    """The reference that the run names, which reads its rows as the run does.

    Raises:
        WorkbenchError: There is none, it has another tokenizer, or it is of another kind.
    """
    reference = named(config)
    with _named_in_errors():
        _require_same_kind(reference.source, config)
        _require_same_tokens(reference.source, tokenizer)
    return reference


def named(config: RunConfig) -> Reference:
    """The reference that the run names, whatever it is; raises WorkbenchError where there is none."""
    section = config.data.sampling
    assert section.reference is not None, "refused by the section"
    with _named_in_errors():
        source = teacher_sources.find(TeacherConfig(id=section.reference, trust=section.trust), config.model)
    if source.run is None:  # which says nothing of how it is stored and computed
        same = {key: getattr(config.model, key) for key in ("weights", "compute", "attention")}
        source = replace(source, model=source.model.model_copy(update=same))
    return Reference(source)


def in_words(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Sentence on the reference, if there is one; raises what `find` does."""
    if not wanted(config):
        return []
    source = find(config, tokenizer).source
    over = " and ".join(map(str, source.adapters))
    what = f"{over} over {source.model.id}" if over else source.model.id
    return [f"Reference of the tokens: {what}; it reads the training rows once, before the first step."]


def cost(config: RunConfig, *, tokens: int, flops: float) -> str:
    """Sentence on what the reference takes before the first step.

    Args:
        tokens: In all training rows.
        flops: Of a step of the training.
    """
    from workbench.planning.fake_quantised import packed_bytes  # with what quantises

    model = named(config).source.model
    blueprint = backbones.blueprint(model, vocabulary=0, task=TEXT, trainable=False)
    weights = sum(each.numel() for each in blueprint.model.parameters())
    size, steps = packed_bytes(blueprint.model, blueprint.weights), 2 * weights * tokens / flops
    return (
        f"The reference, {config.data.sampling.reference}, has {units.size(size)} of weights. Before the training it "
        f"reads {tokens:,} tokens, once, with about as many operations as {steps:.3g} steps, and then it is gone."
    )


def losses(
    config: RunConfig, run: Run, callback: Callback, rows: TokenizedSet, tokenizer: PreTrainedTokenizerBase
) -> ReferenceLosses | None:
    """Losses of the reference on the training rows; None where the run compares with none.

    The model is loaded where something is missing on disk, and is gone when this returns.

    Raises:
        Stopped: a person asked for it; what it has read so far is kept.
    """
    if not wanted(config):
        return None
    reference = find(config, tokenizer)
    folder = reference_reading.folder(reference.identity, rows)
    if run.ranks.any(bool(reference_reading.missing(folder, rows))):
        callback.say(f"The reference, {config.data.sampling.reference}, reads {len(rows):,} rows ...")
        _write(reference, config, folder, run, callback, rows, tokenizer)
    return ReferenceLosses(folder, rows.supervised)


@torch.no_grad()
def _write(
    reference: Reference,
    config: RunConfig,
    folder: Path,
    run: Run,
    callback: Callback,
    rows: TokenizedSet,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    with run.deadline.phase("load"):
        (model,) = teachers.alone(reference.source, config, tokenizer).models
    with model.active():
        reference_reading.write(
            folder,
            rows,
            model.model,
            lambda numbers: reference_reading.token_losses(model.model, model.head, rows, numbers),
            run,
            callback.stop_requested,
        )


@contextmanager
def _named_in_errors() -> Iterator[None]:
    """Inside the block, what is said of a teacher is said of the reference."""
    try:
        yield
    except WorkbenchError as error:
        text = str(error).replace("distill.teacher.id", KEY).replace("distill.teacher.", "data.sampling.")
        raise type(error)(text.replace("distill.teacher", KEY)) from None


def _require_same_kind(source: TeacherSource, config: RunConfig) -> None:
    if len(source.adapters) > 1 or (source.config is not None and source.config.recipe != "sft"):
        assert source.config is not None
        raise ConfigError(
            f"{KEY}={source.name}: its run is of recipe={source.config.recipe}, which predicts no tokens as this one "
            "does. Name a run of recipe=sft on rows to be trusted, or a model."
        )
    theirs, mine = source.hub_config(), backbones.hub_config(config.model)
    if theirs.is_encoder_decoder != mine.is_encoder_decoder:
        raise ConfigError(
            f"{KEY}={source.name}: of it and {config.model.id} one has a decoder beside its encoder and one has none, "
            "so that they do not read the same rows. Name a model of the same kind."
        )


def _require_same_tokens(source: TeacherSource, tokenizer: PreTrainedTokenizerBase) -> None:
    own = source.tokenizer()
    mine, theirs = tokenizer.get_vocab(), {number: token for token, number in own.get_vocab().items()}
    different = next(
        (token for token in sorted(mine, key=lambda token: mine[token]) if theirs.get(mine[token]) != token), None
    )
    if different is None:
        return
    number = mine[different]
    found = f"is {theirs[number]!r} to the reference" if number in theirs else "is unknown to the reference"
    raise ConfigError(
        f"{KEY}={source.name}: it has another tokenizer. Token {number} is {different!r} to the model that trains, and "
        f"{found}, so that their losses are not of the same things. Name a model with the tokenizer of model.id."
    )
