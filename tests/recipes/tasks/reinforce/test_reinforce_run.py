"""Recipe reinforce on a real small backbone: what is written, read and learnt, invariances, and a run that goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import workbench
from tests import forked
from tests.stopping import stop_after
from workbench.errors import ConfigError, ResumeError, Stopped
from workbench.recipes.load import load
from workbench.recipes.tasks.reinforce import reinforce_run
from workbench.recipes.verbs import check, evaluate
from workbench.recipes.verbs.plans.plan import plan
from workbench.training.reinforcement.rollouts import Rollout

RECIPE = """
recipe: reinforce
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {folder}/prompts.jsonl, held_out: 0.2, max_tokens: 96}}
rewards: [{{file: {folder}/reward.py}}]
reinforce: {{answers: 4, max_new_tokens: 6, updates: 2, beta: 0.1}}
batch: {{size: 4}}
train: {{steps: 4, learning_rate: 2.0e-2}}
evaluate: {{every: null, answers: 3}}
save: {{every: null}}
"""
REWARD = """
def reward(answers):
    return [sum(letter in "aeiou" for letter in each.text) / (1 + len(each.text)) for each in answers]
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, short_stories: str) -> Path:
    """A recipe, beside prompts and a reward of vowels."""
    folder = tmp_path_factory.mktemp("reinforce")
    rows = [{"question": f"What comes after {n}?" + " Think." * (n % 3)} for n in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=short_stories, folder=folder))
    return path


