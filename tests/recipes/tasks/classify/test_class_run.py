"""Classification from the command's side: every kind of label and backbone, the same curve however it is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import workbench
from tests.conftest import MINILM, save_tiny
from tests.recipes import weather as varied
from tests.run_files import read_losses, read_scores, trains_rows, write_lines
from workbench import recipes
from workbench.config.sections.distill_config import TeacherConfig
from workbench.data.labelled import labelled_data
from workbench.distillation import class_distillation, teacher_sources
from workbench.errors import BackboneError, ConfigError, Stopped
from workbench.evaluation import classification_scores
from workbench.models import classifier
from workbench.recipes.load import load
from workbench.recipes.tasks.classify.task import ClassInspection
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.export import export
from workbench.recipes.verbs.generate import generate, predict
from workbench.recipes.verbs.merge import merge
from workbench.runs import run_directory
from workbench.runs.trust import Trust

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
WORDS = {"sun": "the sun is warm and bright", "rain": "cold rain fell on the roof", "snow": "white snow lay all around"}
ANIMALS = ("cat", "dog", "bird", "fish", "horse", "cow", "mouse", "fox")


def weather(rows: int, *, rare: int | None = None) -> list[dict[str, Any]]:
    """Sentences of unequal length whose words say their class; `rare` of the class snow."""
    names = list(WORDS)
    found = []
    for number in range(rows):
        label = names[number % 3] if rare is None else "snow" if number < rare else names[number % 2]
        animal = ANIMALS[number % 8]
        text = f"One day {WORDS[label]}" + f", said the {animal}" * (1 + number % 4) + f" number {number}."
        found.append({"text": text, "label": label})
    return found


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT, dropout and all, with the vocabulary of a real one."""
    return save_tiny(tmp_path_factory.mktemp("bert"), "Bert", "SequenceClassification", MINILM, vocabulary=None)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, bert: str) -> Train:
    known = ["data.held_out=0.2", f"model.id={bert}", "model.weights=float32"]
    known += ["adapter={method: full}", "train.learning_rate=3e-3", "train.steps=60", "batch.size=12"]
    known += ["evaluate.every=null", "save.every=null", "batch.tokens_per_device=100000"]
    return trains_rows(tmp_path_factory.mktemp("runs"), "classify/quickstart", *known)


@pytest.fixture(scope="module")
def taught(train: Train) -> Path:
    """A finished run of one class a row. Read only."""
    return train("taught", weather(90))


def _predictions(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / "predictions.parquet")


def test_classes_are_learnt_and_the_report_shows_them(taught: Path) -> None:
    scores = read_scores(taught)
    assert scores["before"]["accuracy"] == pytest.approx(1 / 3) and scores["before"]["loss"] == pytest.approx(np.log(3))
    assert scores["after"]["accuracy"] > 0.9
    assert scores["after"]["accuracy_low"] < scores["after"]["accuracy"] <= scores["after"]["accuracy_high"]
    found = _predictions(taught)
    assert list(found) == ["row", "text", "id", "label", "predicted", "p_rain", "p_snow", "p_sun"]
    np.testing.assert_allclose(found.filter(like="p_").sum(axis=1), 1)
    assert float((found["label"] == found["predicted"]).mean()) == pytest.approx(scores["after"]["accuracy"], abs=1e-6)
    assert dict(found["label"].value_counts()) == {"rain": 6, "snow": 6, "sun": 6}, "stratified"
    page = (taught / "report.html").read_text()
    for shown in ("Accuracy", "Confusion", "Baseline", "nats per row", "taken for"):
        assert shown in page
    assert "nats per token" not in page and "Answers" not in page
    told = pd.read_parquet(taught / "dynamics.parquet").dropna(subset=["text"]).set_index("row")["text"]
    rows = {f"taught.jsonl, row {number}": each["text"] for number, each in enumerate(weather(90), start=1)}
    assert len(told) == 12 and all(text == rows[str(row)] and text[:100] in page for row, text in told.items())


