"""Test and held-out rows in several named files: each has the scores that it has alone, in every recipe that scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes.drawings import draw
from tests.recipes.test_classify import weather
from tests.recipes.test_embed import classes, pairs, scored
from tests.recipes.test_prefer import pair, single
from tests.stopping import stop_after
from workbench.errors import DataError, Stopped
from workbench.recipes import data_report
from workbench.recipes.check import check
from workbench.recipes.load import load
from workbench.recipes.plan import plan
from workbench.recipes.serve import evaluate
from workbench.report import compare

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
FAST = ["model.weights=float32", "model.compute=float32", "train.epochs=null", "train.steps=2", "evaluate.every=2"]
FAST += ["save.every=null", "batch.size=8", "adapter={method: lora, rank: 2}"]


ON_POLICY = "teacher: {id: backbone}, on_policy: {share: 0.5, max_new_tokens: 4}"


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scores(run: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads((run / "scores.json").read_text()))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def of(scores: dict[str, float], name: str) -> dict[str, float]:
    """The scores of a set by the names that they have alone."""
    end = f"[{name}]"
    return {score.removesuffix(end): value for score, value in scores.items() if score.endswith(end)}


def assert_each_scores_as_alone(
    run: Path, files: dict[str, Path], *, ignore: tuple[str, ...] = (), trust: bool = False
) -> None:
    """The law, of scores.json and of `evaluate`; and that the whole is that of one file with all rows."""
    named = "{" + ", ".join(f"{name}: {path}" for name, path in files.items()) + "}"
    test, together = scores(run)["test"], evaluate(run, [f"data.test={named}"], trust=trust)
    assert together == pytest.approx(test, abs=2e-5)
    for name, path in files.items():
        alone = evaluate(run, [f"data.test={path}"], trust=trust)
        assert len(alone) > 2 and not any(score.endswith(f"[{name}]") for score in alone)
        own = of(test, name)
        assert own.keys() == alone.keys(), "every score that it has alone"
        assert own == pytest.approx(alone, abs=2e-5)
    if all(path.is_file() for path in files.values()):
        every = write(run.parent / "every.jsonl", (row for path in files.values() for row in read(path)))
        whole = evaluate(run, [f"data.test={every}"], trust=trust)
        assert {score: test[score] for score in whole if score not in ignore} == pytest.approx(
            {score: value for score, value in whole.items() if score not in ignore}, abs=2e-5
        )


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
        write(found / f"{kind}.jsonl", rows[:24])
        write(found / f"{kind}_a.jsonl", rows[24:29])
        write(found / f"{kind}_b.jsonl", rows[29:])
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_of_several_sets_has_the_scores_that_it_has_alone(
    case: tuple[str, str, list[str]], folder: Path, bert: str, tmp_path: Path
) -> None:
    recipe, kind, more = case
    held = "data.held_out=0.2" if kind == "weather" else f"data.held_out={folder}/{kind}_a.jsonl"
    known = [*words(folder, kind, "data.test"), held, f"model.id={bert}", *more]
    run = workbench.run(recipe, known, out=tmp_path / "run", quiet=True)
    assert_each_scores_as_alone(run, both(folder, kind))


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
    written = ("f1", "rouge_l", "answer_tokens", "repetition")
    # Answers to other prompts are of the same set, and so others than in one file.
    drawn = () if kind == "judged" else ("loss", "accuracy", "accuracy_low", "accuracy_high")
    assert_each_scores_as_alone(run, both(folder, kind), ignore=(*written, *drawn))


def test_each_set_of_prompts_has_its_own_answers(folder: Path, short_stories: str, tmp_path: Path) -> None:
    known = [*words(folder, "asked", "data.test"), f"model.id={short_stories}", "evaluate.answers=3"]
    known += ["evaluate.max_new_tokens=4", "data.held_out=0.2"]
    run = workbench.run("sft/quickstart", known, out=tmp_path / "run", quiet=True)
    assert {"token_accuracy[a]", "perplexity[a]", "f1[a]", "rouge_l[b]"} <= scores(run)["test"].keys()
    assert_each_scores_as_alone(run, both(folder, "asked"), ignore=("f1", "rouge_l"))


def test_sets_of_pictures_have_scores_of_their_own(vit: str, tmp_path: Path) -> None:
    files = {name: draw(tmp_path / name, 9, seed=seed) for seed, name in enumerate("ab")}
    draw(tmp_path / "train", 18, seed=5)
    named = "{" + ", ".join(f"{name}: {path}" for name, path in files.items()) + "}"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: classify\nmodel: {{id: {vit}}}\ndata: {{format: image, train: {tmp_path}/train}}\n")
    known = [f"data.test={named}", f"data.held_out={named}", *FAST]
    run = workbench.run(path, known, out=tmp_path / "run", quiet=True)
    assert_each_scores_as_alone(run, files)
    after = scores(run)["after"]
    assert after == scores(run)["test"], "the same rows"
    assert {"held_out_loss[a]", "held_out_loss[b]"} <= lines(run)[-1].keys()


@pytest.fixture(scope="module")
def crossed(folder: Path, bert: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished cross-validation with two test sets. Read only."""
    known = [*words(folder, "weather", "data.test"), f"model.id={bert}", "folds.k=2", "folds.refit=true"]
    known += ["duplicates.overlap=drop", "duplicates.on_duplicate=ignore", "evaluate.every=null"]
    return workbench.run("crossval/quickstart", known, out=tmp_path_factory.mktemp("crossed") / "run", quiet=True)


