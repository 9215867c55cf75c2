"""Recipe prefer on a real small backbone: identities of the first step, invariances, a resume, and what is scored."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import workbench
from tests.stopping import stop_after
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.data.text.preference_pairs import ROW, TOKEN
from workbench.errors import ConfigError, Stopped
from workbench.recipes import CONFIGS
from workbench.recipes.load import load
from workbench.recipes.single import start_adapter
from workbench.recipes.tasks.prefer import preference_run
from workbench.recipes.verbs import evaluate

BETA = 0.3
RECIPE = """
recipe: prefer
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.2, max_tokens: 96}}
batch: {{size: 8}}
train: {{steps: 3, learning_rate: 5.0e-3}}
prefer: {{beta: {beta}}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""


def pair(n: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"What comes after {n}?" + " Think." * (n % 3)}],
        "chosen": [{"role": "assistant", "content": f"It is {n + 1}." + " Yes." * (n % 4)}],
        "rejected": [{"role": "assistant", "content": "No idea." + " Who knows?" * (n % 5)}],
    }


def single(n: int) -> dict[str, Any]:
    answer = f"It is {n + 1}." if n % 3 else "No idea." + " No." * (n % 4)
    return {
        "messages": [{"role": "user", "content": f"After {n}?"}, {"role": "assistant", "content": answer}],
        "label": bool(n % 3),
    }


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A recipe, beside pairs and single answers."""
    folder = tmp_path_factory.mktemp("prefer")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair(n)) + "\n" for n in range(30)))
    (folder / "single.jsonl").write_text("".join(json.dumps(single(n)) + "\n" for n in range(30)))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=short_stories, train=folder / "pairs.jsonl", beta=BETA))
    return path


def run(recipe: Path, out: Path, *overrides: str, resume: bool = False) -> Path:
    return workbench.run(recipe, overrides, out=out, resume=resume, quiet=True)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def scores(run: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads((run / "scores.json").read_text()))


@pytest.fixture(scope="module")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of DPO. Read only."""
    return run(recipe, tmp_path_factory.mktemp("dpo") / "run", "train.steps=6", "evaluate.answers=2")


def test_begins_with_no_preference_and_learns_one(trained: Path) -> None:
    found, before = losses(trained), scores(trained)["before"]
    assert found[0] == pytest.approx(math.log(2), abs=1e-5) and found[-1] < found[0]
    assert (
        before["margin"] == 0 and before["accuracy"] == 0.5 and before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    )
    after = scores(trained)["after"]
    assert after["margin"] > 0 and after["accuracy"] > 0.5 and after["loss"] < before["loss"]
    assert after["accuracy_low"] < after["accuracy"] <= after["accuracy_high"]
    first = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    assert first["reward[margin]"] == pytest.approx(0, abs=1e-4) and "log_p[chosen]" in first
    page = (trained / "report.html").read_text()
    assert (trained / "predictions.parquet").exists() and "path" in page
    assert 0 <= after["repetition"] <= 1 and "of their runs of four words" in page


def test_evaluations_tell_divergence_and_written_answers(recipe: Path, tmp_path: Path) -> None:
    """The last evaluation is of what is saved, and `before` of the reference."""
    found = run(recipe, tmp_path / "run", "train.steps=2", "evaluate.every=1", "evaluate.answers=2")
    first, last = (json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines())
    before, after = scores(found)["before"], scores(found)["after"]
    for name in ("chosen", "rejected"):
        drop = before[f"log_p_{name}"] - after[f"log_p_{name}"]
        assert last[f"held_out_divergence[{name}]"] == pytest.approx(drop, abs=1e-4) and drop != 0
        assert first[f"held_out_divergence[{name}]"] != last[f"held_out_divergence[{name}]"]
    assert last["held_out_answers[tokens]"] == after["answer_tokens"]
    page = (found / "report.html").read_text()
    assert "Divergence from the reference" in page and "Tokens of written answers" in page


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_what_is_scored_is_what_was_saved(trained: Path, recipe: Path, short_stories: str) -> None:
    """The loss of the held-out pairs, by transformers and PEFT alone, in float64; the reference is the adapter off."""
    config = load(str(recipe), [])
    *_, pairs = preference_run.prepare(config)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(short_stories).double(), trained / "adapter")
    found = []
    for example in range(len(pairs.held_out)):
        ratios = []
        for answer in (2 * example, 2 * example + 1):
            row = pairs.held_out.answers[answer]
            ids = torch.from_numpy(row.input_ids)[None]
            where = np.flatnonzero(row.supervised)
            with torch.no_grad():
                own = model(ids).logits[0].log_softmax(-1)
                with model.disable_adapter():
                    other = model(ids).logits[0].log_softmax(-1)
            ratios.append(float((own - other)[where - 1, ids[0, where]].sum()))
        found.append(math.log1p(math.exp(-BETA * (ratios[0] - ratios[1]))))
    assert scores(trained)["after"]["loss"] == pytest.approx(sum(found) / len(found), abs=2e-5)


