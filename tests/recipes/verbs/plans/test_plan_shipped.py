"""Every shipped recipe has a plan, or a sentence that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MINILM, save_tiny
from workbench import recipes
from workbench.errors import ConfigError, WorkbenchError
from workbench.planning import step_time
from workbench.recipes.load import load
from workbench.recipes.verbs.plans.plan import solve

SHIPPED = [name for name in recipes.shipped() if not name.startswith("models/")]
"""Those of models are made by plans, and name backbones of the hub."""
REFUSED = ("rounds/quickstart", "distill/ensemble", "distill/pictures", "distill/peers")
"""What a plan does not know."""
MARKS = {
    "crossval/combo": pytest.mark.slow,
    "reinforce/quickstart": pytest.mark.nightly,
    "reinforce/tools": pytest.mark.nightly,
    **dict.fromkeys(
        (
            "crossval/quickstart",
            "crossval/pictures",
            "crossval/tabular-text",
            "prefer/quickstart",
            "rerank/quickstart",
            "reward/quickstart",
        ),
        pytest.mark.nightly,
    ),
    **dict.fromkeys(
        ("classify/quickstart", "embed/quickstart", "fleet/quickstart", "search/quickstart", "sweep/quickstart"),
        pytest.mark.nightly,
    ),
    **dict.fromkeys(
        ("budget/1-day-gpu", "budget/1-hour-cpu", "sft/chat", "sft/full", "sft/qlora"), pytest.mark.nightly
    ),
}
"""Those that take more than ten seconds, or are planned as others: a sweep is a bank, combo folds, vision classes."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SHIPPED])
def test_every_shipped_recipe_is_planned_or_refused_with_a_sentence(
    name: str, stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time, "PASSES", (1, 1))
    whole = name.startswith(("crossval", "classify", "vision", "embed", "rerank", "prefer", "reward"))
    words = [] if whole else ["data.limit=100", "data.max_tokens=64"]
    words += ["folds.k=2"] if name.startswith("crossval") else []
    if name.startswith("mlm"):
        bert = save_tiny(tmp_path / "bert", "Bert", "MaskedLM", MINILM, max_position_embeddings=128)
        words.append(f"model.id={bert}")
    if name == "distill/quickstart":
        words += [f"distill.teacher.id={stories}", "distill.match=[]"]
    if name == "distill/answers":
        words += [f"distill.teacher.id={stories}"]
    try:
        planned = solve(load(name, words)).plan
    except WorkbenchError as error:
        assert name in REFUSED and len(str(error)) > 40, str(error)
        return
    assert planned.seconds is not None and planned.interval is not None
    assert 0 < planned.interval[0] <= planned.seconds <= planned.interval[1]


def test_weights_that_cannot_fit_are_refused_before_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.recipes.verbs.plans.plan.dry_run", lambda *_, **__: pytest.fail("a dry run"))
    with pytest.raises(ConfigError, match="its weights alone take"):
        solve(load("sft/quickstart"), memory=1_000_000, device="cpu")
