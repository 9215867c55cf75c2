"""Plans against the same runs: what they hold at most, counted storage by storage."""

from __future__ import annotations

import functools
import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

import workbench
from tests.conftest import MINILM, save_tiny
from tests.run_files import write_lines
from workbench.adapters import METHODS
from workbench.errors import ConfigError
from workbench.models import output_heads
from workbench.planning.counters import MemoryLedger
from workbench.planning.dry_run import hold
from workbench.planning.plan import Plan, that_fit
from workbench.recipes.load import load
from workbench.recipes.verbs.plans import plan_fleet
from workbench.recipes.verbs.plans.plan import PlanTarget, of_one_device, plan
from workbench.training import capacity
from workbench.training.bank_trainer import BankTrainer, FleetTrainer
from workbench.training.trainer import Trainer

LORA = "adapter={method: lora, rank: 4}"
FEW = ["data.limit=100", "data.max_tokens=256"]
SHORT = ["train.steps=8", "train.epochs=null", "evaluate.answers=0", "save.every=null"]


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MemoryLedger]]:
    """Of every training; models that other tests left do not count."""
    found: list[MemoryLedger] = []
    left = _models()

    def counted(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counting(training: Any) -> Any:
            loaded = [each for each in _models() if not any(each is other for other in left)]
            with MemoryLedger() as ledger:
                hold(ledger, training, others=loaded)
                outcome = work(training)
            found.append(ledger)
            return outcome

        return counting

    for kind in (Trainer, BankTrainer):
        monkeypatch.setattr(kind, "work", counted(kind.work))
    monkeypatch.setattr(FleetTrainer, "work_until_one_ends", counted(FleetTrainer.work_until_one_ends))
    yield found


def _models() -> list[PreTrainedModel]:
    """All that are in memory, fake ones aside."""
    gc.collect()
    models = [each for each in gc.get_objects() if issubclass(type(each), PreTrainedModel)]
    return [each for each in models if not isinstance(next(each.parameters()), FakeTensor)]


@pytest.fixture
def compare(ledgers: list[MemoryLedger], tmp_path: Path) -> Callable[..., tuple[Plan, int]]:
    """Plans a run, runs it, and gives the plan and what was measured."""

    def both(recipe: str, *words: str) -> tuple[Plan, int]:
        planned = plan(load(recipe, [*SHORT, *words]))
        workbench.run(recipe, [*SHORT, *words], out=tmp_path / "run", quiet=True)
        return planned, ledgers[-1].peak

    return both


@pytest.mark.parametrize(
    "words",
    [
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                ["batch.packing=true", "adapter.dropout=0.1"],
                ["model.weights=bfloat16", "train.checkpointing=0.5"],
                ["model.weights=nf4", "adapter={method: dora}"],
                ["freeze={policy: lisa, active: 1, every: 1}"],
                ["freeze={policy: static, layers: 0.5, cache: off}"],
            )
        ),
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in (
                ["model.weights=int8"],
                ["model.weights=fp8"],
                ["model.weights=nf4"],
                ["model.weights=bfloat16", "adapter={method: full}"],
                ["model.weights=bfloat16", "adapter={method: full}", "train.rounded=int4"],
                ["model.weights=float32", "adapter={method: houlsby}"],
                ["model.weights=float32", "adapter={method: lora-ga, rows: 16}", "batch.tokens_per_device=400"],
                ["data.sampling={by: selective, pool: 2}", "train.steps=8"],
                ["batch.shared_prefix=true", "model.weights=float32"],
                ["model.weights=bfloat16", "adapter={method: full}", "grow.at=[0.25]"],
                ["model.weights=float32", "adapter={method: sparse, rows: 16}", "batch.tokens_per_device=400"],
                ["optimizer={sam: 0.05, sam_every: 2, sam_reuse: 0.7, gradient_share: 0.1}"],
                ["model.weights=float32", "adapter={method: prefix}"],
                ["batch.tokens_per_device=2000", "batch.size=6", "optimizer={name: sgd}"],
            )
        ),
    ],
    ids=" ".join,
)
def test_a_plan_predicts_the_peak(
    words: list[str], compare: Callable[..., tuple[Plan, int]], short_stories: str
) -> None:
    few = [f"model.id={short_stories}", *FEW, "data.held_out=0.1", "batch.size=8", "train.steps=3"]
    planned, measured = compare("sft/quickstart", *few, *words)
    assert measured * 0.97 <= planned.dry_run.peak <= measured * 1.05
    assert sum(planned.dry_run.at_peak.values()) <= planned.dry_run.peak


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["bfloat16", "nf4"])
def test_a_plan_predicts_what_each_way_to_keep_activations_holds(
    weights: str, compare: Callable[..., tuple[Plan, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scoring reads single rows, so that training takes most; a step has all rows, as the plan expects."""
    monkeypatch.setattr(capacity, "FORWARD_TOKENS", 1)
    words = ["data.limit=24", "batch={size: 24, tokens_per_device: 1024}", "train.steps=2", "evaluate.every=null"]
    peaks = []
    for number, way in enumerate(("false", "elementwise", "0.5", "true")):
        planned, measured = compare("sft/quickstart", *words, f"model.weights={weights}", f"train.checkpointing={way}")
        (tmp_path / "run").rename(tmp_path / str(number))
        assert measured * 0.99 <= planned.dry_run.peak <= measured * 1.03
        peaks.append(measured)
    assert peaks == sorted(peaks, reverse=True) and peaks[1] < 0.85 * peaks[0]


@pytest.mark.slow
def test_of_a_classifier_too(compare: Callable[..., tuple[Plan, int]], tmp_path: Path) -> None:
    bert = save_tiny(
        tmp_path / "bert", "Bert", "SequenceClassification", MINILM, num_hidden_layers=4, max_position_embeddings=128
    )
    few = ["data.limit=300", "train.steps=3"]
    planned, measured = compare("classify/quickstart", f"model.id={bert}", "adapter={method: full}", *few)
    assert measured * 0.97 <= planned.dry_run.peak <= measured * 1.05


@pytest.mark.slow
def test_a_plan_counts_what_a_run_counts(
    compare: Callable[..., tuple[Plan, int]], short_stories: str, tmp_path: Path
) -> None:
    """And predicts its peak."""
    words = [
        f"model.id={short_stories}",
        "data.limit=100",
        "data.held_out=0.1",
        "batch.size=8",
        "train.steps=4",
        "model.weights=float32",
    ]
    planned, measured = compare("sft/quickstart", *words)
    assert measured * 0.97 <= planned.dry_run.peak <= measured * 1.05
    assert sum(planned.dry_run.at_peak.values()) <= planned.dry_run.peak
    manifest: dict[str, Any] = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert planned.size.trainable == manifest["model"]["trainable"]
    assert planned.size.file_bytes == (tmp_path / "run" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert planned.tokens_per_device == manifest["batch"]["tokens_per_device"]
    assert planned.dry_run.at_peak["weights"] >= manifest["model"]["weight_bytes"]
    assert planned.steps == 4


@pytest.mark.parametrize("weights", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_lora_over_packed_weights_is_planned_as_it_is_computed(compare: Callable[..., Any], weights: str) -> None:
    """In one operation, whatever is multiplied: by PEFT's own layer an evaluation took a fifth more."""
    words = [f"model.weights={weights}", "model.compute=float32", "train.checkpointing=true", "train.steps=2"]
    planned, measured = compare("sft/quickstart", *words, "evaluate.every=1", *FEW)
    assert planned.dry_run.peak == pytest.approx(measured, rel=0.01)


PLAIN = ("lora", "shira", "vb-lora", "waveft")
"""Methods that a plain run plans; the last three ask for values, of which a plan has none."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in PLAIN)) for each in METHODS]
)
def test_every_method_is_planned(name: str) -> None:
    """Or refused with what to write, as where the backbone has no biases or what it needs has no default."""
    try:
        planned = plan(load("sft/quickstart", [f"adapter={{method: {name}}}", *SHORT, "data.limit=64"]))
    except ConfigError as error:
        assert name not in PLAIN and "adapter." in str(error)
        return
    assert planned.contents.trainable > 0 and planned.dry_run.peak > planned.contents.weight_bytes


def test_a_backbone_that_grows_is_planned_at_its_largest_and_with_its_mean_work() -> None:
    words = ["adapter={method: full}", "data.limit=60", "data.held_out=0.1", "batch.size=8", *SHORT]
    with output_heads.whole_last_block(True):  # blocks that wait for their turn have another forward pass
        whole, grown, late = (
            plan(load("sft/quickstart", [*words, f"grow.at={at}"])).dry_run for at in ([], [0.25], [0.75])
        )
    assert grown.at_peak == whole.at_peak and grown.evaluation == whole.evaluation
    saved = [whole.flops_per_token - each.flops_per_token for each in (grown, late)]
    assert 0 < 3 * saved[0] == pytest.approx(saved[1]) and saved[1] < 0.375 * whole.flops_per_token


@pytest.mark.nightly
def test_the_rows_that_a_sampler_looks_at_are_counted() -> None:
    """One forward pass more for each row of the pool; none where each row's own loss is enough."""

    def operations(**sampling: object) -> float:
        return plan(
            load("sft/quickstart", ["data.limit=60", f"data.sampling={sampling}", *SHORT])
        ).dry_run.flops_per_token

    plain, pruned, two, four = (
        operations(**words)
        for words in ({}, {"by": "infobatch"}, {"by": "selective", "pool": 2}, {"by": "selective", "pool": 4})
    )
    assert pruned == plain and two > 1.5 * plain
    assert four - two == pytest.approx(two - plain)


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_not_done_in_every_step_counts_as_often_as_it_is(compare: Callable[..., tuple[Plan, int]]) -> None:
    """Memory is that of the step that takes most; SAM is a second pass, whether or not a sampler looks before."""

    def operations(*words: str) -> float:
        return plan(load("sft/quickstart", ["data.limit=60", *words, *SHORT])).dry_run.flops_per_token

    plain, fourth = operations(), operations("optimizer.sam=0.05", "optimizer.sam_every=4")
    look, both = (operations("data.sampling={by: selective, pool: 2}", *sam) for sam in ((), ("optimizer.sam=0.05",)))
    assert fourth == pytest.approx(1.25 * plain) and both == pytest.approx(look + plain)
    words = ["adapter={method: full}", "optimizer={sam: 0.05, sam_every: 2, noise_scale: 3}", "batch.size=8"]
    planned, measured = compare("sft/quickstart", "data.limit=100", "data.held_out=0.1", *words)
    assert measured * 0.97 <= planned.dry_run.peak <= measured * 1.05


@pytest.fixture(scope="module")
def wide() -> Plan:
    """With more memory than it takes."""
    return plan(load("sft/quickstart", ["data.limit=100", *SHORT]), memory=100_000_000_000)


def test_it_says_what_fits(wide: Plan) -> None:
    tight = plan(load("sft/quickstart", ["data.limit=100", *SHORT]), memory=100_000_000)
    assert not tight.fits and "are missing" in tight.reasons[0]
    assert wide.fits and "are left" in wide.reasons[0]
    facts = json.loads(json.dumps(wide.facts))
    assert facts["fits"] is True and facts["bytes"]["peak"] == wide.dry_run.peak
    assert {"weights", "gradients", "optimizer", "activations", "peak"} <= set(facts["bytes"])


@pytest.mark.parametrize(
    ("device", "words", "packs"),
    [
        ("h100", [], "auto"),
        ("4090", ["model.weights=nf4"], "auto"),
        ("t4", [], False),
        ("mi300x", [], False),
        ("h100", ["model.weights=float32"], False),
        ("h100", ["model.compute=float32"], False),
        ("t4", ["batch.packing=true"], True),
    ],
)
def test_a_card_packs_rows_where_a_run_on_it_may(device: str, words: list[str], packs: bool | str) -> None:
    """In halves on NVIDIA's from Ampere on, whose flash attention takes rows of any lengths at once."""
    config, target = load("sft/quickstart", words), PlanTarget.of(device=device)
    batch = of_one_device(config, 1, accelerated=True, packs=target.packs(config)).batch
    assert (batch.packing, batch.shared_prefix) == (packs, False)


@pytest.mark.slow
def test_of_a_student_and_a_teacher_beside_it(compare: Callable[..., tuple[Plan, int]], stories: str) -> None:
    words = [f"distill.teacher.id={stories}", "distill.match=[{what: hidden_mse}]", "data.held_out=0.2", *FEW]
    words.append("train.steps=3")
    planned, measured = compare("distill/quickstart", *words)
    assert planned.dry_run.peak == pytest.approx(measured, rel=0.01)
    assert planned.dry_run.at_peak["teacher"] > planned.dry_run.at_peak["weights"]


@pytest.mark.slow
def test_of_a_student_whose_teacher_fills_a_cache(
    compare: Callable[..., tuple[Plan, int]], stories: str, tmp_path: Path
) -> None:
    """Nothing is asked by the plan; the run's training reads a cache, and asking for it takes a teacher's pass."""
    words = [f"distill.teacher.id={stories}", f"distill.cache.folder={tmp_path / 'said'}", "data.held_out=0.2", *FEW]
    asked = plan(load("distill/quickstart", [*words, *SHORT]))
    assert not (tmp_path / "said").exists()
    planned, measured = compare("distill/quickstart", *words, "train.steps=3")
    assert planned.dry_run.peak == pytest.approx(measured, rel=0.03)
    assert "teacher" not in planned.dry_run.at_peak and asked.dry_run.evaluation == planned.dry_run.evaluation


@pytest.mark.slow
@pytest.mark.nightly(but=["embed"])
@pytest.mark.parametrize("recipe", ["classify", "embed", "tag"])
def test_of_a_student_and_rows_that_only_its_teacher_knows(
    recipe: str, compare: Callable[..., tuple[Plan, int]], stories: str, tmp_path: Path
) -> None:
    """The teacher is gone by then; an epoch has the rows of both files."""
    words = [f"model.id={stories}", "data.limit=300", "evaluate.every=null", "batch.size=8"]
    short = ["train.steps=2", "train.epochs=null", "save.every=null"]
    teacher = workbench.run(f"{recipe}/quickstart", [*words, *short], out=tmp_path / "teacher", quiet=True)
    known = "starter/ewt_train.conll" if recipe == "tag" else "starter/banking77_unlabelled.csv"
    more = ["recipe=distill", f"of={recipe}", f"distill.teacher.id={teacher}", f"distill.unlabelled={known}"]
    words += [*more, "adapter={method: full}", "distill.control=true"]
    planned, measured = compare(f"{recipe}/quickstart", *words, "train.steps=4")
    assert sum(planned.dry_run.at_peak.values()) == pytest.approx(measured, rel=0.01 if recipe == "embed" else 0.03)
    whole = plan(load(f"{recipe}/quickstart", [*words, "train.steps=null", "train.epochs=1"]))
    assert whole.steps is not None and whole.steps > 300 / 8


@pytest.mark.nightly
def test_of_packed_rows_that_a_teacher_reads(compare: Callable[..., tuple[Plan, int]], stories: str) -> None:
    words = [f"distill.teacher.id={stories}", "data.held_out=0.2", "batch.packing=true", *FEW]
    planned, measured = compare("distill/quickstart", *words)
    assert planned.dry_run.peak == pytest.approx(measured, rel=0.01)


@pytest.mark.nightly
def test_of_a_teacher_on_the_backbone_of_its_student(
    compare: Callable[..., tuple[Plan, int]], stories: str, tmp_path: Path
) -> None:
    words = [f"model.id={stories}", LORA, "data.held_out=0.2", *FEW]
    teacher = workbench.run("sft/quickstart", [*words, *SHORT, "train.steps=1"], out=tmp_path / "teacher", quiet=True)
    planned, measured = compare(
        "distill/quickstart", f"distill.teacher.id={teacher}", "distill.student={layers: all}", *words
    )
    assert planned.dry_run.peak == pytest.approx(measured, rel=0.01)
    assert "teacher" not in planned.dry_run.at_peak


@pytest.mark.slow
@pytest.mark.nightly(but=["lora"])
@pytest.mark.parametrize("method", ["lora", "dora", "ia3", "houlsby"])
def test_of_a_bank(compare: Callable[..., tuple[Plan, int]], short_stories: str, method: str) -> None:
    chosen = [f"adapter={{method: {method}}}", "folds.k=2", "train.steps=3"]
    words = [f"model.id={short_stories}", *FEW, "data.limit=400", *chosen]
    planned, measured = compare("crossval/quickstart", *words)
    assert planned.dry_run.peak == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
def test_of_a_fleet_and_of_as_many_as_fit(ledgers: list[MemoryLedger], short_stories: str, tmp_path: Path) -> None:
    rows = "data: {train: starter/arithmetic_start.jsonl, held_out: 0.2, limit: 60}, train.steps: 3"
    members = f"fleet.members={{a: {{{rows}, adapter.rank: 8}}, b: {{{rows}, adapter.rank: 32}}}}"
    config = load("fleet/quickstart", [f"model.id={short_stories}", "evaluate={samples: 0, answers: 0}", members])

    @functools.cache
    def needed(many: int) -> int:
        planned = plan(plan_fleet.with_members(config, many))
        return planned.needed - planned.process

    room = that_fit(needed, few=2, memory=(needed(3) + needed(4)) // 2)
    assert room.count == 3
    workbench.run(plan_fleet.with_members(config, room.count), out=tmp_path / "run", quiet=True)
    measured = max(ledger.peak for ledger in ledgers)
    assert room.known[3] == pytest.approx(measured, rel=0.03)


def test_an_average_takes_the_memory_of_what_it_averages(short_stories: str) -> None:
    """And once more while it is evaluated, when it stands in the place of the values that train."""
    words = [f"model.id={short_stories}", *FEW, *SHORT, "adapter={method: full}", "model.weights=float32"]
    alone, averaged = (
        plan(load("sft/quickstart", [*words, f"average={{method: {method}}}"]))
        for method in ("none", "ema, device: cpu")
    )
    copy = sum(alone.contents.trained) * torch.float32.itemsize
    assert averaged.at_peak["optimizer"] - alone.at_peak["optimizer"] == copy
    assert averaged.dry_run.evaluation - alone.dry_run.evaluation == 2 * copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("classify", ["adapter={method: full}", "average={method: lawa, every: 1, k: 2}"]),
        ("embed", ["adapter={method: prefix}", "batch.size=16", "evaluate.every=null"]),
    ],
)
def test_of_encoders_with_averages_and_of_texts_one_by_one(
    recipe: str, words: list[str], compare: Callable[..., tuple[Plan, int]], tmp_path: Path
) -> None:
    bert = save_tiny(tmp_path / "bert", "Bert", "SequenceClassification", MINILM, max_position_embeddings=160)
    generator = random.Random(0)
    rows = [{key: "word " * generator.randrange(1, 60) + str(n) for key in ("anchor", "positive")} for n in range(24)]
    data = ["data.limit=160", "evaluate.every=0.5"]
    if recipe != "classify":
        write_lines(tmp_path / "rows.jsonl", rows)
        data = [f"data.train={tmp_path / 'rows.jsonl'}", "data.held_out=0.5", "data.columns={}"]
    planned, measured = compare(f"{recipe}/quickstart", f"model.id={bert}", *data, "train.steps=3", *words)
    peak = planned.dry_run.peak if "evaluate.every=null" not in words else sum(planned.dry_run.at_peak.values())
    assert peak == pytest.approx(measured, rel=0.03)


def test_what_cannot_be_planned_is_refused() -> None:
    alone = "recipe=classify and data.held_out=0.2, and leave folds and duplicates out"
    with pytest.raises(ConfigError, match=f"recipe=crossval: its members train one after another .*{alone}"):
        plan(load("crossval/quickstart", ["folds.together=false"]))
    with pytest.raises(ConfigError, match="recipe=sft and the values of a member, and leave sweep out"):
        plan(load("sweep/quickstart", ["optimizer.sam=0.05"]))
    with pytest.raises(ConfigError, match="knows no peers"):
        plan(load("distill/quickstart", ["distill.peers=2", "distill.teacher.id=null", "model.id=starter"]))
    with pytest.raises(ConfigError, match="each device trains a share of the members"):
        plan(load("crossval/quickstart"), devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_plan_counts_answers_and_scoring(stories: str, compute: str) -> None:
    words = [f"model.id={stories}", f"model.compute={compute}", LORA, "data.limit=20", "data.held_out=0.2"]
    words += ["data.max_tokens=128", "train.steps=3"]  # scores of longer rows are the peak in bfloat16

    def evaluation(*more: str) -> int:
        return plan(load("sft/quickstart", [*words, *more])).evaluation

    scoring = evaluation("evaluate.answers=0")
    long = evaluation("evaluate.answers=4", "evaluate.max_new_tokens=20000")
    short = evaluation("evaluate.answers=4", "evaluate.max_new_tokens=1")
    assert long > 1.2 * scoring and long > 1.1 * short, (long, short, scoring)
    assert short < (1.4 if compute == "float32" else 1.05) * scoring, "in float32 prompts take more than scoring does"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["classify/quickstart", "sft/quickstart"])
def test_a_plan_on_a_cpu_is_what_the_whole_process_holds(recipe: str, tmp_path: Path) -> None:
    words = [recipe, "train.steps=3", "train.epochs=null"]
    command = [sys.executable, "-m", "workbench.cli"]
    told = json.loads(subprocess.run([*command, "plan", *words, "--json"], capture_output=True, check=True).stdout)
    planned = told["bytes"]["peak"] + told["process_bytes"] + told["host_bytes"]
    # Through a small process: Linux counts the memory of who forks as its child's.
    held = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    held += "print(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    run = [sys.executable, "-c", held, *command, "run", *words, "--out", str(tmp_path / "run")]
    assert 0.9 < planned / int(subprocess.run(run, capture_output=True, check=True).stdout) < 1.15
