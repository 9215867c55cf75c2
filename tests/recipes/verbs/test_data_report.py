"""From the command line: `data` reports whatever the rows are, and `data.clean` drops what rules flag from training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tests.conftest import MINILM
from tests.run_files import write_lines
from tests.workbench.data.images.pictures import photograph
from workbench import recipes
from workbench.cli.verbs import main
from workbench.config.yaml_text import read_yaml
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.models import backbones
from workbench.recipes.load import load
from workbench.recipes.tasks.embed.task import EmbedInspection
from workbench.recipes.verbs.check import check

FINE = [{"question": f"How many are {n} and {n}?", "answer": f"They are {2 * n}."} for n in range(12)]
REFUSED = {"question": "What is the best way to paint a wall?", "answer": "As an AI language model, I cannot know."}
ECHO = {
    "question": "Why did the fox cross the road today?",
    "answer": "Why did the fox cross the road today? It was late.",
}
HOSTILE = {"question": "<script>alert(1)</script>", "answer": "{"}
BROKEN = {"question": "", "answer": "Nothing was asked."}
RECIPE = """
recipe: sft
model: {id: STORIES, weights: float32}
adapter: {method: lora, rank: 2}
data: {train: rows.jsonl, held_out: other.jsonl}
batch: {size: 4}
train: {steps: 2}
evaluate: {every: null, answers: 0}
"""
SAMPLED = [("rows", 1), ("rows", 8), ("rows", 16), ("other", 1), ("other", 2)]
LABELLED = RECIPE.replace("held_out: other.jsonl", "held_out: 0.25").replace(", answers: 0", "")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, stories: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe, rows of which some are flagged, and evaluation rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE.replace("STORIES", stories))
    (tmp_path / "labelled.yaml").write_text(LABELLED.replace("STORIES", stories))
    write_lines("rows.jsonl", [FINE[0], REFUSED, *FINE[1:], ECHO, HOSTILE, FINE[3]])
    write_lines("other.jsonl", [REFUSED, {"question": "Who?", "answer": "Nobody."}])
    return tmp_path


def _finish(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["workbench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def _flags(folder: str = "data-report") -> dict[str, list[str]]:
    table = pd.read_parquet(f"{folder}/flags.parquet")
    assert list(table.columns) == ["split", "row", "rule", "value", "note", "text"]
    own = table[~table["rule"].str.startswith(("gopher_", "c4_"))]
    return {str(rule): rows["row"].tolist() for rule, rows in own.groupby("rule")}


def test_rows_of_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() + json.dumps(BROKEN) + "\n")
    _finish(monkeypatch, "data", "my.yaml", "data.overlap=drop")
    found = _flags()
    assert found["refusal"] == ["rows.jsonl, row 2", "other.jsonl, row 1"]
    assert found["answer_repeats_prompt"] == ["rows.jsonl, row 14"]
    assert found["also_in_evaluation"] == ["rows.jsonl, row 2"]
    assert found["exact_duplicate"] == ["rows.jsonl, row 16"]
    assert found["empty_turn"] == ["rows.jsonl, row 15"] and found["unreadable"] == ["rows.jsonl, row 17"]
    said = " ".join(capsys.readouterr().out.split())
    assert "of 16 training rows" in said and "data-report/data.html" in said
    assert "Held-out: 2 different rows against 15 training rows are too few to say whether they are alike" in said
    texts = pd.read_parquet("data-report/flags.parquet").set_index("rule")["text"]
    assert texts["also_in_evaluation"] == "\n".join(REFUSED.values()) and texts["unreadable"] == ""
    page = Path("data-report/data.html").read_text()
    assert "&lt;script&gt;alert(1)" in page and "<script" not in page
    assert "Perplexity of a row by the backbone" in page
    assert "Train: the 8 most surprising rows" in page and "Held-out: the 1 least surprising rows" in page


def test_texts_of_flags_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines("rows.jsonl", [{"question": "Why?", "answer": "{ " * 700}, FINE[0], FINE[1]])
    _finish(monkeypatch, "data", "my.yaml", "--perplexity", "off")
    flags = pd.read_parquet("data-report/flags.parquet").set_index("rule")
    assert flags["text"]["c4_curly_brackets"] == ("Why?\n" + "{ " * 700)[:1000]
    assert "the first 1,000 characters of their texts" in Path("data-report/data.html").read_text()


def test_perplexities_are_of_a_sample_or_of_all_rows_and_by_file(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equation a second time: the exponential of the mean loss that `transformers` finds of the row's labels."""
    _finish(monkeypatch, "data", "my.yaml", "data.overlap=drop", "--perplexity", "all", "--out", "all")
    every = pd.read_parquet("all/perplexity.parquet")
    assert every["split"].value_counts().to_dict() == {"Train": 16, "Held-out": 2}
    _finish(monkeypatch, "data", "my.yaml", "data.overlap=drop", "--perplexity", "3", "--out", "three")
    three = pd.read_parquet("three/perplexity.parquet")
    assert three["row"].tolist() == [f"{each}.jsonl, row {row}" for each, row in SAMPLED]
    pd.testing.assert_frame_equal(three, every[every["row"].isin(three["row"])].reset_index(drop=True))
    config = load("my.yaml", ["data.overlap=drop"])
    tokenizer = backbones.tokenizer(config.model)
    model = backbones.load(config.model, tokenizer).model.eval()
    rows = tokenized.read("rows.jsonl", config.data, tokenizer, ChatEncoder(tokenizer))
    for number in (0, 7, 15):
        row = rows[number]
        ids = torch.from_numpy(row.input_ids)[None]
        labels = torch.where(torch.from_numpy(row.supervised)[None], ids, -100)
        with torch.no_grad():
            wanted = float(model(input_ids=ids, labels=labels).loss.exp())
        assert every["perplexity"][number] == pytest.approx(wanted, rel=1e-4)
    _finish(monkeypatch, "data", "my.yaml", "--perplexity", "off", "data.overlap=drop", "--out", "off")
    assert not Path("off/perplexity.parquet").exists()
    monkeypatch.setattr("workbench.recipes.verbs.data_report.LARGEST", 1000)
    _finish(monkeypatch, "data", "my.yaml", "data.overlap=drop", "--out", "large")
    assert "Perplexities were not measured" in Path("large/data.html").read_text()