def test_evaluate_scores_as_the_run_did(trained: Path) -> None:
    wanted = scores(trained)["after"]
    assert evaluate.evaluate(trained, []) == {name: pytest.approx(value, abs=1e-6) for name, value in wanted.items()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_that_is_off_is_the_backbone(trained: Path, short_stories: str) -> None:
    bare = AutoModelForCausalLM.from_pretrained(short_stories)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = bare(ids).logits
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(short_stories), trained / "adapter")
        assert not model(ids).logits.equal(wanted)
        with model.disable_adapter():
            assert model(ids).logits.equal(wanted)


def test_rows_of_a_pair_stay_together(recipe: Path) -> None:
    *_, pairs = preference_run.prepare(load(str(recipe), []))
    batch = pairs.train.batch(np.array([4, 1]))
    assert batch.sequences == 2 and len(batch.inputs["input_ids"]) == 4
    for row, answer in enumerate((8, 9, 2, 3)):
        own = pairs.train.answers[answer]
        labels = batch.labels_N[batch.labels_N[:, ROW] == row, TOKEN]
        assert labels.tolist() == own.input_ids[own.supervised].tolist()


KTO = ["prefer.loss=kto", "data.train={single}"]
VARIANTS = {
    "dpo": [],
    "desensitised": ["prefer.length=desensitised", "prefer.alpha=0.5"],
    "kto": KTO,
    "orpo": ["prefer.loss=orpo"],
    "dropout": ["adapter.dropout=0.2", "prefer.beta_end=1.0"],
}


def words(recipe: Path, name: str) -> list[str]:
    return [each.format(single=recipe.parent / "single.jsonl") for each in VARIANTS[name]]


@pytest.mark.nightly(but=["desensitised", "kto"])
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_change_nothing(recipe: Path, tmp_path: Path, name: str) -> None:
    """One micro-batch of eight examples, one or two examples in each, and rows that are packed."""
    own, more = words(recipe, name), ["batch.packing=false"]
    whole = losses(run(recipe, tmp_path / "whole", *own, *more, "batch.tokens_per_device=2000"))
    parts = losses(run(recipe, tmp_path / "parts", *own, *more, "batch.tokens_per_device=152"))
    packed = losses(run(recipe, tmp_path / "packed", *own, "batch.packing=true"))
    assert parts == pytest.approx(whole, abs=2e-5) and packed == pytest.approx(whole, abs=2e-5)
    assert whole[2] != pytest.approx(whole[0], abs=1e-3)


@pytest.mark.nightly(but=["kto"])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "kto"])
def test_a_resumed_run_has_the_same_bits(
    recipe: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [*words(recipe, name), "train.steps=4", "evaluate.every=2"]
    straight = run(recipe, tmp_path / "straight", *own)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            workbench.run(recipe, own, out=tmp_path / "broken")
    broken = run(recipe, tmp_path / "broken", *own, resume=True)
    assert losses(broken) == losses(straight) and scores(broken) == scores(straight)
    tensors = [load_file(each / "adapter" / "adapter_model.safetensors") for each in (straight, broken)]
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])


