"""`workbench family`: each sign is a trial, and the page says what trials of all families found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.every_family import FAMILIES, save, untried
from tests.scripts.test_support_matrix import tables
from workbench.cli.verbs import main
from workbench.errors import BackboneError, ConfigError
from workbench.models import tiny_model
from workbench.recipes.verbs.family import SIGNS, SUBJECTS, family

PAGE = Path(__file__).parents[3] / "adapters" / "FAMILIES.md"
QUICK = [subject for subject in SUBJECTS if subject != "ONNX"]
LARGE = ("llama", "gpt2", "mixtral", "gemma3", "qwen3_vl", "qwen3_5", "mistral3", "llava", "falcon_h1", "lfm2", "phi3")


def test_the_page_has_every_family_and_subject() -> None:
    columns, rows = tables(PAGE.read_text())["Families"]
    assert columns == [*SUBJECTS] and [*rows] == [*FAMILIES]
    assert {sign for row in rows.values() for sign in row} <= {*SIGNS.values(), "?"} - {"!"}


@pytest.mark.slow
@pytest.mark.nightly(but=["qwen3_5"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_says_what_a_trial_finds(name: str, tmp_path: Path) -> None:
    subjects = [each for each in QUICK if each not in untried(name)]
    found = family(save(name, tmp_path / name), subjects=subjects)
    columns, rows = tables(PAGE.read_text())["Families"]
    signs = dict(zip(columns, rows[name], strict=True))
    assert {each.subject: SIGNS[each.outcome] for each in found.findings} == {each: signs[each] for each in subjects}


@pytest.mark.slow
@pytest.mark.nightly(but=["qwen3_vl"])
@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_is_tried_small(name: str) -> None:
    """Of the sizes that transformers has for a family by default, those of a published model."""
    config = CONFIG_MAPPING[name]()
    text = config.get_text_config()
    model = tiny_model.build(config)
    small = model.config.get_text_config()
    assert type(model.config) is type(config) and sum(each.numel() for each in model.parameters()) < 2 * 10**8
    assert getattr(small, "head_dim", None) == getattr(text, "head_dim", None)
    kinds = getattr(text, "layer_types", None) or ()
    assert {*kinds} == {*(getattr(small, "layer_types", None) or ())} and small.num_hidden_layers <= 12


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model_type": "t5"}, "T5Config is an encoder-decoder"),
        ({"model_type": "vit"}, "ViTConfig has no causal language model"),
    ],
    ids=["pairs", "pictures"],
)
def test_what_is_no_language_model_is_refused(values: dict[str, str], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(BackboneError, match=why):
        family(tmp_path)


def test_an_unknown_subject_is_told_before_anything_is_tried() -> None:
    with pytest.raises(ConfigError, match="vision: expected loads, LoRA"):
        family("nowhere", subjects=["vision"])


def test_a_folder_without_a_model_ends_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["workbench", "family", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "config.json" in capsys.readouterr().err
