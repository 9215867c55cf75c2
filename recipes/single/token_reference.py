"""Reference models, of `data.sampling.by=tokens` and of recipe prefer: found, compared with the run, and asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.model_heads import TEXT
from workbench.config.sections.distill_config import TeacherConfig
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError, WorkbenchError
from workbench.evaluation import reference_loss_store
from workbench.evaluation.reference_loss_store import Answerer
from workbench.models import backbones
from workbench.runs import units
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback
from workbench.training.distributed.placement import Placement
from workbench.training.sampling.loss_based import ReferenceLosses

if TYPE_CHECKING:
    from workbench.distillation.teacher_sources import TeacherSource


class Wanted(NamedTuple):
    """A reference as the configuration names it."""

    key: str
    name: str
    trust: bool


@dataclass(frozen=True)
class Reference:
    """A model whose losses are compared with those of the one that trains."""

    source: TeacherSource

    @property
    def identity(self) -> list[object]:
        """All that its losses depend on besides the rows."""
        model, device = self.source.model, backbones.device().type
        return [sorted(self.source.files.values()), model.values, model.compute, model.attention, device]


def wanted(config: RunConfig) -> bool:
    """Whether the run compares its tokens with a reference."""
    return config.data.sampling.by == "tokens"


def of_tokens(config: RunConfig) -> Wanted:
    """The reference of `data.sampling.by=tokens`."""
    section = config.data.sampling
    assert section.reference is not None, "refused by the section"
    return Wanted("data.sampling.reference", section.reference, section.trust)


def find(wanted: Wanted, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Reference:
    """The reference of that name, which reads its rows as the run does.

    Raises:
        WorkbenchError: There is none, it has another tokenizer, or it is of another kind.
    """
    reference = named(wanted, config)
    with _named_in_errors(wanted):
        source, name = reference.source, f"{wanted.key}={reference.source.name}"
        if source.models > 1 or (source.config is not None and not source.config.task.writes_text):
            assert source.config is not None
            raise ConfigError(
                f"{name}: its run is of recipe={source.config.recipe}, which predicts no tokens as this one "
                "does. Name a run of recipe=sft on rows to be trusted, or a model."
            )
        theirs, mine = source.hub_config(), backbones.hub_config(config.model)
        if theirs.is_encoder_decoder != mine.is_encoder_decoder:
            raise ConfigError(
                f"{name}: of it and {config.model.id} one has a decoder beside its encoder and one has none, "
                "so that they do not read the same rows. Name a model of the same kind."
            )
        _require_same_tokens(wanted.key, source, tokenizer)
    return reference


def named(wanted: Wanted, config: RunConfig) -> Reference:
    """The reference of that name, whatever it is; raises WorkbenchError where there is none."""
    from workbench.distillation import teacher_sources  # most runs have no reference

    with _named_in_errors(wanted):
        source = teacher_sources.find(TeacherConfig(id=wanted.name, trust=wanted.trust), config.model)
    return Reference(source)


def in_words(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Sentence on the reference, if there is one; raises what `find` does."""
    if not wanted(config):
        return []
    source = find(of_tokens(config), config, tokenizer).source
    over = " and ".join(map(str, source.adapters))
    what = f"{over} over {source.model.id}" if over else source.model.id
    return [f"Reference of the tokens: {what}; it reads the training rows once, before the first step."]


def cost(config: RunConfig, *, tokens: int, flops: float) -> str:
    """Sentence on what the reference takes before the first step.

    Args:
        tokens: In all training rows.
        flops: Of a step of the training.
    """
    from workbench.planning.fake_tensors import packed_bytes  # with what quantises

    model = named(of_tokens(config), config).source.model
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
    reference = find(of_tokens(config), config, tokenizer)
    (reference_losses,) = ask(reference, [rows], config, run, callback, tokenizer)
    return reference_losses


@torch.no_grad()
def ask(
    reference: Reference,
    sets: Sequence[TokenizedSet],
    config: RunConfig,
    run: Run,
    callback: Callback,
    tokenizer: PreTrainedTokenizerBase,
) -> list[ReferenceLosses]:
    """Losses of the reference on some sets of rows; what is not on disk yet is asked, by one load of the model.

    Raises:
        Stopped: a person asked for it; what it has read so far is kept.
    """
    folders = [reference_loss_store.folder(reference.identity, rows) for rows in sets]
    missing = [
        (folder, rows)
        for folder, rows in zip(folders, sets, strict=True)
        if run.ranks.any(bool(reference_loss_store.missing(folder, rows)))
    ]
    if missing:
        from workbench.distillation import teachers

        count = sum(len(rows) for _, rows in missing)
        callback.say(f"The reference, {reference.source.name}, reads {count:,} rows ...")
        placement = Placement(config.distributed, run.ranks)
        with run.deadline.phase("load"):
            loader = partial(backbones.load, waiting=placement.waiting)
            (model,) = teachers.alone(reference.source, config, tokenizer, loader).models
        with model.active():
            read = placement.reading(model.model)
            for folder, rows in missing:
                answer = partial(reference_loss_store.token_losses, model.model, model.head, rows)
                answerer = Answerer(model.model, answer, read, together=placement.cuts_weights)
                reference_loss_store.write(folder, rows, answerer, run, callback.stop_requested)
    return [ReferenceLosses(folder, rows.supervised) for folder, rows in zip(folders, sets, strict=True)]


@contextmanager
def _named_in_errors(wanted: Wanted) -> Iterator[None]:
    """Inside the block, what is said of a teacher is said of the reference."""
    try:
        yield
    except WorkbenchError as error:
        section = wanted.key.rpartition(".")[0]
        text = str(error).replace("distill.teacher.id", wanted.key).replace("distill.teacher.", f"{section}.")
        raise type(error)(text.replace("distill.teacher", wanted.key)) from None


def _require_same_tokens(key: str, source: TeacherSource, tokenizer: PreTrainedTokenizerBase) -> None:
    own = source.tokenizer()
    mine, theirs = tokenizer.get_vocab(), {number: token for token, number in own.get_vocab().items()}
    different = next(
        (token for token in sorted(mine, key=lambda token: mine[token]) if theirs.get(mine[token]) != token), None
    )
    if different is None:
        return
    number = mine[different]
    mismatch = f"is {theirs[number]!r} to the reference" if number in theirs else "is unknown to the reference"
    raise ConfigError(
        f"{key}={source.name}: it has another tokenizer. Token {number} is {different!r} to the model that trains, and "
        f"{mismatch}, so that their losses are not of the same things. Name a model with the tokenizer of model.id."
    )
