"""A teacher that predicts other tokens, or was taught another template, is refused before a weight is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import CHAT_TEMPLATE, MINILM, STORIES, write_questions
from tests.run_files import write_lines
from workbench.config import ModelConfig, RunConfig
from workbench.config.sections.distill_config import BACKBONE, DistillConfig, TeacherConfig
from workbench.data.text import tokenized
from workbench.data.text.row_encoder import row_encoder
from workbench.distillation.teacher_sources import TeacherSource, find, require_comparable
from workbench.errors import ConfigError
from workbench.models import backbones

NEW = ("<|start|>", "<|end|>")


@dataclass(frozen=True)
class Student:
    """A student's data as they are when its teacher is looked at."""

    config: RunConfig
    source: str | None = None
    """Its chat template."""

    def compare(self, teacher: TeacherSource, **distill: Any) -> None:
        config, tokenizer = self.config, backbones.tokenizer(self.config.model)
        template = row_encoder(config, backbones.hub_config(config.model), tokenizer, template=self.source)
        train = tokenized.read(config.data.train, config.data, tokenizer, template)
        require_comparable(DistillConfig.model_validate(distill), teacher, config, tokenizer, template, train)


@pytest.fixture
def plain(questions: Path) -> RunConfig:
    return _config(questions)


def _config(rows: Path, *, recipe: str = "sft", data: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    sections = {"recipe": recipe, "model": {"id": str(STORIES), **model}, "data": {"train": str(rows), **(data or {})}}
    return RunConfig.model_validate(sections)


def _teacher(
    folder: Path, *, template: str | None = None, added: tuple[str, ...] = (), swapped: int = 0
) -> TeacherSource:
    """The folder of a backbone without weights: nothing may ask for them."""
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(added), special_tokens=True)
    tokenizer.save_pretrained(folder)
    shutil.copy(STORIES / "config.json", folder)
    if swapped:
        written = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = written["model"]["vocab"]
        one, other = (next(token for token, number in vocabulary.items() if number == swapped + n) for n in (0, 1))
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        (folder / "tokenizer.json").write_text(json.dumps(written))
    return TeacherSource("teacher", ModelConfig(id=str(folder)))


def test_one_tokenizer_and_no_template_of_its_own(plain: RunConfig, tmp_path: Path) -> None:
    teacher = _teacher(tmp_path / "teacher")
    Student(plain).compare(teacher)
    Student(plain, CHAT_TEMPLATE).compare(teacher)
    Student(plain).compare(find(TeacherConfig(id=BACKBONE), plain.model))


def test_a_vocabulary_may_go_on_where_the_other_ends(plain: RunConfig, questions: Path, tmp_path: Path) -> None:
    Student(plain).compare(_teacher(tmp_path / "teacher", added=("<|reserved|>",)))
    Student(_config(questions, new_tokens=list(NEW))).compare(_teacher(tmp_path / "shorter"))


def test_tokens_that_the_teacher_does_not_know_are_shown(questions: Path, tmp_path: Path) -> None:
    config = _config(questions, new_tokens=list(NEW))
    with pytest.raises(ConfigError) as told:
        Student(config, CHAT_TEMPLATE).compare(_teacher(tmp_path / "teacher"))
    assert str(told.value) == (
        "distill.teacher.id=teacher: the student's tokenizer has 514 tokens, the teacher's 512, and it does not know "
        "'<|start|>' (token 512), which questions.jsonl, row 1 holds. Write distill.loss=universal, which compares "
        "models of different vocabularies, or name a teacher with the student's tokenizer. Or leave model.new_tokens "
        "out."
    )
    # The student's own backbone does not know what its adapter will learn, either.
    with pytest.raises(ConfigError, match=r"distill\.teacher\.id=backbone: .* does not know '<\|start\|>'"):
        Student(config, CHAT_TEMPLATE).compare(find(TeacherConfig(id=BACKBONE), config.model))


def test_other_tokens_under_the_same_numbers_are_shown(plain: RunConfig, tmp_path: Path) -> None:
    swapped = _teacher(tmp_path / "teacher", swapped=400)
    with pytest.raises(ConfigError, match=r"has 512 tokens, the teacher's 512, and token 400 is '(.+)' to the one and"):
        Student(plain).compare(swapped)
    other = TeacherSource("starter", ModelConfig(id="starter"))
    with pytest.raises(ConfigError, match=r"token \d+ is .* Write distill\.loss=universal"):
        Student(plain).compare(other)
    for teacher in (swapped, other):
        Student(plain).compare(teacher, loss="universal")


def test_two_templates_that_write_the_same_are_one(plain: RunConfig, tmp_path: Path) -> None:
    same = "{# the same #}" + CHAT_TEMPLATE
    Student(plain, CHAT_TEMPLATE).compare(_teacher(tmp_path / "teacher", template=same))


