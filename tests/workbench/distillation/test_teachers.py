"""A teacher is the same on the student's backbone as beside it, and no second copy is made where one is enough."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import STORIES, save_tiny, tiny
from tests.workbench.distillation.staged import PLAIN, Student, assert_same, log_probs, moved, run, said
from workbench import adapters, evaluation
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.sections.distill_config import BACKBONE, DistillConfig, TeacherConfig
from workbench.data import starter
from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.text import tokenized
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import teacher_sources, teachers
from workbench.distillation.student_loss import distillation_loss
from workbench.distillation.teacher_sources import TeacherSource
from workbench.distillation.teachers import LiveTeacher
from workbench.errors import BackboneError, ConfigError
from workbench.models import backbones, exported, fused_lora, output_heads

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.parametrize("method", ["lora", "pissa", "prompt"])
def test_the_teacher_is_not_saved_with_the_student(
    method: str, saved: Callable[..., TeacherSource], batch: MicroBatch, tmp_path: Path
) -> None:
    student = Student(run(method))
    adapters.save(student.model, tmp_path / "before")
    teacher = student.taught_by(saved(method, 1, 2))
    said(teacher, batch)
    adapters.save(student.model, tmp_path / "after")
    before, after = (
        {str(each.relative_to(tmp_path / name)): each.read_bytes() for each in (tmp_path / name).rglob("*.*")}
        for name in ("before", "after")
    )
    assert before == after and teacher.shared


def _steps(student: Student, teacher: LiveTeacher, batch: MicroBatch, config: DistillConfig) -> list[Tensor]:
    """The trained values after three steps, fused and with dropout as in a run."""
    loss = distillation_loss(config, student.model, student.head, teacher, None, lambda: 0.5)
    student.model.train()
    fused_lora.fuse(student.model)
    optimizer = torch.optim.AdamW(student.trained().values(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)
        loss(batch, 1 / len(batch.labels_N)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in student.trained().values()]


@pytest.mark.nightly(but=["lora-adapter"])
@pytest.mark.parametrize(
    ("method", "kind"),
    [("lora", "adapter"), ("linear-probe", "adapter"), ("linear-probe", BACKBONE), ("prompt", "adapter")],
)
def test_a_shared_teacher_teaches_what_a_second_copy_does(
    method: str, kind: str, saved: Callable[..., TeacherSource], batch: MicroBatch
) -> None:
    config = run(method)
    bare = kind == BACKBONE
    source = teacher_sources.find(TeacherConfig(id=BACKBONE), config.model) if bare else saved(method, 1, 2)
    settings = DistillConfig.model_validate({"loss": "jsd", "temperature": 2.0, "alpha": 0.8})
    one, other, untaught = Student(config), Student(config), Student(config)
    shared = one.taught_by(source)
    copied = teachers.alone(source, config, other.tokenizer)
    assert shared.shared and not copied.shared
    fused_lora.fuse(copied.backbone)
    found, wanted = _steps(one, shared, batch, settings), _steps(other, copied, batch, settings)
    labels = _steps(untaught, copied, batch, settings.model_copy(update={"alpha": 0.0}))
    assert all(map(torch.equal, found, wanted))
    assert any(not torch.allclose(a, c, atol=1e-3) for a, c in zip(found, labels, strict=True))


@pytest.mark.nightly(but=["True"])
@pytest.mark.parametrize("alone", [True, False])
def test_several_are_the_mean_of_their_probabilities(
    alone: bool, saved: Callable[..., TeacherSource], batch: MicroBatch
) -> None:
    both, student = saved("lora", 1, 2), Student(run())
    load = (lambda source: teachers.alone(source, student.config, student.tokenizer)) if alone else student.taught_by
    teacher = load(both)
    assert len(teacher.models) == 2 and teacher.shared is not alone
    each = [log_probs(adapters.load(backbones.load(both.model, None).model, folder), batch) for folder in both.adapters]
    assert not torch.allclose(*each, atol=1e-2)
    torch.testing.assert_close(said(teacher, batch), (sum(one.exp() for one in each) / 2).log())


def test_models_of_their_own_are_the_mean_too(tmp_path: Path, batch: MicroBatch) -> None:
    models, parts = list[Any](), list[TeacherSource]()
    for seed in (3, 4):
        model = backbones.load(run().model, None).model
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        model.save_pretrained(tmp_path / str(seed))
        backbones.tokenizer(run().model).save_pretrained(tmp_path / str(seed))
        models.append(model)
        parts.append(TeacherSource(str(seed), ModelConfig(id=str(tmp_path / str(seed)), **PLAIN)))
    teacher = Student(run()).taught_by(replace(parts[0], name="both", parts=tuple(parts)))
    assert len(teacher.models) == 2 and not teacher.shared
    each = [log_probs(model, batch) for model in models]
    assert not torch.allclose(*each, atol=1e-2)
    torch.testing.assert_close(said(teacher, batch), (sum(one.exp() for one in each) / 2).log())

    # By how likely each finds held-out tokens: here those of the batch.
    rows = np.split(batch.inputs["input_ids"].numpy(), len(batch.inputs["input_ids"]))
    config = DistillConfig(teacher=TeacherConfig(id=("3", "4"), shares="held_out"))
    losses = iter([0.5, 2.0])

    class Told(teachers.LiveTeacher):
        def loss(self, tokens: Any) -> float:
            assert tokens is rows and len(self.models) == 1
            return next(losses)

    told = Told(teacher.models, teacher.backbone, shared=False).weighed(config, rows)  # type: ignore[arg-type]
    first = 1 / (1 + math.exp(-1.5))
    wanted = (first * each[0].exp() + (1 - first) * each[1].exp()).log()
    torch.testing.assert_close(said(told, batch), wanted)


def _bytes(*models: nn.Module) -> int:
    """Of all parameters and buffers, each storage counted once."""
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def test_no_second_copy_of_the_weights(saved: Callable[..., TeacherSource], batch: MicroBatch) -> None:
    """Nothing but the teacher's own adapter is added; a teacher that cannot stand there brings a backbone."""
    source, student = saved("lora"), Student(run())
    alone = _bytes(student.model)
    adapter = sum(4 * each.numel() for each in student.trained().values())
    bare = student.taught_by(teacher_sources.find(TeacherConfig(id=BACKBONE), student.config.model))
    assert _bytes(student.model, bare.backbone, *(teacher.model for teacher in bare.models)) == alone
    guest = student.taught_by(source)
    assert _bytes(student.model, guest.backbone, *(teacher.model for teacher in guest.models)) == alone + adapter
    copied = teachers.alone(source, student.config, student.tokenizer)
    assert _bytes(student.model, copied.backbone) >= alone + adapter + student.backbone.weight_bytes


