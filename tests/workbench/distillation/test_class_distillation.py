"""A teacher of classes is asked once, in its own tokens, classes and units, and never of rows that would flatter it.

What a student of classes learns from outputs: the loss written out, and which rows are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.conftest import MINILM, save_tiny
from tests.run_files import read_losses, write_lines
from workbench.config import RunConfig
from workbench.config.expansions import distill_expansion
from workbench.config.sections.classes_config import ClassesConfig, Kind
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.folds.duplicates import normalised
from workbench.data.labelled import labelled_data as rows_of
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.data.labelled.labels import Floats
from workbench.data.labelled.record_table import EncodedTexts, FieldTokens, LabelledRecord
from workbench.data.labelled.text_reader import TokenRows
from workbench.data.rows import RawRow
from workbench.distillation import class_distillation, teacher_sources
from workbench.distillation.class_distillation import TeacherOutputs, examples, soft_criterion, with_teacher
from workbench.errors import ConfigError, DataError, Stopped
from workbench.evaluation import classification_scores
from workbench.losses.class_losses import Objective, criterion
from workbench.models import classifier
from workbench.recipes.over import crossval_labelled, crossval_verbs, distill_classes
from workbench.recipes.tasks.classify import class_run
from workbench.runs import files, run_directory, score_files

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
WORDS = {"sun": "the sun is warm and bright", "rain": "cold rain fell on the roof", "snow": "white snow lay all around"}
NAMES = ("rain", "snow", "sun")


class Quiet:
    """A callback that says nothing and may ask to stop."""

    def __init__(self, *, stop: bool = False) -> None:
        self.stop = stop

    def step(self, record: dict[str, Any], *, total: int) -> None: ...

    def say(self, text: str) -> None: ...

    def stop_requested(self) -> bool:
        return self.stop


def weather(rows: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Sentences of unequal length whose words say their class."""
    found = []
    for number in range(first, first + rows):
        label = list(WORDS)[number % 3]
        text = f"Day {number}: {WORDS[label]}" + ", said the fox" * (number % 4) + "."
        found.append({"text": text, "label": label, "degrees": [25, 10, -5][number % 3] + number % 7})
    return found


@pytest.fixture(scope="module", autouse=True)
def unreported() -> Iterator[None]:
    """Drawing a report takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.report.write", lambda _: None)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of this file stand, beside their rows."""
    folder = tmp_path_factory.mktemp("classes")
    write_lines(folder / "train.jsonl", weather(30))
    write_lines(folder / "held-out.jsonl", weather(9, first=30))
    write_lines(folder / "test.jsonl", weather(6, first=39))
    return folder


@pytest.fixture(scope="module")
def bert(home: Path) -> str:
    """A tiny BERT with a head for these classes."""
    return save_bert(home / "bert", NAMES)


def save_bert(folder: Path, names: tuple[str, ...], **settings: Any) -> str:
    labels = {"num_labels": len(names), "id2label": dict(enumerate(names))}
    return save_tiny(folder, "Bert", "SequenceClassification", MINILM, **labels, **settings)