@pytest.mark.parametrize(("name", "first"), [("ipo", (1 / (2 * BETA)) ** 2), ("kto", 0.5)])
def test_other_losses_begin_as_their_papers_say(recipe: Path, tmp_path: Path, name: str, first: float) -> None:
    """kto reads the answers of pairs as single ones."""
    found = losses(run(recipe, tmp_path / "run", f"prefer.loss={name}", "train.steps=1"))
    assert found[0] == pytest.approx(first, rel=1e-3)


def test_a_loss_without_a_reference_asks_no_second_model(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is scored where it is loaded anyway, and cut where processes share weights."""
    monkeypatch.setattr("workbench.recipes.single.token_reference.ask", lambda *_: pytest.fail("asked"))
    found = scores(run(recipe, tmp_path / "run", "prefer.loss=orpo", "train.steps=1"))
    assert found["before"]["loss"] > found["after"]["loss"] > 0


@pytest.mark.slow
def test_goes_on_from_another_run(recipe: Path, tmp_path: Path) -> None:
    """It begins where that one ended, which is its reference too: no margin yet, and the same likelihoods."""
    first = run(recipe, tmp_path / "first")
    second = run(recipe, tmp_path / "second", f"prefer.start={first}")
    assert losses(second)[0] == pytest.approx(math.log(2), abs=1e-5)
    before, ended = scores(second)["before"], scores(first)["after"]
    assert before["margin"] == 0
    assert before["log_p_chosen"] == pytest.approx(ended["log_p_chosen"], abs=1e-5)
    third = run(recipe, tmp_path / "third", f"prefer.start={first}", "prefer.reference=backbone", "train.steps=1")
    assert scores(third)["before"]["margin"] == pytest.approx(ended["margin"], abs=1e-4)


def test_a_start_in_blocks_that_never_train_is_refused(trained: Path, recipe: Path) -> None:
    """They get no adapter, and would lose what that run learnt."""
    words = [f"prefer.start={trained}", "freeze.policy=static", "freeze.layers=1"]
    with pytest.raises(ConfigError, match="leaves this run none in the first"):
        preference_run.prepare(load(str(recipe), words))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"method": "lora+", "rate_ratio": 16.0}, ["adapter.method=lora+", "adapter.rate_ratio=4"]),
        ({"method": "houlsby"}, ["adapter={method: houlsby}", "freeze.policy=static", "freeze.layers=1"]),
    ],
    ids=["another ratio of rates", "bottlenecks in frozen blocks"],
)
def test_a_start_that_differs_in_how_it_trains_is_taken(
    trained: Path, recipe: Path, tmp_path: Path, theirs: dict[str, Any], words: list[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    values = read_yaml(copy / "config.yaml")
    own = {key: each for key, each in values["adapter"].items() if key in ("rank", "alpha") and len(theirs) == 2}
    (copy / "config.yaml").write_text(dump_yaml({**values, "adapter": {**own, **theirs}}))
    start_adapter.require(load(str(recipe), [f"prefer.start={copy}", *words]))


@pytest.mark.slow
def test_a_search_finds_settings_of_preferences(recipe: Path, tmp_path: Path) -> None:
    space = "search.space={prefer.beta: [0.1, 0.5], train.learning_rate: {low: 1.0e-3, high: 1.0e-2, log: true}}"
    words = ["recipe=search", "of=prefer", space, "search.trials=4", "search.eta=2", "search.rungs=1"]
    found = run(recipe, tmp_path / "search", *words, "search.rows=4", "train.steps=4", "evaluate.every=2")
    assert scores(found)["after"]["margin"] > 0 and (found / "adapter" / "adapter_model.safetensors").exists()
    members = json.loads((found / "search.json").read_text())["members"]
    assert len(members) == 4 and {each["settings"]["prefer.beta"] for each in members} == {0.1, 0.5}


@pytest.mark.slow
def test_kto_takes_one_answer_a_step(recipe: Path, tmp_path: Path) -> None:
    found = run(recipe, tmp_path / "run", "prefer.loss=kto", "batch.size=1", "train.steps=2")
    assert losses(found)[0] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.nightly(but="each value once")
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["nf4", "int8"])
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_quantised_weights(recipe: Path, tmp_path: Path, weights: str, loss: str) -> None:
    """The reference has these weights too; int8 rounds what its layers read as well, differently in other batches."""
    found = run(recipe, tmp_path / "run", f"model.weights={weights}", f"prefer.loss={loss}", "train.steps=4")
    first, *_, last = losses(found)
    assert first == pytest.approx({"dpo": math.log(2), "kto": 0.5}[loss], abs=1e-3 if weights == "nf4" else 0.1)
    assert last < first and scores(found)["after"]["loss"] < scores(found)["before"]["loss"]


@pytest.mark.slow
def test_all_weights_can_train(recipe: Path, tmp_path: Path) -> None:
    """The reference is on disk, so that nothing has to be kept of the weights that training changes."""
    found = run(recipe, tmp_path / "run", "adapter.method=full", "train.learning_rate=1e-4")
    assert losses(found)[0] == pytest.approx(math.log(2), abs=1e-5) and losses(found)[2] < losses(found)[0]


def test_beta_goes_in_a_straight_line_and_is_told(recipe: Path, tmp_path: Path) -> None:
    """What the metrics tell of each step is what its loss was computed with: rewards are beta times log-ratios.

    Also over layers that are frozen, whose outputs are not kept.
    """
    words = ["train.steps=4", "prefer.beta_end=0.7", "batch.packing=false", "freeze={policy: static, layers: 1}"]
    found = run(recipe, tmp_path / "run", *words)
    told = [json.loads(line) for line in (found / "metrics.jsonl").read_text().splitlines()]
    assert [each["scale[beta]"] for each in told] == pytest.approx(
        [BETA + (0.7 - BETA) * step / 4 for step in range(4)]
    )
    assert "Scale of rewards" in (found / "report.html").read_text()


@pytest.mark.slow
def test_betas_in_one_bank_are_runs_of_their_own(recipe: Path, tmp_path: Path) -> None:
    """Each member has the losses that it has alone; all are measured by the loss of the first."""
    betas = (0.05, 0.2, 0.9)
    sweep = ["recipe=sweep", "of=prefer", f"sweep.over.prefer.beta={[*betas]}", "evaluate.every=3"]
    found = run(recipe, tmp_path / "sweep", *sweep)
    for beta in betas:
        alone = run(recipe, tmp_path / f"{beta}", f"prefer.beta={beta}", "evaluate.every=3", "batch.packing=false")
        assert losses(found / "members" / f"beta={beta}") == pytest.approx(losses(alone), abs=2e-5)
    table = json.loads((found / "sweep.json").read_text())
    assert table["best"] in {f"beta={beta}" for beta in betas} and scores(found)["after"]["margin"] > 0


@pytest.mark.slow
def test_a_sweep_measures_its_best_by_one_section_before_and_after(recipe: Path, tmp_path: Path) -> None:
    """IPO's loss of the start is (1 / (2 beta))^2, of the beta that is shipped and not of the first."""
    sweep = [
        "recipe=sweep",
        "of=prefer",
        "sweep.over.prefer.beta=[0.1, 0.5]",
        "prefer.loss=ipo",
        "prefer.length=sum",
        "evaluate.every=3",
    ]
    found = run(recipe, tmp_path / "sweep", *sweep)
    assert json.loads((found / "sweep.json").read_text())["best"] == "beta=0.5"
    assert scores(found)["before"]["loss"] == pytest.approx((1 / (2 * 0.5)) ** 2, rel=1e-5)


@pytest.mark.nightly
def test_the_shipped_recipe_trains(tmp_path: Path) -> None:
    text = (CONFIGS / "prefer" / "quickstart.yaml").read_text()
    assert text.startswith("# workbench run prefer/quickstart")
    short = ["train.steps=2", "batch.size=2", "evaluate.every=null", "evaluate.answers=1", "evaluate.max_new_tokens=4"]
    short += ["data.limit=40", "data.held_out=0.2", "data.max_tokens=256", "data.on_bad_row=skip"]
    found = workbench.run("prefer/quickstart", short, out=tmp_path / "run", quiet=True)
    assert losses(found)[0] == pytest.approx(math.log(2), abs=2e-3)
    assert json.loads((found / "manifest.json").read_text())["status"] == "done"
