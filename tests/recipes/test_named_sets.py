"""Test and held-out rows in several named files: each has the scores that it has alone, in every recipe that scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.drawings import draw
from tests.recipes.tasks.classify.test_class_run import weather
from tests.recipes.tasks.embed.test_embed_run import classes, pairs, scored
from tests.recipes.tasks.prefer.test_preference_run import pair, single
from tests.run_files import read_lines, read_metrics, read_scores, write_lines
from tests.stopping import stop_after
from workbench.data.named_sets import WITHOUT
from workbench.errors import DataError, Stopped
from workbench.recipes.load import load
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.report import compare

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
FAST = ["model.weights=float32", "model.compute=float32", "train.epochs=null", "train.steps=2", "evaluate.every=2"]
FAST += ["save.every=null", "batch.size=8", "adapter={method: lora, rank: 2}"]

ANSWERED = ("f1", "f1_low", "f1_high", "rouge_l", "rouge_l_low", "rouge_l_high")
ON_POLICY = "teacher: {id: backbone}, on_policy: {share: 0.5, max_new_tokens: 4}"


def of(scores: dict[str, float], name: str) -> dict[str, float]:
    """The scores of a set by the names that they have alone."""
    end = f"[{name}]"
    return {score.removesuffix(end): value for score, value in scores.items() if score.endswith(end)}


def assert_each_scores_as_alone(
    run: Path, files: dict[str, Path], *, ignore: tuple[str, ...] = (), trust: bool = False
) -> None:
    """The law, of scores.json and of `evaluate`; and that the whole is that of one file with all rows."""
    named = "{" + ", ".join(f"{name}: {path}" for name, path in files.items()) + "}"
    test, together = read_scores(run)["test"], evaluate(run, [f"data.test={named}"], trust=trust)
    assert together == pytest.approx(test, abs=2e-5)
    for name, path in files.items():
        alone = evaluate(run, [f"data.test={path}"], trust=trust)
        assert len(alone) > 2 and not any(score.endswith(f"[{name}]") for score in alone)
        alone = {score: value for score, value in alone.items() if WITHOUT not in score}  # of the whole alone
        own = of(test, name)
        assert own.keys() == alone.keys(), "every score that it has alone"
        assert own == pytest.approx(alone, abs=2e-5)
    if all(path.is_file() for path in files.values()):
        every = write_lines(run.parent / "every.jsonl", (row for path in files.values() for row in read_lines(path)))
        whole = evaluate(run, [f"data.test={every}"], trust=trust)
        assert {score: test[score] for score in whole if score not in ignore} == pytest.approx(
            {score: value for score, value in whole.items() if score not in ignore}, abs=2e-5
        )


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "SequenceClassification", MINILM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of every kind: `KIND.jsonl` to train on, and two unlike parts of others of its kind."""
    found = tmp_path_factory.mktemp("sets")
    makers: dict[str, Callable[[int], list[Any]]] = {
        "weather": weather,
        "pairs": pairs,
        "scored": scored,
        "classes": classes,
        "judged": lambda count: [pair(n) for n in range(count)],
        "single": lambda count: [single(n) for n in range(count)],
        "asked": lambda count: [{"question": f"What is {n}?", "answer": f"It is {n * n}."} for n in range(count)],
    }
    for kind, make in makers.items():
        rows = make(48)
        write_lines(found / f"{kind}.jsonl", rows[:24])
        write_lines(found / f"{kind}_a.jsonl", rows[24:29])
        write_lines(found / f"{kind}_b.jsonl", rows[29:])
    return found


def words(folder: Path, kind: str, *keys: str) -> list[str]:
    """The training rows, and for each of `keys` the two named files."""
    named = f"{{a: {folder}/{kind}_a.jsonl, b: {folder}/{kind}_b.jsonl}}"
    return [f"data.train={folder}/{kind}.jsonl", *(f"{key}={named}" for key in keys), *FAST]


def both(folder: Path, kind: str) -> dict[str, Path]:
    return {name: folder / f"{kind}_{name}.jsonl" for name in "ab"}