@pytest.fixture(scope="module")
def sections(home: Path, bert: str) -> Callable[..., dict[str, Any]]:
    """A short run's configuration, its sections changed one by one."""

    def make(**changed: dict[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {
            "model": {"id": bert, "weights": "float32"},
            "adapter": {"method": "lora", "rank": 4},
            "data": {"train": str(home / "train.jsonl"), "held_out": str(home / "held-out.jsonl")},
            "batch": {"size": 10, "tokens_per_device": 100000},
            "train": {"steps": 2, "learning_rate": 1e-2},
            "evaluate": {"every": None},
            "save": {"every": None},
        }
        return own | {name: {**own.get(name, {}), **section} for name, section in changed.items()}

    return make


@pytest.fixture(scope="module")
def train(home: Path, sections: Callable[..., dict[str, Any]]) -> Train:
    """Trains by recipe classify or crossval."""

    def run(name: str, recipe: str = "classify", **changed: Any) -> Path:
        config = RunConfig.model_validate({"recipe": recipe, **sections(**changed)})
        started = run_directory.start(home / name, config, resume=False)
        if recipe == "classify":
            class_run.main(config, started, Quiet())
        else:
            crossval_labelled.main(config, started, Quiet())
        started.close()
        return started.path

    return run


@pytest.fixture(scope="module")
def distil(home: Path, sections: Callable[..., dict[str, Any]]) -> Train:
    def run(
        name: str, teacher: Any, *, resume: bool = False, stop: bool = False, distill: Any = (), **changed: Any
    ) -> Path:
        config = asked_config(sections(**changed), teacher, **dict(distill))
        base = distill_expansion.student_config(config, home / name)
        source = teacher_sources.find(config.distill.teacher, config.model)
        started = run_directory.start(home / name, config, resume=resume)
        try:
            distill_classes.teach(config, base, source, started, Quiet(stop=stop))
        finally:
            started.close()
        return started.path

    return run


def asked_config(own: dict[str, Any], teacher: Any, *, out_of_fold: bool = False, **distill: Any) -> RunConfig:
    ids = [str(each) for each in teacher] if isinstance(teacher, list) else str(teacher)
    section = {"teacher": {"id": ids, "weights": "float32", "out_of_fold": out_of_fold}, **distill}
    return RunConfig.model_validate({"recipe": "distill", "of": "classify", **own, "distill": section})


@pytest.fixture
def ask(tmp_path: Path, sections: Callable[..., dict[str, Any]]) -> Callable[..., tuple[TeacherOutputs, Any]]:
    """What a teacher says, and of which rows, without any training."""

    def said(teacher: Any, *, distill: Any = (), **changed: Any) -> tuple[TeacherOutputs, Any]:
        config = asked_config(sections(**changed), teacher, **dict(distill))
        base = distill_expansion.as_plain_run(config)
        reader = classifier.reader_of_backbone(base)
        data = rows_of.load(base, reader)
        source = teacher_sources.find(config.distill.teacher, config.model)
        extra = distill_classes.prepare(config, base, source, data, reader)
        run = run_directory.start(tmp_path / "run", config, resume=(tmp_path / "run").exists())
        try:
            return class_distillation.teacher_outputs(config, source, data, extra, run, Quiet()), data
        finally:
            run.close()

    return said


@pytest.fixture(scope="module")
def taught(train: Train, short_stories: str) -> Path:
    """A finished run over another backbone, with other tokens and another template. Read only."""
    own = {"classes": {"text": "Weather: {text}"}, "data": {"max_tokens": 24}}
    return train("taught", model={"id": short_stories}, **own)


@pytest.fixture(scope="module")
def folds(train: Train) -> Path:
    """A finished cross-validation. Read only."""
    own = {"folds": {"k": 2, "repeats": 2}, "data": {"held_out": 0.05}, "train": {"steps": 4}}
    return train("folds", "crossval", **own)


def own_outputs(run: Path, rows: str) -> Floats:
    """What the model of a run says of the rows of its own splits."""
    config = run_directory.shipped_config(run)
    model = classifier.load(run, config)
    found: LabelledSet = getattr(rows_of.load(config, model.reader), rows)
    return classification_scores.predict_outputs(model.model, model.outputs, found)


@pytest.mark.slow
def test_alpha_0_trains_as_recipe_classify_does(train: Train, distil: Train, taught: Path) -> None:
    own = {"classes": {"weights": "balanced", "smoothing": 0.1}, "train": {"steps": 4}}
    plain = train("plain", **own)
    assert read_losses(distil("alone", taught, distill={"alpha": 0.0}, **own)) == read_losses(plain)
    scores = files.read_json(plain.parent / "alone" / "scores.json")
    assert scores["after"] == files.read_json(plain / "scores.json")["after"]
    assert read_losses(distil("both", taught, distill={"alpha": 0.5}, **own)) != read_losses(plain)


def test_scores_hold_the_teachers_own(distil: Train, taught: Path, home: Path) -> None:
    run = distil("scored", taught, data={"test": str(home / "test.jsonl")})
    scores = files.read_json(run / "scores.json")
    assert scores["teacher"] == files.read_json(taught / "scores.json")["after"]
    assert {"before", "after", "test", "teacher_test"} <= scores.keys()
    facts = files.read_json(run / "manifest.json")["distill"]
    assert facts["teacher"] == str(taught) and facts["rows"] == {"train": 30, "held_out": 9, "test": 6}
    assert facts["teacher_loss"] == pytest.approx(scores["teacher"]["loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["taught", "folds"])
def test_held_out_rows_that_the_teacher_was_trained_on_are_told(
    distil: Train, taught: Path, folds: Path, home: Path, name: str
) -> None:
    swapped = {"train": str(home / "held-out.jsonl"), "held_out": str(home / "train.jsonl")}
    for own, data in (("as-it-was", {}), ("swapped", swapped)):
        run = distil(f"{name}-{own}", taught if name == "taught" else folds, data=data, train={"steps": 1})
        noted = files.read_json(run / "manifest.json")["distill"].get("trained_on")
        assert noted == ({"rows": 30, "of": 30} if data else None)


@pytest.mark.slow
def test_a_student_distilled_from_itself_has_nothing_to_learn(distil: Train, bert: str, train: Train) -> None:
    own = {"alpha": 1.0, "temperature": 2.0, "match": [{"what": "hidden_mse"}]}
    assert read_losses(distil("itself", bert, distill=own))[0] == pytest.approx(0, abs=1e-6)
    other = train("other", train={"steps": 6})
    both = read_losses(distil("matched", other, distill=own))[0]
    said = read_losses(distil("unmatched", other, distill={**own, "match": []}))[0]
    assert both > said > 1e-5


def test_a_run_reads_rows_in_its_own_tokens_and_template(ask: Any, taught: Path) -> None:
    said, _ = ask(taught)
    np.testing.assert_allclose(said.train_NC, own_outputs(taught, "train"), atol=1e-5)
    np.testing.assert_allclose(said.held_out_NC, own_outputs(taught, "held_out"), atol=1e-5)
    assert said.extra_NC is None and said.test_NC is None


@pytest.mark.nightly
def test_several_runs_say_the_mean_of_their_probabilities(ask: Any, train: Train) -> None:
    teachers = [train(f"one-of-{steps}", train={"steps": steps}) for steps in (3, 6)]
    said, _ = ask(teachers)
    mean = np.mean([special.softmax(own_outputs(run, "train"), axis=1) for run in teachers], axis=0)
    np.testing.assert_allclose(special.softmax(said.train_NC, axis=1), mean, atol=1e-6)


def test_classes_in_another_order_are_put_in_order(ask: Any, home: Path, tmp_path: Path) -> None:
    names = ("sun", "rain", "snow")
    folder = save_bert(tmp_path / "mixed", names)
    said, data = ask(folder)
    stock, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(MINILM)
    for row, found_C in zip(data.train.records[:4], said.train_NC, strict=False):
        with torch.no_grad():
            logits = stock(**tokenizer(row.fields[0], return_tensors="pt")).logits[0]
        wanted = dict(zip(names, logits.tolist(), strict=True))
        assert found_C.tolist() == pytest.approx([wanted[name] for name in data.labels.names], abs=1e-5)
    assert data.labels.names == NAMES


def test_numbers_are_said_in_the_students_units(ask: Any, train: Train, home: Path, tmp_path: Path) -> None:
    number = {"classes": {"kind": "number"}}
    columns = {"columns": {"label": "degrees"}}
    teacher = train("degrees", **number, data=columns)
    hot = write_lines(tmp_path / "hot.jsonl", [{**row, "label": row["degrees"] * 3.0 + 40} for row in weather(30)])
    said, data = ask(teacher, **number, data={"train": str(hot), "held_out": 0.2})
    labels = classifier.read_labels(teacher / "adapter")
    by_text = dict(zip([row["text"] for row in weather(30)], labels.values(own_outputs(teacher, "train")), strict=True))
    wanted = np.stack([by_text[record.fields[0]] for record in data.train.records])
    np.testing.assert_allclose(data.labels.values(said.train_NC), wanted, atol=1e-4)


@pytest.mark.slow
def test_out_of_fold_rows_are_said_by_those_who_did_not_see_them(ask: Any, folds: Path, home: Path) -> None:
    own = {"distill": {"out_of_fold": True}, "data": {"held_out": 0.2, "test": str(home / "test.jsonl")}}
    said, data = ask(folds, **own)
    known = pd.read_parquet(folds / "out_of_fold.parquet")
    assert len(known) == 60, "each of two repeats says something of all rows"
    means = known.groupby("text")[[f"p_{name}" for name in NAMES]].mean()
    for rows, outputs_NC in ((data.train, said.train_NC), (data.held_out, said.held_out_NC)):
        wanted = means.loc[[record.fields[0] for record in rows.records]].to_numpy()
        np.testing.assert_allclose(special.softmax(outputs_NC, axis=1), wanted, atol=1e-9)
    shown = crossval_verbs.predict(folds, str(home / "test.jsonl"), run_directory.shipped_config(folds)).table
    whole = shown[[f"p_{name}" for name in NAMES]].to_numpy()
    np.testing.assert_allclose(special.softmax(said.test_NC, axis=1), whole, atol=1e-6)


@pytest.mark.nightly
def test_a_cross_validation_corrects_by_neighbours_what_it_says(ask: Any, train: Train, home: Path) -> None:
    own: dict[str, Any] = {
        "folds": {"k": 2},
        "data": {"held_out": 0.05},
        "correction": {"neighbours": 3, "strength": 0.5},
    }
    own |= {"ensemble": {"calibrate": False}, "train": {"steps": 6}}
    near = train("near", "crossval", **own)
    said, _ = ask(near, data={"held_out": 0.2, "test": str(home / "test.jsonl")})
    config = run_directory.shipped_config(near)
    shown = crossval_verbs.predict(near, str(home / "test.jsonl"), config).table
    np.testing.assert_allclose(
        special.softmax(said.test_NC, axis=1), shown[[f"p_{name}" for name in NAMES]].to_numpy(), atol=1e-6
    )
    decision = files.read_json(near / "decision.json")
    files.write_json(near / "decision.json", {**decision, "correction": None})
    plain = crossval_verbs.predict(near, str(home / "test.jsonl"), config).table
    assert (shown["p_sun"] - plain["p_sun"]).abs().max() > 1e-4
    files.write_json(near / "decision.json", decision)


def test_without_out_of_fold_the_whole_ensemble_speaks(ask: Any, folds: Path, home: Path) -> None:
    said, data = ask(folds)
    shown = crossval_verbs.predict(folds, str(home / "train.jsonl"), run_directory.shipped_config(folds)).table
    wanted = shown.set_index("text").loc[[record.fields[0] for record in data.train.records]]
    found = special.softmax(said.train_NC, axis=1)
    np.testing.assert_allclose(found, wanted[[f"p_{name}" for name in NAMES]].to_numpy(), atol=1e-6)


@pytest.mark.slow
def test_rows_without_labels_take_part_and_their_labels_never(distil: Train, taught: Path, home: Path) -> None:
    held_out = [{**row, "text": row["text"].upper() + "!"} for row in weather(9, first=30)][:4]
    found = {}
    for label in ("sun", "nonsense"):
        more = write_lines(
            home / f"more-{label}.jsonl", [{**row, "label": label} for row in (*weather(12, first=60), *held_out)]
        )
        own = {"alpha": 0.5, "unlabelled": str(more)}
        found[label] = distil(f"more-{label}", taught, distill=own, train={"steps": None, "epochs": 1.0})
    assert read_losses(found["sun"]) == read_losses(found["nonsense"]) and len(read_losses(found["sun"])) == 5, (
        "30 and 12 rows by 10"
    )
    manifest = files.read_json(found["sun"] / "manifest.json")
    assert manifest["distill"]["rows"]["extra"] == manifest["data"]["unlabelled"]["rows"] == 12
    assert manifest["data"]["unlabelled"]["skipped"] == 1, "one sentence says how many"
    measured = write_lines(home / "measured.jsonl", held_out)
    with pytest.raises(DataError, match=r"every row of .*measured.jsonl is also held out"):
        distil("nothing-new", taught, distill={"unlabelled": str(measured)})


def test_a_run_that_goes_on_reads_what_it_kept(distil: Train, taught: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"train": {"steps": 3}}
    unbroken = distil("unbroken", taught, **own)
    with pytest.raises(Stopped):
        distil("broken", taught, stop=True, **own)
    with monkeypatch.context() as patch:
        patch.setattr("workbench.distillation.class_distillation.outputs_of", lambda *_: pytest.fail("asked again"))
        resumed = distil("broken", taught, resume=True, **own)
    assert read_losses(resumed) == read_losses(unbroken)
    scores = [score_files.of_rows(files.read_json(each / "scores.json")) for each in (resumed, unbroken)]
    assert scores[0] == scores[1]
    kept = [(run / class_distillation.KEPT).read_bytes() for run in (resumed, unbroken)]
    assert kept[0] == kept[1]


def test_what_was_kept_of_other_rows_is_not_read(ask: Any, taught: Path, home: Path) -> None:
    first, _ = ask(taught)
    again, _ = ask(taught)
    np.testing.assert_array_equal(first.train_NC, again.train_NC)
    path = home / "train.jsonl"
    before = path.read_text()
    write_lines(path, [{**row, "text": "Truly. " + row["text"]} for row in weather(30)])
    try:
        moved, _ = ask(taught)
    finally:
        path.write_text(before)
    assert np.abs(moved.train_NC - first.train_NC).max() > 1e-4


def test_teachers_that_cannot_teach_these_classes_are_refused(
    ask: Any, taught: Path, bert: str, short_stories: str, home: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"backbone whose head starts at random.*Write a run"):
        ask("backbone")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no classification head for these classes"):
        ask(short_stories)
    others = save_bert(tmp_path / "others", ("rain", "snow", "fog", "hail"))
    with pytest.raises(ConfigError, match=r"nothing of `sun`, and no training row has `fog`, `hail`.*name them alike"):
        ask(others)
    with pytest.raises(ConfigError, match=r"kind one, the student's of kind number.*classes.kind=one"):
        ask(taught, classes={"kind": "number"}, data={"columns": {"label": "degrees"}})
    with pytest.raises(ConfigError, match=r"out_of_fold: .* is no cross-validation"):
        ask(taught, distill={"out_of_fold": True})
    renamed = write_lines(
        tmp_path / "renamed.jsonl", [{"body": row["text"], "label": row["label"]} for row in weather(30)]
    )
    with pytest.raises(ConfigError, match=r"reads the column `text`, which .*renamed.jsonl has not"):
        ask(taught, classes={"text": "{body}"}, data={"train": str(renamed), "held_out": 0.2})
    with pytest.raises(ConfigError, match=r"has other tokens than"):
        ask(taught, distill={"match": [{"what": "hidden_mse"}]})


def test_out_of_fold_wants_the_rows_of_the_cross_validation(ask: Any, folds: Path, tmp_path: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", [*weather(40, first=100), *weather(10)])
    with pytest.raises(ConfigError, match=r"(?s)only 10 of the 50 training rows of .*other.jsonl stand in .*parquet.*"):
        ask(folds, distill={"out_of_fold": True}, data={"train": str(other)})
    ask(folds, distill={"out_of_fold": True, "alpha": 0}, data={"train": str(other)})  # who asks nobody needs no rows
    with pytest.raises(ConfigError, match=r"compares the layers of one model, and .*folds is several"):
        ask(folds, distill={"match": [{"what": "hidden_mse"}]})


def test_texts_are_matched_but_for_case(ask: Any, folds: Path, tmp_path: Path) -> None:
    loud = write_lines(tmp_path / "loud.jsonl", [{**row, "text": row["text"].upper()} for row in weather(30)])
    said, data = ask(folds, distill={"out_of_fold": True}, data={"train": str(loud)})
    known = pd.read_parquet(folds / "out_of_fold.parquet")
    texts = known["text"].map(normalised)
    first = known[texts == normalised(data.train.records[0].fields[0])]
    wanted_C = first[[f"p_{name}" for name in NAMES]].mean().to_numpy()
    np.testing.assert_allclose(
        classification_scores.outputs_of_values(data.labels, wanted_C), said.train_NC[0], atol=1e-9
    )


B, C, SCALE = 6, 3, 1 / 6
CHANCE = torch.Generator().manual_seed(0)
STUDENT, TEACHER = torch.randn(B, C, generator=CHANCE), 2 * torch.randn(B, C, generator=CHANCE)
HOT = F.one_hot(torch.tensor([0, 1, 2, 2, 0, 2]), C).float()
SOME = torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 1]])
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 3.0])
ONES = torch.ones(B)
DIVERGENCES = ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation"]