def test_same_curve_for_any_micro_batch(train: Train, taught: Path) -> None:
    rows = taught.parent / "taught.jsonl"
    parts, together = (
        train(name, rows, "train.steps=12", f"batch.tokens_per_device={tokens}")
        for name, tokens in (("parts", 40), ("together", 100_000))
    )
    assert read_losses(parts) == pytest.approx(read_losses(together), rel=1e-4)
    weighted = ["classes.weights=balanced", "data.columns={weight: weight}", "train.steps=4"]
    uneven = [{**row, "weight": 0.1 + n % 5 / 7} for n, row in enumerate(weather(60, rare=12))]
    whole = train("whole", uneven, *weighted)
    pieces = train("pieces", taught.parent / "whole.jsonl", *weighted, "batch.tokens_per_device=40")
    assert read_losses(pieces) == pytest.approx(read_losses(whole), rel=1e-5)


def test_a_stopped_run_resumes_to_the_same_bits(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """With classes drawn equally often, where the rows of a step depend on the epoch."""
    from workbench.cli.console import Terminal

    rows, words = weather(50, rare=8), ["classes.sampling=under", "train.steps=7", "batch.size=10"]
    unbroken = train("unbroken", rows, *words)
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "stop_requested", lambda _: True)
        with pytest.raises(Stopped, match="after step 1 of 7"):
            train("broken", unbroken.parent / "unbroken.jsonl", *words)
    resumed = train("broken", unbroken.parent / "unbroken.jsonl", *words, resume=True)
    assert read_losses(resumed) == read_losses(unbroken)


def test_verbs_agree_with_the_run_to_the_last_bit(taught: Path, tmp_path: Path) -> None:
    assert evaluate(taught, []) == read_scores(taught)["after"]
    known = _predictions(taught)
    asked = tmp_path / "asked.csv"
    known[["text"]].to_csv(asked, index=False)
    assert predict(taught, str(asked), out=tmp_path / "said.parquet", max_new_tokens=1).rows == len(known)
    said = pd.read_parquet(tmp_path / "said.parquet")
    pd.testing.assert_frame_equal(said.filter(like="p_"), known.filter(like="p_"), check_exact=True)
    with pytest.raises(ConfigError, match=r"recipe classify trains no model that writes text.*workbench predict"):
        generate(taught, "Hello", max_new_tokens=2)


def test_check_shows_rows_classes_and_cuts(taught: Path, bert: str) -> None:
    words = [f"data.train={taught.parent}/taught.jsonl", "data.held_out=0.2", f"model.id={bert}", "data.max_tokens=12"]
    found = check(load("classify/quickstart", words))
    assert isinstance(found, ClassInspection)
    assert found.data.train.truncated > 0 and found.data.train.lengths.max() == 12
    assert found.data.train.facts()["classes"] == {"rain": 24, "snow": 24, "sun": 24}
    place, text, label = found.examples[0]
    assert place.endswith("row 1") and text.startswith("[CLS] one day") and "number" not in text and label in WORDS


@pytest.mark.nightly(but=["bert"])
@pytest.mark.parametrize("backbone", ["bert", "stories", "minilm"])
def test_lora_merges_into_a_stock_classifier(
    train: Train, bert: str, stories: str, backbone: str, tmp_path: Path
) -> None:
    """A stock pipeline, which pads by the tokenizer's own pad token, names the classes that the run names."""
    folder = {"bert": bert, "stories": stories, "minilm": MINILM}[backbone]
    lora = ["adapter={method: lora, rank: 4}", f"model.id={folder}", "train.steps=4"]
    run = train(f"lora-{backbone}", weather(60), *lora)
    found = merge(run, out=tmp_path / "merged", weights="float32")
    assert "same class 100.00%" in found.agreement.sentence
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert stock.config.problem_type == "single_label_classification"
    known = _predictions(run)
    ask = pipeline("text-classification", model=stock, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "merged"))
    for row, answers in zip(known.to_dict("records"), ask(list(known["text"]), batch_size=5, top_k=None), strict=True):
        for answer in answers:
            assert answer["score"] == pytest.approx(row[f"p_{answer['label']}"], abs=1e-4)


