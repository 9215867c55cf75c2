"""A card says what is known, with intervals and licences, and its front matter is one that the hub reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from workbench.config.yaml_text import load_yaml
from workbench.errors import ConfigError, FileError
from workbench.models.exporting import card
from workbench.models.exporting.card import CardFacts
from workbench.runs import score_files

VALUES: dict[str, Any] = {
    "recipe": "classify",
    "data": {"train": "rows.jsonl"},
    "model": {"id": "google/tiny"},
    "adapter": {"method": "rslora", "rank": 4},
}
SCORES = {
    "before": {"accuracy": 0.25, "accuracy_low": 0.1, "accuracy_high": 0.5, "loss": 2.0},
    "after": {"accuracy": 0.875, "accuracy_low": 0.75, "accuracy_high": 0.95, "loss": 0.5},
}


def _written(
    folder: Path,
    *,
    scores: dict[str, Any] = SCORES,
    intervals: Any = None,
    contests: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> tuple[ModelCard, str]:
    run, out = folder / "my-run", folder / "out"
    run.mkdir()
    out.mkdir()
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# Rows\n")
    (folder / "rows.csv").write_text("text,label\n")
    facts = {"source": str(folder / "rows.csv"), "rows": 90, "fingerprint": "abc123"}
    (run / "manifest.json").write_text(json.dumps({"data": {"train": facts}, "versions": {"peft": "0.21.2"}}))
    (run / "scores.json").write_text(json.dumps(scores))
    for each in contests:
        score_files.keep_win_rate(run, each)
    known = {"target": "peft", "form": "Adapter.", "error": "Same.", "usage": "import x  # DIR", "limits": ("Small.",)}
    known |= {"command": "workbench export my-run --to peft --out out", "head": "classes", "pictures": False}
    known["intervals"] = intervals or {}
    card.write(run, out, {**VALUES, **changes}, CardFacts(**known), out=Path("name"))  # type: ignore[arg-type]
    return ModelCard.load(out / "README.md"), (out / "README.md").read_text()


def test_the_hub_reads_the_front_matter(tmp_path: Path) -> None:
    found, _ = _written(tmp_path)
    assert found.data.base_model == "google/tiny" and found.data.library_name == "peft"
    assert found.data.tags == ["peft-workbench", "classify", "rslora"] and found.data.metrics == ["accuracy", "loss"]
    assert found.data.pipeline_tag == "text-classification" and found.data.license is None


def test_data_scores_limits_licences_and_the_command_are_told(tmp_path: Path) -> None:
    _, text = _written(tmp_path)
    assert "lm-eval" not in text and "Win rates" not in text
    assert f"| train | `{tmp_path / 'rows.csv'}` | 90 | `abc123` |" in text
    assert "| accuracy | 0.250 (0.100 to 0.500) | 0.875 (0.750 to 0.950) |\n| loss | 2.00 | 0.500 |" in text
    (tmp_path / "again").mkdir()
    _, more = _written(tmp_path / "again", intervals={"loss": (0.25, 0.75)})
    assert "| loss | 2.00 | 0.500 (0.250 to 0.750) |" in more
    assert "- Small.\n" in text and "import x  # name" in text
    assert "Base model `google/tiny`: unknown" in text and "rows.csv`: cc-by-4.0" in text
    assert "workbench export my-run --to peft --out out" in text
    assert load_yaml(text.split("```yaml\n")[1].split("```")[0]) == VALUES


def test_win_rates_are_told_with_their_interval(tmp_path: Path) -> None:
    rates = {"win_rate": 0.625, "win_rate_low": 0.4, "win_rate_high": 0.8, "ties": 0.25}
    contest = {"against": "runs/sft", "by": "runs/reward", "prompts": ["p.jsonl"], "count": 8, **rates}
    _, text = _written(tmp_path, contests=[contest])
    assert "| `runs/sft` | runs/reward | 8 of p.jsonl | 0.625 (0.400 to 0.800) | 0.250 |" in text


def test_tasks_of_lm_eval_are_told_with_the_interval_of_their_difference(tmp_path: Path) -> None:
    row = {"metric": "acc", "documents": 40, "before": 0.25, "after": 0.5, "difference": 0.25, "higher_is_better": True}
    rows = [{"task": "sums", **row, "low": 0.125, "high": 0.375}, {"task": "same", **row, "low": None, "high": None}]
    found, text = _written(tmp_path, scores={**SCORES, "tasks": {"shots": None, "limit": 40, "rows": rows}})
    assert "## Tasks of lm-eval" in text and "The first 40 documents of each." in text
    assert "| sums | acc | 40 | 0.2500 | 0.5000 | +0.2500 (+0.1250 to +0.3750) |\n| same | acc | 40 |" in text
    assert found.data.metrics == ["accuracy", "loss"]


def test_a_local_base_model_is_no_address_on_the_hub(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    found, text = _written(tmp_path, model={"id": str(base)})
    assert found.data.base_model is None and found.data.license == "apache-2.0"
    assert f"Base model `{base}`: apache-2.0" in text


@pytest.mark.parametrize("text", ["", "# Model\n", "---\nlicense: [\n---\n", "---\njust words\n---\n"])
def test_a_licence_that_nobody_says_is_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert card.licence(str(tmp_path)) == "unknown"
    (tmp_path / "LICENSE").touch()
    assert card.licence(str(tmp_path)) == "see LICENSE beside it"


@pytest.mark.parametrize("name", ["model", "a/b/c", "me/..", "me/a b", ""])
def test_a_name_that_is_none_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match="Write OWNER/NAME, such as me/my-model"):
        card.require_repository_name(name)


def test_a_hub_that_cannot_be_reached_leaves_the_export(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    card.require_repository_name("me/my-model")
    with pytest.raises(FileError, match=rf"nothing was pushed .*kept at {tmp_path}.*hf upload me/my-model"):
        card.push_to_hub(tmp_path, "me/my-model")
    assert (tmp_path / "README.md").read_text() == "mine"