CASES = {
    "classify": ("classify/quickstart", "weather", []),
    "embed, pairs": ("embed/quickstart", "pairs", ["embed.sizes=[8]"]),
    "embed, scored": ("embed/quickstart", "scored", ["embed.sizes=[8]"]),
    "embed, classes": ("embed/quickstart", "classes", []),
}


@pytest.mark.nightly(but=["classify", "embed, pairs"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_of_several_sets_has_the_scores_that_it_has_alone(
    case: tuple[str, str, list[str]], folder: Path, bert: str, tmp_path: Path
) -> None:
    recipe, kind, more = case
    held = "data.held_out=0.2" if kind == "weather" else f"data.held_out={folder}/{kind}_a.jsonl"
    known = [*words(folder, kind, "data.test"), held, f"model.id={bert}", *more]
    run = workbench.run(recipe, known, out=tmp_path / "run", quiet=True)
    assert_each_scores_as_alone(run, both(folder, kind))


@pytest.mark.nightly(but=["prefer-judged"])
@pytest.mark.parametrize(("recipe", "kind"), [("prefer", "judged"), ("prefer", "single"), ("reward", "judged")])
def test_each_set_of_judged_answers_has_the_scores_that_it_has_alone(
    recipe: str, kind: str, folder: Path, short_stories: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    own = {"prefer": "prefer: {beta: 0.3}", "reward": "reward: {centre: 0.01}"}[recipe]
    own = "prefer: {loss: kto}" if kind == "single" else own
    path.write_text(f"recipe: {recipe}\nmodel: {{id: x}}\ndata: {{train: x, max_tokens: 96}}\n{own}\n")
    known = [*words(folder, kind, "data.test"), f"data.held_out={folder}/{kind}_a.jsonl"]
    known += [f"model.id={short_stories}"]
    known += ["evaluate.answers=3", "evaluate.max_new_tokens=4"] if recipe == "prefer" else []
    run = workbench.run(path, known, out=tmp_path / "run", quiet=True)
    # As many answers of each set are written, so that the whole has more of them.
    written = (*ANSWERED, "answer_tokens", "repetition")
    # Answers to other prompts are of the same set, and so others than in one file.
    drawn = () if kind == "judged" else ("loss", "accuracy", "accuracy_low", "accuracy_high")
    assert_each_scores_as_alone(run, both(folder, kind), ignore=(*written, *drawn))


def test_each_set_of_prompts_has_its_own_answers(folder: Path, short_stories: str, tmp_path: Path) -> None:
    known = [*words(folder, "asked", "data.test"), f"model.id={short_stories}", "evaluate.answers=3"]
    known += ["evaluate.max_new_tokens=4", "data.held_out=0.2"]
    run = workbench.run("sft/quickstart", known, out=tmp_path / "run", quiet=True)
    assert {"token_accuracy[a]", "perplexity[a]", "f1[a]", "rouge_l[b]"} <= read_scores(run)["test"].keys()
    assert_each_scores_as_alone(run, both(folder, "asked"), ignore=ANSWERED)


def test_sets_of_pictures_have_scores_of_their_own(vit: str, tmp_path: Path) -> None:
    files = {name: draw(tmp_path / name, 9, seed=seed) for seed, name in enumerate("ab")}
    draw(tmp_path / "train", 18, seed=5)
    named = "{" + ", ".join(f"{name}: {path}" for name, path in files.items()) + "}"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: classify\nmodel: {{id: {vit}}}\ndata: {{format: image, train: {tmp_path}/train}}\n")
    known = [f"data.test={named}", f"data.held_out={named}", *FAST]
    run = workbench.run(path, known, out=tmp_path / "run", quiet=True)
    assert_each_scores_as_alone(run, files)
    after = read_scores(run)["after"]
    assert after == read_scores(run)["test"], "the same rows"
    assert {"held_out_loss[a]", "held_out_loss[b]"} <= read_metrics(run)[-1].keys()


@pytest.fixture(scope="module")
def crossed(folder: Path, bert: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cross-validation with two test sets. Read only."""
    known = [*words(folder, "weather", "data.test"), f"model.id={bert}", "folds.k=2", "folds.refit=true"]
    known += ["data.overlap=drop", "duplicates.on_duplicate=ignore", "evaluate.every=null"]
    return workbench.run("crossval/quickstart", known, out=tmp_path_factory.mktemp("crossed") / "run", quiet=True)


@pytest.mark.nightly
def test_an_ensemble_is_scored_on_each_test_set(crossed: Path, folder: Path) -> None:
    assert_each_scores_as_alone(crossed, both(folder, "weather"))
    found = read_scores(crossed)
    assert of(found["refit"], "a").keys() == of(found["test"], "a").keys()
    stage = json.loads((crossed / "stages.json").read_text())["stages"][-1]
    assert of(stage["test"], "b") == of(found["test"], "b")
    page = (crossed / "report.html").read_text()
    assert "on 24 test rows (a " in page and "Accuracy, b" in page


def test_held_out_sets_are_followed_through_a_run_and_a_stop(
    folder: Path, bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [
        *words(folder, "weather", "data.held_out"),
        f"model.id={bert}",
        "train.steps=4",
        "classes.every_class=false",
    ]
    whole = workbench.run("classify/quickstart", known, out=tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            workbench.run("classify/quickstart", known, out=tmp_path / "broken", quiet=True)
    broken = workbench.run("classify/quickstart", known, out=tmp_path / "broken", resume=True, quiet=True)
    small = [*known, "batch.tokens_per_device=40"]
    parts = workbench.run("classify/quickstart", small, out=tmp_path / "small", quiet=True)
    keys = ("loss", "held_out_loss", "held_out_loss[a]", "held_out_loss[b]")
    curve = [[line.get(key) for key in keys] for line in read_metrics(whole)]
    assert [[line.get(key) for key in keys] for line in read_metrics(broken)] == curve
    assert read_scores(broken) == read_scores(whole)
    assert read_scores(parts)["after"] == pytest.approx(read_scores(whole)["after"], abs=1e-4)
    evaluated = [row for row in curve if row[1] is not None]
    assert len(evaluated) == 2
    for _, mean, a, b in evaluated:
        assert mean == pytest.approx((5 * a + 19 * b) / 24, rel=1e-6), "the mean over rows"
    page = (whole / "report.html").read_text()
    assert "Accuracy, a" in page and "held-out loss, b" in page and "accuracy_low[" not in page
    table = {row[0]: row[1:] for row in compare([whole, broken], tmp_path / "compared.html").rows}
    assert table["accuracy after, a"][0] == table["accuracy after, a"][1] != ""
    notes = check(load("classify/quickstart", known)).notes
    assert "Held-out rows: a 5, b 19." in notes


@pytest.mark.nightly
def test_hidden_words_of_each_set_are_scored(folder: Path, tmp_path: Path) -> None:
    encoder = save_tiny(tmp_path / "bert", "Bert", "MaskedLM", MINILM)
    known = [*words(folder, "weather", "data.test", "data.held_out"), f"model.id={encoder}", "data.columns={}"]
    run = workbench.run("mlm/quickstart", [*known, "evaluate.dynamics=false"], out=tmp_path / "run", quiet=True)
    test = read_scores(run)["test"]
    assert test == read_scores(run)["after"] and of(test, "b").keys() == {"loss", "perplexity", "token_accuracy"}
    # What is hidden in a row follows from its number, which is the same in the first of several sets.
    assert of(test, "a") == pytest.approx(evaluate(run, [f"data.test={folder}/weather_a.jsonl"]), rel=1e-5)
    assert min(test["loss[a]"], test["loss[b]"]) < test["loss"] < max(test["loss[a]"], test["loss[b]"])
    assert {"held_out_loss[a]", "held_out_loss[b]"} <= read_metrics(run)[-1].keys()


TAUGHT = {"a live teacher": "teacher: {id: backbone}", "peers": "peers: 2", "a student's own": ON_POLICY}


@pytest.mark.nightly(but=["a live teacher"])
@pytest.mark.parametrize("taught", TAUGHT.values(), ids=TAUGHT)
def test_students_are_scored_on_each_set(taught: str, folder: Path, short_stories: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: distill\nmodel: {{id: x}}\ndata: {{train: x}}\ndistill: {{{taught}}}\n")
    known = [*words(folder, "asked", "data.test", "data.held_out"), f"model.id={short_stories}", "evaluate.answers=0"]
    run = workbench.run(path, known, out=tmp_path / "run", quiet=True)
    assert_each_scores_as_alone(run, both(folder, "asked"))
    last = read_metrics(run)[-1]
    assert last["held_out_loss"] != last["held_out_loss[a]"] != last["held_out_loss[b]"]
    if "teacher" in taught:  # which is the backbone, without the adapter
        before, teacher = read_scores(run)["before"], read_scores(run)["teacher"]
        assert teacher.keys() == {"loss", "loss[a]", "loss[b]"}
        assert teacher == pytest.approx({name: before[name] for name in teacher}, abs=1e-4)


@pytest.mark.parametrize("recipe", ["sft", "classify", "crossval"])
def test_training_rows_are_compared_with_every_set(
    recipe: str, folder: Path, bert: str, short_stories: str, tmp_path: Path
) -> None:
    """A row of each set is planted in capitals among the training rows; all are found and dropped."""
    kind, column = ("asked", "question") if recipe == "sft" else ("weather", "text")
    if recipe != "sft":  # whose near-duplicates stay: rows of one template get words of their own
        for path in folder.glob(f"{kind}*"):
            unlike = [
                row | {column: f"{row[column]} {sha256(repr(row).encode()).hexdigest()[:20]}"}
                for row in read_lines(path)
            ]
            write_lines(tmp_path / path.name, unlike)
        folder = tmp_path
    own = read_lines(folder / f"{kind}.jsonl")
    planted = [read_lines(folder / f"{kind}_{name}.jsonl")[0] for name in "ab"]
    for row in planted:
        row[column] = row[column].upper().replace(".", " !!")
        row |= {"answer": row["answer"].upper()} if recipe == "sft" else {}
    rows = [*own[:7], planted[0], *own[7:], planted[1]]
    known = [*words(folder, kind, "data.test"), f"data.train={write_lines(tmp_path / 'train.jsonl', rows)}"]
    known += [f"model.id={short_stories if recipe == 'sft' else bert}", "data.overlap=drop", "evaluate.answers=0"]
    known += ["data.decontaminate.action=drop", "data.decontaminate.share=1", "data.decontaminate.ngram=4"]
    known += ["duplicates.on_duplicate=ignore"] if recipe == "crossval" else ["data.held_out=0.2"]
    found: Any = check(load(f"{recipe}/quickstart", known)).data
    train = found.rows if recipe == "crossval" else found.train
    sets = {match.source for match in train.contamination.matches}
    assert {"data.test.a": 5, "data.test.b": 19}.items() <= train.contamination.sets.items()
    kept = {row.partition(", ")[2] for row in train.places()}
    assert not {"row 8", "row 26"} & kept
    assert recipe != "sft" or sets >= {"data.test.a", "data.test.b"}


def test_near_duplicates_of_one_template_do_not_empty_the_training_rows(folder: Path, bert: str) -> None:
    known = [*words(folder, "weather", "data.test"), f"model.id={bert}", "data.held_out=0.2", "evaluate.answers=0"]
    with pytest.raises(DataError, match=r"(?s)near.*data\.overlap=tell"):
        check(load("classify/quickstart", [*known, "data.overlap=drop"]))
    assert check(load("classify/quickstart", [*known, "data.overlap=tell"]))


def test_a_console_lists_every_score(
    folder: Path, bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from workbench.cli import render

    known = [*words(folder, "weather", "data.test"), f"model.id={bert}", "data.held_out=0.2"]
    run = workbench.run("classify/quickstart", known, out=tmp_path / "run", quiet=True)
    capsys.readouterr()
    render.outcome(run)
    printed = capsys.readouterr().out
    assert "Accuracy, a" in printed and "Macro-F1, b" in printed
    assert len(pd.read_parquet(run / "predictions.parquet")) > 0
