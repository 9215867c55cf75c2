"""Students that learn from several sources: they draw what a plain run draws, and hear the teacher about each row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.weather import weather
from tests.run_files import read_losses, read_scores, write_lines
from tests.stopping import stop_after
from workbench.config import RunConfig
from workbench.errors import ConfigError, Stopped
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.plans.plan import plan

Config = Callable[..., RunConfig]
LORA = {"method": "lora", "rank": 4, "alpha": 8}


def scores(run: Path) -> dict[str, Any]:
    return dict(read_scores(run)["after"])


def run(config: RunConfig, out: Path, *, resume: bool = False) -> Path:
    return workbench.run(config, out=out, resume=resume, quiet=True)


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.parent.mkdir(exist_ok=True)
    write_lines(path, rows)
    return {"path": str(path)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Config:
    """A recipe of two sources in files of one name, of which the smaller one is drawn more often than it has rows."""
    folder = tmp_path_factory.mktemp("sources")
    sums = [{"question": f"sums {n}?", "answer": f"{n * n} it is"} for n in range(28)]
    tales = [{"q": f"tales {n}?", "a": "Once upon a time" + " there was" * (n % 4)} for n in range(8)]
    columns = {"question": "q", "answer": "a"}
    sources = {
        "sums": write(folder / "sums" / "rows.jsonl", sums),
        "tales": {**write(folder / "tales" / "rows.jsonl", tales), "weight": 3, "columns": columns},
    }
    base: dict[str, Any] = {
        "recipe": "distill",
        "model": {"id": short_stories, "weights": "float32"},
        "adapter": LORA,
        "data": {"sources": sources, "held_out": 0.25, "mix": {"by": "weight"}},
        "batch": {"size": 6},
        "train": {"steps": 6, "learning_rate": 5e-3},
        "evaluate": {"every": None, "answers": 0},
    }
    return lambda **sections: RunConfig.model_validate({**base, **sections})


@pytest.fixture(scope="module")
def plain(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of recipe sft over the same sources. Read only."""
    return run(config(recipe="sft"), tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("more", [{}, {"on_policy": {"share": 1e-9, "max_new_tokens": 4}}], ids=["live", "on-policy"])
def test_without_a_share_of_the_teacher_it_is_plain_training(
    config: Config, plain: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    taught = run(config(distill={"teacher": {"id": str(plain)}, "alpha": 0.0, **more}), tmp_path / "run")
    assert read_losses(taught) == pytest.approx(read_losses(plain), rel=1e-6)
    assert scores(taught)["loss[tales]"] == pytest.approx(scores(plain)["loss[tales]"], rel=1e-5)


def test_peers_draw_what_a_plain_run_draws(config: Config, plain: Path, tmp_path: Path) -> None:
    taught = run(config(distill={"peers": 2, "alpha": 0.0}, train={"steps": 1}), tmp_path / "run")
    assert read_losses(taught)[0] == pytest.approx(read_losses(plain)[0], rel=1e-5)  # fresh adapters change nothing


def test_a_full_cache_of_all_sources_teaches_what_the_live_teacher_does(
    config: Config, plain: Path, tmp_path: Path
) -> None:
    distill = {"teacher": {"id": str(plain)}, "alpha": 0.8}
    live = run(config(distill=distill), tmp_path / "live")
    cache = {"folder": str(tmp_path / "cache"), "k": 512, "dtype": "float32"}
    cached = run(config(distill={**distill, "cache": cache}), tmp_path / "cached")
    assert read_losses(cached) == pytest.approx(read_losses(live), abs=1e-5)


def test_a_teacher_of_another_vocabulary_reads_each_source_as_its_columns_say(config: Config, tmp_path: Path) -> None:
    wanted = config(distill={"teacher": {"id": "starter"}, "loss": "universal", "alpha": 0.5})
    taught = run(wanted, tmp_path / "run")
    assert 0.05 < json.loads((taught / "manifest.json").read_text())["distill"]["aligned"] <= 1
    assert read_losses(taught)[-1] < read_losses(taught)[0]


def test_a_stopped_run_whose_student_writes_goes_on_to_the_same_bits(
    config: Config, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_policy = {"share": 0.5, "max_new_tokens": 4}
    wanted = config(distill={"teacher": {"id": str(plain)}, "alpha": 0.7, "on_policy": on_policy})
    with monkeypatch.context() as patch:
        stop_after(patch)
        with pytest.raises(Stopped):
            run(wanted, tmp_path / "broken")
    straight, broken = run(wanted, tmp_path / "straight"), run(wanted, tmp_path / "broken", resume=True)
    assert read_losses(broken) == read_losses(straight)
    weights = [each / "adapter" / "adapter_model.safetensors" for each in (straight, broken)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_check_and_plan_tell_what_is_drawn(config: Config, plain: Path) -> None:
    wanted = config(distill={"teacher": {"id": str(plain)}})
    notes = "\n".join(check(wanted).notes)
    assert "sums: 21 rows" in notes and "tales: 6 rows" in notes and "75.0% of the draws, 4.50 passes" in notes
    assert plan(wanted).steps == 6
    with pytest.raises(ConfigError, match=r"data\.sources\.tales\.passes=2"):
        check(config(distill={"teacher": {"id": str(plain)}}, data=_with_passes(wanted, 2)))


def _with_passes(config: RunConfig, passes: float) -> dict[str, Any]:
    data = config.data.model_dump(mode="json")
    data["sources"]["tales"]["passes"] = passes
    return data


@pytest.mark.nightly
def test_a_student_of_classes_draws_what_a_plain_run_draws_and_hears_the_teacher_about_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = save_tiny(tmp_path / "bert", "Bert", "SequenceClassification", MINILM)
    rows = {"diary": weather(36, seed=0), "radio": weather(12, seed=1)}
    sources = {name: write(tmp_path / f"{name}.jsonl", own) for name, own in rows.items()}
    sources["radio"]["weight"] = 3
    values: dict[str, Any] = {
        "model": {"id": bert, "weights": "float32"},
        "adapter": LORA,
        "data": {"sources": sources, "held_out": 0.25},
        "batch": {"size": 6},
        "train": {"steps": 6, "learning_rate": 1e-2},
        "evaluate": {"every": None},
    }
    plain = run(RunConfig.model_validate({**values, "recipe": "classify"}), tmp_path / "plain")

    def taught(alpha: float) -> RunConfig:
        distill = {"teacher": {"id": str(plain)}, "alpha": alpha}
        return RunConfig.model_validate({**values, "recipe": "distill", "of": "classify", "distill": distill})

    assert read_losses(run(taught(0.0), tmp_path / "alone")) == pytest.approx(read_losses(plain), rel=1e-5)
    assert "radio: 9 rows" in "\n".join(check(taught(0.9)).notes)
    straight = run(taught(0.9), tmp_path / "straight")
    assert {"accuracy[diary]", "loss[radio]"} <= scores(straight).keys()
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            run(taught(0.9), tmp_path / "broken")
    broken = run(taught(0.9), tmp_path / "broken", resume=True)
    assert read_losses(broken) == read_losses(straight) and scores(broken) == scores(straight)
