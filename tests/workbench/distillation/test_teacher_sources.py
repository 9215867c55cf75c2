"""Where a teacher comes from: the student's backbone, a model, what runs shipped, or the adapters of all folds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CHAT_TEMPLATE, STORIES
from workbench.config import ModelConfig, RunConfig
from workbench.config.sections.distill_config import BACKBONE, STUDENT, TEACHER, TeacherConfig
from workbench.data import starter
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.row_encoder import row_encoder
from workbench.distillation.teacher_sources import find
from workbench.errors import ConfigError, FileError
from workbench.models import backbones, exported

MINE = ModelConfig(id="starter", weights="float32")


def _values(recipe: str = "sft", **sections: Any) -> dict[str, Any]:
    of = {"recipe": recipe, "model": {"id": str(STORIES)}, "data": {"train": "rows.jsonl"}, **sections}
    return RunConfig.model_validate(of).model_dump(mode="json")


def _run(path: Path, *, full: bool = False, template: str | None = None, **sections: Any) -> str:
    """A run directory as far as a teacher is looked for in it; no tensors are."""
    config = RunConfig.model_validate(_values(**sections))
    tokenizer = backbones.tokenizer(config.model)
    (path / "adapter").mkdir(parents=True)
    (path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path / "adapter")
    if full:
        shutil.copy(STORIES / "config.json", path / "adapter")
    else:
        (path / "adapter" / "adapter_config.json").write_text("{}")
        (path / "adapter" / "adapter_model.safetensors").touch()
    return str(path)


def test_the_backbone_is_the_students_as_it_came() -> None:
    student = MINE.model_copy(update={"new_tokens": ("<|a|>",), "attention": "eager"})
    found = find(TeacherConfig(id=BACKBONE), student)
    assert found.model == MINE.model_copy(update={"attention": "eager"})
    assert (found.name, found.adapters, found.run, found.config) == (BACKBONE, (), None, None)
    assert len(found.tokenizer()) == len(backbones.tokenizer(MINE))
    assert find(TeacherConfig(id=BACKBONE, weights="nf4"), MINE).model.weights == "nf4"
    assert found.hub_config().hidden_size == backbones.hub_config(MINE).hidden_size


def test_a_name_without_a_run_is_a_model() -> None:
    found = find(TeacherConfig(id="owner/name", revision="v2", weights="bfloat16"), MINE)
    assert found.model == ModelConfig(id="owner/name", revision="v2", weights="bfloat16")
    assert (found.name, found.adapters, found.run) == ("owner/name", (), None)
    folder = str(Path(starter.resolve("starter")))
    assert find(TeacherConfig(id=folder), MINE).model == ModelConfig(id=folder)


def test_an_adapter_that_a_run_shipped(tmp_path: Path) -> None:
    sections = {"model": {"id": str(STORIES), "weights": "float32", "new_tokens": ["<|start|>", "<|end|>"]}}
    run = _run(tmp_path / "run", template=CHAT_TEMPLATE, **sections)
    found = find(TeacherConfig(id=run), MINE)
    assert found.adapters == (tmp_path / "run" / "adapter",) and found.run == tmp_path / "run"
    assert found.config is not None and found.model == found.config.model
    assert found.model.weights == "float32", "as it was trained"
    assert find(TeacherConfig(id=run, weights="int8"), MINE).model.weights == "int8"
    tokenizer = found.tokenizer()
    assert tokenizer.get_vocab() == exported.load_tokenizer(tmp_path / "run", found.config).get_vocab()
    assert tokenizer.convert_tokens_to_ids("<|end|>") == 513
    student = RunConfig.model_validate(_values())
    written = found.template(student, tokenizer)
    plain = row_encoder(student, backbones.hub_config(student.model), backbones.tokenizer(student.model))
    assert isinstance(written, ChatEncoder) and isinstance(plain, ChatEncoder)
    assert written.source == CHAT_TEMPLATE != plain.source


def test_why_a_teacher_cannot_read_packed_rows(tmp_path: Path) -> None:
    lora, prefix = (_run(tmp_path / name, adapter={"method": name}) for name in ("lora", "prefix"))
    assert find(TeacherConfig(id=lora), MINE).no_packing(longest=99) is None
    assert "virtual tokens" in str(find(TeacherConfig(id=prefix), MINE).no_packing(longest=99))
    assert "virtual tokens" in str(find(TeacherConfig(id=(lora, prefix)), MINE).no_packing(longest=99))
    eager = MINE.model_copy(update={"attention": "eager"})
    assert "attention is eager" in str(find(TeacherConfig(id=BACKBONE), eager).no_packing(longest=99))
    shutil.copytree(STORIES, tmp_path / "short")
    config = json.loads((STORIES / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(
        json.dumps({**config, "model_type": "mistral", "sliding_window": 8})
    )
    short = find(TeacherConfig(id=str(tmp_path / "short")), MINE)
    assert short.no_packing(longest=8) is None and "reaches back 8 tokens" in str(short.no_packing(longest=9))


def test_a_model_that_a_run_trained_whole(tmp_path: Path) -> None:
    run = _run(
        tmp_path / "run", full=True, adapter={"method": "full"}, model={"id": str(STORIES), "weights": "float32"}
    )
    found = find(TeacherConfig(id=run), MINE)
    assert found.adapters == () and found.run == tmp_path / "run"
    assert found.model == ModelConfig(id=str(tmp_path / "run" / "adapter"), weights="float32")
    assert found.hub_config().vocab_size == 512 and len(found.tokenizer()) == 512


def test_the_best_of_a_sweep(tmp_path: Path) -> None:
    over = {"over": {"train.learning_rate": [1e-4, 1e-3]}}
    run = _run(tmp_path / "run", recipe="sweep", sweep=over)
    members = [{"member": f"m{n}", "settings": {"train.learning_rate": rate}} for n, rate in enumerate((1e-4, 1e-3))]
    (tmp_path / "run" / "sweep.json").write_text(json.dumps({"best": "m1", "members": members}))
    found = find(TeacherConfig(id=run), MINE)
    assert found.config is not None and found.config.train.learning_rate == 1e-3 and found.config.recipe == "sft"
    assert found.adapters == (tmp_path / "run" / "adapter",)


def test_a_student_is_the_teacher_of_the_next(tmp_path: Path) -> None:
    """Its backbone was made of another one, and stands in its run."""
    distill = {"teacher": {"id": BACKBONE}, "student": {"layers": "every-2"}}
    run = _run(tmp_path / "run", recipe="distill", distill=distill)
    found = find(TeacherConfig(id=run), MINE)
    assert found.model.id == str(tmp_path / "run" / STUDENT)
    assert found.config is not None and found.config.recipe == "sft"


def _crossval(path: Path, decided: dict[str, Any] | None) -> str:
    path.mkdir()
    sections = {"data": {"train": "rows.csv"}, "model": {"id": str(STORIES)}}
    (path / "config.yaml").write_text(json.dumps(_values("crossval", **sections)))
    if decided is not None:
        (path / "decision.json").write_text(json.dumps(decided))
    return str(path)


def test_all_adapters_of_a_cross_validation(tmp_path: Path) -> None:
    run = _crossval(tmp_path / "run", {"round": 1, "members": ["fold-0", "fold-1", "fold-2"]})
    found = find(TeacherConfig(id=run), MINE)
    where = tmp_path / "run" / "members" / "round-1"
    assert found.adapters == tuple(where / f"fold-{number}" / "adapter" for number in range(3))
    assert found.config is not None and found.config.recipe == "crossval"
    assert len(found.tokenizer()) == 512, "no adapter brings one of its own"


def test_several_runs_over_one_backbone(tmp_path: Path) -> None:
    runs = tuple(_run(tmp_path / name) for name in ("a", "b"))
    found = find(TeacherConfig(id=runs), MINE)
    assert found.adapters == (tmp_path / "a" / "adapter", tmp_path / "b" / "adapter")
    assert found.name == f"{tmp_path}/a, {tmp_path}/b" and found.run == tmp_path / "a"
    assert find(TeacherConfig(id=runs[:1]), MINE) == find(TeacherConfig(id=runs[0]), MINE)
    halves = find(TeacherConfig(id=runs, weights="bfloat16"), MINE)
    assert halves.model.weights == "bfloat16"


def test_several_that_are_no_such_runs_are_refused(tmp_path: Path) -> None:
    first = _run(tmp_path / "first")
    others = {
        "stored": _run(tmp_path / "stored", model={"id": str(STORIES), "weights": "bfloat16"}),
        "whole": _run(tmp_path / "whole", full=True, adapter={"method": "full"}),
        "classifier": _run(tmp_path / "classifier", recipe="classify", data={"train": "rows.csv"}),
        "folds": _crossval(tmp_path / "folds", {"round": 0, "members": ["fold-0", "fold-1"]}),
        "model": str(STORIES),
    }
    for other in others.values():
        with pytest.raises(ConfigError) as told:
            find(TeacherConfig(id=(first, other)), MINE)
        assert f"{other} is no single adapter over {STORIES} as {first} is" in str(told.value)


def test_what_cannot_teach_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"distill\.teacher\.id: name a teacher"):
        find(TeacherConfig(), MINE)
    with pytest.raises(ConfigError, match="name each other"):
        find(TeacherConfig(id=BACKBONE), ModelConfig(id=TEACHER))
    running = _run(tmp_path / "running")
    shutil.rmtree(tmp_path / "running" / "adapter")
    with pytest.raises(ConfigError, match="no adapter there yet"):
        find(TeacherConfig(id=running), MINE)
    damaged = _run(tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter" / "tokenizer.json").unlink()
    with pytest.raises(FileError, match=r"tokenizer\.json missing"):
        find(TeacherConfig(id=damaged), MINE)
    with pytest.raises(ConfigError, match="the cross-validation has not ended"):
        find(TeacherConfig(id=_crossval(tmp_path / "folds", None)), MINE)