def test_an_ensemble_is_scored_on_each_test_set(crossed: Path, folder: Path) -> None:
    assert_each_scores_as_alone(crossed, both(folder, "weather"))
    found = scores(crossed)
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
    curve = [[line.get(key) for key in keys] for line in lines(whole)]
    assert [[line.get(key) for key in keys] for line in lines(broken)] == curve
    assert scores(broken) == scores(whole)
    assert scores(parts)["after"] == pytest.approx(scores(whole)["after"], abs=1e-4)
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


REWARDS = """
def vowels(answers):
    return [sum(letter in "aeiou" for letter in each.text) / (1 + len(each.text)) for each in answers]

def bonus(answers):
    return [float(each.row["bonus"]) for each in answers]
"""
REINFORCE = """
recipe: reinforce
model: {{id: {model}}}
data: {{train: {folder}/prompts.jsonl, max_tokens: 96}}
rewards: [{{file: {folder}/rewards.py, function: vowels}}, {{file: {folder}/rewards.py, function: bonus, weight: 0.5}}]
reinforce: {{answers: 2, max_new_tokens: 4, updates: 2}}
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A recipe of rewards, beside prompts to train on and two unlike sets of others, in files of one name."""
    found = tmp_path_factory.mktemp("prompts")
    for part, size, first in (("prompts.jsonl", 12, 0), ("a/rows.jsonl", 5, 20), ("b/rows.jsonl", 9, 40)):
        (found / part).parent.mkdir(exist_ok=True)
        rows = [{"question": f"What comes after {n}?", "bonus": n / 10} for n in range(first, first + size)]
        write(found / part, rows)
    (found / "rewards.py").write_text(REWARDS)
    (found / "recipe.yaml").write_text(REINFORCE.format(folder=found, model=short_stories))
    return found


def rewarded(prompts: Path, out: Path, *more: str, resume: bool = False) -> Path:
    """A run with both sets as held-out and as test rows."""
    known = [*of_prompts(prompts), *more]
    return workbench.run(prompts / "recipe.yaml", known, out=out, resume=resume, quiet=True)


def of_prompts(prompts: Path) -> list[str]:
    named = f"{{a: {prompts}/a/rows.jsonl, b: {prompts}/b/rows.jsonl}}"
    more = ["batch.size=4", "train.steps=4", "evaluate.answers=0"]
    return [f"data.held_out={named}", f"data.test={named}", *FAST, *more]


