"""Features are those of the backbone as it came, and are computed once for what the model reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import STORIES
from tests.vision_backbones import SIZE, save_vision
from workbench.config import ModelConfig, RunConfig
from workbench.data.labelled.labelled_data import LabelledSet, load
from workbench.data.labelled.records import RowReader
from workbench.errors import FileError
from workbench.evaluation import frozen_features as module
from workbench.evaluation.features import features
from workbench.evaluation.frozen_features import frozen_features
from workbench.models import backbones, classifier, row_readers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


def texts() -> tuple[ModelConfig, RowReader, LabelledSet]:
    model = {"id": str(STORIES), "weights": "float32"}
    values = {"recipe": "classify", "model": model, "data": {"train": "starter/banking77_train.csv"}}
    config = RunConfig.model_validate(values)
    reader = row_readers.of_backbone(config)
    return config.model, reader, load(config, reader).train.subset(np.arange(24))


def kept(cache: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in cache.rglob("*.bin")}


def test_they_are_those_of_the_backbone_in_the_order_of_the_rows(cache: Path) -> None:
    model, reader, rows = texts()
    first, second = rows.inputs.take(np.arange(9, -1, -1)), rows.inputs.take(np.arange(5, 24))
    found = frozen_features(model, reader, [first, second])
    labels = classifier.Labels("one", ("x", "y", "z"))
    backbone = backbones.load(model, reader.tokenizer, task=classifier.task(labels, seed=3)).model
    loaded = classifier.classification_model(backbone, backbone, reader, labels)
    for inputs, each in zip((first, second), found, strict=True):
        np.testing.assert_allclose(each, features(loaded, inputs), rtol=1e-3, atol=1e-4)
    assert found[0][0].tobytes() == found[1][4].tobytes(), "row 9 stands in both"


def test_known_rows_need_no_backbone_and_new_ones_are_added(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reader, rows = texts()
    (some,) = frozen_features(model, reader, [rows.inputs.take(np.arange(8))])
    before = kept(cache)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with monkeypatch.context() as without:
        without.delattr(module, "_loaded")
        (again,) = frozen_features(model, reader, [rows.inputs.take(np.asarray([7, 0, 0]))])
    assert again.tobytes() == some[[7, 0, 0]].tobytes() and kept(cache) == before
    (more,) = frozen_features(model, reader, [rows.inputs])
    assert more[:8].tobytes() == some.tobytes()
    assert torch.equal(state, torch.get_rng_state()), "no random number is drawn"


@pytest.mark.few("changed")
@pytest.mark.parametrize("damage", ["cut", "changed", "index gone"])
def test_what_is_damaged_is_computed_again(cache: Path, damage: str) -> None:
    model, reader, rows = texts()
    (sound,) = frozen_features(model, reader, [rows.inputs])
    (states,), (index,) = cache.rglob("states.bin"), cache.rglob("index.bin")
    content = states.read_bytes()
    if damage == "cut":
        states.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        states.write_bytes(b"\xff" * 64 + content[64:])
    else:
        index.unlink()
    (found,) = frozen_features(model, reader, [rows.inputs])
    np.testing.assert_allclose(found, sound, rtol=1e-3, atol=1e-4)


def test_other_weights_precision_or_preparation_are_kept_apart(cache: Path, tmp_path: Path) -> None:
    folder = save_vision(tmp_path, "ViT")

    def name(weights: str = "float32", size: int = SIZE) -> str:
        config = RunConfig.model_validate(
            {
                "recipe": "classify",
                "model": {"id": folder, "weights": weights},
                "data": {"train": "starter/sign_digits.zip/test", "format": "image"},
                "image": {"size": size},
            }
        )
        return module._fingerprint(config.model, row_readers.of_backbone(config))

    names = [name(), name(weights="bfloat16"), name(size=2 * SIZE)]
    assert name() == names[0]
    tensors = load_file(Path(folder, "model.safetensors"))
    save_file(
        {key: tensor + 0.1 for key, tensor in tensors.items()}, Path(folder, "model.safetensors"), {"format": "pt"}
    )
    assert len({*names, name()}) == 4


def test_a_cache_that_cannot_be_written_is_a_mistake_with_a_cure(cache: Path) -> None:
    model, reader, rows = texts()
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(FileError, match=r"evaluate\.probe=0"):
        frozen_features(model, reader, [rows.inputs.take(np.arange(2))])
