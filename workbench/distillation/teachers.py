"""Live teachers of language models: on the student's own backbone where both fit there, or a second model beside it.

Legend: L padded length, D hidden, N supervised positions, n of them, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench import adapters
from workbench.adapters import Full, anatomy, multi_adapter
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import MicroBatch, micro_batches
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation.student_loss import TeacherLogits
from workbench.distillation.teacher_sources import TeacherSource
from workbench.losses.chunked_loss import chunks
from workbench.models import backbone_source, backbones, output_heads
from workbench.models.backbones import Loader
from workbench.models.output_heads import Head
from workbench.models.shared_model import SWITCHED, SharedModel
from workbench.runs import files
from workbench.training import capacity

Activation = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class TeacherModel:
    """One distribution of a teacher: a model with one of its adapters on, or with none."""

    model: nn.Module
    """To be called inside `active`."""
    head: Head
    """Projects with the teacher's own adapter, wherever it is called."""
    active: Activation
    """Inside, the model is this teacher, in evaluation mode and without gradients; afterwards it is what it was."""


@dataclass(frozen=True)
class LiveTeacher:
    """A teacher that reads every batch, on the student's device."""

    models: Sequence[TeacherModel]  # several are one distribution, the mean of theirs
    backbone: PreTrainedModel  # the model under all adapters of the teacher; of several models the first one's
    shared: bool  # whether that is the student's: there is no second copy of its weights
    notes: list[str] = field(default_factory=list)  # sentences that a person should read
    shares: Sequence[float] = ()  # how much each of several models counts; none: alike

    @property
    def own_backbones(self) -> list[PreTrainedModel]:
        """Its backbones that are not the student's."""
        models: list[Any] = [each.model for each in self.models]
        bare: list[Any] = [each.get_base_model() if isinstance(each, PeftModel) else each for each in models]
        return [] if self.shared else list({id(each): each for each in bare}.values())

    def weighed(self, config: DistillConfig, held_out: TokenizedSet) -> LiveTeacher:
        """The same, its models counting as `distill.teacher.shares` says, which has as many numbers."""
        shares = config.teacher.shares
        if shares == "held_out":
            # The geometric mean of the probabilities of held-out tokens.
            shares = tuple(math.exp(-replace(self, models=[model]).loss(held_out)) for model in self.models)
        return replace(self, shares=shares) if isinstance(shares, tuple) else self

    def signal(self, batch: MicroBatch, config: DistillConfig, *, temperature: float) -> TeacherLogits:
        """Teacher logits at the batch's supervised positions."""
        hidden = []
        for teacher in self.models:
            with teacher.active():
                hidden_BLD = teacher.head.hidden(teacher.model, batch.inputs)
            hidden.append(hidden_BLD.flatten(0, 1)[batch.positions_N])
        heads = [teacher.head for teacher in self.models]
        projects, sizes = [head.project for head in heads], [head.vocabulary for head in heads]
        return TeacherLogits(hidden, projects, sizes, config, temperature, self.shares)

    def loss(self, tokens: TokenizedSet) -> float:
        """Mean negative log-likelihood of the supervised tokens of a set, each counted once, in nats."""
        total, count = 0.0, 0
        device, width = self.backbone.device, anatomy.hidden_size(self.backbone.config)
        limit = capacity.forward_tokens(device, width=width)
        for indices in micro_batches(np.arange(len(tokens)), tokens.lengths, tokens=limit):
            batch = tokens.batch(indices).to(device)
            signal = self.signal(batch, DistillConfig(), temperature=1.0)
            for labels_n, *hidden in chunks(signal.vocabulary, batch.labels_N, *signal.tensors):
                logp_nV = signal.log_probs(hidden, vocabulary=signal.vocabulary)
                total -= float(logp_nV.gather(1, labels_n[:, None]).double().sum())
            count += len(batch.labels_N)
        return total / count


def load(
    source: TeacherSource,
    student: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: nn.Module,
    backbone: PreTrainedModel,
    loader: Loader = backbones.load,
) -> LiveTeacher:
    """The teacher beside a student that is there: on its backbone where both fit there.

    The student stays what it is: what trains, what is saved, and what it computes. Raises BackboneError, ConfigError,
    FileError: the teacher cannot be loaded.

    Args:
        student: The student as a plain run.
        tokenizer: The student's.
        model: The student, its adapter on.
        backbone: What is under that adapter.
    """
    reason = _reason_apart(source, student, model)
    if reason is not None:
        apart = alone(source, student, tokenizer, loader)
        return replace(apart, notes=[f"The teacher is a second model beside the student: {reason}.", *apart.notes])
    assert isinstance(model, PeftModel), "what is no adapter trains every weight"
    if source.adapters:
        # Teachers of adapters that are loaded beside the student's, where only they themselves see them. Outside
        # of a teacher no configuration names them and no state dict holds them: what is saved is the student.
        named = _named(source.adapters)
        with SharedModel(model).inference():
            for name, folder in named.items():
                adapters.load(model, folder, name=name)
        configs = {name: model.peft_config.pop(name) for name in named}

        def leave_out(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
            for key in [key for key in state if not set(key.split(".")).isdisjoint(named)]:
                del state[key]

        model.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]
        models = _teacher_models(model, backbone, configs)
    else:
        models = [_without_adapter(model, backbone)]
    note = "The teacher stands on the student's backbone: there is no second copy of its weights."
    return LiveTeacher(models, backbone, shared=True, notes=[note])