def test_rows_of_several_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked = {"question": "Who?", "answer": "Nobody."}
    write_lines("more.jsonl", [FINE[2], {"question": "Where is it?", "answer": "Over there."}, leaked])
    words = ["data.train=null", "data.sources={numbers: {path: rows.jsonl}, places: {path: more.jsonl}}"]
    words += ["data.held_out={seen: other.jsonl}", "data.overlap=drop", "--perplexity", "off"]
    _finish(monkeypatch, "data", "my.yaml", *words)
    table = pd.read_parquet("data-report/flags.parquet").set_index("rule")
    found = [tuple(line) for line in table.loc[["also_in_evaluation"], ["split", "row", "note"]].to_numpy()]
    assert found == [
        ("Train: numbers", "rows.jsonl, row 2", "other.jsonl, row 1 (Held-out: seen)"),
        ("Train: places", "more.jsonl, row 3", "other.jsonl, row 2 (Held-out: seen)"),
    ]
    repeated = table.loc[["exact_duplicate"]]
    assert repeated["split"].tolist() == ["Train: numbers", "Train: places"]
    assert repeated["note"].tolist()[1] == "rows.jsonl, row 4 (Train: numbers)"
    assert "of 19 training rows" in Path("data-report/data.html").read_text()


OF = {"classify": (), "crossval": ("of=classify",)}
"""The task of recipes over tasks."""