@pytest.mark.nightly(but=["bert"])
@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["bert", "stories"])
def test_an_exported_classifier_says_what_the_run_says(
    train: Train, bert: str, short_stories: str, backbone: str, tmp_path: Path
) -> None:
    """By onnxruntime and by PEFT; a server of language models takes none."""
    words = ["adapter={method: lora, rank: 4}", f"model.id={bert if backbone == 'bert' else short_stories}"]
    run = train(f"exported-{backbone}", weather(60), *words, "train.steps=4")
    for to in ("peft", "onnx"):
        found = export(run, to=to, out=tmp_path / to)
        assert "same class 100.00%" in found.error and float(found.error.split("divergence ")[1].split(" ")[0]) < 1e-6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    known = _predictions(run)
    asked = tokenizer(list(known["text"]), padding=True, return_tensors="np")
    (logits_NC,) = session.run(["logits"], {name: asked[name] for name in ("input_ids", "attention_mask")})
    found_NC = torch.from_numpy(logits_NC).softmax(-1).numpy()
    wanted_NC = known[[f"p_{label}" for label in ("rain", "snow", "sun")]].to_numpy()
    np.testing.assert_allclose(found_NC, wanted_NC, atol=1e-4)
    with pytest.raises(ConfigError, match="--to vllm takes language models"):
        export(run, to="vllm", out=tmp_path / "vllm")


def test_neither_padding_nor_its_side_changes_a_causal_row(train: Train, stories: str) -> None:
    """stories260K has no pad token."""
    run = train("padding", weather(45), "adapter={method: lora}", f"model.id={stories}", "train.steps=2")
    config = run_directory.read_config(run)
    model = classifier.load(run, config)
    rows = labelled_data.load(config, model.reader).held_out
    together = classification_scores.predict_outputs(model.model, model.outputs, rows)
    one_by_one = np.concatenate(
        [
            classification_scores.predict_outputs(model.model, model.outputs, rows.subset(np.asarray([n])))
            for n in range(len(rows))
        ]
    )
    np.testing.assert_allclose(together, one_by_one, rtol=1e-4, atol=1e-5)
    pad = model.backbone.config.pad_token_id
    ids = [torch.from_numpy(each) for each in rows.inputs.arrays()]
    left = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], True, 0, "left")
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        stock = model.model(input_ids=left, attention_mask=mask, position_ids=positions).logits
    np.testing.assert_allclose(stock.numpy(), together, rtol=1e-4, atol=1e-5)


def test_several_classes_a_row(train: Train) -> None:
    rows = []
    for number, row in enumerate(weather(90)):
        animal = ANIMALS[number % 8]
        labels = [row["label"], *(["pet"] if animal in ("cat", "dog") else [])]
        rows.append({"text": row["text"], "label": "; ".join(labels) if number % 9 else ""})
    words = [
        "classes.kind=several",
        "classes.separator=;",
        "train.steps=120",
        "classes.smoothing=0.02",
        "train.learning_rate=1e-2",
    ]
    run = train("several", rows, *words, "classes.gamma=0.5")
    scores = read_scores(run)
    assert scores["after"]["micro_f1"] > 0.7 > scores["before"]["micro_f1"]
    assert scores["after"]["loss"] < 0.7 * scores["before"]["loss"]
    found = _predictions(run)
    assert all(isinstance(label, np.ndarray) for label in found["label"])
    assert set(found.columns[5:]) == {"p_rain", "p_snow", "p_sun", "p_pet"}
    assert "Micro-F1" in (run / "report.html").read_text()
    assert evaluate(run, []) == scores["after"]


