"""`check` shows what carries loss and refuses, before any weight is read, what would fail or learn nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.run_files import write_lines
from workbench.config import RunConfig
from workbench.data.labelled.labels import Labels
from workbench.errors import BackboneError, ConfigError, DataError, WorkbenchError
from workbench.models import backbones
from workbench.recipes.inspection import SHOWN, pieces
from workbench.recipes.tasks.classify.task import unequal
from workbench.recipes.verbs.check import check

Inspect = Callable[..., Any]


@pytest.fixture
def inspect(stories: str, questions: Path) -> Inspect:
    """`check` of a small recipe, with sections replaced."""

    def run(**sections: dict[str, Any]) -> Any:
        data = {"train": str(questions), "held_out": 0.1, **sections.pop("data", {})}
        base = {"recipe": "sft", "model": {"id": stories}, "data": data, "batch": {"size": 8}}
        return check(RunConfig.model_validate({**base, **sections}))

    return run


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    write_lines(path, rows)
    return str(path)


def _talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]}


def test_no_weight_is_read(inspect: Inspect, stories: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stories, tmp_path / "bare"))
    with (folder / "model.safetensors").open("r+b") as file:  # the header stays, and every weight is a hole
        header = 8 + int.from_bytes(file.read(8), "little")
        size = (folder / "model.safetensors").stat().st_size
        file.truncate(header)
        file.truncate(size)
    found = inspect(model={"id": str(folder)})
    assert found.targets == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (len(found.data.train), len(found.data.held_out), found.data.test) == (108, 12, None)
    assert found.steps == 14
    assert inspect(model={"id": str(folder)}, train={"epochs": 2.5}).steps == 35
    assert inspect(model={"id": str(folder)}, train={"steps": 3}).steps == 3
    assert inspect(model={"id": str(folder)}, adapter={"method": "full"}).targets == []


def test_examples_mark_answers_and_their_end(inspect: Inspect, tmp_path: Path) -> None:
    rows = [_talk(f"Ask {n}.", f"Say {n}.", "And?", f"More {n}.") for n in range(20)]
    found = inspect(data={"train": _write(tmp_path / "talks.jsonl", rows)})
    assert len(found.examples) == SHOWN
    for place, parts in found.examples:
        number = int(place.removeprefix("talks.jsonl, row ")) - 1
        assert [text for text, loss in parts if loss] == [f"Say {number}.</s>", f"More {number}.</s>"]
        assert [loss for _, loss in parts] == [False, True] * 2 + [False]
        assert f"Ask {number}." in parts[0][0] and "And?" in parts[2][0]


@pytest.mark.parametrize(("loss_on", "wanted"), [("last", ["Fine.</s>"]), ("assistant", ["Well.</s>", "Fine.</s>"])])
def test_loss_on_decides_what_is_marked(inspect: Inspect, tmp_path: Path, loss_on: str, wanted: list[str]) -> None:
    rows = [_talk(f"Hello {n}.", "Well.", "And?", "Fine.") for n in range(9)]
    found = inspect(data={"train": _write(tmp_path / "talks.jsonl", rows), "loss_on": loss_on})
    assert [[text for text, loss in parts if loss] for _, parts in found.examples] == [wanted] * SHOWN


def test_pieces_put_together_are_the_row(inspect: Inspect) -> None:
    found = inspect()
    tokenizer = backbones.tokenizer(found.config.model)
    for number in range(10):
        row = found.data.train[number]
        parts = pieces(row, tokenizer)
        assert all(text for text, _ in parts)
        assert all(one != other for (_, one), (_, other) in pairwise(parts))
        assert "".join(text for text, _ in parts).count("What comes after") == 1
        assert any(loss for _, loss in parts) == bool(np.any(row.supervised))


def _refused(inspect: Inspect, kind: type[WorkbenchError], *words: str, **sections: dict[str, Any]) -> None:
    with pytest.raises(kind) as caught:
        inspect(**sections)
    for word in words:
        assert word in str(caught.value)


def test_a_cut_that_leaves_no_end_of_turn_is_refused(inspect: Inspect, tmp_path: Path) -> None:
    train = _write(tmp_path / "long.jsonl", [_talk("Hi.", "very long " * 60 + str(n)) for n in range(12)])
    cut = {"train": train, "max_tokens": 48, "truncate": "right"}
    cut = {**cut, "held_out": _write(tmp_path / "other.jsonl", [_talk("Hi.", "Ho.")])}
    _refused(inspect, DataError, "never learn to stop", "data.truncate=left", "long.jsonl", data=cut)
    assert inspect(data={**cut, "truncate": "left"}).data.train.truncated == 12


def test_a_cut_that_leaves_no_answer_is_refused(inspect: Inspect, tmp_path: Path) -> None:
    rows = [_talk("very long " * 60 + str(n), "Yes.") for n in range(12)]
    train = _write(tmp_path / "long.jsonl", rows)
    cut = {"train": train, "max_tokens": 48, "truncate": "right"}
    _refused(inspect, DataError, "no supervised token is left", "long.jsonl, row 1", "max_tokens=48", data=cut)
    _refused(inspect, DataError, "no usable row", data={**cut, "on_bad_row": "skip"})


@pytest.mark.parametrize("rows", [[], [{"question": "What?", "answer": "That."}] * 5])
def test_a_split_that_would_be_empty_is_refused(inspect: Inspect, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    train = _write(tmp_path / "few.jsonl", rows)
    _refused(inspect, DataError, "few to hold out" if rows else "empty", "few.jsonl", data={"train": train})


def test_held_out_rows_that_stand_in_train_are_refused_or_dropped(
    inspect: Inspect, questions: Path, tmp_path: Path
) -> None:
    lines = questions.read_text().splitlines()
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"question": "New?", "answer": "Yes."}) + "\n" + lines[6] + "\n" + lines[3] + "\n")
    data = {"held_out": str(held_out)}
    place = "questions.jsonl, row 4 equals held_out.jsonl, row 3"
    _refused(inspect, DataError, "2 of 120 training rows", place, "data.overlap=drop", data=data)
    found = inspect(data={**data, "overlap": "drop"})
    assert len(found.data.train) == 118
    assert found.notes == [f"Left out: 2 rows that are also in {held_out}"]
    _refused(inspect, DataError, "training rows are also", data={"test": str(held_out)})


def test_an_adapter_that_matches_no_module_is_refused(inspect: Inspect) -> None:
    adapter = {"method": "lora", "targets": ["query"]}
    _refused(inspect, ConfigError, "no linear layer of LlamaForCausalLM is called query", "Nearest", adapter=adapter)


def test_a_model_that_is_no_causal_language_model_is_refused(inspect: Inspect, stories: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stories, tmp_path / "encoder"))
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    _refused(inspect, BackboneError, "ViTConfig has no causal language model", model={"id": str(folder)})


def test_rows_that_were_left_out_are_told(inspect: Inspect, questions: Path) -> None:
    with questions.open("a") as file:
        file.write('{"question": "What?", "answer": ""}\n')
    _refused(inspect, DataError, "questions.jsonl, row 121", "`answer` is empty")
    found = inspect(data={"on_bad_row": "skip"})
    assert len(found.notes) == 1 and "row 121" in found.notes[0] and found.notes[0].startswith("Left out: ")


@pytest.mark.parametrize("freeze", [{}, {"policy": "lisa"}])
def test_blocks_are_counted_where_layers_freeze(inspect: Inspect, freeze: dict[str, Any]) -> None:
    assert inspect(freeze=freeze).blocks == (5 if freeze else None)


def test_blocks_of_a_student_that_is_to_be_made_and_of_a_sweep_are_counted(inspect: Inspect, stories: str) -> None:
    freeze, evaluate = {"policy": "static"}, {"every": 0.5}
    distill = {"teacher": {"id": stories}, "student": {"layers": "first-3"}}
    assert inspect(recipe="distill", distill=distill, freeze=freeze).blocks == 3
    assert inspect(recipe="sweep", sweep={"over": {"seed": [0, 1]}}, freeze=freeze, evaluate=evaluate).blocks == 5


@pytest.mark.parametrize(
    "own", [{"recipe": "classify"}, {"recipe": "crossval", "duplicates": {"on_duplicate": "ignore"}}]
)
def test_blocks_of_a_classifier_are_counted(own: dict[str, Any], stories: str, tmp_path: Path) -> None:
    rows = [{"text": f"The {name} said {n}.", "label": name} for n in range(20) for name in ("cat", "dog")]
    sections = {"model": {"id": stories}, "data": {"train": _write(tmp_path / "rows.jsonl", rows)}}
    found = check(RunConfig.model_validate({**own, **sections, "freeze": {"policy": "gradual"}}))
    assert found.blocks == 5


def test_a_run_that_only_a_budget_ends_has_no_number_of_steps(inspect: Inspect) -> None:
    assert inspect(budget={"tokens": 50_000}).steps is None
    assert inspect(budget={"tokens": 50_000}, train={"epochs": 2}).steps == 28


def test_a_budget_that_the_first_step_uses_up_is_refused(inspect: Inspect) -> None:
    step = round(8 * float(inspect().data.train.lengths.mean()))
    _refused(inspect, ConfigError, f"budget.tokens={step - 1}", f"about {step} tokens", budget={"tokens": step - 1})
    assert inspect(budget={"tokens": step}).steps is None


def test_muon_is_refused_where_only_vectors_train(inspect: Inspect) -> None:
    muon = {"name": "muon"}
    for method in ("ia3", "layernorm", "prompt"):
        _refused(inspect, ConfigError, "optimizer.name=muon", method, adapter={"method": method}, optimizer=muon)
    for method in ("lora", "full", "last-layers"):
        inspect(adapter={"method": method}, optimizer=muon)
    head = {"policy": "static", "layers": 5}
    _refused(inspect, ConfigError, "optimizer.name=muon", adapter={"method": "full"}, optimizer=muon, freeze=head)


class _Rows:
    """Labelled rows, as far as their classes go."""

    def __init__(self, targets_NC: Any) -> None:
        self.targets_NC = targets_NC

    def __len__(self) -> int:
        return len(self.targets_NC)


def test_a_rare_class_is_told_with_the_setting_that_answers_it() -> None:
    labels = Labels("one", ("often", "seldom", "rare"))
    config = RunConfig.model_validate({"recipe": "classify", "data": {"train": "x.csv"}})
    rows = _Rows(np.repeat(np.eye(3), [120, 60, 9], axis=0))
    (told,) = unequal(cast(Any, rows), labels, config)
    assert (
        told.startswith("Classes are unequal: rare has 9 of 189 rows") and "Every class is drawn equally often" in told
    )
    answered = config.model_copy(update={"classes": config.classes.model_copy(update={"logit_adjustment": 1.0})})
    assert unequal(cast(Any, rows), labels, answered) == []
    assert unequal(cast(Any, _Rows(np.repeat(np.eye(3), [60, 60, 40], axis=0))), labels, config) == []


def test_it_says_what_all_rows_begin_with(inspect: Inspect, tmp_path: Path) -> None:
    begun = "You are the oldest of all story tellers. Answer in one sentence, and only that. "
    rows = [{"prompt": f"{begun}How many after {n}?", "completion": f"{n + 1} it is."} for n in range(40)]
    path = _write(tmp_path / "begun.jsonl", rows)
    for shared, told in (("auto", True), (False, False)):
        found = inspect(data={"train": path}, batch={"shared_prefix": shared})
        assert any("begin with the same" in note for note in found.notes) == told