def test_a_row_that_both_write_otherwise_is_shown(plain: RunConfig, tmp_path: Path) -> None:
    teacher = _teacher(tmp_path / "teacher", template=CHAT_TEMPLATE.replace("'<|end|>", "'<|stop|>"))
    with pytest.raises(ConfigError) as told:
        Student(plain, CHAT_TEMPLATE).compare(teacher)
    first, student, other, cure = str(told.value).splitlines()
    assert first.startswith("distill.teacher.id=teacher: its chat template writes rows otherwise than the student's")
    assert "questions.jsonl, row 1, from token " in first
    assert student.startswith("  student: ... ") and "<|end" in student and "<|stop" not in student
    assert other.startswith("  teacher: ... ") and "<|stop" in other and "<|end" not in other
    assert cure == "  Write the teacher's into a file, and name it to the student: model.chat_template=FILE"
    Student(plain, CHAT_TEMPLATE).compare(teacher, loss="universal")


def test_a_difference_in_a_later_row_is_found(tmp_path: Path) -> None:
    """The templates differ in answers of the word `six`, of which the third row has one."""
    rows = write_questions(tmp_path / "rows.jsonl", ["one", "two", "six", "one"])
    twice = CHAT_TEMPLATE.replace("message.content", "(message.content | replace('six', 'six six'))")
    teacher = _teacher(tmp_path / "teacher", template=twice)
    with pytest.raises(ConfigError, match=r"rows\.jsonl, row 3, from token"):
        Student(_config(rows), CHAT_TEMPLATE).compare(teacher)


def test_a_template_that_refuses_a_row_is_told(plain: RunConfig, tmp_path: Path) -> None:
    refusing = "{{ raise_exception('no conversations, please') }}"
    with pytest.raises(ConfigError, match=r"its chat template refuses a row\. (?s:.)*no conversations, please"):
        Student(plain).compare(_teacher(tmp_path / "teacher", template=refusing))


def test_rows_that_are_left_out_are_not_compared(tmp_path: Path) -> None:
    """The student's own template refuses them, and so does reading the rows."""
    rows = write_questions(tmp_path / "rows.jsonl", ["no", "yes", "yes"])
    refusing = "{% if messages[-1].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
    config = _config(rows, data={"on_bad_row": "skip"})
    Student(config, refusing).compare(_teacher(tmp_path / "teacher", template=CHAT_TEMPLATE))


def test_raw_text_has_no_template(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, ({"text": f"Once upon a time {n}"} for n in range(9)))
    Student(_config(rows)).compare(_teacher(tmp_path / "teacher", template=CHAT_TEMPLATE))


def test_the_template_of_a_run_is_named(trained: Path, questions: Path) -> None:
    teacher = find(TeacherConfig(id=str(trained)), ModelConfig(id=str(STORIES)))
    with pytest.raises(ConfigError) as told:
        Student(_config(questions)).compare(teacher)
    cure = str(told.value).splitlines()[-1]
    template = trained / "adapter" / "chat_template.jinja"
    assert cure == (
        f"  Give the student the teacher's: model.chat_template={template} model.new_tokens='[<|start|>, <|end|>]'"
    )
    Student(_config(questions, new_tokens=list(NEW)), template.read_text()).compare(teacher)


def test_masked_text_has_no_template(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, ({"text": f"Once upon a time {n}"} for n in range(9)))
    Student(_config(rows, recipe="mlm", id=MINILM)).compare(TeacherSource("same", ModelConfig(id=MINILM)), of="mlm")


def test_teachers_of_other_tasks_are_refused(
    plain: RunConfig, encoder_decoder: str, questions: Path, tmp_path: Path
) -> None:
    classifier = TeacherSource("runs/a", plain.model, config=plain.model_copy(update={"recipe": "classify"}))
    with pytest.raises(
        ConfigError, match=r"runs/a: its run is of recipe=classify, and the student's is distill\.of=sft"
    ):
        Student(plain).compare(classifier)
    pairs = TeacherSource("pairs", ModelConfig(id=encoder_decoder))
    with pytest.raises(ConfigError, match=r"pairs: T5Config has a decoder beside its encoder, and the student, LlamaC"):
        Student(plain).compare(pairs)
    with pytest.raises(ConfigError, match=r"LlamaConfig reads and writes in one sequence, and the student, T5Config"):
        Student(_config(questions, id=encoder_decoder)).compare(_teacher(tmp_path / "teacher"), loss="universal")
    Student(_config(questions, id=encoder_decoder)).compare(pairs)


def test_one_teacher_where_one_is_compared(plain: RunConfig) -> None:
    both = TeacherSource("both", plain.model, (Path("a"), Path("b")))
    with pytest.raises(ConfigError, match=r"distill\.match compares with one teacher, and these are 2 adapters"):
        Student(plain).compare(both, match=[{"what": "hidden_mse"}])
    with pytest.raises(ConfigError, match=r"distill\.loss=universal compares with one teacher"):
        Student(plain).compare(both, loss="universal")
    Student(plain).compare(both)