def test_numbers(train: Train, tmp_path: Path) -> None:
    warmth = {"sun": 25.0, "rain": 10.0, "snow": -5.0}
    rows = [{"text": row["text"], "label": warmth[row["label"]] + n % 3 / 10} for n, row in enumerate(weather(90))]
    run = train("numbers", rows, "classes.kind=number", "train.steps=80", "train.learning_rate=1e-2")
    scores = read_scores(run)
    assert scores["before"]["rmse"] == pytest.approx(12.2, abs=0.5)
    assert scores["after"]["rmse"] < 4 and scores["after"]["r2"] > 0.9
    found = _predictions(run)
    assert float(((found["label"] - found["predicted"]) ** 2).mean() ** 0.5) == pytest.approx(
        scores["after"]["rmse"], abs=1e-5
    )
    merged = merge(run, out=tmp_path / "merged", weights="float32")
    assert "100.00%" in merged.agreement.sentence
    _, scale, mean = merged.sentence.rsplit("times", 1)[0], *merged.sentence.rsplit("times", 1)[1].split("plus")
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")(found["text"][0], return_tensors="pt")
    with torch.no_grad():
        said = float(stock(**ids).logits) * float(scale) + float(mean.split(" is ")[0])
    assert said == pytest.approx(found["predicted"][0], rel=1e-3)


@pytest.mark.slow
def test_pairs_of_responses(train: Train) -> None:
    """The better response thanks; both parts survive a budget that the prompt alone would fill."""
    rows = []
    for number in range(120):
        winner = ("a", "b", "tie")[number % 3]
        responses = {
            name: ("thank you so much, " if winner in (name, "tie") else "no idea, ") + ANIMALS[(number + shift) % 8]
            for shift, name in enumerate("ab")
        }
        prompt = f"Question {number}: " + "what is it " * (5 + number % 30)
        rows.append({"prompt": prompt, "response_a": responses["a"], "response_b": responses["b"], "winner": winner})
    run = train("pairs", rows, "classes.kind=pair", "data.max_tokens=48", "train.steps=200", "batch.size=24")
    assert json.loads((run / "adapter" / "classes.json").read_text())["names"] == ["a", "b", "tie"]
    assert read_scores(run)["after"]["accuracy"] > 0.8
    assert json.loads((run / "manifest.json").read_text())["data"]["train"]["truncated"] > 50


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("name", [name for name in recipes.shipped() if name.startswith("classify/")])
def test_every_shipped_recipe_trains_the_starter(name: str, tmp_path: Path) -> None:
    words = ["train.steps=8", "data.limit=320", "data.held_out=0.1", "evaluate.every=null", "save.every=null"]
    run = workbench.run(name, words, out=tmp_path / "run", quiet=True)
    losses = read_losses(run)
    classes = json.loads((run / "adapter" / "classes.json").read_text())["names"]
    assert losses[0] == pytest.approx(np.log(len(classes)), abs=0.2) and len(classes) >= 10
    assert read_scores(run)["after"]["loss"] < read_scores(run)["before"]["loss"] - 0.05
    assert "<path" in (run / "report.html").read_text()


def test_the_shipped_questions_are_whole_and_apart() -> None:
    found = check(load("classify/quickstart", ["evaluate.probe=0"]))
    assert isinstance(found, ClassInspection) and found.data.train.truncated == 0
    counts = [split.facts()["classes"] for split in (found.data.train, found.data.held_out)]
    assert [set(each.values()) for each in counts] == [{80}, {20}] and len(counts[0]) == 20
    assert set(counts[0]) == set(counts[1])


@pytest.mark.slow
def test_eight_bits_that_depend_on_other_rows_are_refused_for_what_they_are(tmp_path: Path) -> None:
    """MiniLM has outliers, which bitsandbytes multiplies apart: by the columns that any row of a pass has them in."""
    path = tmp_path / "rows.jsonl"
    write_lines(path, ({"text": f"row {n}", "label": "ab"[n % 2]} for n in range(40)))
    words = [f"model.id={MINILM}", "model.weights=int8", f"data.train={path}", "data.held_out=0.2", "data.columns={}"]
    words += ["train.steps=1", "train.epochs=null", "model.compute=bfloat16"]
    with pytest.raises(BackboneError, match=r"^model\.weights=int8: .* outliers apart.*Write model\.weights=nf4"):
        workbench.run("classify/quickstart", words, out=tmp_path / "run", quiet=True)