@pytest.fixture(scope="module")
def answered(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of recipe reinforce with two held-out and two test sets. Read only."""
    return rewarded(prompts, tmp_path_factory.mktemp("answered") / "run")


def test_answers_to_each_set_of_prompts_earn_what_they_earn_alone(answered: Path, prompts: Path) -> None:
    assert_each_scores_as_alone(answered, {name: prompts / name / "rows.jsonl" for name in "ab"}, trust=True)
    found = scores(answered)
    assert found["after"] == found["test"], "the same prompts"
    assert found["before"].keys() == found["after"].keys()
    own = {"reward", "reward_low", "reward_high", "loss", "reward[vowels]", "reward[bonus]"}
    assert of(found["after"], "a").keys() == own | {"answer_tokens", "repetition"}
    assert of(found["after"], "a")["reward[bonus]"] == pytest.approx(2.2)  # of 2.0 to 2.4
    assert of(found["after"], "b")["reward[bonus]"] == pytest.approx(4.4)
    page = (answered / "report.html").read_text()
    assert "Reward, a" in page and "Reward, bonus, b" in page and "held out, greedy, b" in page


def test_held_out_rewards_of_each_set_are_followed(answered: Path, prompts: Path, tmp_path: Path) -> None:
    keys = ("mean", "a", "b")
    watched = [[line.get(f"held_out_reward[{key}]") for key in keys] for line in lines(answered)]
    evaluated = [row for row in watched if row[0] is not None]
    assert len(evaluated) == 2
    for mean, a, b in evaluated:
        assert mean == pytest.approx((5 * a + 9 * b) / 14, rel=1e-6), "the mean over prompts"
    assert evaluated[-1][1] == pytest.approx(scores(answered)["after"]["reward[a]"], abs=1e-5)
    table = {row[0]: row[1:] for row in compare([answered], tmp_path / "compared.html").rows}
    assert {
        "mean reward after",
        "mean reward after, a",
        "test mean reward, b",
        "held-out loss after, b",
    } <= table.keys()
    places = pd.read_parquet(answered / "predictions.parquet")["row"].tolist()
    assert sorted(places)[:1] == ["a: rows.jsonl, row 1"] and len(set(places)) == 14


def test_a_stop_and_micro_batches_change_no_reward_of_a_set(
    answered: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            rewarded(prompts, tmp_path / "broken")
    assert scores(rewarded(prompts, tmp_path / "broken", resume=True)) == scores(answered)
    small = rewarded(prompts, tmp_path / "small", "batch.tokens_per_device=60")
    assert scores(small)["after"] == pytest.approx(scores(answered)["after"], abs=1e-4)


def test_a_set_without_a_column_of_the_rewards_is_named(prompts: Path, tmp_path: Path) -> None:
    rows = [{"question": f"Who is {n}?", "answer": str(n)} for n in range(12)]
    (tmp_path / "a").mkdir()
    train = write(tmp_path / "train.jsonl", rows)
    other = write(tmp_path / "a" / "rows.jsonl", [{"question": "Who?", "answer": "1"}])
    known = [f"data.train={train}", f"data.held_out={{a: {other}, b: {prompts}/b/rows.jsonl}}", "data.test=null"]
    with pytest.raises(DataError, match=r"b: rows\.jsonl, row 1: no column `answer`"):
        check(load(str(prompts / "recipe.yaml"), [*known, "rewards=[{kind: number}]"]))


def test_so_many_prompts_of_each_set_are_answered(prompts: Path, tmp_path: Path) -> None:
    run = rewarded(prompts, tmp_path / "run", "evaluate.answers=2", "evaluate.every=null", "train.steps=1")
    table = pd.read_parquet(run / "predictions.parquet")
    assert sorted(place[0] for place in table["row"]) == ["a", "a", "b", "b"]
    expected = table.groupby(table["row"].str[0])["reward_after"].mean()
    assert scores(run)["after"]["reward[b]"] == pytest.approx(expected["b"], abs=1e-6)


def test_check_plan_and_data_take_sets_of_prompts(prompts: Path, tmp_path: Path) -> None:
    config = load(str(prompts / "recipe.yaml"), of_prompts(prompts))
    notes = check(config).notes
    assert "Held-out rows: a 5, b 9." in notes and "Test rows: a 5, b 9." in notes
    assert plan(config).steps == 4
    found = data_report.write(config, tmp_path).findings
    assert [each.read.title for each in found] == ["Train", "Held-out: a", "Held-out: b", "Test: a", "Test: b"]


def test_a_set_named_as_a_source_is_read_from_its_own_file(prompts: Path, tmp_path: Path) -> None:
    """Sources whose prompts stand in other columns, and as many rows, so that a mix-up would not be told."""
    known, sources = of_prompts(prompts), []
    for name, size in {"a": 5, "b": 9}.items():
        path = write(tmp_path / f"{name}.jsonl", [{"ask": f"Who is {name} {n}?", "bonus": -1} for n in range(size)])
        sources.append(f"{name}: {{path: {path}, columns: {{question: ask}}}}")
    known += [f"data.sources={{{', '.join(sources)}}}", "data.train=null", "train.steps=1"]
    run = workbench.run(prompts / "recipe.yaml", known, out=tmp_path / "run", quiet=True)
    after = scores(run)["after"]
    assert after["reward[bonus][a]"] == pytest.approx(2.2) and after["reward[bonus][b]"] == pytest.approx(4.4)
    assert lines(run)[0]["reward[bonus]"] == -1


def test_a_training_prompt_in_any_set_is_found(prompts: Path, tmp_path: Path) -> None:
    planted = [*read(prompts / "prompts.jsonl"), read(prompts / "b" / "rows.jsonl")[3]]
    known = [*of_prompts(prompts), f"data.train={write(tmp_path / 'train.jsonl', planted)}"]
    with pytest.raises(DataError, match=r"also in .*b/rows\.jsonl"):
        check(load(str(prompts / "recipe.yaml"), known))
    found: Any = check(load(str(prompts / "recipe.yaml"), [*known, "data.overlap=drop"])).data
    assert len(found.train) == len(planted) - 1


def test_hidden_words_of_each_set_are_scored(folder: Path, tmp_path: Path) -> None:
    encoder = save_tiny(tmp_path / "bert", "Bert", "MaskedLM", MINILM)
    known = [*words(folder, "weather", "data.test", "data.held_out"), f"model.id={encoder}", "data.columns={}"]
    run = workbench.run("mlm/quickstart", [*known, "evaluate.dynamics=false"], out=tmp_path / "run", quiet=True)
    test = scores(run)["test"]
    assert test == scores(run)["after"] and of(test, "b").keys() == {"loss", "perplexity", "token_accuracy"}
    # What is hidden in a row follows from its number, which is the same in the first of several sets.
    assert of(test, "a") == pytest.approx(evaluate(run, [f"data.test={folder}/weather_a.jsonl"]), rel=1e-5)
    assert min(test["loss[a]"], test["loss[b]"]) < test["loss"] < max(test["loss[a]"], test["loss[b]"])
    assert {"held_out_loss[a]", "held_out_loss[b]"} <= lines(run)[-1].keys()


TAUGHT = {"a live teacher": "teacher: {id: backbone}", "peers": "peers: 2", "a student's own": ON_POLICY}


@pytest.mark.parametrize("taught", TAUGHT.values(), ids=TAUGHT)
def test_students_are_scored_on_each_set(taught: str, folder: Path, short_stories: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: distill\nmodel: {{id: x}}\ndata: {{train: x}}\ndistill: {{{taught}}}\n")
    known = [*words(folder, "asked", "data.test", "data.held_out"), f"model.id={short_stories}", "evaluate.answers=0"]
    run = workbench.run(path, known, out=tmp_path / "run", quiet=True)
    assert_each_scores_as_alone(run, both(folder, "asked"))
    last = lines(run)[-1]
    assert last["held_out_loss"] != last["held_out_loss[a]"] != last["held_out_loss[b]"]
    if "teacher" in taught:  # which is the backbone, without the adapter
        before, teacher = scores(run)["before"], scores(run)["teacher"]
        assert teacher.keys() == {"loss", "loss[a]", "loss[b]"}
        assert teacher == pytest.approx({name: before[name] for name in teacher}, abs=1e-4)


@pytest.mark.parametrize("recipe", ["sft", "classify", "crossval"])
def test_training_rows_are_compared_with_every_set(
    recipe: str, folder: Path, bert: str, short_stories: str, tmp_path: Path
) -> None:
    """A row of each set is planted in capitals among the training rows; all are found and dropped."""
    kind, column = ("asked", "question") if recipe == "sft" else ("weather", "text")
    own = read(folder / f"{kind}.jsonl")
    planted = [read(folder / f"{kind}_{name}.jsonl")[0] for name in "ab"]
    for row in planted:
        row[column] = row[column].upper().replace(".", " !!")
        row |= {"answer": row["answer"].upper()} if recipe == "sft" else {}
    rows = [*own[:7], planted[0], *own[7:], planted[1]]
    known = [*words(folder, kind, "data.test"), f"data.train={write(tmp_path / 'train.jsonl', rows)}"]
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


def test_a_console_lists_every_score(
    folder: Path, bert: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from workbench.cli import render

    known = [*words(folder, "weather", "data.test"), f"model.id={bert}", "data.held_out=0.2"]
    run = workbench.run("classify/quickstart", known, out=tmp_path / "run", quiet=True)
    capsys.readouterr()
    render.outcome(run)
    printed = capsys.readouterr().out
    assert "accuracy[a]" in printed and "macro_f1[b]" in printed
    assert len(pd.read_parquet(run / "predictions.parquet")) > 0