def hard(kind: Kind = "one", targets: Tensor = HOT, **settings: Any) -> Objective:
    return criterion(ClassesConfig.model_validate({"kind": kind, **settings}), targets)


def loss(
    kind: Kind = "one",
    *,
    targets: Tensor = HOT,
    student: Tensor = STUDENT,
    teacher: Tensor = TEACHER,
    weights: Tensor = WEIGHTS,
    labelled: Tensor = ONES,
    progress: float = 0.0,
    **settings: Any,
) -> Tensor:
    config = DistillConfig.model_validate({"teacher": {"id": "x"}, **settings})
    objective = soft_criterion(hard(kind, targets), kind, config, classes=targets.shape[1], progress=lambda: progress)
    return objective(student, torch.cat([weights[:, None], targets, teacher, labelled[:, None]], dim=1), SCALE)


def test_labels_alone_are_the_plain_loss_to_the_last_bit() -> None:
    plain = hard()(STUDENT, torch.cat([WEIGHTS[:, None], HOT], dim=1), SCALE)
    assert torch.equal(loss(alpha=0.0), plain)


@pytest.mark.parametrize("kind", ["one", "pair"])
def test_one_class_is_the_kl_of_softened_distributions_times_the_square(kind: Kind) -> None:
    p, q = (TEACHER / 3).softmax(1), (STUDENT / 3).softmax(1)
    wanted = 9 * ((p * (p / q).log()).sum(1) * WEIGHTS).sum() * SCALE
    torch.testing.assert_close(loss(kind, alpha=1.0, temperature=3.0), wanted)
    plain = hard()(STUDENT, torch.cat([WEIGHTS[:, None], HOT], dim=1), SCALE)
    torch.testing.assert_close(loss(kind, alpha=0.3, temperature=3.0), 0.7 * plain + 0.3 * wanted)


