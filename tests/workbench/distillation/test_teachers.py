"""A teacher on the student's backbone says what it says alone, and the student is what it would be without it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import STORIES, save_tiny, tiny
from workbench import adapters, backbones, evaluation, fused, heads, shipped, starter, tasks
from workbench.adapters import Method
from workbench.backbones import Backbone
from workbench.config import ModelConfig, RunConfig
from workbench.data import tokens
from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.forms import form
from workbench.data.tokens import Tokens
from workbench.distillation import sources, teachers
from workbench.distillation.learning import taught_loss
from workbench.distillation.sources import Source
from workbench.distillation.teachers import LiveTeacher
from workbench.distilling import BACKBONE, DistillConfig, TeacherConfig
from workbench.errors import BackboneError, ConfigError

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

PLAIN = {"weights": "float32", "compute": "float32"}
SWITCHED: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2, "dropout": 0.5},
    "dora": {"rank": 2},
    "pissa": {"rank": 2},
    "ia3": {},
    "linear-probe": {},
    "last-layers": {"layers": 1},
    "houlsby": {"width": 2},
    "oft": {"block": 4},
    "prompt": {"virtual_tokens": 3},
    "prefix": {"virtual_tokens": 3, "encoder_width": 8},
}
"""Methods of every way to be switched: layers in place of others, beside them, copies of weights, virtual tokens."""


def _run(
    method: str = "lora", *, recipe: str = "sft", model: dict[str, Any] | None = None, **settings: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": recipe,
            "model": {"id": str(STORIES), **PLAIN, **(model or {})},
            "adapter": {"method": method, **(settings or SWITCHED.get(method, {}))},
            "data": {"train": "rows.jsonl"},
        }
    )


def _moved(model: nn.Module, *, seed: int) -> nn.Module:
    """Its trainable values are those of an adapter that has learnt something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


class Student:
    """A student as a run has it in the moment when its teacher comes."""

    def __init__(self, config: RunConfig, *, seed: int = 0) -> None:
        self.config = config
        self.tokenizer = backbones.tokenizer(config.model)
        full = isinstance(config.adapter, adapters.Full)
        self.backbone: Backbone = backbones.load(config.model, self.tokenizer, task=tasks.of(config), trainable=full)
        self.model = _moved(attached(self.backbone, config.adapter), seed=seed)
        self.head = heads.find(self.model, self.backbone.model)

    def taught_by(self, source: Source) -> LiveTeacher:
        return teachers.load(source, self.config, self.tokenizer, model=self.model, backbone=self.backbone)

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def state(self, batch: MicroBatch) -> dict[str, Any]:
        """All that a teacher must leave as it is; in training mode, with dropout."""
        torch.manual_seed(5)
        hidden_BLD = self.head.hidden(self.model, batch.inputs)
        logits_NV = self.head.project(hidden_BLD.flatten(0, 1)[batch.positions_N])
        trained = self.trained()
        grads = torch.autograd.grad(logits_NV.square().sum(), list(trained.values()), allow_unused=True)
        return {
            "logits": logits_NV.detach(),
            "trained": [(name, id(each)) for name, each in trained.items()],
            "grads": grads,
            "saved": list(self.model.state_dict()),
            "modes": {name: module.training for name, module in self.model.named_modules()},
        }


def attached(backbone: Backbone, method: Method, *, seed: int = 0) -> nn.Module:
    return adapters.attach(backbone.model, method, seed=seed)


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert torch.equal(one["logits"], other["logits"])
    assert one["trained"] == other["trained"]
    for a, b in zip(one["grads"], other["grads"], strict=True):
        assert a is b is None or torch.equal(a, b)
    assert one["saved"] == other["saved"]
    assert one["modes"].items() <= other["modes"].items()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Source]:
    """Adapters over stories260K that have learnt something, as a teacher."""

    def save(method: str = "lora", *seeds: int, **settings: Any) -> Source:
        config, folders = _run(method, **settings), []
        for seed in seeds or (1,):
            folders.append(tmp_path_factory.mktemp(method))
            loaded = backbones.load(config.model, None, trainable=False)
            adapters.save(_moved(attached(loaded, config.adapter, seed=seed), seed=seed), folders[-1])
        return Source(method, config.model, tuple(folders))

    return save


@pytest.fixture(scope="module")
def batch() -> MicroBatch:
    chance = np.random.default_rng(0)
    return collate([Row(chance.integers(3, 500, size), np.arange(size) % 3 != 1) for size in (11, 5, 8)])


def _said(teacher: LiveTeacher, batch: MicroBatch, **settings: Any) -> Tensor:
    spoken = teacher.signal(batch, DistillConfig.model_validate(settings), temperature=1.0)
    return spoken.log_probs(spoken.tensors, vocabulary=spoken.vocabulary)