VIEWS = """
def views(row): return [{"text": row["text"].replace("~", "")}]
"""


@pytest.mark.slow
def test_views_that_help_held_out_rows_are_used_by_every_verb(train: Train, tmp_path: Path) -> None:
    """Held-out and test rows have marks between the letters, which a view takes out."""
    marked = [{**row, "text": "~".join(row["text"])} for row in varied.weather(60, seed=1)]
    held_out, test = (write_lines(tmp_path / f"{name}.jsonl", marked) for name in ("held_out", "test"))
    (tmp_path / "mine.py").write_text(VIEWS)
    words = [f"data.held_out={held_out}", f"data.test={test}", "data.overlap=tell", "data.max_tokens=64"]
    words += [f"tta={{views: [user], function: {tmp_path / 'mine.py'}, merge: max}}", "evaluate.metric=macro_f1"]
    run = train("marked", varied.weather(90, seed=0), *words)
    scores = read_scores(run)
    decided = json.loads((run / "decision.json").read_text())["tta"]
    assert decided["names"] == ["plain", "user 1"] and decided["gain"]["accepted"] and not decided["gain"]["kept"]
    assert "Macro-F1" in decided["gain"]["score"], "the gate judges evaluate.metric"
    for plain, views in (("plain", "after"), ("plain_test", "test")):
        assert scores[plain]["accuracy"] + 0.2 < scores[views]["accuracy"]
    page = (run / "report.html").read_text()
    assert "Test rows, read once" in page and "These rows chose it" in page

    assert evaluate(run, [], trust=True) == scores["test"] != scores["plain_test"]
    with pytest.raises(ConfigError, match=r"need tta.function=.*--trust"):
        evaluate(run, [])
    predict(run, str(test), out=tmp_path / "p.csv", max_new_tokens=1, trust=True)
    found, kept = pd.read_csv(tmp_path / "p.csv"), pd.read_parquet(run / "test_predictions.parquet")
    pd.testing.assert_frame_equal(found.filter(like="p_"), kept.filter(like="p_"), rtol=1e-5)
    config = run_directory.shipped_config(run, Trust(True))
    served: Any = recipes.task.implementation(config).serve(run, config, "marked", 0, queue=4)
    said = [each["label"] for each in served.classify([row["text"] for row in marked])]
    assert said == kept["predicted"].tolist()

    # Neither the adapter alone nor a stock model does what the run does; a student's teacher does.
    for write in (merge, partial(export, to="merged")):
        with pytest.raises(ConfigError, match=r"several views of a row.*--resume tta.keep=false"):
            write(run, out=tmp_path / "out", trust=True)
    labels = classifier.read_labels(run / "adapter")
    source = teacher_sources.find(TeacherConfig(id=str(run), trust=True), config.model)
    (teacher,) = class_distillation.class_teachers(source, config, labels)
    rows = labelled_data.scored(config, teacher.reader, labels)
    p_NC = labels.values(teacher.predict(teacher.rows(rows, config)))
    np.testing.assert_allclose(p_NC, kept.filter(like="p_"), atol=1e-6)

    before = (run / "adapter" / "model.safetensors").read_bytes()
    workbench.run(run / "config.yaml", ["tta.keep=false"], out=run, resume=True, quiet=True)
    again = read_scores(run)
    assert again["after"] == scores["plain"] and again["test"] == scores["plain_test"] and "plain" not in again
    assert (run / "adapter" / "model.safetensors").read_bytes() == before, "nothing was trained again"
    assert merge(run, out=tmp_path / "merged", trust=True).agreement.same == 1