def test_several_classes_are_questions_of_their_own() -> None:
    p, q = (TEACHER / 2).sigmoid(), (STUDENT / 2).sigmoid()
    each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    wanted = 4 * (each.sum(1) * WEIGHTS).sum() * SCALE
    torch.testing.assert_close(loss("several", targets=SOME, alpha=1.0, temperature=2.0), wanted)


def test_numbers_know_no_temperature() -> None:
    one: dict[str, Any] = {"targets": HOT[:, :1], "student": STUDENT[:, :1], "teacher": TEACHER[:, :1]}
    wanted = ((STUDENT[:, 0] - TEACHER[:, 0]) ** 2 * WEIGHTS).sum() * SCALE
    torch.testing.assert_close(loss("number", **one, alpha=1.0, temperature=5.0), wanted)


@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_weight_counts_like_repeated_rows_and_parts_add_up(name: str, kind: Kind) -> None:
    repeats = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 5, 5])
    student = STUDENT.clone().requires_grad_()
    whole = loss(kind, student=student, weights=torch.tensor([1.0, 2, 3, 1, 1, 2]), loss=name)
    parts = [
        loss(
            kind,
            student=student[rows],
            teacher=TEACHER[rows],
            targets=HOT[rows],
            weights=torch.ones(len(rows)),
            labelled=torch.ones(len(rows)),
            loss=name,
        )
        for rows in (repeats[:4], repeats[4:])
    ]
    total = torch.stack(parts).sum()
    torch.testing.assert_close(whole, total)
    grads = [torch.autograd.grad(each, student)[0] for each in (whole, total)]
    assert grads[0].abs().sum() > 0
    torch.testing.assert_close(*grads)
    same = loss(kind, teacher=STUDENT, loss=name, alpha=1.0)
    torch.testing.assert_close(same, torch.zeros(()), atol=1e-6, rtol=0)


