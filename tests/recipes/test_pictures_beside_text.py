"""A run over rows with pictures: trained, killed and resumed, scored, asked."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image, ImageColor
from safetensors.numpy import load_file
from starlette.testclient import TestClient
from transformers import AutoModelForImageTextToText, AutoProcessor

import workbench
from tests.stopping import stop_after
from tests.vision_families import FAMILIES, save
from tests.workbench.evaluation.serving.conftest import SETTINGS
from workbench.config import ModelConfig
from workbench.config.sections.image_config import ImageConfig
from workbench.errors import ConfigError, Stopped
from workbench.evaluation.serving.app import Server
from workbench.models import backbones, exported
from workbench.models.picture_processor import PictureProcessor
from workbench.recipes.verbs import serving
from workbench.runs import metrics_log, run_directory
from workbench.runs.trust import Trust

WORDS = [
    *("adapter.rank=4", "batch.size=8", "train.steps=4", "train.learning_rate=1e-2", "data.held_out=0.25"),
    *("evaluate.answers=4", "evaluate.max_new_tokens=3", "evaluate.every=null", "model.weights=float32"),
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    lines = []
    (folder / "pictures").mkdir()
    for number, colour in enumerate(["red", "green", "blue", "black"] * 6):
        Image.new("RGB", (20 + number, 30), colour).save(folder / "pictures" / f"{number}.png")
        lines.append({"question": f"Which colour has {number}?", "answer": colour, "image": f"{number}.png"})
    lines.append({"question": "Which colour has the sky?", "answer": "blue"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def words(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = save("llava", tmp_path_factory.mktemp("llava"), mixed=True)
    return [f"model.id={model}", f"data.train={rows}", "image.folder=pictures", *WORDS]


@pytest.fixture(scope="module")
def run(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workbench.run("sft/quickstart", words, out=tmp_path_factory.mktemp("runs") / "whole", quiet=True)


def test_check_shows_where_a_picture_stands_and_its_tokens(words: list[str]) -> None:
    found = workbench.check("sft/quickstart", words)
    pieces = [piece for _, example in found.examples for piece in example]
    assert ("[picture: 4 tokens]", False) in pieces
    assert all("<image>" not in text for text, _ in pieces)


def test_scores_tell_what_the_pictures_are_worth(run: Path) -> None:
    scores = json.loads((run / "scores.json").read_text())
    for moment in ("before", "after"):
        assert {"loss_of_other_pictures", "f1_of_other_pictures"} <= scores[moment].keys()
        assert scores[moment]["loss_of_other_pictures"] != scores[moment]["loss"]


def test_the_report_shows_the_pictures_of_its_answers(run: Path) -> None:
    answers = pd.read_parquet(run / "predictions.parquet").set_index("row")["reference"]
    shown = pd.read_parquet(run / "pictures.parquet").set_index("row")["jpeg"]
    assert len(shown) and set(shown.index) <= set(answers.index)
    for place, jpeg in shown.items():
        pixel = Image.open(io.BytesIO(jpeg)).convert("RGB").getpixel((5, 5))
        assert np.abs(np.subtract(pixel, ImageColor.getrgb(answers[place].strip()))).max() < 12
    assert (run / "report.html").read_text().count('<img class="sample-picture"') == len(shown)


def test_any_micro_batch_gives_the_same_curve(run: Path, words: list[str], tmp_path: Path) -> None:
    def curve(of: Path) -> list[float]:
        return [line["loss"] for line in metrics_log.read(of) if "loss" in line]

    for tokens, packing in ((40, False), (100, False), (100, True)):
        others = [*words, f"batch.tokens_per_device={tokens}", f"batch.packing={packing}"]
        cut = workbench.run("sft/quickstart", others, out=tmp_path / f"{tokens} {packing}", quiet=True)
        assert curve(run) == pytest.approx(curve(cut), rel=1e-4)


def _of_family(family: str, run: Path, words: list[str], folder: Path) -> tuple[Path, list[str]]:
    """A run of a family over the rows of these tests, and its settings; `run` is LLaVA's."""
    if family == "llava":
        return run, words
    own = [*words, f"model.id={save(family, folder / family, mixed=True)}"]
    return workbench.run("sft/quickstart", own, out=folder / "whole", quiet=True), own


