"""A backbone is told from every other by its files, and is here where its weights are."""

from __future__ import annotations

from pathlib import Path

from tests.vision_backbones import save_vision
from workbench.config import ModelConfig
from workbench.models import model_files


def test_digests_follow_the_weights_and_nothing_else(tmp_path: Path) -> None:
    model = ModelConfig(id=save_vision(tmp_path, "ViT"))
    before = model_files.digests(model)
    (Path(model.id) / "notes.md").write_text("read me")
    assert model_files.digests(model) == before
    weights = Path(model.id) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    changed = {name for name, digest in model_files.digests(model).items() if before[name] != digest}
    assert changed == {f"{model.id}/model.safetensors"}


def test_weights_are_here_or_would_have_to_be_fetched(tmp_path: Path) -> None:
    model = ModelConfig(id=save_vision(tmp_path, "ViT"))
    assert model_files.are_here(model) and model_files.are_here(ModelConfig())
    (Path(model.id) / "model.safetensors").unlink()
    assert not model_files.are_here(model) and not model_files.are_here(ModelConfig(id="nobody/nothing"))
