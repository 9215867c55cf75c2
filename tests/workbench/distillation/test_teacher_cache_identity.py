"""A teacher is what its weights are, wherever they stand; a tokenizer is what it does."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.workbench.distillation.cached import settings
from workbench.config import ModelConfig
from workbench.distillation import teacher_cache
from workbench.distillation.teacher_cache import identity
from workbench.distillation.teacher_sources import TeacherSource


@pytest.fixture
def tokenizer(stories: str) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    return found


def test_a_folders_teacher_is_what_its_files_hold(
    stories: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def teacher(folder: Path, *adapters: Path, weights: str = "float32") -> str | None:
        model = ModelConfig.model_validate({"id": str(folder), "weights": weights})
        return identity(settings(), TeacherSource(str(folder), model, adapters), tokenizer).teacher

    same = Path(shutil.copytree(stories, tmp_path / "copy"))
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(folder.name.encode())
    plain, adapted = teacher(Path(stories)), teacher(same, first)
    assert teacher(same) == plain
    assert teacher(same, first, second) == teacher(same, second, first)
    (same / "README.md").write_text("Not a weight.")
    assert teacher(same) == plain
    different = [plain, adapted, teacher(same, second), teacher(same, first, second), teacher(same, weights="nf4")]
    (first / "adapter_model.safetensors").write_bytes(b"trained on")
    different.append(teacher(same, first))
    (same / "config.json").write_text("{}")
    different.append(teacher(same))
    assert len(set(different)) == len(different) and None not in different


def test_a_hubs_teacher_is_its_commit(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    def teacher(name: str, commit: str | None, revision: str | None = None) -> str | None:
        hub = SimpleNamespace(_commit_hash=commit)
        monkeypatch.setattr("workbench.models.backbones.hub_config", lambda _: hub)
        return identity(settings(), TeacherSource(name, ModelConfig(id=name, revision=revision)), tokenizer).teacher

    assert teacher("owner/one", "abc") == teacher("owner/one", "abc", "main")
    found = [teacher("owner/one", "abc"), teacher("owner/one", "abd"), teacher("owner/two", "abc")]
    found += [teacher("owner/one", None), teacher("owner/one", None, "v2")]
    assert len(set(found)) == 5


def test_the_starter_is_a_folder(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(teacher_cache.backbones, "hub_config")
    assert identity(settings(), TeacherSource("starter", ModelConfig(id="starter")), tokenizer).teacher


def test_what_is_asked_for(stories: str, tokenizer: PreTrainedTokenizerBase) -> None:
    found = identity(settings(k=1000), None, tokenizer)
    assert found.teacher is None and found.k == "512" and found.kind == "likeliest" and found.temperature == "1.0"
    drawn = identity(settings(k=1000, sampled=True), None, tokenizer)
    assert drawn.dtype is None and drawn.k == "1000" and drawn.kind == "draws"
    other: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(stories)
    assert identity(settings(), None, other).tokenizer == found.tokenizer
    other.eos_token = other.bos_token
    assert identity(settings(), None, other).tokenizer != found.tokenizer
