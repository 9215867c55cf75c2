"""The reference of recipe prefer: other runs and models, and what it said, which is asked for once."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import trains
from tests.recipes.tasks.prefer.test_preference_run import BETA, RECIPE, pair
from tests.run_files import read_scores, write_lines
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.data.text.preference_pairs import PreferenceSet
from workbench.distillation import teachers
from workbench.errors import ConfigError
from workbench.evaluation import reference_loss_store
from workbench.recipes.load import load
from workbench.recipes.single import token_reference
from workbench.recipes.tasks.prefer import preference_reference, preference_run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

Train = Callable[..., Path]
WEIGHTS = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of answers."""
    found = tmp_path_factory.mktemp("references")
    write_lines(found / "pairs.jsonl", (pair(n) for n in range(30)))
    return found


@pytest.fixture(scope="module")
def train(folder: Path, short_stories: str) -> Train:
    return trains(folder, RECIPE, model=short_stories, train=folder / "pairs.jsonl", beta=BETA)


@pytest.fixture(scope="module")
def first(train: Train) -> Path:
    """A finished run. Read only."""
    return train(name="first")


@pytest.fixture(scope="module")
def other(first: Path) -> Path:
    """Another run, of which half was learnt. Read only."""
    copy = first.with_name("other")
    shutil.copytree(first, copy)
    save_file({name: each / 2 for name, each in load_file(copy / WEIGHTS).items()}, copy / WEIGHTS)
    return copy


@pytest.fixture(scope="module")
def changed_model(folder: Path, short_stories: str) -> Path:
    """The backbone with other weights and the same tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(short_stories)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.05)
    model.save_pretrained(folder / "changed")
    AutoTokenizer.from_pretrained(short_stories).save_pretrained(folder / "changed")
    return folder / "changed"


def log_p(model: nn.Module, rows: PreferenceSet) -> list[float]:
    """Log-probabilities of all answers, in float64."""
    found = []
    for number in range(len(rows.answers)):
        row = rows.answers[number]
        ids, where = torch.from_numpy(row.input_ids)[None], np.flatnonzero(row.supervised)
        with torch.no_grad():
            found.append(float(model(ids).logits[0].log_softmax(-1)[where - 1, ids[0, where]].sum()))
    return found


def dpo(own: list[float], known: list[float]) -> float:
    ratios = [BETA * (mine - theirs) for mine, theirs in zip(own, known, strict=True)]
    each = [math.log1p(math.exp(bad - good)) for good, bad in zip(ratios[::2], ratios[1::2], strict=True)]
    return sum(each) / len(each)


@pytest.mark.nightly(but=["run"])
@pytest.mark.parametrize("kind", ["run", "model"])
def test_a_reference_beside_another_start(
    kind: str, train: Train, first: Path, other: Path, changed_model: Path, short_stories: str
) -> None:
    """What is learnt begins at the start, and is compared with a third model, by transformers and PEFT alone."""

    def backbone() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(short_stories).double()  # type: ignore[no-any-return]

    reference = other if kind == "run" else changed_model
    words = [f"prefer.start={first}", f"prefer.reference={reference}", "train.steps=2"]
    found = train(*words, name=f"beside-{kind}")
    scores = read_scores(found)
    rows = preference_run.prepare(load(found.parent / "recipe.yaml", words))[2].held_out
    if kind == "run":
        known = log_p(PeftModel.from_pretrained(backbone(), other / "adapter"), rows)
    else:
        known = log_p(AutoModelForCausalLM.from_pretrained(changed_model).double(), rows)
    for when, run in (("before", first), ("after", found)):
        own = log_p(PeftModel.from_pretrained(backbone(), run / "adapter"), rows)
        assert scores[when]["loss"] == pytest.approx(dpo(own, known), abs=2e-5)
    assert abs(scores["before"]["margin"]) > 1e-3


def test_a_second_run_asks_nobody(train: Train, first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes that the reference's numbers do not depend on."""
    monkeypatch.setattr(teachers, "alone", lambda *_: pytest.fail("asked again"))
    same = train(name="again")
    assert (same / "scores.json").read_text() == (first / "scores.json").read_text()
    train("prefer.loss=ipo", "prefer.beta=0.7", "prefer.length=mean", "batch.size=4", "train.steps=1", name="ipo")


def where(words: list[str], train_folder: Path) -> Path:
    """Folder of what the reference says of the training rows."""
    config = load(train_folder / "recipe.yaml", words)
    tokenizer, _, pairs = preference_run.prepare(config)
    reference = token_reference.find(preference_reference.wanted(config), config, tokenizer)
    return reference_loss_store.folder(reference.identity, pairs.train.answers)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["prefer.reference={changed}"], True),
        (["model.id={changed}"], True),
        (["prefer.reference={first}"], True),
        (["prefer.start={other}"], True),
        (["model.chat_template={template}"], True),
        (["data.max_tokens=56", "data.truncate=left"], True),
        (["data.train={fewer}"], True),
        (["data.train={reworded}"], True),
        (["seed=7"], True),
        (["model.weights=bfloat16"], True),
        (["model.weights=nf4"], True),
        (["model.attention=eager"], True),
        (["prefer.reference={copy}"], False),
        (["adapter.rank=8", "adapter.dropout=0.1", "prefer.beta=1.0", "prefer.loss=hinge", "train.steps=9"], False),
        (["data.max_tokens=90"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_reference_is_asked_again_where_its_numbers_would_differ(
    words: list[str], asks: bool, train: Train, first: Path, other: Path, changed_model: Path, short_stories: str
) -> None:
    """By model, adapter, template, truncation, rows, and how weights are stored and computed; not by names."""
    folder = first.parent
    rows = [pair(n) for n in range(30)]
    write_lines(folder / "fewer.jsonl", rows[:-1])
    rows[0]["rejected"][0]["content"] = "No."
    write_lines(folder / "reworded.jsonl", rows)
    (folder / "template.jinja").write_text(TEMPLATE)
    shutil.copytree(short_stories, folder / "copy", dirs_exist_ok=True)
    names = {
        "changed": changed_model,
        "first": first,
        "other": other,
        "template": folder / "template.jinja",
        "fewer": folder / "fewer.jsonl",
        "reworded": folder / "reworded.jsonl",
        "copy": folder / "copy",
    }
    own = [word.format(**names) for word in words]
    assert (where(own, folder) != where([], folder)) == asks


def test_adapters_of_one_name_are_told_apart(first: Path, other: Path, train: Train) -> None:
    found = {where([f"prefer.reference={run}"], first.parent) for run in (first, other)}
    assert len(found) == 2


def test_an_int8_reference_is_not_cut(first: Path, train: Train, tmp_path: Path) -> None:
    copy = tmp_path / "int8"
    shutil.copytree(first, copy)
    values = read_yaml(copy / "config.yaml")
    values["model"]["weights"] = "int8"
    (copy / "config.yaml").write_text(dump_yaml(values))
    words = [f"prefer.reference={copy}", "distributed.zero=3"]
    with pytest.raises(ConfigError, match=r"has model.weights=int8.*Write distributed.zero=2"):
        preference_run.prepare(load(first.parent / "recipe.yaml", words))
