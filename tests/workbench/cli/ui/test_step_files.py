"""What a page shows of a run's sample answers and layers, also of files that are damaged or still grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.workbench.cli.ui.made_runs import HOSTILE, make_run, write_layers, write_samples
from workbench.cli.ui import step_files
from workbench.cli.ui.run_folder import RunFolder
from workbench.evaluation import answer_samples
from workbench.runs import run_directory
from workbench.training.freezing import layer_log


def test_names_of_files_are_those_that_a_run_writes() -> None:
    assert (step_files.SAMPLES, step_files.LAYERS) == (answer_samples.FILE, layer_log.FILE)
    assert {step_files.SAMPLES, step_files.LAYERS} < set(run_directory.STEPPED)


def test_answers_stand_by_prompt_the_newest_first(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=40)
    write_samples(path, steps=[0, 20, 40], prompts=["one", HOSTILE])
    found = step_files.samples(path)
    assert [each["prompt"] for each in found] == ["one", HOSTILE]
    assert all([answer["step"] for answer in each["answers"]] == [40, 20, 0] for each in found)
    assert found[0]["answers"][0]["answer"] == "answer of step 40 to one" and found[0]["reference"] == "right"


def test_a_long_run_shows_its_newest_steps_and_its_start(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_samples(path, steps=range(step_files.STEPS + 50), prompts=["one"])
    (own,) = step_files.samples(path)
    steps = [answer["step"] for answer in own["answers"]]
    assert steps == [*range(step_files.STEPS + 49, 49, -1), 0]


@pytest.mark.parametrize("bad", [b'{"step": 3, "row"', b"[]\n", b"\xff\xfe\n", b'{"step": "x"}\n', b"[" * 9000 + b"\n"])
def test_lines_that_are_none_are_passed_over(bad: bytes, tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_samples(path, steps=[0, 2], prompts=["one"])
    write_layers(path, changes=[(0, "1111"), (3, "1011")])
    before = step_files.samples(path), step_files.layers(path, {})
    for name in (step_files.SAMPLES, step_files.LAYERS):
        with (path / name).open("ab") as file:
            file.write(bad)
    assert (step_files.samples(path), step_files.layers(path, {})) == before


def test_long_texts_are_cut_and_say_so(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_samples(path, steps=[0], prompts=["a" * 9000])
    (own,) = step_files.samples(path)
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
    changes = step_files.layers(path, {})["changes"]
    assert len(changes) <= step_files.CHANGES + 1 and changes[-1][0] == 1000 and changes[0][0] == 0


def test_blocks_that_are_not_stacked_yet_do_not_train(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    write_layers(path, changes=[(0, "1111")])
    manifest = {"grow": {"first": 1, "stackings": [{"step": 5, "blocks": 2}]}}
    assert step_files.layers(path, manifest)["changes"] == [[0, "1101"], [6, "1111"]]


def test_a_file_of_another_kind_shows_nothing(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    (path / step_files.LAYERS).write_text(json.dumps({"step": 0, "trains": "1", "layers": [3]}) + "\n")
    assert step_files.layers(path, {}) == {}
