"""A student of tags learns what its teachers say of words, whatever tokens either of them reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.conftest import MINILM, STORIES, save_tiny
from tests.recipes.tasks.tag.tagged_sentences import make_home, sections, sentences, train
from tests.run_files import read_losses, read_scores
from workbench.cli.verbs import app
from workbench.config import RunConfig
from workbench.config.yaml_text import dump_yaml
from workbench.data import tagged_rows
from workbench.distillation import teacher_sources
from workbench.errors import ConfigError
from workbench.recipes.over import distill_tags
from workbench.recipes.over.distill_tags import WordsSaid
from workbench.recipes.tasks.tag import task as tagging
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.merge import merge
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Silent

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("tags"))


@pytest.fixture(scope="module")
def done(home: Path) -> Path:
    """A finished run. Read only."""
    return train(sections(home), home / "run")


def distilled(home: Path, teacher: Any, **changed: Any) -> dict[str, Any]:
    distill = {"teacher": {"id": teacher}, **changed.pop("distill", {})}
    return sections(home, recipe="distill", of="tag", distill=distill, **changed)


def asked(home: Path, teacher: Any, **changed: Any) -> tuple[tagging.TagSplits, dict[str, list[WordsSaid]]]:
    """What teachers say of all rows, read as the student does."""
    config = RunConfig.model_validate(distilled(home, teacher, **changed))
    data = tagging.prepare(config.model_copy(update=config.as_task()))[1]
    source = teacher_sources.find(config.distill.teacher, config.model)
    return data, distill_tags.asked(distill_tags.find(source, config, data.tags), data.tags, data.named())


def test_the_loss_is_the_equation_of_hinton(home: Path, done: Path, tmp_path: Path) -> None:
    """Cross-entropy of the tags, and T^2 KL(teacher || student) of the words that the teacher has read."""
    alpha, temperature = 0.3, 2.0
    section = {"alpha": alpha, "temperature": temperature}
    config = RunConfig.model_validate(distilled(home, str(done), distill=section))
    base = config.model_copy(update={**config.as_task(), "distill": type(config.distill)()})
    tokenizer, data, _ = tagging.prepare(base)
    student = tagging.TagRun(base, Run(tmp_path, None, resumed=False), Silent(), tokenizer, data)
    live = tagging.load(done, RunConfig.model_validate(sections(home)))
    rng = np.random.default_rng(0)
    said = [
        WordsSaid(rng.dirichlet(np.ones(len(data.tags.names)), len(row.words)), rng.random(len(row.words)) < 0.7)
        for row in data.train.rows
    ]
    signal = distill_tags.supervise(config, student, None, {"train": said})(live, None, lambda: 0.0)  # type: ignore[arg-type]
    rows = np.array([5, 0, 41])
    found = float(signal.loss(signal.train.batch(rows), 0.25))
    hard = soft = torch.zeros((), dtype=torch.float64)
    for row in rows.tolist():
        encoded = data.train.encoded[row]
        log_q_SC = live.outputs(data.train.batch(np.array([row]))).double()
        hard = hard - log_q_SC.log_softmax(1)[range(len(encoded.labels)), encoded.labels].sum()
        for place, log_q_C in zip(np.flatnonzero(encoded.supervised).tolist(), log_q_SC, strict=True):
            word = encoded.position_W.tolist().index(place)
            if said[row].known_W[word]:
                p_C = (torch.from_numpy(said[row].p_WC[word]).log() / temperature).softmax(0)
                soft = soft + (p_C * (p_C.log() - (log_q_C / temperature).log_softmax(0))).sum()
    wanted = 0.25 * ((1 - alpha) * hard + alpha * temperature**2 * soft)
    assert found == pytest.approx(float(wanted), rel=1e-5)


def test_a_student_learns_from_its_teacher_alone(home: Path, done: Path, tmp_path: Path) -> None:
    """From the command line, without a label, over a causal backbone with other tokens."""
    model = save_tiny(tmp_path / "llama", "Llama", "TokenClassification", str(STORIES), num_key_value_heads=2)
    section = {"alpha": 1.0, "temperature": 2.0}
    values = distilled(home, str(done), distill=section, model={"id": model, "weights": "float32"})
    (tmp_path / "recipe.yaml").write_text(dump_yaml(values))
    said = CliRunner().invoke(app, ["run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    scores = read_scores(tmp_path / "run")
    assert scores["teacher"]["f1"] == read_scores(done)["after"]["f1"]
    assert scores["teacher"]["loss"] == pytest.approx(read_scores(done)["after"]["loss"], rel=1e-4)
    assert scores["before"]["f1"] == 0 and scores["after"]["f1"] > 0.8
    assert evaluate(tmp_path / "run", []) == pytest.approx(scores["after"])


@pytest.mark.slow
def test_held_out_rows_that_the_teacher_was_trained_on_are_told(home: Path, done: Path, tmp_path: Path) -> None:
    names = [str(home / "held_out.conll"), str(home / "train.conll")]
    for trained, held_out in (names, names[::-1]):
        values = distilled(home, str(done), data={"train": trained, "held_out": held_out}, train={"steps": 1})
        run = train(values, tmp_path / Path(trained).stem)
        assert ('"trained_on"' in (run / "manifest.json").read_text()) == (held_out == names[1])


@pytest.mark.parametrize("packing", [False, True])
def test_without_the_teacher_it_is_the_plain_run(home: Path, done: Path, tmp_path: Path, packing: bool) -> None:
    batch, steps = {"size": 8, "packing": packing}, {"steps": 4, "learning_rate": 1e-2}
    one = train(distilled(home, str(done), distill={"alpha": 0.0}, batch=batch, train=steps), tmp_path / "student")
    other = train(sections(home, batch=batch, train=steps), tmp_path / "plain")
    assert read_losses(one) == pytest.approx(read_losses(other), rel=1e-5)
    taught = distilled(home, str(done), distill={"alpha": 0.7}, batch=batch, train=steps)
    assert read_losses(train(taught, tmp_path / "taught"))[1:] != pytest.approx(read_losses(other)[1:], rel=1e-2)


def test_rows_without_tags_take_part(home: Path, done: Path, tmp_path: Path) -> None:
    """And their tags never; rows that are held out do not."""
    (tmp_path / "few.conll").write_text(sentences(16))
    words = ["\n".join(line.split()[0] for line in block.splitlines()) for block in sentences(40, 90).split("\n\n")]
    (tmp_path / "more.conll").write_text("\n\n".join(words) + "\n")
    data = {"train": str(tmp_path / "few.conll"), "held_out": str(home / "held_out.conll")}
    values = distilled(home, str(done), data=data, distill={"unlabelled": str(tmp_path / "more.conll")})
    assert check(RunConfig.model_validate(values)).steps == 8 * (16 + 40 - 16) / 8
    path = train(values, tmp_path / "run")
    assert read_scores(path)["after"]["f1"] > 0.9
    assert json.loads((path / "manifest.json").read_text())["data"]["unlabelled"]["rows"] == 24


def test_several_teachers_say_the_mean_of_their_probabilities(home: Path, done: Path, tmp_path: Path) -> None:
    other = train(sections(home, train={"steps": 6}, seed=1), tmp_path / "other")
    said = [asked(home, teacher)[1]["train"] for teacher in ([str(done), str(other)], str(done), str(other))]
    for together, *each in zip(*said, strict=True):
        np.testing.assert_allclose(together.p_WC, np.mean([own.p_WC for own in each], axis=0))


def test_a_stock_model_teaches_as_the_run_that_it_was_merged_from(home: Path, done: Path, tmp_path: Path) -> None:
    merge(done, out=tmp_path / "merged", weights="float32")
    said = [asked(home, teacher)[1]["held_out"] for teacher in (str(done), str(tmp_path / "merged"))]
    for one, other in zip(*said, strict=True):
        np.testing.assert_allclose(one.p_WC, other.p_WC, atol=2e-3)  # computed in another precision


def test_words_that_the_teacher_cuts_say_nothing(home: Path, done: Path, tmp_path: Path) -> None:
    config = RunConfig.model_validate(sections(home))
    short = distill_tags.TagTeacher(
        tagged_rows.TagSet.read(done / "adapter").names, lambda: tagging.load(done, config), max_tokens=6
    )
    data, whole = asked(home, str(done))
    cut = distill_tags.asked([short], data.tags, data.named())
    assert all(each.known_W.all() for each in whole["train"])
    assert all(not each.known_W.all() and each.known_W[0] for each in cut["train"])


def test_a_student_of_its_teachers_first_layer_ships_as_a_stock_model(home: Path, done: Path, tmp_path: Path) -> None:
    section = {"student": {"layers": "first-1"}}
    values = distilled(home, str(done), distill=section, model={"id": "teacher", "weights": "float32"})
    path = train({**values, "train": {"epochs": 2, "learning_rate": 1e-2}}, tmp_path / "run")
    assert json.loads((path / "student" / "config.json").read_text())["num_hidden_layers"] == 1
    assert read_scores(path)["after"]["loss"] < read_scores(path)["before"]["loss"]
    assert evaluate(path, []) == pytest.approx(read_scores(path)["after"])


@pytest.mark.parametrize(
    ("teacher", "section", "sentence"),
    [
        ("backbone", {}, "need the same tags, and B-LOC, .* LABEL_0"),
        ("masked", {}, "has no head that tags tokens. Write a run of recipe tag"),
        (None, {"match": [{"what": "hidden_mse"}]}, "leave distill.match"),
        (None, {"loss": "universal"}, "asks the teacher once"),
        ("other", {}, "need the same tags, and B-LOC, B-ORG, I-LOC, I-ORG are known to one"),
    ],
)
def test_what_cannot_teach_is_told(
    home: Path, done: Path, tmp_path: Path, teacher: str | None, section: dict[str, Any], sentence: str
) -> None:
    if teacher == "masked":
        teacher = save_tiny(tmp_path / "masked", "Bert", "MaskedLM", MINILM)
    if teacher == "other":
        (tmp_path / "other.conll").write_text(sentences(32).replace("LOC", "ORG"))
        data = {"train": str(tmp_path / "other.conll"), "held_out": 0.2}
        teacher = str(train(sections(home, data=data, train={"steps": 1}), tmp_path / "other"))
    with pytest.raises((ConfigError, ValueError), match=sentence):
        check(RunConfig.model_validate(distilled(home, teacher or str(done), distill=section)))
