"""Where a teacher comes from: the student's backbone, a model, what runs shipped, or the adapters of all folds.

A teacher that predicts other tokens, or was taught another template, is refused before a weight is read.
"""

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
from workbench.config.sections.distill_config import BACKBONE, STUDENT, TEACHER, DistillConfig, TeacherConfig
from workbench.data import starter
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.row_encoder import row_encoder
from workbench.distillation.teacher_sources import TeacherSource, find, require_comparable
from workbench.errors import ConfigError, FileError
from workbench.models import backbones, exported

MINE = ModelConfig(id="starter", weights="float32")


def _values(recipe: str = "sft", **sections: Any) -> dict[str, Any]:
    of = {"recipe": recipe, "model": {"id": str(STORIES)}, "data": {"train": "rows.jsonl"}, **sections}
    return RunConfig.model_validate(of).model_dump(mode="json")


def _run(path: Path, *, full: bool = False, template: str | None = None, **sections: Any) -> str:
    """A run directory as far as a teacher is looked for in it; no tensors are."""
    config = RunConfig.model_validate(_values(**sections))
    tokenizer = backbones.tokenizer(config.model)
    (path / "adapter").mkdir(parents=True)
    (path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path / "adapter")
    if full:
        shutil.copy(STORIES / "config.json", path / "adapter")
    else:
        (path / "adapter" / "adapter_config.json").write_text("{}")
        (path / "adapter" / "adapter_model.safetensors").touch()
    return str(path)


def test_the_backbone_is_the_students_as_it_came() -> None:
    student = MINE.model_copy(update={"new_tokens": ("<|a|>",), "attention": "eager"})
    found = find(TeacherConfig(id=BACKBONE), student)
    assert found.model == MINE.model_copy(update={"attention": "eager"})
    assert (found.name, found.adapters, found.run, found.config) == (BACKBONE, (), None, None)
    assert len(found.tokenizer()) == len(backbones.tokenizer(MINE))
    assert find(TeacherConfig(id=BACKBONE, weights="nf4"), MINE).model.weights == "nf4"
    assert found.hub_config().hidden_size == backbones.hub_config(MINE).hidden_size


def test_a_name_without_a_run_is_a_model() -> None:
    found = find(TeacherConfig(id="owner/name", revision="v2", weights="bfloat16"), MINE)
    assert found.model == ModelConfig(id="owner/name", revision="v2", weights="bfloat16")
    assert (found.name, found.adapters, found.run) == ("owner/name", (), None)
    folder = str(Path(starter.resolve("starter")))
    assert find(TeacherConfig(id=folder), MINE).model == ModelConfig(id=folder, weights="float32")


def test_an_adapter_that_a_run_shipped(tmp_path: Path) -> None:
    sections = {"model": {"id": str(STORIES), "weights": "float32", "new_tokens": ["<|start|>", "<|end|>"]}}
    run = _run(tmp_path / "run", template=CHAT_TEMPLATE, **sections)
    found = find(TeacherConfig(id=run), MINE)
    assert found.adapters == (tmp_path / "run" / "adapter",) and found.run == tmp_path / "run"
    assert found.config is not None and found.model == found.config.model
    assert found.model.weights == "float32", "as it was trained"
    assert find(TeacherConfig(id=run, weights="int8"), MINE).model.weights == "int8"
    tokenizer = found.tokenizer()
    assert tokenizer.get_vocab() == exported.load_tokenizer(tmp_path / "run", found.config).get_vocab()
    assert tokenizer.convert_tokens_to_ids("<|end|>") == 513
    student = RunConfig.model_validate(_values())
    written = found.template(student, tokenizer)
    plain = row_encoder(student, backbones.hub_config(student.model), backbones.tokenizer(student.model))
    assert isinstance(written, ChatEncoder) and isinstance(plain, ChatEncoder)
    assert written.source == CHAT_TEMPLATE != plain.source