def test_rows_without_labels_are_taught_by_the_teacher_alone() -> None:
    some = torch.tensor([1.0, 0, 1, 0, 0, 1])
    kept = some.bool()
    apart = loss(alpha=1.0) + loss(alpha=0.0, weights=WEIGHTS * some)
    torch.testing.assert_close(2 * loss(alpha=0.5, labelled=some), apart)
    other = torch.where(kept[:, None], HOT, 1 - HOT)
    assert torch.equal(loss(labelled=some, targets=other), loss(labelled=some)), "their targets are not looked at"


def test_settings_follow_the_run() -> None:
    moving: dict[str, Any] = {"alpha": (1.0, 0.0), "temperature": (4.0, 2.0)}
    assert torch.equal(loss(**moving, progress=0.0), loss(alpha=1.0, temperature=4.0))
    assert torch.equal(loss(**moving, progress=0.5), loss(alpha=0.5, temperature=3.0))
    assert torch.equal(loss(**moving, progress=1.0), loss(alpha=0.0))


def rows(classes: list[int], *, name: str = "rows") -> LabelledSet:
    return LabelledSet(
        records=tuple(LabelledRecord(RawRow(f"{name} {n}"), ("",), None) for n in range(len(classes))),
        inputs=TokenRows(EncodedTexts.of(FieldTokens(np.arange(2, 5 + n % 4), False) for n in range(len(classes)))),
        targets_NC=np.asarray([[float(each == c) for c in range(C)] for each in classes], dtype=np.float32),
        supervised=np.ones(len(classes)),
        source=name,
        fingerprint="",
    )