def run(recipe: Path, out: Path, *overrides: str, resume: bool = False) -> Path:
    return workbench.run(recipe, overrides, out=out, resume=resume, quiet=True)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clocks(run: Path) -> list[dict[str, Any]]:
    clocks = ("tokens_per_second", "data_wait", "peak_bytes", "elapsed_s")
    return [{name: each for name, each in line.items() if name not in clocks} for line in metrics(run)]


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = adapter(one), adapter(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def rolled_out(run: Path, step: int) -> Rollout:
    return Rollout.from_state(load_file(run / "checkpoints" / f"step-{step:08d}" / "rollout.safetensors"))


@pytest.fixture(scope="module")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rollouts with two updates each. Read only."""
    return run(recipe, tmp_path_factory.mktemp("grpo") / "run", "save.every=2", "save.keep=9")


def test_tells_rewards_answers_and_updates(trained: Path) -> None:
    first, second, third, _ = metrics(trained)
    assert first["update[kl]"] == pytest.approx(0, abs=1e-6) and first["update[clipped]"] == 0
    assert second["update[kl]"] > 0 and first["reward[mean]"] == second["reward[mean]"] != third["reward[mean]"]
    assert first["reward[spread]"] > 0 and 1 <= first["answers[tokens]"] <= 6
    assert first["supervised_tokens"] == 16
    scores = json.loads((trained / "scores.json").read_text())
    assert scores["before"].keys() == scores["after"].keys() >= {"reward", "reward_low", "answer_tokens", "repetition"}
    page = (trained / "report.html").read_text()
    assert "The mean reward of held-out answers" in page and "Answers with the lowest rewards" in page


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_log_probabilities_are_those_of_the_model_and_of_the_backbone(trained: Path, recipe: Path) -> None:
    """By transformers and PEFT alone, from prompts and answers as they stand in a checkpoint."""
    config = load(str(recipe), [])
    prompts = reinforce_run.prepare(config)[2].train
    found = rolled_out(trained, 4)
    base = AutoModelForCausalLM.from_pretrained(config.model.id)
    shipped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(config.model.id), trained / "adapter")
    assert found.old_ST is not None and found.reference_ST is not None
    differs = 0.0
    for slot, prompt in enumerate(np.repeat(found.prompts_P.numpy(), found.each)):
        asked, answer = prompts[int(prompt)].input_ids[:-1], found.answer(slot)
        ids = torch.from_numpy(np.concatenate([asked, answer]))[None]
        read = []
        for model in (base, shipped.eval()):
            with torch.no_grad():
                logits = model(ids).logits[0, len(asked) - 1 : -1].double()
            read.append(logits.log_softmax(-1).gather(1, ids[0, len(asked) :, None])[:, 0])
        torch.testing.assert_close(found.reference_ST[slot, : len(answer)].double(), read[0], rtol=0, atol=1e-4)
        differs = max(differs, float((found.old_ST[slot, : len(answer)].double() - read[1]).abs().max()))
    assert differs > 1e-4  # the shipped adapter has taken two steps since
    assert (found.reference_ST[~found.mask_ST] == 0).all()


@pytest.mark.nightly
def test_prompts_of_several_sources_are_drawn_by_their_weights_also_after_a_stop(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one name, whose columns have different names; two updates on each answer."""
    words = ["data.train=null", "data.mix.by=weight", "data.mix.rows=6", "batch.size=3", "save.every=2", "save.keep=9"]
    for name, key, size in (("sums", "question", 20), ("tales", "ask", 5)):
        (tmp_path / name).mkdir()
        rows = [{key: f"{name} {n}?"} for n in range(size)]
        (tmp_path / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words.append(f"data.sources.{name}.path={tmp_path}/{name}/rows.jsonl")
    words += ["data.sources.tales.columns={question: ask}", "data.sources.tales.weight=2"]
    notes = "\n".join(check.check(load(str(recipe), words)).notes)
    assert "sums: 16 rows" in notes and "tales: 4 rows" in notes and "66.7% of the draws, 1.00 passes" in notes
    whole = run(recipe, tmp_path / "whole", *words)
    prompts = reinforce_run.prepare(load(str(recipe), words))[2].train
    taken = np.concatenate([rolled_out(whole, step).prompts_P.numpy() for step in (2, 4)]) % len(prompts)
    assert sorted(prompts.source_N[taken]) == [0, 0, 1, 1, 1, 1]
    scores = json.loads((whole / "scores.json").read_text())
    assert all({"reward[sums]", "reward[tales]"} <= each.keys() for each in scores.values())
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            run(recipe, tmp_path / "broken", *words)
    assert same(run(recipe, tmp_path / "broken", *words, resume=True), whole)
    assert plan(load(str(recipe), words)).steps == 4


@pytest.mark.slow
def test_the_same_run_twice_has_the_same_bits(trained: Path, recipe: Path, tmp_path: Path) -> None:
    again = run(recipe, tmp_path / "again")
    assert same(trained, again)
    assert [line["reward[mean]"] for line in metrics(again)] == [line["reward[mean]"] for line in metrics(trained)]


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_goes_on_after_a_stop_with_the_same_bits(trained: Path, recipe: Path, tmp_path: Path, step: int) -> None:
    """Between two rollouts, and between two updates on one."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, step)
        run(recipe, tmp_path / "run")
    assert same(trained, run(recipe, tmp_path / "run", resume=True))
    assert without_clocks(tmp_path / "run") == without_clocks(trained)


@pytest.mark.slow
def test_a_beta_that_adapts_goes_on_with_the_same_bits(trained: Path, recipe: Path, tmp_path: Path) -> None:
    """At the first rollout the model is the reference, so that beta falls as fast as it can."""
    words = ("reinforce.kl_target=0.1", "reinforce.kl_horizon=20")
    whole = run(recipe, tmp_path / "whole", *words)
    betas = [line["scale[beta]"] for line in metrics(whole)]
    assert betas == pytest.approx([0.1, 0.1, *2 * [0.1 * (1 - 0.2 * 16 / 20)]], rel=1e-6)
    assert not same(whole, trained)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        run(recipe, tmp_path / "run", *words)
    assert same(whole, run(recipe, tmp_path / "run", *words, resume=True))
    assert without_clocks(tmp_path / "run") == without_clocks(whole)


@pytest.mark.slow
def test_the_entropy_bonus_is_that_of_the_distributions_that_tokens_were_drawn_from(
    recipe: Path, tmp_path: Path
) -> None:
    """By transformers alone, of the backbone, which a fresh adapter leaves as it is."""
    words = ["reinforce.temperature=0.7", "reinforce.normalise=token", "train.steps=1", "save.every=1"]
    plain = metrics(run(recipe, tmp_path / "plain", *words))[0]
    done = run(recipe, tmp_path / "run", *words, "reinforce.entropy_bonus=0.5")
    config, drawn = load(str(recipe), words), rolled_out(done, 1)
    prompts = reinforce_run.prepare(config)[2].train
    model, entropies = AutoModelForCausalLM.from_pretrained(config.model.id), list[torch.Tensor]()
    for slot, prompt in enumerate(np.repeat(drawn.prompts_P.numpy(), drawn.each)):
        asked, answer = prompts[int(prompt)].input_ids[:-1], drawn.answer(slot)
        with torch.no_grad():
            logits = model(torch.from_numpy(np.concatenate([asked, answer]))[None]).logits[0, len(asked) - 1 : -1]
        entropies.append(torch.distributions.Categorical(logits=logits / 0.7).entropy())
    wanted, found = float(torch.cat(entropies).mean()), metrics(done)[0]
    assert found["update[entropy]"] == pytest.approx(wanted, rel=1e-4)
    assert found["loss"] == pytest.approx(plain["loss"] - 0.5 * wanted, abs=1e-4)
    assert found["grad_norm"] != plain["grad_norm"]


@pytest.mark.parametrize("tokens", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_micro_batches_do_not_matter(trained: Path, recipe: Path, tmp_path: Path, tokens: int) -> None:
    found = metrics(run(recipe, tmp_path / "run", f"batch.tokens_per_device={tokens}"))
    for mine, theirs in zip(found, metrics(trained), strict=True):
        assert mine["reward[mean]"] == theirs["reward[mean]"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.nightly(but=["dapo", "online_dpo"])
@pytest.mark.slow
@pytest.mark.parametrize("method", ["dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo", "online_dpo"])
def test_every_method_learns(recipe: Path, tmp_path: Path, method: str) -> None:
    overrides = ["reinforce.updates=1", f"reinforce.method={method}", "train.steps=2", "reinforce.measure_kl=true"]
    first, second = metrics(run(recipe, tmp_path / "run", *overrides, "evaluate.answers=1"))
    assert first["grad_norm"] > 0 and second["update[kl]"] > 0
    if method == "online_dpo":
        assert first["loss"] == pytest.approx(np.log(2) * (1 - first["answers[no signal]"]), abs=1e-5)


def test_answers_of_the_model_itself_are_weighed_by_almost_1(trained: Path, recipe: Path, tmp_path: Path) -> None:
    """Their probabilities by the sampler and by training differ by rounding alone, over the ids that both know."""
    found = metrics(run(recipe, tmp_path / "run", "reinforce.importance_cap=2"))
    for mine, theirs in zip(found, metrics(trained), strict=True):
        assert mine["update[importance]"] == pytest.approx(1, abs=1e-4) and mine["update[capped]"] == 0
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4) and "update[importance]" not in theirs


@pytest.mark.slow
def test_rewards_rise(recipe: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=12", "reinforce.beta=0", "reinforce.updates=1", "batch.size=8", "schedule.name=constant"]
    found = [line["reward[mean]"] for line in metrics(run(recipe, tmp_path / "run", *overrides))]
    assert np.mean(found[-5:]) > 1.3 * np.mean(found[:3])


@pytest.mark.nightly(but=["lora"])
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_warms_up_by_sft_first(recipe: Path, tmp_path: Path, method: str) -> None:
    """Training starts from what the rows taught, which is the reference, too, and a resumed run teaches it once."""
    rows = [{"question": f"What comes after {n}?", "answer": f"It is {n + 1}."} for n in range(12)]
    (tmp_path / "start.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"reinforce.warm_up={tmp_path}/start.jsonl", "reinforce.warm_up_steps=1", f"adapter.method={method}"]
    words += ["reinforce.beta=0"] if method == "full" else []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 2)
        run(recipe, tmp_path / "run", *words)
    began = (tmp_path / "run" / "start" / "metrics.jsonl").read_text()
    kept = (tmp_path / "start.jsonl").read_text()
    (tmp_path / "start.jsonl").write_text(kept.replace("It is", "That is"))
    with pytest.raises(ResumeError, match=r"start\.jsonl \(warm-up rows\): other content"):
        run(recipe, tmp_path / "run", *words, resume=True)
    (tmp_path / "start.jsonl").write_text(kept)
    found = metrics(run(recipe, tmp_path / "run", *words, resume=True))
    assert len(found) == 4 and (tmp_path / "run" / "start" / "metrics.jsonl").read_text() == began
    if method == "lora":
        assert found[0]["update[kl]"] == pytest.approx(0, abs=1e-6) and found[3]["update[kl]"] > 0


@pytest.mark.nightly(but=["hangs", "not a number"])
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("1 / 0", r"reward.*from prompts\.jsonl.*ZeroDivisionError"),
        ("time.sleep(60)", r"reward\(\) of .* took more than 2 s"),
        ("[float('nan')] * len(answers)", "the reward of an answer is nan"),
        ("good(answers)[1:]", r"returned \d+ rewards for 16 answers"),
    ],
    ids=["raises", "hangs", "not a number", "wrong length"],
)
def test_a_reward_that_fails_loses_nothing(
    trained: Path, recipe: Path, tmp_path: Path, fails: str, message: str
) -> None:
    """It is named, in time; what was learnt is saved, and once it is corrected the run ends as if nothing had been."""
    broken = tmp_path / "broken"
    failing = REWARD.replace("def reward", "def good") + (
        f"import time\nfrom pathlib import Path\ncalls = []\ndef reward(answers):\n    calls.append(1)\n"
        f"    return good(answers) if len(calls) < 3 or not Path({str(broken)!r}).exists() else {fails}\n"
    )
    (tmp_path / "reward.py").write_text(failing)
    broken.touch()
    here = f"rewards=[{{file: {tmp_path}/reward.py, timeout: 2}}]"
    began = time.monotonic()
    with pytest.raises(ConfigError, match=message):  # after scores of the start, and a rollout
        run(recipe, tmp_path / "run", here)
    assert time.monotonic() - began < 30
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    broken.unlink()
    assert same(trained, run(recipe, tmp_path / "run", here, resume=True))


@pytest.mark.slow
def test_a_reward_model_judges_the_answers(recipe: Path, tmp_path: Path, short_stories: str) -> None:
    """It prefers answers with vowels; each answer has the reward that the model of the reward run gives it."""
    pairs = [
        {"prompt": f"What comes after {n}?", "chosen": " a e i o u" * 2, "rejected": " n t s r" * 2} for n in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    words = [f"model.id={short_stories}", f"data.train={tmp_path}/pairs.jsonl", "data.limit=null", "train.steps=10"]
    words += [
        "model.weights=float32",
        "batch.size=8",
        "evaluate.every=null",
        "save.every=null",
        "train.learning_rate=1e-2",
    ]
    judge = workbench.run("reward/quickstart", words, out=tmp_path / "judge", quiet=True)
    here = [f"rewards=[{{kind: model, run: {judge}}}]", "train.steps=2", "save.every=2", "batch.size=8"]
    done = run(recipe, tmp_path / "run", *here)
    config = load(str(recipe), here)
    tokenizer, _, data, _ = reinforce_run.prepare(config)
    found = rolled_out(done, 2)
    rows = data.train.rows[np.repeat(found.prompts_P.numpy(), found.each)].tolist()
    generate = [found.answer(slot) for slot in range(len(rows))]
    named = reinforce_run.judges(config, data, tokenizer)[0].named(rows, generate)
    assert found.total_S.numpy() == pytest.approx(next(iter(named.values())), abs=1e-5)
    assert found.total_S.std() > 0 and all(line["grad_norm"] > 0 for line in metrics(done))
    scores = json.loads((done / "scores.json").read_text())["after"]
    assert evaluate.evaluate(done, [], trust=True)["reward"] == pytest.approx(scores["reward"], abs=1e-5)


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
import workbench
from torch.optim.optimizer import register_optimizer_step_post_hook
from workbench.evaluation import generation

def kill_at(call):
    calls = itertools.count(1)
    return lambda *_: next(calls) == call and os.kill(os.getpid(), signal.SIGKILL)

recipe, out, moment, *words = sys.argv[1:]
if moment == "rollout":  # the second token of the second rollout's answers
    drawn, killed = generation.picked, kill_at(6 + 2)
    generation.picked = lambda *words: (killed(), drawn(*words))[1]
if moment == "update":  # weights have moved, and nothing of it is saved
    register_optimizer_step_post_hook(kill_at(4))
workbench.run(recipe, words, out=Path(out), resume=moment == "resume", quiet=True)
"""


@pytest.mark.nightly(but=["reward-2", "update-3"])
@pytest.mark.slow
@pytest.mark.parametrize(("moment", "saved"), [("rollout", 2), ("reward", 2), ("update", 3)])
def test_killed_it_goes_on_with_the_same_bits(
    trained: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, saved: int
) -> None:
    """Inside the second rollout, while its answers are judged, and inside the last update on them."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    broken = tmp_path / "broken"
    deadly = REWARD.replace("def reward", "def good") + (
        f"import os\nfrom pathlib import Path\ncalls = []\ndef reward(answers):\n    calls.append(1)\n"
        f"    if len(calls) == 3 and Path({str(broken)!r}).exists():\n        os.kill(os.getpid(), 9)\n"
        f"    return good(answers)\n"
    )
    (tmp_path / "reward.py").write_text(deadly)
    words = (f"rewards=[{{file: {tmp_path}/reward.py}}]", "save.every=1")
    if moment == "reward":
        broken.touch()
    (tmp_path / "killed.py").write_text(KILLED)

    def status(moment: str) -> int:
        command = [forked.python(), tmp_path / "killed.py", recipe, tmp_path / "run", moment, *words]
        return subprocess.run(list(map(str, command)), timeout=180).returncode

    assert status(moment) == -signal.SIGKILL
    assert max(int(each.name[5:]) for each in (tmp_path / "run" / "checkpoints").glob("step-*")) == saved
    broken.unlink(missing_ok=True)
    assert status("resume") == 0
    assert same(trained, tmp_path / "run")
    assert without_clocks(tmp_path / "run") == without_clocks(trained)
    scores = [json.loads((each / "scores.json").read_text()) for each in (trained, tmp_path / "run")]
    assert scores[0] == scores[1]


def test_check_shows_answers_with_their_rewards(recipe: Path) -> None:
    found = check.check(load(str(recipe), []))
    title, (prompt, answer) = found.examples[0][0], found.examples[0][1]
    assert "prompts.jsonl, row" in title and "reward" in title
    assert "What comes after" in prompt[0] and not prompt[1] and answer[1]


@pytest.mark.slow
def test_evaluates_by_the_rewards_of_the_run(trained: Path, recipe: Path, tmp_path: Path) -> None:
    found = evaluate.evaluate(trained, [], trust=True)
    scores = json.loads((trained / "scores.json").read_text())["after"]
    assert found["reward"] == pytest.approx(scores["reward"], abs=1e-6)
    # Two of four drawn answers to each prompt are right.
    every_other = tmp_path / "every_other.py"
    every_other.write_text("def reward(answers):\n    return [float(n % 2) for n, _ in enumerate(answers)]\n")
    drawn = evaluate.evaluate(trained, ["reinforce.draws=4", f"rewards=[{{file: {every_other}}}]"], trust=True)
    wanted = {"mean@4": 0.5, "pass@1": 0.5, "pass@2": 5 / 6, "pass@4": 1.0}
    assert {name: drawn[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)
