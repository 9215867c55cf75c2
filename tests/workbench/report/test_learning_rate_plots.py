"""The plot of `check --plot`: a true picture of what a run then does, in a file that was not there before.

The panel of layers shows what the policy says of each step, and no two labels in one place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from typer.testing import CliRunner

import workbench
from tests.run_files import read_metrics
from workbench.cli.verbs import app
from workbench.config import RunConfig
from workbench.config.freeze_config import FreezeConfig, Moment
from workbench.config.freeze_policies import FreezeOut, Gradual, Lisa, Static
from workbench.errors import ConfigError
from workbench.recipes.load import load
from workbench.report import learning_rate_plots
from workbench.report.plots import palette
from workbench.training.optim.schedules import factor

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 2}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 10, learning_rate: 2.0e-3}}
schedule: {{name: wsd, warmup: 0.25, decay: 0.3, decay_shape: sqrt, floor: 0.1}}
evaluate: {{every: 4, answers: 0}}
save: {{every: 0.3}}
"""


@pytest.fixture
def recipe(tmp_path: Path, stories: str, questions: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=stories, train=questions))
    return path


def _config(freeze: dict[str, object] | None = None, **schedule: object) -> RunConfig:
    base = {"recipe": "sft", "model": {"id": "starter"}, "adapter": {"method": "lora"}, "data": {"train": "a.jsonl"}}
    return RunConfig.model_validate({**base, "schedule": schedule, "freeze": freeze or {}})


def _texts(path: Path) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.parse(path).iter() if one.tag.endswith("}text")]


@pytest.mark.slow
def test_what_is_drawn_is_what_a_run_does(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe)
    curve, strip = learning_rate_plots._draw(config, learning_rate_plots.Span(10), palette()).axes
    x, y = curve.lines[1].get_data()
    drawn = [{int(at) for at, _ in np.concatenate(row.get_segments())} for row in strip.collections]
    run = workbench.run(recipe, out=tmp_path / "run", quiet=True)
    records = read_metrics(run)
    assert y.tolist() == [record["learning_rate"] for record in records]
    assert (x + 0.5).tolist() == [record["step"] for record in records]
    evaluated = {record["step"] for record in records if "held_out_loss" in record}
    assert drawn == [evaluated, {3, 6, 9, 10}] and evaluated == {4, 8, 10}
    kept = {int(path.name.split("-")[-1]) for path in (run / "checkpoints").iterdir() if path.name[-1].isdigit()}
    assert kept <= drawn[1] and 10 in kept


def test_check_writes_it_and_says_where(recipe: Path, tmp_path: Path) -> None:
    runner, png, svg = CliRunner(), tmp_path / "new" / "plot.png", tmp_path / "plot.svg"
    plain = runner.invoke(app, ["check", str(recipe)], catch_exceptions=False)
    assert plain.exit_code == 0 and "Plot" not in plain.output
    for path in (png, svg):
        told = runner.invoke(app, ["check", str(recipe), "--plot", str(path)], catch_exceptions=False)
        assert told.exit_code == 0 and told.output == f"{plain.output}Plot: {path}\n"
    assert image.imread(png).shape == (880, 1800, 4)
    expected = {"Learning rate: wsd", "evaluate", "save", "warm-up ends at step 2.5", "decay begins at step 7"}
    assert expected <= set(_texts(svg))
    assert not [path for path in tmp_path.rglob("*unfinished*")]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    there = tmp_path / "there.png"
    there.write_bytes(b"mine")
    wrong = dict.fromkeys((tmp_path / "a.jpg", tmp_path / "plot", Path("")), "a .png or .svg file. Write --plot")
    for path, expected in {**wrong, there: "exists already"}.items():
        told = CliRunner().invoke(app, ["check", "sft/quickstart", "--plot", str(path)])
        assert isinstance(told.exception, ConfigError) and expected in str(told.exception)
    assert there.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [there]