@pytest.mark.parametrize(
    ("method", "teacher", "model", "reason"),
    [
        ("full", BACKBONE, {}, "adapter.method=full trains the student's every weight"),
        ("full", "lora", {}, "adapter.method=full trains the student's every weight"),
        ("ia3", "lora", {}, "its adapter is LORA and the student's IA3, and PEFT holds one kind at a time"),
        ("adalora", "adalora", {}, "its adapter is LORA and the student's ADALORA"),
        ("vera", "vera", {}, "VeRA adapters of one backbone share random matrices"),
        ("lora", "lora", {"attention": "eager"}, "its model.attention is auto, and the student's eager"),
        ("lora", "lora", {"new_tokens": ["<|a|>"]}, r"its model.new_tokens is \[\], and the student's \['<|a|>'\]"),
    ],
)
def test_what_does_not_fit_on_one_backbone_gets_its_own(
    method: str,
    teacher: str,
    model: dict[str, Any],
    reason: str,
    saved: Callable[..., TeacherSource],
    batch: MicroBatch,
) -> None:
    student = Student(run(method, model=model))
    source = (
        teacher_sources.find(TeacherConfig(id=BACKBONE), student.config.model)
        if teacher == BACKBONE
        else saved(teacher)
    )
    wanted = backbones.load(run().model, None).model
    if source.adapters:
        wanted = adapters.load(wanted, source.adapters[0])  # type: ignore[assignment]
    student.model.train()
    before = student.state(batch)
    found = student.taught_by(source)
    assert not found.shared and found.backbone is not student.backbone.model
    assert f"The teacher is a second model beside the student: {reason}".replace("\\", "") in found.notes[0]
    torch.testing.assert_close(said(found, batch), log_probs(wanted, batch))
    assert_same(before, student.state(batch))
    assert not any(each.requires_grad for each in found.backbone.parameters())


def test_other_weights_are_another_backbone() -> None:
    student = Student(run(model={"id": "starter"}))
    folder = str(Path(starter.resolve("starter")))
    assert student.taught_by(TeacherSource("folder", ModelConfig(id=folder, **PLAIN))).shared, (
        "the same by another name"
    )
    source = teacher_sources.find(TeacherConfig(id=BACKBONE, weights="bfloat16"), student.config.model)
    found = student.taught_by(source)
    assert found.notes[:2] == [
        "The teacher is a second model beside the student: its model.weights is bfloat16, and the student's float32.",
        next(note for note in found.notes if note.startswith("Teacher: weights stored in bfloat16")),
    ]


def _tokens(config: RunConfig, tokenizer: Any, path: Path) -> TokenizedSet:
    template = row_encoder(config, backbones.hub_config(config.model), tokenizer)
    return tokenized.read(str(path), config.data, tokenizer, template)