@torch.no_grad()
def _log_probs(model: nn.Module, batch: MicroBatch) -> Tensor:
    logits_BLV = model(**batch.inputs).logits[:, -batch.inputs["input_ids"].shape[1] :]
    logp_NV: Tensor = F.log_softmax(logits_BLV.flatten(0, 1)[batch.positions_N], dim=-1)
    return logp_NV


@pytest.mark.parametrize("method", ["lora", "linear-probe", "houlsby", "oft", "prompt", "prefix"])
def test_the_bare_backbone_under_an_adapter_teaches_it(method: str, batch: MicroBatch) -> None:
    student = Student(_run(method))
    bare = _log_probs(backbones.load(student.config.model, None).model, batch)
    student.model.train()
    before = student.state(batch)
    teacher = student.taught_by(sources.find(TeacherConfig(id=BACKBONE), student.config.model))
    assert teacher.shared and teacher.backbone is student.backbone.model
    torch.testing.assert_close(_said(teacher, batch), bare)
    _same(before, student.state(batch))
    assert not torch.allclose(_log_probs(student.model.eval(), batch), bare, atol=1e-3)


@pytest.mark.parametrize("method", sorted(SWITCHED))
def test_an_adapter_beside_the_students_is_what_it_is_alone(
    method: str, saved: Callable[..., Source], batch: MicroBatch
) -> None:
    source, student = saved(method), Student(_run(method))
    alone = adapters.load(backbones.load(source.model, None).model, source.adapters[0])
    student.model.train()
    before = student.state(batch)
    teacher = student.taught_by(source)
    assert teacher.shared and teacher.notes == [
        "The teacher stands on the student's backbone: there is no second copy of its weights."
    ]
    torch.testing.assert_close(_said(teacher, batch), _log_probs(alone, batch))
    _same(before, student.state(batch))


@pytest.mark.parametrize("method", ["lora", "pissa", "prompt"])
def test_the_teacher_is_not_saved_with_the_student(
    method: str, saved: Callable[..., Source], batch: MicroBatch, tmp_path: Path
) -> None:
    student = Student(_run(method))
    adapters.save(student.model, tmp_path / "before")
    teacher = student.taught_by(saved(method, 1, 2))
    _said(teacher, batch)
    adapters.save(student.model, tmp_path / "after")
    before, after = (
        {str(each.relative_to(tmp_path / name)): each.read_bytes() for each in (tmp_path / name).rglob("*.*")}
        for name in ("before", "after")
    )
    assert before == after and teacher.shared


def _steps(student: Student, teacher: LiveTeacher, batch: MicroBatch, config: DistillConfig) -> list[Tensor]:
    """The trained values after three steps, fused and with dropout as in a run."""
    loss = taught_loss(config, student.model, student.head, teacher, None, lambda: 0.5)
    student.model.train()
    fused.fuse(student.model)
    optimizer = torch.optim.AdamW(student.trained().values(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)
        loss(batch, 1 / len(batch.labels_N)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in student.trained().values()]


@pytest.mark.parametrize(
    ("method", "kind"),
    [("lora", "adapter"), ("linear-probe", "adapter"), ("linear-probe", BACKBONE), ("prompt", "adapter")],
)
def test_a_shared_teacher_teaches_what_a_second_copy_does(
    method: str, kind: str, saved: Callable[..., Source], batch: MicroBatch
) -> None:
    config = _run(method)
    bare = kind == BACKBONE
    source = sources.find(TeacherConfig(id=BACKBONE), config.model) if bare else saved(method, 1, 2)
    settings = DistillConfig.model_validate({"loss": "jsd", "temperature": 2.0, "alpha": 0.8})
    one, other, untaught = Student(config), Student(config), Student(config)
    shared = one.taught_by(source)
    copied = teachers.alone(source, config, other.tokenizer)
    assert shared.shared and not copied.shared
    fused.fuse(copied.backbone)
    found, wanted = _steps(one, shared, batch, settings), _steps(other, copied, batch, settings)
    labels = _steps(untaught, copied, batch, settings.model_copy(update={"alpha": 0.0}))
    assert all(map(torch.equal, found, wanted))
    assert any(not torch.allclose(a, c, atol=1e-3) for a, c in zip(found, labels, strict=True))


@pytest.mark.parametrize("alone", [True, False])
def test_several_are_the_mean_of_their_probabilities(
    alone: bool, saved: Callable[..., Source], batch: MicroBatch
) -> None:
    both, student = saved("lora", 1, 2), Student(_run())
    load = (lambda source: teachers.alone(source, student.config, student.tokenizer)) if alone else student.taught_by
    teacher = load(both)
    assert len(teacher.voices) == 2 and teacher.shared is not alone
    each = [
        _log_probs(adapters.load(backbones.load(both.model, None).model, folder), batch) for folder in both.adapters
    ]
    assert not torch.allclose(*each, atol=1e-2)
    torch.testing.assert_close(_said(teacher, batch), (sum(one.exp() for one in each) / 2).log())


def _bytes(*models: nn.Module) -> int:
    """Of all parameters and buffers, each storage counted once."""
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def test_no_second_copy_of_the_weights(saved: Callable[..., Source], batch: MicroBatch) -> None:
    """Nothing but the teacher's own adapter is added; a teacher that cannot stand there brings a backbone."""
    source, student = saved("lora"), Student(_run())
    alone = _bytes(student.model)
    adapter = sum(4 * each.numel() for each in student.trained().values())
    bare = student.taught_by(sources.find(TeacherConfig(id=BACKBONE), student.config.model))
    assert _bytes(student.model, bare.backbone, *(voice.model for voice in bare.voices)) == alone
    guest = student.taught_by(source)
    assert _bytes(student.model, guest.backbone, *(voice.model for voice in guest.voices)) == alone + adapter
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
    saved: Callable[..., Source],
    batch: MicroBatch,
) -> None:
    student = Student(_run(method, model=model))
    source = sources.find(TeacherConfig(id=BACKBONE), student.config.model) if teacher == BACKBONE else saved(teacher)
    wanted = backbones.load(_run().model, None).model
    if source.adapters:
        wanted = adapters.load(wanted, source.adapters[0])  # type: ignore[assignment]
    student.model.train()
    before = student.state(batch)
    found = student.taught_by(source)
    assert not found.shared and found.backbone is not student.backbone.model
    assert f"The teacher is a second model beside the student: {reason}".replace("\\", "") in found.notes[0]
    torch.testing.assert_close(_said(found, batch), _log_probs(wanted, batch))
    _same(before, student.state(batch))
    assert not any(each.requires_grad for each in found.backbone.parameters())


