"""A student that is made of another model: its start is told before training, and a bad one with what to write."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import workbench
from tests.conftest import MINILM, STORIES, write_questions
from tests.recipes.drawings import draw
from tests.recipes.over.test_distill import FULL, _config
from tests.recipes.tasks.tag.tagged_sentences import make_home
from tests.run_files import read_losses, read_scores, write_lines
from tests.vision_backbones import SIZE, save_vision
from workbench.cli.verbs import app
from workbench.config import RunConfig
from workbench.config.yaml_text import dump_yaml
from workbench.distillation import layer_importance
from workbench.errors import ConfigError
from workbench.recipes.over.student_start import in_words
from workbench.recipes.verbs.check import check

TOLD = re.compile(
    r"loss before training is (\S+), on (\d+) held-out rows; the teacher's is (\S+), and guessing \D*([\d.]+)\."
)
WORSE = "begins worse than guessing"


@pytest.mark.parametrize(
    ("of", "student", "start", "cure"),
    [
        ("sft", {"layers": "every-2"}, 8.1, None),
        ("sft", {"layers": "every-2"}, 8.3, "distill.student.layers=important-50% or important-N"),
        ("sft", {"layers": [0, 3]}, 15.0, "distill.student.layers=important-50% or important-N"),
        ("sft", {"layers": "important-25%"}, 8.3, "Keep more layers, such as distill.student.layers=important-75%"),
        ("sft", {"neurons": "25%"}, 8.3, "Keep more of its width, such as distill.student.neurons=75%"),
        ("sft", {"layers": "all"}, 8.3, "Name a model that was trained for this"),
        ("sft", {"layers": "first-2", "weights": "random"}, 8.3, None),
        ("classify", {"layers": "every-2"}, 8.3, None),
        ("classify", {"layers": "every-2"}, 9.0, "distill.student.layers=important-50%"),
    ],
)
def test_a_start_that_is_worse_than_guessing_is_named_with_a_cure(
    of: str, student: dict[str, Any], start: float, cure: str | None
) -> None:
    sections = {"recipe": "distill", "of": of, "data": {"train": "rows.jsonl"}, "distill": {"student": student}}
    sections["distill"]["teacher"] = {"id": "starter"}
    told = in_words(RunConfig.model_validate(sections), student=start, teacher=3.5, guess=8.2, rows=64)
    assert TOLD.search(told[0]).groups() == (f"{start:g}", "64", "3.5", "8.2")  # type: ignore[union-attr]
    assert (WORSE in told[-1]) == (cure is not None) and (cure is None or cure in told[-1])
    alone = in_words(RunConfig.model_validate(sections), student=start, teacher=None, guess=8.2, rows=64)[0]
    assert alone.endswith("held-out rows; guessing would have 8.2.")


def test_check_makes_the_student_and_its_layers_are_chosen_once(
    short_stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    chosen, choose = list[int](), layer_importance.choose
    monkeypatch.setattr(layer_importance, "choose", lambda *words: chosen.append(1) or choose(*words))
    rows = write_questions(tmp_path / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 5) for n in range(40)])
    distill = {"teacher": {"id": short_stories}, "student": {"layers": "important-1"}}
    model = {"id": "teacher", "weights": "float32"}
    config = _config(short_stories, rows, model=model, adapter=FULL, distill=distill)
    notes = [check(config).notes, check(config).notes]
    assert notes[0] == notes[1] and len(chosen) == 1, "kept for these weights and rows"
    student, count, teacher, guess = map(float, TOLD.search(notes[0][1]).groups())  # type: ignore[union-attr]
    assert guess == pytest.approx(math.log(len(AutoTokenizer.from_pretrained(short_stories))), rel=1e-3)
    assert 0 < teacher != student > 0 and count == 8
    other = config.model_copy(update={"seed": 1})  # other rows train, and other ones are held out
    assert TOLD.search(check(other).notes[1]) and len(chosen) == 2
    plain = _config(short_stories, rows, distill={"teacher": {"id": short_stories}})
    assert not any(TOLD.search(note) for note in check(plain).notes), "no student is made"


def _tokens(home: Path) -> dict[str, Any]:
    rows = write_questions(home / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 5) for n in range(60)])
    return {"of": "sft", "model": {"id": str(STORIES)}, "data": {"train": str(rows), "held_out": 0.2}}


def _classes(home: Path) -> dict[str, Any]:
    kinds = {"red": "warm", "blue": "cold"}
    lines = [{"text": f"{n} {word} things", "label": kind} for n in range(40) for word, kind in kinds.items()]
    rows = write_lines(home / "rows.jsonl", lines)
    return {"of": "classify", "model": {"id": MINILM}, "data": {"train": str(rows), "held_out": 0.2}}


def _tags(home: Path) -> dict[str, Any]:
    make_home(home)
    data = {"train": str(home / "train.conll"), "held_out": str(home / "held_out.conll")}
    return {"of": "tag", "model": {"id": str(home / "bert")}, "data": data}


def _pictures(home: Path) -> dict[str, Any]:
    from transformers import ViTImageProcessorPil

    draw(home / "drawings", 60)
    save_vision(home / "vit", "ViT", num_hidden_layers=4)
    ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(home / "vit")
    data = {"format": "image", "train": str(home / "drawings"), "held_out": 0.2}
    return {"of": "classify", "model": {"id": str(home / "vit")}, "data": data}


@pytest.mark.slow
@pytest.mark.nightly(but=["_tokens"])
@pytest.mark.parametrize("task", [_tokens, _classes, _tags, _pictures])
def test_check_and_run_tell_the_same_start(task: Any, tmp_path: Path) -> None:
    made = task(tmp_path)
    of, model = made.pop("of"), {**made.pop("model"), "weights": "float32"}
    train = {"steps": 12, "learning_rate": 2e-3}
    common = {"adapter": FULL, "batch": {"size": 8}, "train": train, "evaluate": {"every": None, "answers": 0}, **made}

    def called(verb: str, name: str, values: dict[str, Any], *words: str) -> str:
        (tmp_path / f"{name}.yaml").write_text(dump_yaml(values))
        command = [verb, str(tmp_path / f"{name}.yaml"), *words]
        said = CliRunner().invoke(app, command, env={"COLUMNS": "400"}, catch_exceptions=False)
        assert said.exit_code == 0, said.output
        return said.output

    called("run", "teacher", {"recipe": of, "model": model, **common}, "--out", str(tmp_path / "teacher"))
    distill = {"teacher": {"id": str(tmp_path / "teacher")}, "student": {"layers": "important-50%"}, "control": True}
    values = {"recipe": "distill", "of": of, "model": {**model, "id": "teacher"}, "distill": distill, **common}
    told = [called("check", "student", values), called("run", "student", values, "--out", str(tmp_path / "run"))]
    first, second = (TOLD.search(" ".join(each.split())).groups() for each in told)  # type: ignore[union-attr]
    assert [float(each) for each in first] == pytest.approx([float(each) for each in second], rel=2e-3)
    scores = read_scores(tmp_path / "run")
    assert float(first[2]) == pytest.approx(scores["teacher"]["loss"], rel=2e-3)
    if of == "sft":
        assert float(first[0]) == pytest.approx(scores["before"]["loss"], rel=2e-3)
    else:
        assert float(first[3]) == pytest.approx(scores["before"]["loss"], rel=2e-3)
    noted = (tmp_path / "run" / "manifest.json").read_text()
    assert '"weights": "float32"' in noted.partition('"distill"')[2]


def test_an_untrained_student_is_written_for_any_recipe(
    short_stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_questions(tmp_path / "rows.jsonl", [f"{n + 1} it is" for n in range(30)])
    distill: dict[str, Any] = {"teacher": {"id": short_stories}, "student": {"layers": "important-1"}}
    config = _config(short_stories, rows, model={"id": "teacher", "weights": "float32"}, adapter=FULL, distill=distill)
    workbench.distill_student(config, out=tmp_path / "student")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert written.config.num_hidden_layers == 1
    plain = config.model_copy(update={"distill": type(config.distill)(), **config.as_task()})
    model = config.model.model_copy(update={"id": str(tmp_path / "student")})
    assert check(plain.model_copy(update={"model": model})).steps == 5
    with pytest.raises(ConfigError, match="student exists already"):
        workbench.distill_student(config, out=tmp_path / "student")
    for recipe, words in (("distill/peers", []), ("sft/quickstart", [])):
        with pytest.raises(ConfigError, match=r"Write model.id=teacher or distill.student.layers=important-50%"):
            workbench.distill_student(recipe, words, out=tmp_path / "other")


@pytest.mark.slow
def test_a_written_student_trains_as_the_control_does_and_a_finished_one_is_a_backbone(
    short_stories: str, tmp_path: Path
) -> None:
    rows = write_questions(tmp_path / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 5) for n in range(60)])
    distill: dict[str, Any] = {"teacher": {"id": short_stories}, "student": {"layers": "every-2"}, "alpha": 0.0}
    config = _config(short_stories, rows, model={"id": "teacher", "weights": "float32"}, adapter=FULL, distill=distill)
    workbench.distill_student(config, out=tmp_path / "student")
    silent = workbench.run(config, out=tmp_path / "silent", quiet=True)
    own = {"adapter": FULL, "recipe": "sft"}
    plain = _config(short_stories, rows, model={"id": str(tmp_path / "student"), "weights": "float32"}, **own)
    assert read_losses(workbench.run(plain, out=tmp_path / "plain", quiet=True)) == read_losses(silent)
    # The finished student by its run directory, and by the folder of its model.
    for name, place in (("run", silent), ("model", silent / "adapter")):
        further = _config(short_stories, rows, recipe="sft", model={"id": str(place), "weights": "float32"})
        workbench.run(further, out=tmp_path / name, quiet=True)
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "model")
    assert read_scores(tmp_path / "run")["before"]["loss"] == pytest.approx(
        read_scores(silent)["after"]["loss"], rel=1e-4
    )
    assert workbench.evaluate(tmp_path / "run")["loss"] == pytest.approx(
        read_scores(tmp_path / "run")["after"]["loss"], rel=1e-4
    )