@pytest.mark.nightly(but=["llava"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_has_the_same_adapter(family: str, run: Path, words: list[str], tmp_path: Path) -> None:
    whole, own = _of_family(family, run, words, tmp_path)
    half = tmp_path / "half"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        workbench.run("sft/quickstart", [*own, "save.every=2"], out=half, quiet=True)
    workbench.run("sft/quickstart", [*own, "save.every=2"], out=half, quiet=True, resume=True)
    adapters = [load_file(each / "adapter" / "adapter_model.safetensors") for each in (whole, half)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(np.array_equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


@pytest.mark.nightly(but=["llava"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_says_the_same_in_stock_transformers(
    family: str, run: Path, words: list[str], rows: Path, tmp_path: Path
) -> None:
    whole, _ = _of_family(family, run, words, tmp_path)
    merged = tmp_path / "merged"
    workbench.merge(whole, out=merged, weights="float32")
    stock = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    processor = PictureProcessor(ModelConfig(id=str(merged)), type(stock.config), ImageConfig()).processor
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour has 0?"}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    picture = Image.open(rows.parent / "pictures" / "0.png")
    inputs = processor(text=[text], images=[[picture]], return_tensors="pt")
    config = run_directory.shipped_config(whole, Trust(False, ""))
    with torch.no_grad():
        own, other = exported.load(whole, config).model(**inputs).logits, stock(**inputs).logits
        bare = backbones.load(config.model, backbones.tokenizer(config.model)).model(**inputs).logits
    assert (own - other).abs().max() < 1e-4 < (own - bare).abs().max()


@pytest.mark.nightly
def test_all_weights_are_read_by_the_stock_class(words: list[str], rows: Path, tmp_path: Path) -> None:
    own = [each for each in words if not each.startswith("adapter.")]
    run = workbench.run("sft/quickstart", [*own, "adapter={method: full}"], out=tmp_path / "full", quiet=True)
    stock = AutoModelForImageTextToText.from_pretrained(run / "adapter", dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(run / "adapter")
    part = {"type": "image", "image": Image.open(rows.parent / "pictures" / "0.png")}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "Which colour has 0?"}]}]
    inputs = processor.apply_chat_template(asked, tokenize=True, return_dict=True, return_tensors="pt")
    config = run_directory.shipped_config(run, Trust(False, ""))
    with torch.no_grad():
        own_BLV, other_BLV = exported.load(run, config).model(**inputs).logits, stock(**inputs).logits
        bare_BLV = backbones.load(config.model, backbones.tokenizer(config.model)).model(**inputs).logits
    assert (own_BLV - other_BLV).abs().max() < 1e-5 < (own_BLV - bare_BLV).abs().max()


@pytest.mark.nightly
def test_two_processes_give_the_curve_of_one(run: Path, words: list[str], tmp_path: Path) -> None:
    command = ["workbench", "run", "sft/quickstart", *words, "--devices", "2", "--out", str(tmp_path / "two")]
    subprocess.run(command, check=True, capture_output=True)
    curves = [[line["loss"] for line in metrics_log.read(each) if "loss" in line] for each in (run, tmp_path / "two")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.nightly
def test_folds_in_one_bank_are_those_of_single_runs(words: list[str], tmp_path: Path) -> None:
    own = [each for each in words if not each.startswith("data.held_out")]
    own += ["recipe=crossval", "of=sft", "folds.k=2", "folds.refit=false", "evaluate.answers=0", "train.steps=2"]
    tables = []
    for together in (True, False):
        folds = workbench.run(
            "sft/quickstart", [*own, f"folds.together={together}"], out=tmp_path / str(together), quiet=True
        )
        tables.append(pd.read_parquet(folds / "out_of_fold_held_out_losses.parquet").set_index("row"))
    assert len(tables[0]) == 25 and tables[0]["fold"].equals(tables[1]["fold"])
    assert tables[0]["loss"].to_numpy() == pytest.approx(tables[1]["loss"].to_numpy(), rel=1e-4)


def _pairs(rows: Path) -> list[str]:
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    pairs = [
        {"image": line.get("image"), "question": line["question"], "chosen": line["answer"], "rejected": "purple"}
        for line in lines
    ]
    path = rows.with_name("pairs.jsonl")
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return [f"data.train={path}"]


@pytest.mark.nightly
def test_preferences_cost_the_same_in_any_micro_batch(words: list[str], rows: Path, tmp_path: Path) -> None:
    curves = []
    for name, more in {"whole": [], "cut": ["batch.tokens_per_device=40", "batch.packing=false"]}.items():
        settings = [*words, *_pairs(rows), "evaluate.answers=0", *more]
        found = workbench.run("prefer/quickstart", settings, out=tmp_path / name, quiet=True)
        curves.append([line["loss"] for line in metrics_log.read(found) if "loss" in line])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


REDNESS = """
from PIL import Image

def reward(answers):
    \"\"\"Vowels where the picture is red, other letters where it is not.\"\"\"
    return [_one(each.text, each.row["image"]) for each in answers]

def _one(text, name):
    vowels = sum(letter in "aeiou" for letter in text) / (1 + len(text))
    return vowels if Image.open(FOLDER + name).getpixel((0, 0))[0] > 99 else 1 - vowels
"""


def test_reinforcement_over_prompts_with_pictures(words: list[str], rows: Path, tmp_path: Path) -> None:
    reward, asked = tmp_path / "redness.py", rows.with_name("asked.jsonl")
    reward.write_text(REDNESS.replace("FOLDER", repr(f"{rows.parent}/pictures/")))
    asked.write_text("".join(f"{line}\n" for line in rows.read_text().splitlines() if "image" in line))
    recipe = tmp_path / "recipe.yaml"  # JSON is YAML
    recipe.write_text(
        json.dumps(
            {
                "recipe": "reinforce",
                "model": {"id": words[0].removeprefix("model.id="), "weights": "float32"},
                "adapter": {"method": "lora", "rank": 4},
                "data": {"train": str(asked), "held_out": 0.25},
                "image": {"folder": "pictures"},
                "rewards": [{"file": str(reward)}],
                "reinforce": {"answers": 4, "max_new_tokens": 5, "updates": 2, "beta": 0.1},
                "batch": {"size": 4},
                "train": {"steps": 4, "learning_rate": 1e-2},
                "evaluate": {"every": None, "answers": 4},
                "save": {"every": 3},
            }
        )
    )
    whole = workbench.run(recipe, out=tmp_path / "whole", quiet=True)
    first = [line for line in metrics_log.read(whole) if "loss" in line]
    assert abs(first[0]["update[kl]"]) < 1e-10, "the first update sees what was drawn"
    cut = workbench.run(recipe, ["batch.tokens_per_device=40"], out=tmp_path / "cut", quiet=True)
    assert [line["loss"] for line in metrics_log.read(cut) if "loss" in line] == pytest.approx(
        [line["loss"] for line in first], abs=1e-5
    )
    half = tmp_path / "half"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 3)  # between the updates of a rollout
        workbench.run(recipe, out=half, quiet=True)
    workbench.run(recipe, out=half, quiet=True, resume=True)
    adapters = [load_file(each / "adapter" / "adapter_model.safetensors") for each in (whole, half)]
    assert all(np.array_equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert workbench.evaluate(whole, trust=True)["reward"] == pytest.approx(
        json.loads((whole / "scores.json").read_text())["after"]["reward"], abs=1e-5
    )
    table = pd.read_parquet(whole / "predictions.parquet")
    assert not table["prompt"].str.contains("<image>").any()
    assert (whole / "report.html").read_text().count("data:image/") == len(table)
    inspected = workbench.check(recipe)
    assert ("[picture: 4 tokens]", False) in [piece for _, shown in inspected.examples for piece in shown]
    with pytest.raises(ConfigError, match=r"reinforce.rollouts.url takes rows for tokens alone"):
        workbench.check(recipe, ["reinforce.rollouts={url: 'http://127.0.0.1:9/v1', id: teacher}"])


def test_a_reward_depends_on_the_picture(words: list[str], rows: Path, tmp_path: Path) -> None:
    model = save("gemma3", tmp_path / "gemma3", mixed=True)
    own = [each for each in words if not each.startswith("evaluate")]
    rated = workbench.run(
        "reward/quickstart", [*own, *_pairs(rows), f"model.id={model}"], out=tmp_path / "rated", quiet=True
    )
    asked = {"question": "Which colour?", "chosen": "red", "rejected": "purple"}
    path = rows.with_name("asked.jsonl")
    path.write_text("".join(json.dumps({**asked, "image": f"{number}.png"}) + "\n" for number in (0, 1, 4)))
    rewards = workbench.predict(rated, str(path)).table["reward"].to_numpy().reshape(3, 2)
    assert (np.abs(rewards[0] - rewards[1]) > 1e-4).all()  # red and green


@pytest.mark.nightly
def test_a_student_learns_from_who_sees_the_same_pictures(run: Path, words: list[str], tmp_path: Path) -> None:
    taught = [*words, f"distill.teacher.id={run}", "model.id=teacher", "adapter.method=full", "train.steps=2"]
    taught = [each for each in taught if not each.startswith("adapter.rank")]
    whole = workbench.run(
        "distill/quickstart", [*taught, "distill.student.layers=every-2"], out=tmp_path / "a", quiet=True
    )
    cut = ["distill.student.layers=every-2", "batch.tokens_per_device=40", "batch.packing=false"]
    curves = [
        [line["loss"] for line in metrics_log.read(each) if "loss" in line]
        for each in (whole, workbench.run("distill/quickstart", [*taught, *cut], out=tmp_path / "b", quiet=True))
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert (whole / "adapter" / "processor_config.json").is_file(), "a whole model has its processor"
    with pytest.raises(ConfigError, match="reads text alone, and rows here have pictures"):
        blind = ["distill.teacher.id=starter", "distill.student.layers=all"]
        workbench.check("distill/quickstart", [*words, "adapter.method=lora", *blind])
    with pytest.raises(ConfigError, match="the student writes answers to texts alone"):
        own = [f"distill.teacher.id={run}", "distill.student.layers=all", "distill.on_policy.share=0.5"]
        workbench.check("distill/quickstart", [*words, "adapter.method=lora", *own])


def test_it_answers_rows_and_prompts_with_pictures(run: Path, rows: Path) -> None:
    table = workbench.predict(run, str(rows), max_new_tokens=2).table
    assert len(table) == 25 and "<image>" not in "".join(table["prompt"])
    answer = workbench.generate(
        run, "Which colour has 0?", pictures=[rows.parent / "pictures" / "0.png"], max_new_tokens=2
    )
    assert answer.strip() == table["answer"][0]
    assert workbench.evaluate(run)["loss"] == pytest.approx(
        json.loads((run / "scores.json").read_text())["after"]["loss"], abs=1e-4
    )


def test_sampled_answers_are_rows_with_the_same_pictures(
    run: Path, words: list[str], rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    drawn = workbench.sample(run, str(rows), out=out, score=["likelihood"], to="all", n=2, max_new_tokens=3)
    assert (drawn.prompts, drawn.answers) == (25, 50) and drawn.reward is not None
    cold = {"to": "all", "n": 1, "temperature": 1e-4, "max_new_tokens": 3}
    workbench.sample(run, str(rows), out=tmp_path / "cold.jsonl", **cold)
    lines = [json.loads(line) for line in (tmp_path / "cold.jsonl").read_text().splitlines()]
    greedy = workbench.predict(run, str(rows), max_new_tokens=3).table["answer"].str.strip()
    assert [line["messages"][-1]["content"].strip() for line in lines] == greedy.tolist()
    elsewhere = [each for each in words if not each.startswith(("image.folder", "data.train"))]
    found = [workbench.check("sft/quickstart", own) for own in (words, [*elsewhere, f"data.train={out}"])]
    known, again = ({*each.data.train.pictures, *each.data.held_out.pictures} for each in found)
    assert known == again, "no setting says where they are"


def test_a_server_answers_about_pictures_that_requests_hold(run: Path, rows: Path) -> None:
    models = serving.load(serving.named([str(run)], trust=False), SETTINGS)
    client = TestClient(Server(models, SETTINGS.limits).app, base_url="http://127.0.0.1")
    paths = [rows.parent / "pictures" / f"{number}.png" for number in range(2)]
    addresses = ["data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in paths]

    def asked(*shown: str) -> Any:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in shown]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": "Which colour?"}]}
        settings = {"model": models[0].name, "temperature": 0, "max_tokens": 3, "logprobs": True}
        return client.post("/v1/chat/completions", json={**settings, "messages": [turn]})

    found = [asked(url).json()["choices"][0] for url in addresses]
    wanted = [workbench.generate(run, "Which colour?", pictures=[path], max_new_tokens=3) for path in paths]
    assert [each["message"]["content"].strip() for each in found] == [each.strip() for each in wanted]
    scores = [each["logprobs"]["content"][0]["logprob"] for each in found]
    assert abs(scores[0] - scores[1]) > 1e-5, "each has the picture of its own request"
    both = asked(*addresses)
    assert both.status_code == 200
    for shown, why in {
        (str(paths[0].resolve()),): "files of the server are not read",
        (f"file://{paths[0].resolve()}",): "files of the server are not read",
        ("http://example.org/a.png",): "data.fetch=true",
        ("data:image/png;base64,AAAA",): "no kind of picture that can be read",
        tuple(addresses) * 9: "at most 16 pictures or recordings",
    }.items():
        refused = asked(*shown)
        assert refused.status_code == 400 and why in refused.json()["error"]["message"]


def test_what_takes_rows_for_tokens_alone_is_refused(run: Path, words: list[str], rows: Path, tmp_path: Path) -> None:
    for setting, reason in {
        "data.length_warm_up.start=4": "data.length_warm_up",
        "token_drop.keep=0.5": "token_drop",
        "image.size=32": "own processor",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            workbench.check("sft/quickstart", [*words, setting])