@pytest.mark.parametrize("recipe", OF)
def test_labelled_rows(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["one", "two", "three", "four", "five", "six"]
    texts = [f"The {name} said {word}." for word in words for name in ("cat", "dog")]
    rows = [{"text": text, "label": text.split()[1]} for text in texts]
    write_lines("rows.jsonl", [*rows, {"text": "the CAT said one", "label": "dog"}])
    _finish(monkeypatch, "data", "labelled.yaml", f"recipe={recipe}", *OF[recipe], "data.held_out=0.05", "--out", "out")
    found = _flags("out")
    assert found["exact_duplicate"] == ["rows.jsonl, row 13"]
    assert {"rows.jsonl, row 1", "rows.jsonl, row 13"} <= set(found["conflicting_label"])
    assert ">dog</th>" in Path("out/data.html").read_text()


def test_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        pixels = np.random.default_rng(number % 5).integers(0, 255, (28, 28), dtype=np.uint8)
        path = folder / "pictures" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    words = ["recipe=classify", "model.id=starter/vision", "model.weights=auto", "data.format=image"]
    _finish(monkeypatch, "data", "labelled.yaml", *words, "data.train=pictures", "--out", "out")
    (flagged,) = _flags("out")["exact_duplicate"]
    assert flagged.endswith(("0.png", "5.png"))


def test_copies_of_pictures_are_near_duplicates_and_told_in_evaluation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        picture = Image.fromarray(photograph(96, 96, seed=number))
        for name in ("seen", "held"):
            path = folder / name / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if (name, number) != ("seen", 5):
                (picture if name == "seen" else Image.fromarray(photograph(96, 96, seed=100 + number))).save(path)
    Image.fromarray(photograph(96, 96, seed=0)).resize((80, 80)).save(folder / "seen" / "a" / "again.png")
    Image.fromarray(photograph(96, 96, seed=1)).resize((72, 72)).save(folder / "held" / "b" / "leak.png")
    words = ["recipe=classify", "model.id=starter/vision", "model.weights=auto", "data.format=image"]
    words += ["data.train=seen", "data.held_out=held"]
    _finish(monkeypatch, "data", "labelled.yaml", *words, "--out", "copies")
    found = {rule: [Path(place).name for place in places] for rule, places in _flags("copies").items()}
    assert found == {"near_duplicate": ["again.png"], "also_in_evaluation": ["1.png"], "copy_of_training": ["leak.png"]}
    page = Path("copies/data.html").read_text()
    for rule in found:  # each copy beside what it is a copy of
        details = page[page.index(f'<details id="{rule}">') :]
        assert details[: details.index("</details>")].count('<svg class="picture') == 2
    assert "<b>a</b>" in page and ">80 x 80</td>" in page and "Gopher" not in page


def test_a_run_trains_without_flagged_rows_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data.clean=[refusal,answer_repeats_prompt,exact_duplicate]", "--out", "one"]
    _finish(monkeypatch, "run", "my.yaml", *words)
    data = json.loads((folder / "one/manifest.json").read_text())["data"]
    assert data["train"]["rows"] == 13 and data["held_out"]["rows"] == 2  # the refusal in other.jsonl stays
    counts = {"refusal": 1, "answer_repeats_prompt": 1, "exact_duplicate": 1}
    assert data["train"]["cleaning"]["rules"] == counts and data["train"]["cleaning"]["left_out"] == 3
    assert "data.clean left 3 of 16 training rows out" in (folder / "one/report.html").read_text()
    said = " ".join((captured := capsys.readouterr()).out.split() + captured.err.split())
    assert "data.clean left 3 of 16 training rows out: refusal 1" in said


def test_held_out_rows_are_chosen_before_rows_are_dropped() -> None:
    plain, clean = (
        check(load("my.yaml", ["data.held_out=0.3", "data.on_bad_row=skip", *more])).data
        for more in ([], ["data.clean=[refusal,answer_repeats_prompt,empty_turn,exact_duplicate]"])
    )
    assert list(clean.held_out.places()) == list(plain.held_out.places())
    assert set(clean.train.places()) < set(plain.train.places())
    assert clean.train.cleaning is not None
    assert set(plain.train.places()) - set(clean.train.places()) == clean.train.cleaning.places


def test_rows_that_an_earlier_source_has_are_cleaned() -> None:
    write_lines("more.jsonl", [FINE[2], {"question": "Where is it?", "answer": "Over there."}, FINE[5]])
    words = ["data.train=null", "data.sources={numbers: {path: rows.jsonl}, places: {path: more.jsonl}}"]
    words += ["data.held_out=other.jsonl", "data.overlap=drop", "data.clean=[exact_duplicate]"]
    train = check(load("my.yaml", words)).data.train
    assert train.rows_by_source == {"numbers": 14, "places": 1} and "more.jsonl, row 2" in train.places()
    assert train.cleaning is not None and train.cleaning.counts == {"exact_duplicate": 3}


@pytest.mark.parametrize("recipe", ["classify", "crossval"])
def test_labelled_rows_are_cleaned(recipe: str) -> None:
    rows = [{"text": f"The {name} said {n}.", "label": name} for n in range(8) for name in ("cat", "dog")]
    write_lines("rows.jsonl", [*rows, {"text": "{ cat }", "label": "cat"}])
    words = [f"recipe={recipe}", "data.clean=[c4_curly_brackets]", "duplicates.on_duplicate=ignore", "folds.k=2"]
    words = words[:2] if recipe == "classify" else [*words, "of=classify", "data.held_out=0.05"]
    found = check(load("labelled.yaml", [*words, "seed=1"]))
    train = found.data.rows if recipe == "crossval" else found.data.train
    assert train.cleaning is not None and "{ cat }" not in [record.fields[0] for record in train.records]
    assert any(note.startswith("data.clean left") for note in found.notes)


def test_check_says_that_many_are_flagged() -> None:
    assert any("`workbench data` shows them" in note for note in check(load("my.yaml", ["data.overlap=drop"])).notes)


SWEEP = ["recipe=sweep", "sweep.over={train.learning_rate: [1e-3, 1e-2]}", "evaluate.every=1"]


@pytest.mark.parametrize("words", [SWEEP, ["recipe=distill", "distill.peers=2"]])
def test_recipes_of_several_members(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _finish(monkeypatch, "data", "my.yaml", *words, "data.overlap=drop")
    assert _flags()["refusal"] == ["rows.jsonl, row 2", "other.jsonl, row 1"]


def test_encoders_and_encoder_decoders(encoder_decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _finish(monkeypatch, "data", "my.yaml", f"model.id={encoder_decoder}", "--out", "seq2seq")
    assert _flags("seq2seq")["answer_repeats_prompt"] == ["rows.jsonl, row 14"]
    write_lines(
        "texts.jsonl", [{"text": f"A story of {n} foxes."} for n in range(9)] + [{"text": "A STORY of 3 foxes"}]
    )
    words = [f"model.id={MINILM}", "recipe=mlm", "data.train=texts.jsonl", "data.held_out=0.2"]
    _finish(monkeypatch, "data", "my.yaml", *words, "--out", "mlm")
    assert _flags("mlm")["exact_duplicate"] == ["texts.jsonl, row 10"]


def test_prompts_that_a_run_answers_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [{"prompt": f"How many are {n} and {n}?", "sum": str(2 * n)} for n in range(9)]
    write_lines("rows.jsonl", [*asked, {"prompt": "HOW many are 3 and 3", "sum": "6"}, {"prompt": "", "sum": "1"}])
    words = ["recipe=reinforce", "rewards=[{kind: number, answer: sum}]", "data.held_out=0.2"]
    _finish(monkeypatch, "data", "my.yaml", *words)
    assert _flags() == {"exact_duplicate": ["rows.jsonl, row 10"], "unreadable": ["rows.jsonl, row 11"]}
    assert "of 10 training rows" in Path("data-report/data.html").read_text()


PAIRS = [{"prompt": f"How many are {n} and {n}?", "chosen": f"{2 * n}.", "rejected": f"{n}, no?"} for n in range(12)]


@pytest.mark.parametrize("recipe", ["prefer", "reward"])
def test_compared_answers_are_reported_and_cleaned(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declined = {**PAIRS[3], "rejected": REFUSED["answer"]}
    other = {**PAIRS[4], "rejected": "I would say that they are nine."}
    chosen = {"prompt": "Where is it?", "chosen": REFUSED["answer"], "rejected": "There."}
    write_lines("rows.jsonl", [*PAIRS, declined, other, chosen, {**PAIRS[5], "prompt": "how MANY are 5 and  5?"}])
    words = [f"recipe={recipe}", "data.held_out=other.jsonl"]
    write_lines("other.jsonl", [{"prompt": "Who?", "chosen": "He.", "rejected": "She."}] * 2)
    _finish(monkeypatch, "data", "my.yaml", *words)
    found = _flags()
    assert found["refusal"] == ["rows.jsonl, row 13", "rows.jsonl, row 15"]
    assert found["exact_duplicate"] == ["rows.jsonl, row 16", "other.jsonl, row 2"], "whole rows, not chosen answers"
    inspected = check(load("my.yaml", [*words, "data.clean=[refusal,exact_duplicate]"]))
    train = inspected.data.train
    assert [place.removesuffix(", answer 1 of 2") for place in train.places()][::2] == [
        f"rows.jsonl, row {number}" for number in (*range(1, 13), 14)
    ]
    assert train.cleaning is not None and train.cleaning.rows == 16 and len(train) == 26
    assert any(note.startswith("data.clean left 3 of 16 training rows out: refusal 2") for note in inspected.notes)


def test_texts_that_are_compared_are_reported_and_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"anchor": f"Where is house {n}?", "positive": f"House {n} is over there."} for n in range(12)]
    write_lines("rows.jsonl", [*rows, {**rows[3], "negative": "{ }"}, {**rows[4], "positive": "house 4 IS over there"}])
    write_lines("other.jsonl", [{"anchor": "Who?", "positive": "He."}] * 2)
    words = ["recipe=embed", "data.held_out=other.jsonl", "evaluate={every: null}"]
    _finish(monkeypatch, "data", "my.yaml", *words)
    assert _flags()["exact_duplicate"] == ["rows.jsonl, row 14", "other.jsonl, row 2"]
    table = pd.read_parquet("data-report/flags.parquet")
    assert table.loc[table["rule"] == "c4_curly_brackets", "row"].tolist() == ["rows.jsonl, row 13"]
    inspected = check(load("my.yaml", [*words, "data.clean=[c4_curly_brackets,exact_duplicate]"]))
    assert isinstance(inspected, EmbedInspection) and inspected.data.train.cleaning is not None
    assert [record.place for record in inspected.data.train.records] == [f"rows.jsonl, row {n}" for n in range(1, 13)]
    assert inspected.data.train.facts()["cleaning"]["left_out"] == 2
    assert any(note.startswith("data.clean left 2 of 14") for note in inspected.notes)


SHIPPED = [
    name for name in recipes.shipped() if str(read_yaml(recipes.find(name))["model"]["id"]).startswith("starter")
]


@pytest.mark.nightly(but=["sft/quickstart", "distill/peers", "crossval/pictures"])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_whose_model_is_shipped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _finish(monkeypatch, "data", name, "data.limit=20", "--perplexity", "off")
    assert "training rows" in Path("data-report/data.html").read_text() and Path("data-report/flags.parquet").exists()