def test_why_a_teacher_cannot_read_packed_rows(tmp_path: Path) -> None:
    lora, prefix = (_run(tmp_path / name, adapter={"method": name}) for name in ("lora", "prefix"))
    assert find(TeacherConfig(id=lora), MINE).no_packing(longest=99) is None
    assert "virtual tokens" in str(find(TeacherConfig(id=prefix), MINE).no_packing(longest=99))
    assert "virtual tokens" in str(find(TeacherConfig(id=(lora, prefix)), MINE).no_packing(longest=99))
    eager = MINE.model_copy(update={"attention": "eager"})
    assert "attention is eager" in str(find(TeacherConfig(id=BACKBONE), eager).no_packing(longest=99))
    shutil.copytree(STORIES, tmp_path / "short")
    config = json.loads((STORIES / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(
        json.dumps({**config, "model_type": "mistral", "sliding_window": 8})
    )
    short = find(TeacherConfig(id=str(tmp_path / "short")), MINE)
    assert short.no_packing(longest=8) is None and "reaches back 8 tokens" in str(short.no_packing(longest=9))


def test_a_model_that_a_run_trained_whole(tmp_path: Path) -> None:
    run = _run(
        tmp_path / "run", full=True, adapter={"method": "full"}, model={"id": str(STORIES), "weights": "float32"}
    )
    found = find(TeacherConfig(id=run), MINE)
    assert found.adapters == () and found.run == tmp_path / "run"
    assert found.model == ModelConfig(id=str(tmp_path / "run" / "adapter"), weights="float32")
    assert found.hub_config().vocab_size == 512 and len(found.tokenizer()) == 512


def test_the_best_of_a_sweep(tmp_path: Path) -> None:
    over = {"over": {"train.learning_rate": [1e-4, 1e-3]}}
    run = _run(tmp_path / "run", recipe="sweep", sweep=over)
    members = [{"member": f"m{n}", "settings": {"train.learning_rate": rate}} for n, rate in enumerate((1e-4, 1e-3))]
    (tmp_path / "run" / "sweep.json").write_text(json.dumps({"best": "m1", "members": members}))
    found = find(TeacherConfig(id=run), MINE)
    assert found.config is not None and found.config.train.learning_rate == 1e-3 and found.config.recipe == "sft"
    assert found.adapters == (tmp_path / "run" / "adapter",)


def test_a_student_is_the_teacher_of_the_next(tmp_path: Path) -> None:
    """Its backbone was made of another one, and stands in its run."""
    distill = {"teacher": {"id": BACKBONE}, "student": {"layers": "every-2"}}
    run = _run(tmp_path / "run", recipe="distill", distill=distill)
    found = find(TeacherConfig(id=run), MINE)
    assert found.model.id == str(tmp_path / "run" / STUDENT)
    assert found.config is not None and found.config.recipe == "sft"


def _crossval(path: Path, decided: dict[str, Any] | None) -> str:
    path.mkdir()
    sections = {"data": {"train": "rows.csv"}, "model": {"id": str(STORIES)}}
    (path / "config.yaml").write_text(json.dumps(_values("crossval", **sections)))
    if decided is not None:
        (path / "decision.json").write_text(json.dumps(decided))
    return str(path)


def test_all_adapters_of_a_cross_validation(tmp_path: Path) -> None:
    run = _crossval(tmp_path / "run", {"round": 1, "members": ["fold-0", "fold-1", "fold-2"]})
    found = find(TeacherConfig(id=run), MINE)
    where = tmp_path / "run" / "members" / "round-1"
    assert found.adapters == tuple(where / f"fold-{number}" / "adapter" for number in range(3))
    assert found.config is not None and found.config.recipe == "crossval"
    assert len(found.tokenizer()) == 512, "no adapter brings one of its own"


def test_several_runs_over_one_backbone(tmp_path: Path) -> None:
    runs = tuple(_run(tmp_path / name) for name in ("a", "b"))
    found = find(TeacherConfig(id=runs), MINE)
    assert found.adapters == (tmp_path / "a" / "adapter", tmp_path / "b" / "adapter")
    assert found.name == f"{tmp_path}/a, {tmp_path}/b" and found.run == tmp_path / "a"
    assert find(TeacherConfig(id=runs[:1]), MINE) == find(TeacherConfig(id=runs[0]), MINE)
    halves = find(TeacherConfig(id=runs, weights="bfloat16"), MINE)
    assert halves.model.weights == "bfloat16"


def test_several_with_weights_of_their_own_teach_together(tmp_path: Path) -> None:
    first = _run(tmp_path / "first")
    others = {
        "whole": _run(tmp_path / "whole", full=True, adapter={"method": "full"}),
        "packed": _run(tmp_path / "packed", model={"id": str(STORIES), "weights": "nf4"}),
        "model": str(STORIES),
    }
    for other in others.values():
        found = find(TeacherConfig(id=(first, other)), MINE)
        assert found.parts == (find(TeacherConfig(id=first), MINE), find(TeacherConfig(id=other), MINE))
        assert found.name == f"{first}, {other}" and found.models == 2
        assert found.files == {**found.parts[0].files, **found.parts[1].files}
    folds = _crossval(tmp_path / "folds", {"round": 0, "members": ["fold-0", "fold-1"]})
    with pytest.raises(
        ConfigError, match=r"folds is a cross-validation, whose adapters teach together already\. Name it"
    ):
        find(TeacherConfig(id=(first, folds)), MINE)


@pytest.mark.parametrize(
    ("trained", "student", "asked", "found"),
    [
        ({}, {}, None, ("auto", "auto")),
        ({}, {"weights": "float32"}, None, ("float32", "auto")),
        ({}, {"compute": "float32"}, None, ("auto", "float32")),
        ({"weights": "bfloat16", "compute": "bfloat16"}, {"weights": "float32"}, None, ("float32", "auto")),
        ({"weights": "bfloat16"}, {}, None, ("bfloat16", "auto")),
        ({"weights": "nf4"}, {"weights": "float32"}, None, ("nf4", "auto")),
        ({"weights": "bfloat16"}, {"weights": "float32"}, "int8", ("int8", "auto")),
    ],
)
def test_weights_are_stored_as_the_students_or_as_asked(
    trained: dict[str, str], student: dict[str, str], asked: Any, found: tuple[str, str], tmp_path: Path
) -> None:
    name = _run(tmp_path / "run", model={"id": str(STORIES), **trained})
    source = find(TeacherConfig(id=name, weights=asked), ModelConfig.model_validate({"id": "starter", **student}))
    assert (source.model.weights, source.model.compute) == found
    if "weights" not in trained:
        plain = find(TeacherConfig(id=str(STORIES)), ModelConfig.model_validate({"id": "starter", **student}))
        assert (plain.model.weights, plain.model.compute) == found
    assert source.facts["weights"] == (found[0] if found[0] != "auto" else source.facts["weights"])


def test_what_cannot_teach_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"distill\.teacher\.id: name a teacher"):
        find(TeacherConfig(), MINE)
    with pytest.raises(ConfigError, match="name each other"):
        find(TeacherConfig(id=BACKBONE), ModelConfig(id=TEACHER))
    running = _run(tmp_path / "running")
    shutil.rmtree(tmp_path / "running" / "adapter")
    with pytest.raises(ConfigError, match="no adapter there yet"):
        find(TeacherConfig(id=running), MINE)
    damaged = _run(tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter" / "tokenizer.json").unlink()
    with pytest.raises(FileError, match=r"tokenizer\.json missing"):
        find(TeacherConfig(id=damaged), MINE)
    with pytest.raises(ConfigError, match="the cross-validation has not ended"):
        find(TeacherConfig(id=_crossval(tmp_path / "folds", None)), MINE)


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
    architecture = json.loads((STORIES / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**architecture, "vocab_size": len(tokenizer)}))
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
        "'<|start|>' (token 512), which questions.jsonl, row 1 holds. Write distill.loss=gold, which compares "
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
    with pytest.raises(ConfigError, match=r"token \d+ is .* Write distill\.loss=gold"):
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
    Student(_config(rows, recipe="mlm", id=MINILM)).compare(TeacherSource("same", ModelConfig(id=MINILM)))


def test_teachers_of_other_tasks_are_refused(
    plain: RunConfig, encoder_decoder: str, questions: Path, tmp_path: Path
) -> None:
    classifier = TeacherSource("runs/a", plain.model, config=plain.model_copy(update={"recipe": "classify"}))
    with pytest.raises(ConfigError, match=r"runs/a: its run is of recipe=classify, and the student's is of=sft"):
        Student(plain).compare(classifier)
    pairs = TeacherSource("pairs", ModelConfig(id=encoder_decoder))
    with pytest.raises(ConfigError, match=r"pairs: T5Config has a decoder beside its encoder, and the student, LlamaC"):
        Student(plain).compare(pairs)
    with pytest.raises(ConfigError, match=r"LlamaConfig reads and writes in one sequence, and the student, T5Config"):
        Student(_config(questions, id=encoder_decoder)).compare(_teacher(tmp_path / "teacher"), loss="universal")
    Student(_config(questions, id=encoder_decoder)).compare(pairs)


def test_one_teacher_where_one_is_compared(plain: RunConfig) -> None:
    both = TeacherSource("both", plain.model, (Path("a"), Path("b")))
    with pytest.raises(ConfigError, match=r"distill\.match compares with one teacher, and these are 2 models"):
        Student(plain).compare(both, match=[{"what": "hidden_mse"}])
    with pytest.raises(ConfigError, match=r"distill\.loss=universal compares with one teacher"):
        Student(plain).compare(both, loss="universal")
    Student(plain).compare(both)