def alone(
    source: TeacherSource, student: RunConfig, tokenizer: PreTrainedTokenizerBase, loader: Loader = backbones.load
) -> LiveTeacher:
    """Load the teacher on a backbone of its own. Raises BackboneError, ConfigError, FileError: the teacher cannot be
    loaded. `student`: the student as a plain run; says what the backbone is loaded for. `tokenizer`: the student's; the
    teacher's own is read where it may be another."""
    if source.parts:
        loaded_parts = [alone(each, student, tokenizer, loader) for each in source.parts]
        models = [model for part in loaded_parts for model in part.models]
        return replace(loaded_parts[0], models=models, notes=[note for part in loaded_parts for note in part.notes])
    same = source.run is None and _difference(source.model, student.model) is None
    loaded = loader(source.model, tokenizer if same else source.tokenizer(), task=model_heads.of(student))
    backbone = loaded.model
    if source.adapters:
        model = multi_adapter.load(backbone, _named(source.adapters))
        models = _teacher_models(model, backbone, dict(model.peft_config))
    else:
        models = [_without_adapter(backbone, backbone)]
    return LiveTeacher(models, backbone, shared=False, notes=[f"Teacher: {note}." for note in loaded.notes])


def _reason_apart(source: TeacherSource, student: RunConfig, model: nn.Module) -> str | None:
    """Why the teacher needs a backbone of its own; None where it can share the student's."""
    if source.parts:
        return f"{source.name} are models of their own"
    if isinstance(student.adapter, Full):
        return "adapter.method=full trains the student's every weight"
    if reason := _difference(source.model, student.model):
        return reason
    if source.adapters and student.model.new_tokens:
        return "rows of new tokens change the vocabulary for every adapter"
    assert isinstance(model, PeftModel)
    mine = model.active_peft_config.peft_type.value
    for folder in source.adapters:
        kind = files.read_json(folder / "adapter_config.json").get("peft_type")
        if kind != mine:
            return f"its adapter is {kind} and the student's {mine}, and PEFT holds one kind at a time"
        if kind == "VERA":
            return "VeRA adapters of one backbone share random matrices, and these have others"
    return None


def _difference(teacher: ModelConfig, student: ModelConfig) -> str | None:
    """Reason why two backbones cannot share memory; None where they are equal."""
    theirs, mine = (_deciding(each) for each in (teacher, student))
    for name, value in theirs.items():
        if value != mine[name]:
            return f"its model.{name} is {value}, and the student's {mine[name]}"
    return None


def _deciding(model: ModelConfig) -> dict[str, Any]:
    """What decides whether two backbones have the same weights."""
    path = Path(backbone_source.located(model.id)).expanduser()
    return {
        "id": str(path.resolve()) if path.is_dir() else model.id,
        "revision": model.revision or "main",
        "weights": model.weights,
        "sparsity": model.sparsity,
        "compute": model.compute,
        "attention": model.attention,
        "new_tokens": list(model.new_tokens),
    }


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """PEFT's names for the adapters of a teacher; the student's is `default`."""
    return {f"teacher{number}": folder for number, folder in enumerate(folders)}


def _without_adapter(model: nn.Module, backbone: PreTrainedModel) -> TeacherModel:
    """The model under the adapters of `model`, if it has any."""
    return _teacher_model(backbone, backbone, SharedModel(model).without_adapters)


def _teacher_models(
    model: PeftModel, backbone: PreTrainedModel, configs: Mapping[str, PeftConfig]
) -> list[TeacherModel]:
    """Those of the named adapters that `model` holds."""
    shared = SharedModel(model)
    return [
        _teacher_model(model, backbone, partial(shared.with_virtual_tokens, model, name, config))
        if config.is_prompt_learning
        else _teacher_model(backbone, backbone, partial(shared.with_adapter, name))
        for name, config in configs.items()
    ]


def _teacher_model(model: nn.Module, backbone: PreTrainedModel, active: Activation) -> TeacherModel:
    with active():
        head = output_heads.find(model, backbone)
    if any(isinstance(part, SWITCHED) for part in head.module.modules()):
        head = _AdaptedHead(**vars(head), active=active)
    return TeacherModel(model, head, active)


@dataclass(frozen=True)
class _AdaptedHead(Head):
    """A head that an adapter changes, of the teacher or of the student beside it."""

    active: Activation = nullcontext

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), by the teacher's adapter and not by the student's."""
        with self.active():
            return super().project(hidden)
