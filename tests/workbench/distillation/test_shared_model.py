"""A teacher on the student's backbone says what it says alone, and the student is what it would be without it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.workbench.distillation.staged import SWITCHED, Student, assert_same, log_probs, moved, run, said
from workbench import adapters
from workbench.config.sections.distill_config import BACKBONE, TeacherConfig
from workbench.data.batching import MicroBatch, Row, collate
from workbench.distillation import teacher_sources, teachers
from workbench.distillation.teacher_sources import TeacherSource
from workbench.models import backbones, output_heads

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.parametrize("method", ["lora", "linear-probe", "houlsby", "oft", "prompt", "prefix"])
def test_the_bare_backbone_under_an_adapter_teaches_it(method: str, batch: MicroBatch) -> None:
    student = Student(run(method))
    bare = log_probs(backbones.load(student.config.model, None).model, batch)
    student.model.train()
    before = student.state(batch)
    teacher = student.taught_by(teacher_sources.find(TeacherConfig(id=BACKBONE), student.config.model))
    assert teacher.shared and teacher.backbone is student.backbone.model
    torch.testing.assert_close(said(teacher, batch), bare)
    assert_same(before, student.state(batch))
    assert not torch.allclose(log_probs(student.model.eval(), batch), bare, atol=1e-3)


@pytest.mark.nightly(but=["houlsby", "lora", "prefix", "linear-probe"])
@pytest.mark.parametrize("method", sorted(SWITCHED))
def test_an_adapter_beside_the_students_is_what_it_is_alone(
    method: str, saved: Callable[..., TeacherSource], batch: MicroBatch
) -> None:
    source, student = saved(method), Student(run(method))
    alone = adapters.load(backbones.load(source.model, None).model, source.adapters[0])
    student.model.train()
    before = student.state(batch)
    teacher = student.taught_by(source)
    assert teacher.shared and teacher.notes == [
        "The teacher stands on the student's backbone: there is no second copy of its weights."
    ]
    torch.testing.assert_close(said(teacher, batch), log_probs(alone, batch))
    assert_same(before, student.state(batch))


@pytest.mark.parametrize("kind", [BACKBONE, "adapter"])
@pytest.mark.parametrize("method", ["lora", "prefix"])
def test_whatever_fails_while_it_speaks_the_student_is_back(
    method: str, kind: str, saved: Callable[..., TeacherSource], batch: MicroBatch
) -> None:
    student = Student(run(method))
    student.model.train()
    before = student.state(batch)
    source = (
        teacher_sources.find(TeacherConfig(id=BACKBONE), student.config.model) if kind == BACKBONE else saved(method)
    )
    (teacher,) = student.taught_by(source).models
    with pytest.raises(KeyboardInterrupt), teacher.active():
        assert not torch.is_grad_enabled() and not any(module.training for module in teacher.model.modules())
        with teacher.active():
            inner = teacher.head.hidden(teacher.model, batch.inputs)
        assert torch.equal(teacher.head.hidden(teacher.model, batch.inputs), inner), (
            "a teacher may be used inside itself"
        )
        raise KeyboardInterrupt
    assert torch.is_grad_enabled()
    assert_same(before, student.state(batch))


def test_a_student_with_new_tokens_sits_on_the_backbone_that_teaches_it(batch: MicroBatch) -> None:
    """Its rows of the embedding are switched off with its adapter, where the teacher knows the tokens too."""
    config = run(model={"new_tokens": ["<|a|>", "<|b|>"]})
    tokenizer = backbones.tokenizer(config.model)
    loaded = backbones.load(config.model, tokenizer)
    grown = copy.deepcopy(loaded.model)
    model = moved(adapters.attach(loaded.model, config.adapter, seed=0, new_token_ids=[512, 513]), seed=0)
    head = output_heads.find(model, loaded.model)
    found = teachers.load(TeacherSource("same", config.model), config, tokenizer, model=model, backbone=loaded.model)
    read = collate([Row(np.asarray([3, 512, 5, 513, 9, 512]), np.ones(6, dtype=bool))])
    assert found.shared
    torch.testing.assert_close(said(found, read), log_probs(grown, read))
    assert len(head.trainable()) == 1, "the rows train again"


def test_switching_leaves_no_hook_behind(saved: Callable[..., TeacherSource], batch: MicroBatch) -> None:
    student = Student(run())
    teacher = student.taught_by(saved("lora"))
    for _ in range(2):
        said(teacher, batch)
    assert not any(module._forward_pre_hooks for module in student.model.modules())