def config(**classes: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "classify", "data": {"train": "x"}, "classes": classes})


NONE = -1


@pytest.mark.parametrize("sampling", ["none", "over", "under"])
def test_further_rows_are_drawn_once_beside_balanced_ones(sampling: str) -> None:
    train, extra = rows([0] * 7 + [1] * 2 + [2] * 4), rows([NONE] * 5, name="extra")
    both = [with_teacher(each, np.zeros((len(each), C)), labelled=True) for each in (train, extra)]
    drawn = examples(config(sampling=sampling), both[0], both[1])
    each = {"none": None, "over": 7, "under": 2}[sampling]
    assert len(drawn) == (13 if each is None else 3 * each) + 5
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(drawn))
        taken = drawn.sample(order, epoch=epoch)
        assert sorted(taken[taken >= 13]) == [13, 14, 15, 16, 17]
        assert [drawn.place(row) for row in (12, 13)] == ["rows 12", "extra 0"]
        counts = [int(train.targets_NC[taken[taken < 13]][:, c].sum()) for c in range(C)]
        assert counts == ([7, 2, 4] if each is None else [each] * 3)
    assert drawn.lengths[17] == 3 and len(drawn.supervised) == 18


def test_class_weights_leave_further_rows_their_weight() -> None:
    train, extra = rows([0] * 6 + [1] * 2 + [2] * 4), rows([NONE] * 3)
    both = [with_teacher(each, np.zeros((len(each), C)), labelled=True) for each in (train, extra)]
    drawn = examples(config(weights="balanced"), both[0], both[1])
    np.testing.assert_allclose(drawn.supervised[[0, 6, 8, 12]], [4 / 6, 4 / 2, 4 / 4, 1], rtol=1e-6)


def test_a_batch_carries_what_was_said_of_its_rows() -> None:
    said = np.arange(12.0).reshape(4, C)
    train = with_teacher(rows([0, 1, 2, 0]), said, labelled=True)
    joined = train.subset(np.asarray([3, 1])).concatenated(with_teacher(rows([NONE]), -said[:1], labelled=False))
    found = joined.batch(np.asarray([2, 0])).labels_N
    wanted = [[1, 0, 0, 0, -0.0, -1, -2, 0], [1, 1, 0, 0, 9, 10, 11, 1]]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32))
    assert rows([0]).batch(np.asarray([0])).labels_N.shape == (1, 1 + C)