@pytest.mark.nightly(but="each value once")
@pytest.mark.parametrize("steps", [1, 7, 30_000])
@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "constant", "warmup": 0},
        {"name": "inverse_sqrt", "warmup": 0.1, "floor": 0.2},
        {"name": "one_cycle", "warmup": 0.3, "start": 0.04, "floor": 4e-6},
        {"name": "wsd", "warmup": 0, "decay": 1},
    ],
    ids=lambda schedule: schedule["name"],
)
def test_any_schedule_is_drawn_the_same_twice(schedule: dict[str, object], steps: int, tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        learning_rate_plots.write_schedule(path, _config(**schedule), steps=steps)
    assert first.read_bytes() == second.read_bytes()
    texts = _texts(first)
    assert f"Learning rate: {schedule['name']}" in texts
    assert ("decay begins" in " ".join(texts)) == (schedule["name"] not in ("constant", "wsd"))
    assert any(text.startswith("steps done; a dot") for text in texts) == (steps <= learning_rate_plots.DOTS)


@pytest.mark.parametrize(("policy", "steps"), [("static", 1), ("gradual", 30), ("freezeout", 5000), ("lisa", 30)])
def test_layers_are_drawn_under_the_learning_rate(policy: str, steps: int, tmp_path: Path) -> None:
    config, first, second = _config({"policy": policy}), tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        learning_rate_plots.write_schedule(path, config, steps=steps, blocks=3)
    assert first.read_bytes() == second.read_bytes()
    texts = _texts(first)
    assert {f"Freezing: {policy}", "embeddings", "block 1", "block 2", "block 3", "head", "frozen"} <= set(texts)
    assert any(text.endswith("of the layer-steps are frozen") for text in texts)
    curve, layers, strip = learning_rate_plots._draw(config, learning_rate_plots.Span(steps), palette(), blocks=3).axes
    assert curve.get_xlim() == layers.get_xlim() == strip.get_xlim() == (0, steps)
    assert tuple(layers.images[0].get_extent()) == (0, steps, -0.5, 4.5)


@pytest.mark.parametrize(
    ("freeze", "blocks", "message"),
    [
        ({"policy": "autofreeze", "every": 7}, 4, "decided while training, from gradients measured every 7 steps"),
        ({"policy": "egeria"}, None, "decided while training, from activations measured every 20 steps"),
        ({"policy": "lisa"}, None, "the blocks of this backbone are not known"),
    ],
)
def test_a_plan_that_is_not_known_is_said_in_words(
    freeze: dict[str, object], blocks: int | None, message: str, tmp_path: Path
) -> None:
    learning_rate_plots.write_schedule(tmp_path / "plot.svg", _config(freeze), steps=100, blocks=blocks)
    texts = _texts(tmp_path / "plot.svg")
    assert {f"Freezing: {freeze['policy']}", message} <= set(texts) and "embeddings" not in texts


def test_without_freezing_there_is_no_panel_of_layers(tmp_path: Path) -> None:
    learning_rate_plots.write_schedule(tmp_path / "plot.svg", _config(), steps=100, blocks=12)
    assert not [text for text in _texts(tmp_path / "plot.svg") if "reezing" in text or "block" in text]


def _budgeted(freeze: dict[str, object] | None = None, **sections: dict[str, object]) -> RunConfig:
    given = {"budget": {"time": "90m"}, **sections, "freeze": freeze or {}}
    return RunConfig.model_validate({**_config().model_dump(mode="json"), **given})


@pytest.mark.parametrize("steps", [None, 40])
def test_a_run_that_a_budget_may_end_is_drawn_in_percent(steps: int | None, tmp_path: Path) -> None:
    config = _budgeted(
        {"policy": "gradual", "until": 0.4},
        schedule={"name": "wsd", "warmup": 0.25, "decay": 0.3},
        evaluate={"every": 0.3},
        save={"every": 40},
    )
    learning_rate_plots.write_schedule(tmp_path / "plot.svg", config, steps=steps, blocks=4)
    texts = _texts(tmp_path / "plot.svg")
    told = {"warm-up ends at 25 % of the run", "decay begins at 70 % of the run", "every 40 steps, and at the end"}
    assert told <= set(texts) and any(text.startswith("until the budget is used up") for text in texts)
    curve, layers, strip = learning_rate_plots._draw(config, learning_rate_plots.Span(None), palette(), blocks=4).axes
    assert curve.get_xlim() == layers.get_xlim() == strip.get_xlim() == (0, 100)
    assert tuple(layers.images[0].get_extent()) == (0, 100, -0.5, 5.5)
    x, y = curve.lines[0].get_data()
    np.testing.assert_allclose(y, [config.train.learning_rate * factor(at / 100, config.schedule) for at in x])
    drawn = [{round(at, 6) for at, _ in np.concatenate(row.get_segments())} for row in strip.collections]
    assert drawn == [{30, 60, 90, 100}, {100}]


def test_layers_that_change_with_the_steps_are_not_drawn_where_nobody_knows_these(tmp_path: Path) -> None:
    learning_rate_plots.write_schedule(tmp_path / "plot.svg", _budgeted({"policy": "lisa"}), steps=None, blocks=4)
    texts = _texts(tmp_path / "plot.svg")
    assert "changes with the number of steps, and a budget decides how many there are" in texts
    assert "embeddings" not in texts


def test_the_rate_is_drawn_as_it_is_scaled() -> None:
    given = {"optimizer": {"scaling": "linear", "reference_batch": 8}, "batch": {"size": 32}}
    config = RunConfig.model_validate({**_config().model_dump(mode="json"), **given})
    curve, _ = learning_rate_plots._draw(config, learning_rate_plots.Span(200), palette()).axes
    assert max(curve.lines[0].get_ydata()) == pytest.approx(4 * config.train.learning_rate)


def test_check_draws_the_layers_of_the_backbone(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    words = [str(recipe), "freeze.policy=static", "freeze.layers=2", "--plot", str(path)]
    told = CliRunner().invoke(app, ["check", *words], catch_exceptions=False)
    assert "the embeddings and blocks 1 to 2 of 5 never train" in " ".join(told.output.split())
    assert {"Freezing: static", "block 5", "42.9 % of the layer-steps are frozen"} <= set(_texts(path))


@pytest.mark.parametrize(
    ("peak", "rates"),
    [(2e-4, ["0", "0.5e-4", "1e-4", "1.5e-4", "2e-4"]), (0.1, ["0", "0.025", "0.05", "0.075", "0.1"])],
)
def test_ticks_are_quarters_of_the_peak(peak: float, rates: list[str], tmp_path: Path) -> None:
    config = _config()
    config = config.model_copy(update={"train": config.train.model_copy(update={"learning_rate": peak})})
    learning_rate_plots.write_schedule(tmp_path / "plot.svg", config, steps=100)
    assert set(rates) <= set(_texts(tmp_path / "plot.svg"))


POLICIES = [Static(), Gradual(), FreezeOut(scaled=True), Lisa(active=1, every=3)]


def panel(policy: FreezeConfig, *, steps: int, blocks: int) -> tuple[np.ndarray[Any, Any], Any]:
    found = learning_rate_plots.freezing(policy, steps=steps, blocks=blocks, seed=5)
    axes = Figure().add_subplot()
    learning_rate_plots.draw_freezing(axes, found, steps=steps, colours=palette())
    return found, axes


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.policy)
def test_each_cell_is_the_plan_of_its_step(policy: FreezeConfig) -> None:
    found, axes = panel(policy, steps=24, blocks=4)
    shown, grey = np.asarray(axes.images[0].get_array()), to_rgb(palette()["grid"])
    assert found.shape == (6, 24) == shown.shape[:2]
    for step in range(24):
        plan = policy.plan(Moment(step, step / 24, 5), blocks=4)
        for layer, (trains, rate) in enumerate(zip(*plan, strict=True)):
            assert trains == (not np.isnan(found[layer, step])) == (tuple(shown[layer, step]) != grey)
            assert not trains or found[layer, step] == rate
    assert learning_rate_plots.frozen_share(found) == np.isnan(found).sum() / (6 * 24)


def test_the_deeper_the_shade_the_higher_the_rate() -> None:
    found, axes = panel(FreezeOut(first=0.6, scaled=True), steps=50, blocks=5)
    trains = ~np.isnan(found)
    order = np.argsort(found[trains])
    light = np.asarray(axes.images[0].get_array()).sum(-1)[trains][order]
    assert np.all(np.diff(light) <= 1e-12) and light[0] - light[-1] > 0.5
    key = [text.get_text() for text in axes.get_legend().get_texts()]
    assert key == [f"rate times {np.nanmax(found):.3g}", "near 0", "frozen"]


def test_a_long_run_is_drawn_from_its_first_to_its_last_step() -> None:
    found = learning_rate_plots.freezing(
        Gradual(until=1.0), steps=10 * learning_rate_plots.FREEZE_COLUMNS, blocks=4, seed=0
    )
    assert found.shape == (6, learning_rate_plots.FREEZE_COLUMNS)
    assert np.isnan(found[:4, 0]).all() and not np.isnan(found[1:, -1]).any()
    assert learning_rate_plots.frozen_share(found) == pytest.approx((1 / 4 + 2 / 4 + 3 / 4 + 1) / 6, abs=1e-3)


@pytest.mark.parametrize("blocks", [1, 2, 8, 9, 12, 13, 24, 80])
def test_labels_are_few_and_apart(blocks: int) -> None:
    _, axes = panel(Static(), steps=3, blocks=blocks)
    places = axes.get_yticks().tolist()
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[0] == "embeddings" and names[-1] == "head" and (places[0], places[-1]) == (0, blocks + 1)
    assert (
        names[1:-1] == [f"block {place:.0f}" for place in places[1:-1]]
        and 1 <= len(names) - 2 <= learning_rate_plots.FREEZE_LABELS
    )
    assert min(np.diff(places)) >= (blocks + 2) / (learning_rate_plots.FREEZE_LABELS + 2) * 0.8