def test_a_run_teaches_what_it_ships(tmp_path: Path, questions: Path) -> None:
    """With its new tokens, whose rows need a vocabulary that the student's may not have."""
    config = run(model={"new_tokens": ["<|a|>", "<|b|>"]})
    tokenizer = backbones.tokenizer(config.model)
    loaded = backbones.load(config.model, tokenizer)
    model = moved(adapters.attach(loaded.model, config.adapter, seed=0, new_token_ids=[512, 513]), seed=0)
    template = row_encoder(config, loaded.model.config, tokenizer)
    exported.save(model, tmp_path / "adapter", tokenizer, template, [2])
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))

    student = Student(config)
    source = teacher_sources.find(TeacherConfig(id=str(tmp_path)), config.model)
    teacher = student.taught_by(source)
    assert teacher.notes == [
        "The teacher is a second model beside the student: rows of new tokens change the vocabulary for every adapter."
    ]
    wanted = exported.load(tmp_path, config)
    rows = _tokens(config, tokenizer, questions)
    torch.testing.assert_close(
        said(teacher, rows.batch(np.arange(4))), log_probs(wanted.model, rows.batch(np.arange(4)))
    )
    expected = evaluation.likelihood(wanted.model, wanted.head, rows).loss
    assert teacher.loss(rows) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(evaluation.likelihood(student.backbone.model, student.head, rows).loss, rel=1e-3)


def test_a_model_that_a_run_trained_whole_teaches(tmp_path: Path, questions: Path) -> None:
    model = backbones.load(run().model, None).model
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(tmp_path / "whole")
    backbones.tokenizer(run().model).save_pretrained(tmp_path / "whole")
    student = Student(run())
    found = student.taught_by(TeacherSource("whole", ModelConfig(id=str(tmp_path / "whole"), **PLAIN)))
    assert not found.shared and "its model.id is" in found.notes[0]
    rows = _tokens(student.config, student.tokenizer, questions)
    assert found.loss(rows) == pytest.approx(
        evaluation.likelihood(model, output_heads.find(model, model), rows).loss, rel=1e-5
    )


@pytest.mark.parametrize("kind", [BACKBONE, "adapter"])
def test_an_encoder_decoder_teaches(kind: str, encoder_decoder: str, tmp_path: Path) -> None:
    student = Student(run(model={"id": encoder_decoder}))
    source = _saved_beside(student, kind, tmp_path)
    ids, ones = np.asarray([5, 6, 7, 0, 11, 12, 1]), np.arange(7) > 3
    read = collate([Row(ids, ones, 3), Row(ids[1:], ones[1:], 2)])
    teacher = student.taught_by(source)
    wanted = backbones.load(source.model, None).model
    if source.adapters:
        wanted = adapters.load(wanted, source.adapters[0])  # type: ignore[assignment]
    length = read.inputs["decoder_input_ids"].shape[1]
    with torch.no_grad():
        logits_NV = wanted(**read.inputs).logits[:, -length:].flatten(0, 1)[read.positions_N]
    assert teacher.shared
    torch.testing.assert_close(said(teacher, read), F.log_softmax(logits_NV, dim=-1))


@pytest.mark.parametrize("kind", [BACKBONE, "adapter"])
def test_an_encoder_teaches(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "bert", "Bert", "MaskedLM", str(STORIES))
    student = Student(run(recipe="mlm", model={"id": folder}))
    source = _saved_beside(student, kind, tmp_path)
    ids_BL = torch.arange(4, 16).view(2, 6)
    inputs = {"input_ids": ids_BL, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    read = MicroBatch(inputs, torch.tensor([1, 4, 8]), torch.tensor([7, 8, 9]), tokens=10)
    teacher = student.taught_by(source)
    wanted = backbones.load(source.model, None, task=model_heads.MASKED).model
    if source.adapters:
        wanted = adapters.load(wanted, source.adapters[0])  # type: ignore[assignment]
    assert teacher.shared
    torch.testing.assert_close(said(teacher, read), log_probs(wanted, read))


def _saved_beside(student: Student, kind: str, tmp_path: Path) -> TeacherSource:
    if kind == BACKBONE:
        return teacher_sources.find(TeacherConfig(id=BACKBONE), student.config.model)
    adapters.save(Student(student.config, seed=4).model, tmp_path / "teacher")
    return TeacherSource("teacher", student.config.model, (tmp_path / "teacher",))


def test_mistakes_are_told(saved: Callable[..., TeacherSource], tmp_path: Path) -> None:
    student = Student(run())
    wide = tiny("Llama", hidden_size=48, num_attention_heads=4, vocab_size=512)
    adapters.save(adapters.attach(wide, student.config.adapter, seed=0), tmp_path / "other")
    with pytest.raises(BackboneError, match="this adapter does not fit the backbone"):
        student.taught_by(TeacherSource("other", student.config.model, (tmp_path / "other",)))
    mixed = TeacherSource("mixed", student.config.model, (*saved("lora").adapters, *saved("ia3").adapters))
    with pytest.raises(ConfigError, match="different kinds"):
        student.taught_by(mixed)
