"""Runs as a page shows them: metrics, sample answers and layers, also while they grow and where a line is damaged."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.workbench.cli.ui.made_runs import HOSTILE, log, make_run, row, write_layers, write_samples
from workbench.cli.ui import run_folder
from workbench.cli.ui.run_folder import POINTS, MetricFile, RunFolder, last_rows, thinned
from workbench.errors import FileError
from workbench.evaluation import generation
from workbench.recipes.load import load  # noqa: F401, registers the tasks, as the server's form does
from workbench.runs import metrics_log
from workbench.training.freezing import freezer


def test_a_growing_file_gives_each_row_once_however_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps(row(step)) + "\n" for step in range(1, 200))
    file, position, steps, random_ = MetricFile(path), None, [], random.Random(0)
    written = 0
    while written < len(text):
        more = random_.randint(1, 2000)
        with path.open("a") as stream:
            stream.write(text[written : written + more])  # also in the middle of a line
        written += more
        file.refresh()
        goes_on, columns = file.after(position)
        assert goes_on or position is None
        steps += columns.get("step", [])
        position = file.position
    assert steps == list(range(1, 200))
    _, whole = RunFolder(tmp_path).metrics(path).after(None)
    assert whole["step"] == steps and whole["tokens_seen"][-1] == 199_000
    assert [value for value in whole["held_out_loss"] if value is not None] == pytest.approx(
        [row(step)["held_out_loss"] for step in range(20, 200, 20)], rel=1e-6
    )


def test_a_file_that_was_replaced_is_sent_anew(tmp_path: Path) -> None:
    log(tmp_path, 1, 50)
    path = tmp_path / "metrics.jsonl"
    file = RunFolder(tmp_path).metrics(path)
    position = file.position
    other = tmp_path / "other"
    other.write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, 31)))
    other.replace(path)  # as a resumed run rewinds it
    file.refresh()
    goes_on, columns = file.after(position)
    assert not goes_on and columns["step"] == list(range(1, 31))


@pytest.mark.parametrize("position", ["", "x", "1.2", "0.0", "-1.-1", "..", "9" * 400])
def test_a_position_of_another_file_begins_anew(tmp_path: Path, position: str) -> None:
    log(tmp_path, 1, 5)
    goes_on, columns = RunFolder(tmp_path).metrics(tmp_path / "metrics.jsonl").after(position)
    assert not goes_on and len(columns["step"]) == 5


def test_many_rows_become_means_between_their_lowest_and_highest() -> None:
    rows = 3 * POINTS + 7
    random_N = np.random.default_rng(0).normal(size=rows)
    sparse_N = np.where(np.arange(rows) % 50 == 0, 1.5, np.nan)
    columns = {"step": np.arange(1.0, rows + 1), "loss": random_N, "held_out_loss": sparse_N}
    found = thinned(columns)
    assert len(found["step"]) <= POINTS and found["step"][-1] == rows
    starts = np.r_[0, found["step"][:-1]].astype(int)
    for place, (start, end) in enumerate(zip(starts, found["step"].astype(int), strict=True)):
        part = random_N[start:end]
        assert found["loss"][place] == pytest.approx(part.mean())
        assert (found["loss_low"][place], found["loss_high"][place]) == (part.min(), part.max())
    known = found["held_out_loss"][np.isfinite(found["held_out_loss"])]
    assert len(known) > 0 and (known == 1.5).all()
    assert thinned({"step": np.arange(5.0)})["step"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("line", ["nonsense", "[1, 2]", "3", '{"step": 1} {"step": 2}'])
def test_a_damaged_file_is_said_to_be(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(FileError, match=r"metrics\.jsonl: damaged"):
        RunFolder(tmp_path).metrics(path)


@pytest.mark.parametrize("steps", [0, 1, 20, 21, 22, 500])
def test_the_last_rows_are_read_from_the_end(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "metrics.jsonl"
    log(tmp_path, 1, steps)
    with path.open("a") as stream:
        stream.write(json.dumps(row(steps + 1))[:-5])  # not whole yet
    assert [each["step"] for each in last_rows(path, 21)] == list(range(max(1, steps - 20), steps + 1))
    assert last_rows(tmp_path / "none", 21) == []


def test_names_of_files_are_those_that_a_run_writes() -> None:
    assert (run_folder.SAMPLES, run_folder.LAYERS) == (generation.FILE, freezer.FILE)
    assert {run_folder.SAMPLES, run_folder.LAYERS} < set(metrics_log.STEPPED)


def test_answers_stand_by_prompt_the_newest_first(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=40)
    write_samples(path, steps=[0, 20, 40], prompts=["one", HOSTILE])
    found = run_folder.sample_answers(path)
    assert [each["prompt"] for each in found] == ["one", HOSTILE]
    assert all([answer["step"] for answer in each["answers"]] == [40, 20, 0] for each in found)
    assert found[0]["answers"][0]["answer"] == "answer of step 40 to one" and found[0]["reference"] == "right"


def test_a_long_run_shows_its_newest_steps_and_its_start(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_samples(path, steps=range(run_folder.STEPS + 50), prompts=["one"])
    (own,) = run_folder.sample_answers(path)
    steps = [answer["step"] for answer in own["answers"]]
    assert steps == [*range(run_folder.STEPS + 49, 49, -1), 0]


@pytest.mark.parametrize("bad", [b'{"step": 3, "row"', b"[]\n", b"\xff\xfe\n", b'{"step": "x"}\n', b"[" * 9000 + b"\n"])
def test_lines_that_are_none_are_passed_over(bad: bytes, tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_samples(path, steps=[0, 2], prompts=["one"])
    write_layers(path, changes=[(0, "1111"), (3, "1011")])
    before = run_folder.sample_answers(path), run_folder.training_layers(path, {})
    for name in (run_folder.SAMPLES, run_folder.LAYERS):
        with (path / name).open("ab") as file:
            file.write(bad)
    assert (run_folder.sample_answers(path), run_folder.training_layers(path, {})) == before


def test_long_texts_are_cut_and_say_so(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_samples(path, steps=[0], prompts=["a" * 9000])
    (own,) = run_folder.sample_answers(path)
    assert own["prompt"].endswith("... (5,000 more characters)") and len(own["prompt"]) < 4100


def test_layers_and_their_changes(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=9)
    assert RunFolder(tmp_path).layers("run") == {} and RunFolder(tmp_path).marks("run") == {}
    write_layers(path, changes=[(0, "1111"), (3, "1011")])
    found = RunFolder(tmp_path).layers("run")
    assert found["changes"] == [[0, "1111"], [3, "1011"]] and found["layers"][1]["parts"]["q"] == 512
    assert set(RunFolder(tmp_path).marks("run")) == {"layers"}


def test_many_changes_are_thinned_to_some_with_the_last(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_layers(path, changes=[(step, "1011" if step % 2 else "1101") for step in range(1001)])
    changes = run_folder.training_layers(path, {})["changes"]
    assert len(changes) <= run_folder.CHANGES + 1 and changes[-1][0] == 1000 and changes[0][0] == 0


def test_blocks_that_are_not_stacked_yet_do_not_train(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_layers(path, changes=[(0, "1111")])
    manifest = {"grow": {"first": 1, "stackings": [{"step": 5, "blocks": 2}]}}
    assert run_folder.training_layers(path, manifest)["changes"] == [[0, "1101"], [6, "1111"]]


@pytest.mark.parametrize(
    ("recipe", "after", "wanted"),
    [
        ("classify", {"accuracy": 0.9, "accuracy_low": 0.8, "accuracy_high": 0.95}, ("accuracy", True)),
        ("classify", {"accuracy": 0.3, "accuracy_low": 0.2, "accuracy_high": 0.4}, ("accuracy", False)),
        ("classify", {"accuracy": 0.6, "accuracy_low": 0.4, "accuracy_high": 0.7}, ("accuracy", None)),
        ("sft", {"loss": 1.0, "wer": 0.2, "wer_low": 0.1, "wer_high": 0.3}, ("wer", True)),
        ("sft", {"loss": 1.0, "perplexity": 3.0}, None),
        ("reinforce", {"reward": 0.9}, ("reward", True)),
        ("unheard-of", {"loss": 1.0}, None),
    ],
)
def test_the_main_score_is_the_tasks_and_better_only_beyond_chance(
    recipe: str, after: dict[str, float], wanted: tuple[str, bool | None] | None
) -> None:
    before = dict.fromkeys(after, 0.5)
    found = run_folder.main_score({"recipe": recipe}, {"before": before, "after": after})
    assert (found and (found["name"], found["better"])) == wanted
    assert found is None or (found["before"], found["after"]) == (0.5, after[found["name"]])


def test_members_have_their_scores_and_their_curves(tmp_path: Path) -> None:
    path = make_run(tmp_path, "folds", steps=1)
    (path / "config.yaml").write_text("recipe: crossval\nof: classify\n")
    scores = {"loss": 0.5, "accuracy": 0.75, "accuracy_low": 0.5, "accuracy_high": 0.9}
    folds = [{"member": f"fold-{fold}", "fold": fold, "seed": 0, "scores": scores} for fold in (0, 1)]
    (path / "stages.json").write_text(json.dumps({"folds": folds}))
    (path / "members" / "round-0" / "fold-1").mkdir(parents=True)
    log(path / "members" / "round-0" / "fold-1", 1, 3)
    found = RunFolder(tmp_path).page("folds")["members"]
    assert found["head"] == ["adapter", "fold", "seed", "held-out loss", "accuracy"]
    assert [row["curve"] for row in found["rows"]] == [None, "members/round-0/fold-1"]
    assert found["rows"][1]["cells"] == ["fold-1", 1, 0, 0.5, "0.75 (0.500 to 0.900)"]


def test_each_action_has_its_command(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a run", steps=1)
    assert RunFolder(tmp_path).commands("a run") == []
    (path / "adapter").mkdir()
    words = [shlex.split(each) for each in RunFolder(tmp_path).commands("a run")]
    assert [each[:3] for each in words] == [
        ["workbench", verb, str(path)] for verb in ("evaluate", "merge", "generate", "predict", "serve")
    ]


def test_a_file_of_another_kind_shows_nothing(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    (path / run_folder.LAYERS).write_text(json.dumps({"step": 0, "trains": "1", "layers": [3]}) + "\n")
    assert run_folder.training_layers(path, {}) == {}