def test_other_weights_are_another_backbone() -> None:
    student = Student(_run(model={"id": "starter"}))
    folder = str(Path(starter.resolve("starter")))
    assert student.taught_by(Source("folder", ModelConfig(id=folder, **PLAIN))).shared, "the same by another name"
    source = sources.find(TeacherConfig(id=BACKBONE, weights="bfloat16"), student.config.model)
    found = student.taught_by(source)
    assert found.notes[:2] == [
        "The teacher is a second model beside the student: its model.weights is bfloat16, and the student's float32.",
        next(note for note in found.notes if note.startswith("Teacher: weights stored in bfloat16")),
    ]


@pytest.mark.parametrize("kind", [BACKBONE, "adapter"])
@pytest.mark.parametrize("method", ["lora", "prefix"])
def test_whatever_fails_while_it_speaks_the_student_is_back(
    method: str, kind: str, saved: Callable[..., Source], batch: MicroBatch
) -> None:
    student = Student(_run(method))
    student.model.train()
    before = student.state(batch)
    source = sources.find(TeacherConfig(id=BACKBONE), student.config.model) if kind == BACKBONE else saved(method)
    (voice,) = student.taught_by(source).voices
    with pytest.raises(KeyboardInterrupt), voice.speaking():
        assert not torch.is_grad_enabled() and not any(module.training for module in voice.model.modules())
        with voice.speaking():
            inner = voice.head.hidden(voice.model, batch.inputs)
        assert torch.equal(voice.head.hidden(voice.model, batch.inputs), inner), "a voice may speak inside itself"
        raise KeyboardInterrupt
    assert torch.is_grad_enabled()
    _same(before, student.state(batch))


def test_a_student_with_new_tokens_sits_on_the_backbone_that_teaches_it(batch: MicroBatch) -> None:
    """Its rows of the embedding are switched off with its adapter, where the teacher knows the tokens too."""
    config = _run(model={"new_tokens": ["<|a|>", "<|b|>"]})
    tokenizer = backbones.tokenizer(config.model)
    loaded = backbones.load(config.model, tokenizer)
    grown = copy.deepcopy(loaded.model)
    model = _moved(adapters.attach(loaded.model, config.adapter, seed=0, new_token_ids=[512, 513]), seed=0)
    head = heads.find(model, loaded.model)
    found = teachers.load(Source("same", config.model), config, tokenizer, model=model, backbone=loaded)
    read = collate([Row(np.asarray([3, 512, 5, 513, 9, 512]), np.ones(6, dtype=bool))])
    assert found.shared
    torch.testing.assert_close(_said(found, read), _log_probs(grown, read))
    assert len(head.trainable()) == 1, "the rows train again"


def _tokens(config: RunConfig, tokenizer: Any, path: Path) -> Tokens:
    template = form(config, backbones.hub_config(config.model), tokenizer)
    return tokens.read(str(path), config.data, tokenizer, template)


