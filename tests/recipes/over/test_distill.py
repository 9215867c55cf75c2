"""Recipe distill from the command's side: every kind of teacher and student, with real small backbones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import workbench
from tests.conftest import write_questions
from tests.run_files import read_losses, read_scores
from tests.stopping import stop_after
from workbench import recipes
from workbench.cli.console import Terminal
from workbench.config import RunConfig
from workbench.config.sections.distributed_config import DistributedConfig
from workbench.config.yaml_text import dump_yaml
from workbench.data import starter
from workbench.data.batching import evenly_spaced
from workbench.data.text import tokenized
from workbench.data.text.row_encoder import row_encoder
from workbench.errors import ConfigError, Stopped
from workbench.models import backbones, exported
from workbench.recipes.load import load
from workbench.recipes.over import distill_verbs
from workbench.recipes.verbs.evaluate import evaluate
from workbench.recipes.verbs.export import export
from workbench.runs import run_directory
from workbench.runs.ranks import Ranks
from workbench.training.distributed import layout_checks

FULL = {"method": "full"}
LORA = {"method": "lora", "rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    return write_questions(folder / "rows.jsonl", [f"{n + 1}" + " it is" * (n % 5) for n in range(60)])


def _config(short_stories: str, rows: Path, **sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "recipe": "distill",
        "model": {"id": short_stories, "weights": "float32"},
        "adapter": LORA,
        "data": {"train": str(rows), "held_out": 0.2},
        "batch": {"size": 8},
        "train": {"steps": 5, "learning_rate": 5e-3},
        "evaluate": {"every": None, "answers": 0},
    }
    return RunConfig.model_validate({**base, **sections})


def _run(config: RunConfig, out: Path) -> Path:
    return workbench.run(config, out=out, quiet=True)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory, short_stories: str, rows: Path) -> dict[str, Path]:
    """Finished runs: all weights trained, a LoRA adapter, and another one."""
    folder = tmp_path_factory.mktemp("teachers")
    made = {}
    for name, adapter, rate in (("full", FULL, 2e-3), ("lora", LORA, 1e-2), ("other", LORA, 4e-3)):
        train = {"steps": 15, "learning_rate": rate}
        config = _config(short_stories, rows, recipe="sft", adapter=adapter, train=train, batch={"size": 16})
        made[name] = _run(config, folder / name)
    return made


@pytest.mark.slow
def test_a_student_with_half_of_the_layers_is_a_stock_model(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    distill = {"teacher": {"id": str(teachers["full"])}, "student": {"layers": "every-2"}, "alpha": 0.7}
    config = _config(short_stories, rows, model={"id": "teacher", "weights": "float32"}, adapter=FULL, distill=distill)
    run = _run(config, tmp_path / "run")
    teacher = AutoModelForCausalLM.from_pretrained(teachers["full"] / "adapter")
    student, found = AutoModelForCausalLM.from_pretrained(run / "adapter", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert student.config.num_hidden_layers == (teacher.config.num_hidden_layers + 1) // 2
    assert student.config.hidden_size == teacher.config.hidden_size
    assert not (run / "student").exists() and str(run / "student") not in (run / "report.html").read_text()
    scores = read_scores(run)
    assert scores["teacher"]["loss"] == pytest.approx(read_scores(teachers["full"])["after"]["loss"], rel=0.02)
    assert scores["after"]["loss"] < scores["before"]["loss"]
    assert evaluate(run, [])["loss"] == pytest.approx(scores["after"]["loss"], rel=1e-4)
    assert "same first choice 100" in export(run, to="vllm", out=tmp_path / "served", weights="float32").error


def test_an_adapter_over_a_made_student_is_served_with_it(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    distill = {"teacher": {"id": str(teachers["lora"])}, "student": {"layers": [1]}}
    run = _run(_config(short_stories, rows, distill=distill), tmp_path / "run")
    config = run_directory.shipped_config(run)
    assert config.recipe == "sft" and Path(config.model.id) == (run / "student").resolve()
    assert len(exported.load(run, config).model.base_model.model.model.layers) == 1
    assert evaluate(run, [])["loss"] == pytest.approx(read_scores(run)["after"]["loss"], rel=1e-4)


def test_without_a_share_of_the_teacher_it_is_plain_training(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    plain = _run(_config(short_stories, rows, recipe="sft"), tmp_path / "plain")
    distill = {"teacher": {"id": str(teachers["full"])}, "alpha": 0.0}
    taught = _run(_config(short_stories, rows, distill=distill), tmp_path / "taught")
    assert read_losses(taught) == pytest.approx(read_losses(plain), rel=1e-6)


@pytest.mark.nightly
def test_a_teacher_on_the_students_backbone_teaches_what_a_copy_would(
    short_stories: str, rows: Path, tmp_path: Path
) -> None:
    shutil.copytree(short_stories, tmp_path / "copy")
    found = {}
    for name, who in (("shared", {"id": "backbone"}), ("copied", {"id": str(tmp_path / "copy"), "weights": "float32"})):
        config = _config(short_stories, rows, distill={"teacher": who, "alpha": 0.9, "temperature": 2.0})
        run = _run(config, tmp_path / name)
        assert json.loads((run / "manifest.json").read_text())["distill"]["shared"] is (name == "shared")
        found[name] = read_losses(run)
    assert found["shared"] == pytest.approx(found["copied"], rel=1e-6)


@pytest.mark.nightly
def test_several_adapters_teach_together(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    who = {"id": [str(teachers["lora"]), str(teachers["other"])]}
    run = _run(_config(short_stories, rows, distill={"teacher": who, "alpha": 1.0}), tmp_path / "run")
    each = [read_scores(teachers[name])["after"]["loss"] for name in ("lora", "other")]
    # By Jensen's inequality a mean of distributions is likelier than they are on average.
    assert min(each) / 2 < read_scores(run)["teacher"]["loss"] < sum(each) / 2


@pytest.mark.nightly
def test_a_full_cache_teaches_what_the_live_teacher_does(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    distill = {"teacher": {"id": str(teachers["full"])}, "temperature": 2.0, "loss": "jsd", "alpha": 0.8}
    live = _run(_config(short_stories, rows, distill=distill), tmp_path / "live")
    cache = {"folder": str(tmp_path / "cache"), "k": 512, "dtype": "float32"}
    cached = _run(_config(short_stories, rows, distill={**distill, "cache": cache}), tmp_path / "cached")
    assert read_losses(cached) == pytest.approx(read_losses(live), abs=1e-5)
    again = _run(_config(short_stories, rows, distill={**distill, "cache": cache}, seed=0), tmp_path / "again")
    assert read_losses(again) == read_losses(cached)
    few = {"folder": str(tmp_path / "few"), "k": 16}
    near = _run(_config(short_stories, rows, distill={**distill, "cache": few}), tmp_path / "near")
    assert read_scores(near)["after"]["loss"] == pytest.approx(read_scores(live)["after"]["loss"], rel=0.01)


def test_a_cache_is_made_by_a_verb_of_its_own_and_needs_no_teacher_afterwards(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    cache = {"folder": str(tmp_path / "cache"), "k": 16}
    config = _config(short_stories, rows, distill={"teacher": {"id": str(teachers["lora"])}, "cache": cache})
    with Terminal(quiet=True) as terminal:
        facts = distill_verbs.distill_cache(config, callback=terminal)
    assert facts["bytes_per_token"] < 100 and facts["k"] == 16
    _run(_config(short_stories, rows, distill={"cache": cache}), tmp_path / "run")


@pytest.mark.slow
def test_a_cache_says_what_it_loses_and_keeps_as_much_as_is_asked_for(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    cache = {"folder": str(tmp_path / "cache"), "gap": 0.02, "dtype": "float32"}
    teacher = {"id": str(teachers["full"])}
    config = _config(short_stories, rows, distill={"teacher": teacher, "temperature": 2.0, "cache": cache})
    with Terminal(quiet=True) as terminal:
        facts = distill_verbs.distill_cache(config, callback=terminal)
    base = config.model_copy(update={"recipe": "sft"})
    tokenizer = AutoTokenizer.from_pretrained(teachers["full"] / "adapter")
    template = row_encoder(base, backbones.hub_config(base.model), tokenizer)
    train = tokenized.load(config.data, tokenizer, template, seed=config.seed).train
    models = [
        AutoModelForCausalLM.from_pretrained(path).eval() for path in (short_stories, teachers["full"] / "adapter")
    ]
    live, cached, count = 0.0, {facts["k"]: 0.0, facts["k"] - 1: 0.0}, 0
    for number in evenly_spaced(len(train), 8):
        row = train[int(number)]
        at = np.flatnonzero(row.supervised[1:])
        with torch.no_grad():
            q, p = (
                (model(torch.from_numpy(row.input_ids)[None]).logits[0, at].double() / 2).softmax(-1)
                for model in models
            )
        live += 4 * float((p * (p / q).log()).sum())
        order, count = p.argsort(-1, descending=True), count + len(at)
        for k in cached:
            kept = [each.gather(1, order[:, :k]) for each in (q, p)]
            q_k, p_k = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], 1) for each in kept)
            cached[k] += 4 * float((p_k * (p_k / q_k).log()).sum())
    lost = {k: (live - value) / live for k, value in cached.items()}
    assert facts["live_divergence"] == pytest.approx(live / count, rel=1e-5)
    assert facts["gap"] == pytest.approx((live - cached[facts["k"]]) / count, abs=1e-5)
    assert lost[facts["k"]] <= 0.02 < lost[facts["k"] - 1] and 0 < facts["mass_beyond_k"] < 1
    run = _run(_config(short_stories, rows, distill={"temperature": 2.0, "cache": cache}), tmp_path / "run")
    noted = json.loads((run / "manifest.json").read_text())["distill"]["cache"]
    assert {name: noted[name] for name in ("k", "gap", "gap_share")} == {
        name: facts[name] for name in ("k", "gap", "gap_share")
    }
    with pytest.raises(
        ConfigError, match=rf"gap=0.001: .*cache keeps {facts['k']} tokens, and that loses 0.0.*higher gap"
    ):
        _run(
            _config(short_stories, rows, distill={"temperature": 2.0, "cache": {**cache, "gap": 1e-3}}), tmp_path / "no"
        )


@pytest.mark.nightly(but=["schedules"])
@pytest.mark.parametrize(
    "distill",
    [
        {"match": [{"what": "hidden_mse", "layers": "uniform"}, {"what": "relation"}]},
        {"on_policy": {"share": 0.5, "max_new_tokens": 6}},
        {"alpha": [0.0, 1.0], "temperature": [4.0, 1.0], "loss": "skew_reverse_kl"},
    ],
    ids=["match", "on-policy", "schedules"],
)
def test_a_stopped_run_resumes_to_the_same_bits(
    short_stories: str,
    rows: Path,
    teachers: dict[str, Path],
    tmp_path: Path,
    distill: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distill = {"teacher": {"id": str(teachers["full"])}, "student": {"layers": "first-1"}, **distill}
    config = _config(short_stories, rows, distill=distill)
    straight = _run(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_after(patch)
        with pytest.raises(Stopped):
            _run(config, tmp_path / "broken")
    broken = workbench.run(config, out=tmp_path / "broken", resume=True, quiet=True)
    assert read_losses(broken) == read_losses(straight)
    one, other = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (straight, broken))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_micro_batches_change_nothing(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    distill = {"teacher": {"id": str(teachers["full"])}, "match": [{"what": "hidden_cosine"}], "alpha": 0.5}
    found = [
        read_losses(
            _run(_config(short_stories, rows, distill=distill, batch={"size": 8, "tokens_per_device": tokens}), out)
        )
        for tokens, out in ((90, tmp_path / "small"), (4000, tmp_path / "large"))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.nightly
def test_peers_without_each_other_learn_as_if_alone(short_stories: str, rows: Path, tmp_path: Path) -> None:
    """At alpha 0 the loss is the mean of runs of their own, but for the clipping of gradients, which is off here."""
    train = {"steps": 4, "learning_rate": 5e-3, "max_grad_norm": 1e6}
    alone = [
        read_losses(_run(_config(short_stories, rows, recipe="sft", seed=0, train=train), tmp_path / "alone")),
        read_losses(
            _run(_config(short_stories, rows, distill={"peers": 2, "alpha": 0.0}, train=train), tmp_path / "peers")
        ),
        read_losses(
            _run(_config(short_stories, rows, distill={"peers": 2, "alpha": 0.5}, train=train), tmp_path / "taught")
        ),
    ]
    assert alone[1][0] == pytest.approx(alone[0][0], rel=1e-5)  # fresh adapters change nothing
    assert alone[1] == pytest.approx(alone[0], rel=0.05)
    assert alone[2][0] == pytest.approx(0.5 * alone[0][0], rel=1e-5)  # equal peers have nothing to teach


@pytest.mark.parametrize("loss", ["universal", "gold", "alm"])
def test_a_teacher_of_another_vocabulary(short_stories: str, rows: Path, tmp_path: Path, loss: str) -> None:
    distill = {"teacher": {"id": "starter"}, "loss": loss, "alpha": 0.5}
    run = _run(_config(short_stories, rows, distill=distill), tmp_path / "run")
    assert 0.05 < json.loads((run / "manifest.json").read_text())["distill"]["aligned"] <= 1
    assert read_losses(run)[-1] < read_losses(run)[0]


@pytest.mark.parametrize("loss", ["gold", "alm"])
def test_a_cache_of_another_vocabulary_is_its_teacher(
    short_stories: str, rows: Path, tmp_path: Path, loss: str
) -> None:
    distill = {"teacher": {"id": "starter"}, "loss": loss, "alpha": 1.0}
    live = _run(_config(short_stories, rows, distill=distill), tmp_path / "live")
    distill["cache"] = {"folder": str(tmp_path / "cache"), "k": 6144, "dtype": "float32"}
    cached = _run(_config(short_stories, rows, distill=distill), tmp_path / "cached")
    assert read_losses(cached) == pytest.approx(read_losses(live), rel=1e-3)
    facts = json.loads((cached / "manifest.json").read_text())["distill"]
    assert facts["cache"]["kind"] == {"gold": "spans", "alm": "likelihoods"}[loss] and facts["aligned"] > 0.05


def test_a_student_writes_for_a_teacher_of_another_vocabulary(short_stories: str, rows: Path, tmp_path: Path) -> None:
    on_policy = {"share": 0.5, "max_new_tokens": 8}
    distill = {"teacher": {"id": "starter"}, "loss": "gold", "alpha": 1.0, "on_policy": on_policy}
    run = _run(_config(short_stories, rows, distill=distill), tmp_path / "run")
    assert all(0 < loss < 20 for loss in read_losses(run))


def test_devices_share_rows_and_weights_unless_the_student_writes(short_stories: str, rows: Path) -> None:
    config = _config(short_stories, rows, distill={"teacher": {"id": "backbone"}})
    layout_checks.require(config, Ranks(0, 2))
    layout_checks.require(config.model_copy(update={"distributed": DistributedConfig(zero=3)}), Ranks(0, 2))
    distill = {"teacher": {"id": "backbone"}, "on_policy": {"share": 0.5}}
    writing = _config(short_stories, rows, distill=distill, distributed={"zero": 3})
    with pytest.raises(ConfigError, match=r"on_policy writes with the whole student.* Write distributed\.zero=2"):
        layout_checks.require(writing, Ranks(0, 2))


def test_check_shows_a_student_that_is_still_to_be_made(
    short_stories: str, rows: Path, teachers: dict[str, Path], tmp_path: Path
) -> None:
    recipe = tmp_path / "my.yaml"
    distill = {"teacher": {"id": str(teachers["full"])}, "student": {"layers": "last-2"}}
    config = _config(short_stories, rows, model={"id": "teacher"}, distill=distill)
    recipe.write_text(dump_yaml(config.model_dump(mode="json")))
    from workbench.recipes.verbs.check import check

    found = check(load(recipe))
    assert found.notes[0].startswith("Teacher: ")
    assert not list(tmp_path.glob("*/student"))


@pytest.mark.nightly(but=["distill/quickstart"])
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("distill/quickstart", "distill/peers") else [pytest.mark.slow])
        for name in recipes.shipped()
        if name.startswith("distill/")
    ],
)
def test_every_shipped_recipe_trains(name: str, tmp_path: Path) -> None:
    """On fewer rows; a teacher that another recipe trains is a short run of it, or the starter as it is."""
    short = ["train.steps=2", "batch.size=4", "evaluate.every=null"]
    words = [*short, "data.limit=24"]
    if name == "distill/ensemble":
        folds = ["folds.k=2", "data.limit=160", "data.test=null"]
        teacher = workbench.run("crossval/quickstart", [*short, *folds], out=tmp_path / "teacher", quiet=True)
        few = _head("banking77_unlabelled.csv", tmp_path)
        words += ["data.limit=160", "data.held_out=0.2", f"distill.unlabelled={few}", f"distill.teacher.id={teacher}"]
    elif name == "distill/pictures":
        folds = ["folds.k=2", "data.limit=60", "data.test=null", "pseudo_label.unlabelled=null", "tta.views=[]"]
        teacher = workbench.run("crossval/pictures", [*short, *folds], out=tmp_path / "teacher", quiet=True)
        words += ["data.limit=60", "data.held_out=0.4", "data.test=null", f"distill.teacher.id={teacher}"]
        words.append("distill.control=true")  # so short a run knows little
    else:
        few = _head("fairytaleqa_held_out.jsonl", tmp_path)
        words += [f"data.held_out={few}", "evaluate.answers=2", "evaluate.max_new_tokens=4"]
    if name == "distill/quickstart":
        words += ["distill.teacher.id=starter"]
    if name == "distill/answers":  # of a teacher that knows how answers end
        known = ["train.steps=16", "train.learning_rate=2e-3", "data.limit=128", *words[-3:]]
        teacher = workbench.run("sft/full", [*short[1:], *known], out=tmp_path / "teacher", quiet=True)
        words += [f"distill.teacher.id={teacher}"]
    run = workbench.run(name, words, out=tmp_path / "run", quiet=True)
    assert len(read_losses(run)) == 2 and all(0 < loss < 10 for loss in read_losses(run))
    assert json.loads((run / "manifest.json").read_text())["status"] == "done"
    assert "<path" in (run / "report.html").read_text()


def _head(name: str, folder: Path) -> Path:
    """The first lines of a file of the starter."""
    lines = (starter.FOLDER / name).read_text().splitlines()
    (folder / name).write_text("\n".join(lines[:8]) + "\n")
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_a_plan_knows_a_teacher_of_another_vocabulary(
    short_stories: str, rows: Path, tmp_path: Path, cached: bool
) -> None:
    distill: dict[str, Any] = {"teacher": {"id": "starter"}, "loss": "gold"}
    if cached:
        distill["cache"] = {"folder": str(tmp_path / "none")}
    taught, alone = (
        sum(workbench.plan(_config(short_stories, rows, distill=each)).plan.at_peak.values())
        for each in (distill, {"teacher": {"id": "starter"}, "alpha": 0.0})
    )
    assert taught > alone > 0
