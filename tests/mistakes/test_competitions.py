"""Mistakes with folds, views, ensembles, metrics, blends and submissions: status 2, place and cure, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench
from tests.mistakes import cases
from tests.mistakes.cases import Case, file, lines, refusal
from tests.recipes.weather import weather

CROSSVAL = "crossval/quickstart"
ROWS = [{**row, "place": n % 2, "part": n % 3, "day": n} for n, row in enumerate(weather(60, seed=0))]
UNLABELLED = [{"text": f"moon wet wind {n}"} for n in range(12)]
METRICS = """
def nan(labels, predicted): return float("nan")
def fails(labels, predicted): return 1 / 0
def text(labels, predicted): return "x"
def one(labels): return 1
number = 1
"""

CONFIGURED = {
    # Folds.
    "folds in words": ("folds.k=two", "folds.k: expected a valid integer", "found 'two'"),
    "no repeat": ("folds.repeats=0", "folds.repeats", "greater than 0"),
    "no seed": ("folds.seeds=0", "folds.seeds", "greater than 0"),
    "no such key": ("folds.groups=place", "folds.groups: unknown key", "Did you mean `group`?"),
    "a column, repeated": ("folds.column=part folds.repeats=2", "gives one set of folds", "Write folds.repeats=1"),
    "time, repeated": ("folds.time=day folds.repeats=2", "gives one set of folds", "Leave repeats and column out"),
    "a stage by another name": ("folds.keep=[ensemble]", "no stage is called `ensemble`", "Write calibration"),
    "a stage without its file": ("folds.keep=[pseudo_label]", "which this run does not have", "Leave it out"),
    "no such duplicates": ("duplicates.on_duplicate=remove", "duplicates.on_duplicate", "'keep_one'"),
    "a threshold above 1": ("duplicates.threshold=2", "duplicates.threshold", "less than or equal to 1"),
    "folds elsewhere": ("recipe=classify folds.k=3", "folds is for recipe=crossval", "Leave folds out"),
    "no such task": ("of=generate", "unknown task 'generate'", "Known: classify"),
    "no such fold": (
        "recipe=classify folds={} duplicates={} data.fold='{of: 3, number: 3}'",
        "data.fold.number=3 is none of 3 folds",
        "from 0 to 2",
    ),
    # Views.
    "a view of pictures": ("tta.views=[flip]", "names views of pictures (flip)", "data.format=image"),
    "a view twice": ("tta.views=[lower,lower]", "duplicate entry 'lower'", "Name it once"),
    "one view": ("tta.views=lower", "tta.views: expected a list", "[a, b]"),
    "no such merge": ("tta.views=[lower] tta.merge=learned", "tta.merge: expected 'mean'", "found 'learned'"),
    "more than all rows": ("tta.views=[lower] tta.uncertain=2", "tta.uncertain", "less than 1"),
    "no copies": ("tta.views=[typos] tta.copies=0", "tta.copies", "greater than 0"),
    "a view of no file": ("tta.views=[user]", "`user` needs function", "the path of your Python file"),
    "a merge of no file": ("tta.views=[lower] tta.merge=user", "`user` needs function", "the path"),
    "settings of no view": ("tta.merge=vote", "merge: there are no views", "Write views too"),
    "views to keep": ("tta.views=[lower] tta.keep=true", "tta.keep: is for a run of one", "folds.keep=[tta]"),
    "views to keep of one run": (
        "recipe=classify folds.k=5 tta.views=[lower] folds.keep=[tta]",
        "folds is for recipe=crossval",
        "Leave folds out",
    ),
    "views in time": (
        "recipe=classify folds={} tta.views=[lower] budget.time=60s",
        "tta: reads held-out rows again",
        "Leave budget's limits of time out",
    ),
    "views of members": (
        "recipe=sweep of=classify folds={} sweep.over='{seed: [0, 1]}' tta.views=[lower]",
        "tta: recipe=sweep compares runs by the rows that would choose their views",
        "Leave tta out",
    ),
    "views of a search": (
        "recipe=search of=classify folds={} search.space='{seed: {low: 0, high: 9}}' tta.views=[lower]",
        "tta: recipe=search compares runs",
        "recipe=classify with it",
    ),
    "views of a student": (
        "recipe=distill of=classify folds={} distill.teacher.id=one tta.views=[lower]",
        "tta: recipe=distill compares runs",
        "Leave tta out",
    ),
    "views of answers": (
        "recipe=sft classes={} folds={} duplicates={} tta.views=[lower]",
        "tta is for recipe=classify",
        "Leave tta out",
    ),
    # Ensembles, pseudo-labels and corrections.
    "greedy weights are a blend's": ("ensemble.merge=greedy", "ensemble.merge: expected 'auto'", "found 'greedy'"),
    "no such combination": ("ensemble.merge=median", "ensemble.merge: expected 'auto'", "found 'median'"),
    "a calibration, perhaps": ("ensemble.calibrate=maybe", "ensemble.calibrate", "true or false"),
    "too sure": ("pseudo_label.threshold=1.5", "pseudo_label.threshold", "less than or equal to 1"),
    "surer than sure": ("pseudo_label.sure=2", "pseudo_label.sure", "less than 1"),
    "more than all agree": ("pseudo_label.agreement=1.2", "pseudo_label.agreement", "less than or equal to 1"),
    "no round": ("pseudo_label.rounds=0", "pseudo_label.rounds", "greater than 0"),
    "a misspelt threshold": ("pseudo_label.treshold=0.5", "pseudo_label.treshold", "Did you mean `threshold`?"),
    "pseudo-labels elsewhere": (
        "recipe=classify pseudo_label.unlabelled=more.jsonl",
        "pseudo_label is for recipe=crossval",
        "Leave pseudo_label out",
    ),
    "no neighbour": ("correction.neighbours=[0]", "correction.neighbours", "greater than 0"),
    # Metrics.
    "half a name": ("evaluate.metric=f1", "`f1` is no metric", "Known: accuracy"),
    "the name of others": ("evaluate.metric=auc", "`auc` is no metric", "Did you mean `roc_auc`?"),
    "of numbers": ("evaluate.metric=rmse", "does not apply to classes.kind=one", "Write one of accuracy"),
    "the first none": ("evaluate.metric=map@0", "`map@0` is no metric", "Did you mean `map@3`?"),
    "a file alone": ("evaluate.metric=own.py", "names a file without its function", "Write FILE.py:FUNCTION"),
    "two functions": ("evaluate.metric=own.py:a:b", "names a file without its function", "Write FILE.py:FUNCTION"),
    "several metrics": ("evaluate.metric=[accuracy]", "evaluate.metric", "a valid string"),
    "a direction alone": ("evaluate.better=lower", "better is for evaluate.metric=FILE.py:FUNCTION", "Leave it out"),
    # Sweeps of cross-validations.
    "one member": ("sweep.over='{seed: [0]}'", "needs two members or more", "such as"),
    "other folds": (
        "sweep.over='{folds.k: [3, 5]}'",
        "members cannot differ in folds.k",
        "beside the cross-validation",
    ),
    "a misspelt key": ("sweep.over='{adapter.rnk: [1, 2]}'", "unknown key", "Did you mean `adapter.rank`?"),
}

CHECK = (
    f"check {CROSSVAL} data.train=rows.jsonl data.test=null model.id=stories data.limit=null folds.k=3 train.steps=1"
)
OF_ROWS = {
    "no such column": ("folds.column=prat", "no row has such a column", "Did you mean `part`?"),
    "a row of no fold": ("folds.column=hole", "row 4: has no value in the column `hole`", "Fill in the values"),
    "one fold": ("folds.column=same", "every row has the value `1`", "Give two values or more"),
    "a fold cut across a group": ("folds.column=part folds.group=place", "is in fold", "write folds.group=null"),
    "one time": ("folds.time=same", "its 1 different times are too few", "another column"),
    "no date among numbers": ("folds.time=late", "row 6: `yesterday`", "Write dates as"),
    "no number among dates": ("folds.time=dates", "row 6: `soon`", "Write dates as"),
    "the label as the id": ("'data.columns={id: label}'", "`label` in the column of that name", "Leave `id` out"),
    "the text as the weight": ("'data.columns={weight: text}'", "`text` in the column", "Leave `weight` out"),
    "no such id": ("'data.columns={id: nope}'", "has no column `nope`", "Known: "),
    "numbers as classes": ("'data.columns={label: day}'", "60 different numbers", "Write classes.kind=number"),
    "no file of views": ("'tta={views: [user], function: no.py}'", "tta.function: no.py is no Python file", "Write"),
    "a folder of views": ("'tta={views: [user], function: .}'", "tta.function: . is no Python file", "Write the path"),
    "no text without labels": ("pseudo_label.unlabelled=bad.jsonl", "has no column `text`", "data.columns='{text: NAM"),
    "no metric": ("evaluate.metric=no.py:f", "no.py is no Python file", "Write the path"),
    "a broken metric": ("evaluate.metric=broken.py:f", "broken.py, line 1: SyntaxError", "Correct the file"),
    "no such function": ("evaluate.metric=own.py:f", "own.py defines no function f", "Write `def f(labels, predicted)"),
    "a number as a function": ("evaluate.metric=own.py:number", "defines no function number", "Write `def number("),
    "a metric of labels": ("evaluate.metric=own.py:one", "takes 1 positional argument", "Correct the file"),
    "no number": ("evaluate.metric=own.py:nan", "returned nan", "Correct the function"),
    "a text": ("evaluate.metric=own.py:text", "returned 'x'", "Correct the function"),
    "a failure": ("evaluate.metric=own.py:fails", "ZeroDivisionError", "Correct the file"),
    "a class of copies": (
        "data.test=suns.jsonl data.overlap=drop",
        "row(s) of the class `sun` are also in suns.jsonl, or nearly, so that data.overlap=drop leaves none",
        "Take them out of one of the two files",
    ),
    "no embedder": ("correction.embedder=no correction.neighbours=[2]", "not a run directory", "recipe=embed"),
}

LIKE = "predict both ids.csv --out x.csv --like"
OF_RUNS = {
    "no sample": (f"{LIKE} no.csv", "--like no.csv: expected a csv file that exists", "sample_submission.csv"),
    "no table": (f"{LIKE} empty.csv", "not a csv file that can be read", "Download it again"),
    "no rows": (f"{LIKE} head.csv", "expected rows with an id", "Download it again"),
    "other rows": (f"{LIKE} few.csv", "11 id(s) of ids.csv are not in few.csv", "Name the file of the rows"),
    "an id twice": (f"{LIKE} twice.csv", "stand(s) twice in `id`", "Give each row an id of its own"),
    "other classes": (f"{LIKE} cow.csv", "`label` holds cow", "Train with the labels that the sample has"),
    "other columns": (f"{LIKE} columns.csv", "are not the names of the run's classes", "one column of values"),
    "rows without ids": (
        "predict both rows.jsonl --out x.csv --like sample.csv",
        "and it has none (columns",
        "Rename the column of ids",
    ),
    "another file": ("predict both ids.csv --out x.jsonl --like sample.csv", "--like writes a file", "--out FILE.csv"),
    "nowhere": ("predict both ids.csv --like sample.csv", "Missing option", "--out"),
    "no input": ("predict both isd.csv --out x.csv --like sample.csv", "isd.csv: no such file", "Did you mean `ids.cs"),
    "folds of a prediction": ("predict one ids.csv --out x.csv folds.k=2", "cannot change folds", "Leave it out"),
    "no such way": ("blend one two --out x --way median", "--way median", "expected auto, mean"),
    "a blend of one": ("blend one --out x", "two runs or more", "Write workbench blend RUN RUN"),
    "a blend of itself": ("blend one one --out x", "named twice", "Name each run once"),
    "a blend of no run": ("blend one no --out x", "no: not a run directory", "lists the runs here"),
    "a blend of an adapter": ("blend one single --out x", "no predictions out of fold", "Blend runs of recipe=crossv"),
    "a blend in a run": ("blend one two --out one", "one exists already", "Name another folder"),
    "a blend of other folds": ("blend one two --out x folds.k=4", "takes its parts as they are", "evaluate.metric"),
    "a blend for numbers": ("blend one two --out x evaluate.metric=rmse", "does not apply", "Write one of accuracy"),
    "a blend for nothing": ("blend one two --out x evaluate.metric=own.py:nan", "returned nan", "Correct the function"),
    "a blend served": ("serve both", "a blend is not served", "distill/ensemble"),
    "a blend merged": ("merge both --out x", "a blend is no single model", "distill/ensemble"),
    "a blend resumed": ("run both/config.yaml --out both --resume", "is a blend, which trains nothing", "Resume its p"),
    "a stage that was none": ("run one/config.yaml --out one --resume 'folds.keep=[tta]'", "does not have", "Leave it"),
    "other folds": ("run one/config.yaml --out one --resume folds.k=2", "another configuration", "a new run"),
    "no such metric": ("evaluate both evaluate.metric=auc data.test=rows.jsonl", "is no metric", "Did you mean `roc_a"),
    "no test": ("evaluate both data.test=rosw.jsonl", "rosw.jsonl: no such file", "Did you mean `rows.jsonl`?"),
}


@pytest.mark.parametrize(("words", "place", "cure"), CONFIGURED.values(), ids=CONFIGURED)
def test_a_configuration_is_refused(words: str, place: str, cure: str) -> None:
    """And what the message says to write changes it, which `refusal` tries."""
    told = refusal(f"{CROSSVAL} {words}")
    assert told is not None and place in told and cure in told, told


def prepare(folder: Path) -> None:
    """Rows, tables, samples and code that mistakes are made with."""
    rows = [
        {
            **row,
            "hole": None if n == 3 else n % 3,
            "same": 1,
            "late": "yesterday" if n == 5 else n,
            "dates": "soon" if n == 5 else f"2026-01-{1 + n % 28:02}",
        }
        for n, row in enumerate(ROWS)
    ]
    lines(rows, "rows.jsonl")(folder)
    lines([row for row in rows if row["label"] == "sun"], "suns.jsonl")(folder)
    lines([{"words": row["text"]} for row in UNLABELLED], "bad.jsonl")(folder)
    ids = range(1, 31)
    tables = {
        "ids": ["id,text", *(f"{n},rain {n} cold" for n in ids)],
        "sample": ["id,label", *(f"{n},sun" for n in ids)],
        "few": ["id,label", *(f"{n},sun" for n in ids[:19])],
        "twice": ["id,label", "1,sun", "1,sun"],
        "cow": ["id,label", *(f"{n},cow" for n in ids)],
        "columns": ["id,a,b", *(f"{n},0.5,0.5" for n in ids)],
        "head": ["id,label"],
        "empty": [],
    }
    for name, table in tables.items():
        file(f"{name}.csv", "".join(f"{line}\n" for line in table))(folder)
    file("own.py", METRICS)(folder)
    file("broken.py", "def f(:\n")(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "place", "cure"), OF_ROWS.values(), ids=OF_ROWS)
@pytest.mark.parametrize("verb", ["check", "run"])
def test_rows_and_code_are_refused(
    verb: str,
    words: str,
    place: str,
    cure: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(folder)
    case = Case(CHECK.replace("check", verb, 1) + f" {words}", place, cure)
    told = cases.assert_refused_with((place, cure), case.command, monkeypatch, capsys)
    assert "Traceback" not in told and not list(folder.glob("runs/*/members"))


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    """A folder with two cross-validations, their blend, and one adapter. Read only."""
    home = tmp_path_factory.mktemp("competition")
    lines(ROWS, "train.jsonl")(home)
    words = [f"data.train={home}/train.jsonl", "data.test=null", f"model.id={stories}", "model.weights=float32"]
    words += ["data.limit=null", "train.steps=1", "batch.size=8", "data.seed=0"]
    for seed, name in enumerate(("one", "two")):
        workbench.run(CROSSVAL, [*words, "folds.k=3", f"seed={seed}"], out=home / name, quiet=True)
    workbench.blend([home / "one", home / "two"], out=home / "both", way="mean")
    workbench.run("classify/quickstart", [*words, "data.held_out=0.2"], out=home / "single", quiet=True)
    return home


@pytest.mark.slow
@pytest.mark.parametrize(("command", "place", "cure"), OF_RUNS.values(), ids=OF_RUNS)
def test_finished_runs_are_left_as_they_are(
    command: str,
    place: str,
    cure: str,
    finished_runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(finished_runs)
    monkeypatch.chdir(finished_runs)
    before = cases.content(finished_runs)
    told = cases.assert_refused_with((place, cure), command, monkeypatch, capsys)
    assert "Traceback" not in told
    assert cases.content(finished_runs) == before