def test_a_run_teaches_what_it_ships(tmp_path: Path, questions: Path) -> None:
    """With its new tokens, whose rows need a vocabulary that the student's may not have."""
    config = _run(model={"new_tokens": ["<|a|>", "<|b|>"]})
    tokenizer = backbones.tokenizer(config.model)
    loaded = backbones.load(config.model, tokenizer)
    model = _moved(adapters.attach(loaded.model, config.adapter, seed=0, new_token_ids=[512, 513]), seed=0)
    template = form(config, loaded.model.config, tokenizer)
    shipped.save(model, tmp_path / "adapter", tokenizer, template, [2])
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))

    student = Student(config)
    source = sources.find(TeacherConfig(id=str(tmp_path)), config.model)
    teacher = student.taught_by(source)
    assert teacher.notes == [
        "The teacher is a second model beside the student: rows of new tokens change the vocabulary for every adapter."
    ]
    wanted = shipped.load(tmp_path, config)
    rows = _tokens(config, tokenizer, questions)
    torch.testing.assert_close(
        _said(teacher, rows.batch(np.arange(4))), _log_probs(wanted.model, rows.batch(np.arange(4)))
    )
    expected = evaluation.likelihood(wanted.model, wanted.head, rows).loss
    assert teacher.loss(rows) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(evaluation.likelihood(student.backbone.model, student.head, rows).loss, rel=1e-3)


def test_a_model_that_a_run_trained_whole_teaches(tmp_path: Path, questions: Path) -> None:
    model = backbones.load(_run().model, None).model
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(tmp_path / "whole")
    backbones.tokenizer(_run().model).save_pretrained(tmp_path / "whole")
    student = Student(_run())
    found = student.taught_by(Source("whole", ModelConfig(id=str(tmp_path / "whole"), **PLAIN)))
    assert not found.shared and "its model.id is" in found.notes[0]
    rows = _tokens(student.config, student.tokenizer, questions)
    assert found.loss(rows) == pytest.approx(
        evaluation.likelihood(model, heads.find(model, model), rows).loss, rel=1e-5
    )


@pytest.mark.parametrize("kind", [BACKBONE, "adapter"])
def test_an_encoder_decoder_teaches(kind: str, encoder_decoder: str, tmp_path: Path) -> None:
    student = Student(_run(model={"id": encoder_decoder}))
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
    torch.testing.assert_close(_said(teacher, read), F.log_softmax(logits_NV, dim=-1))


@pytest.mark.parametrize("kind", [BACKBONE, "adapter"])
def test_an_encoder_teaches(kind: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "bert", "Bert", "MaskedLM", str(STORIES))
    student = Student(_run(recipe="mlm", model={"id": folder}))
    source = _saved_beside(student, kind, tmp_path)
    ids_BL = torch.arange(4, 16).view(2, 6)
    inputs = {"input_ids": ids_BL, "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    read = MicroBatch(inputs, torch.tensor([1, 4, 8]), torch.tensor([7, 8, 9]), tokens=10)
    teacher = student.taught_by(source)
    wanted = backbones.load(source.model, None, task=tasks.MASKED).model
    if source.adapters:
        wanted = adapters.load(wanted, source.adapters[0])  # type: ignore[assignment]
    assert teacher.shared
    torch.testing.assert_close(_said(teacher, read), _log_probs(wanted, read))


def _saved_beside(student: Student, kind: str, tmp_path: Path) -> Source:
    if kind == BACKBONE:
        return sources.find(TeacherConfig(id=BACKBONE), student.config.model)
    adapters.save(Student(student.config, seed=4).model, tmp_path / "teacher")
    return Source("teacher", student.config.model, (tmp_path / "teacher",))


def test_mistakes_are_told(saved: Callable[..., Source], tmp_path: Path) -> None:
    student = Student(_run())
    wide = tiny("Llama", hidden_size=48, num_attention_heads=4, vocab_size=512)
    adapters.save(adapters.attach(wide, student.config.adapter, seed=0), tmp_path / "other")
    with pytest.raises(BackboneError, match="this adapter does not fit the backbone"):
        student.taught_by(Source("other", student.config.model, (tmp_path / "other",)))
    mixed = Source("mixed", student.config.model, (*saved("lora").adapters, *saved("ia3").adapters))
    with pytest.raises(ConfigError, match="different kinds"):
        student.taught_by(mixed)


def test_switching_leaves_no_hook_behind(saved: Callable[..., Source], batch: MicroBatch) -> None:
    student = Student(_run())
    teacher = student.taught_by(saved("lora"))
    for _ in range(2):
        _said(teacher, batch)
    assert not any(module._forward_pre_hooks for module in student.model.modules())


@pytest.fixture(autouse=True)
def _no_gradients_are_off() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()
