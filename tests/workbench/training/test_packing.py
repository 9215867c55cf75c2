"""Packed rows train as padded ones do, under every setting that meets them, and `auto` takes them where they pay."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import MINILM, save_tiny, trains
from tests.run_files import read_lines, read_losses, write_lines
from tests.stopping import stop_after
from workbench.data.batching import global_batch
from workbench.data.packing import PADDED
from workbench.errors import Stopped
from workbench.models import backbones
from workbench.training import packing

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32, compute: float32}}
adapter: {{method: lora, rank: 4, alpha: 8}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, tokens_per_device: 400}}
train: {{steps: 4, learning_rate: 2.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: 2}}
"""
OF_AN_ENCODER = ("recipe=classify", "model.id={classifier}", "data.train={labelled}")
FOLDS = ("recipe=crossval", "of=classify", "data={{train: {labelled}}}", "folds={{k: 2, column: fold}}")
SWEEP = ("recipe=sweep", "evaluate.every=2", "sweep.over={{train.learning_rate: [1.0e-3, 2.0e-3]}}")
EMBED = ("recipe=embed", "data={{train: {twins}, held_out: 0.1}}", "batch.tokens_per_device=120")
TAUGHT = ("recipe=distill", "distill.teacher.id=backbone")
WAYS: dict[str, tuple[str, ...]] = {
    "plain": ("evaluate.every=2",),
    "recomputed": ("train.checkpointing=true", "adapter.dropout=0.3"),
    "weighted rows": ("data.sampling.by=infobatch", "data.limit=24", "train.steps=6"),
    "rows that are looked at": ("data.sampling.by=selective",),
    "a bottleneck": ("adapter={method: houlsby, dropout: 0.2}",),
    "all weights": ("adapter={method: full}", "train.learning_rate=1e-4"),
    "frozen layers": ("freeze.policy=egeria", "freeze.every=2", "train.steps=6"),
    "kept outputs": ("freeze.policy=static", "freeze.layers=0.5", "freeze.cache=memory", "train.steps=24"),
    "masked words": ("recipe=mlm", "model.id={encoder}", "data.train={texts}"),
    "rewards": ("recipe=reward", "data.train={pairs}", "adapter.dropout=0.3"),
    "classes of a causal model": ("recipe=classify", "data.train={labelled}"),
    "classes of an encoder": OF_AN_ENCODER,
    "classes of an encoder with dropout": (*OF_AN_ENCODER, "adapter.dropout=0.3"),
    "a probe of an encoder": (*OF_AN_ENCODER, "adapter={method: linear-probe}"),
    "means of texts": (*EMBED, "model.id={encoder}", "adapter.dropout=0.3"),
    "first tokens of texts": (*EMBED, "model.id={encoder}", "embed.pooling=first"),
    "last tokens of texts": (*EMBED, "embed.pooling=last", "embed.symmetric=true"),
    "a teacher": (*TAUGHT, "distill.temperature=2.0", "adapter.dropout=0.3"),
    "a teacher that was asked": (*TAUGHT, "distill.cache={{folder: {cache}, k: 16}}"),
    "a teacher of other tokens": ("recipe=distill", "distill={{teacher: {{id: starter}}, loss: universal}}"),
    "a teacher of own answers": (*TAUGHT, "distill.on_policy={{share: 0.5, max_new_tokens: 6}}"),
    "a teacher of hidden words": (
        *("recipe=distill", "of=mlm", "distill={{teacher: {{id: {encoder}}}}}"),
        *("model.id={encoder}", "data.train={texts}", "data.max_tokens=200"),
    ),
    "a teacher of classes": (
        *("recipe=distill", "of=classify", "distill={{teacher: {{id: {classifier}}}, control: true}}"),
        *("model.id={classifier}", "data.train={labelled}"),
    ),
    "peers": ("recipe=distill", "distill.peers=3", "adapter.dropout=0.3"),
}


@pytest.fixture
def folder(tmp_path: Path, questions: Path) -> dict[str, str]:
    rows = read_lines(questions)
    texts, labelled = tmp_path / "texts.jsonl", tmp_path / "labelled.jsonl"
    said = [" ".join(str(value) for value in row.values()) for row in rows]
    write_lines(texts, ({"text": text} for text in said))
    labelled.write_text(
        "".join(
            json.dumps({"text": text, "label": ["odd", "even"][len(text) % 2], "fold": number // 2 % 2}) + "\n"
            for number, text in enumerate(said)
        )
    )
    for name, head in {"encoder": "MaskedLM", "classifier": "SequenceClassification"}.items():
        save_tiny(tmp_path / name, "Bert", head, MINILM, id2label={0: "even", 1: "odd"})
    encoders = {name: str(tmp_path / name) for name in ("encoder", "classifier")}
    pairs = tmp_path / "pairs.jsonl"
    worse = ["I do not know.", "No."]
    pairs.write_text(
        "".join(
            json.dumps({"prompt": row["question"], "chosen": row["answer"], "rejected": worse[number % 2]}) + "\n"
            for number, row in enumerate(rows)
        )
    )
    twins = tmp_path / "twins.jsonl"
    write_lines(twins, ({"anchor": row["question"], "positive": row["answer"] * 2} for row in rows[:48]))
    made = {"texts": texts, "labelled": labelled, "pairs": pairs, "twins": twins, "cache": tmp_path / "cache"}
    return {**encoders, **{name: str(path) for name, path in made.items()}}


@pytest.fixture
def train(tmp_path: Path, short_stories: str, questions: Path) -> Callable[..., Path]:
    return trains(tmp_path, RECIPE, model=short_stories, train=questions)


def is_packed(run: Path) -> bool:
    manifests = [json.loads(path.read_text()) for path in sorted(run.rglob("manifest.json"))]
    (packed,) = {each["batch"]["packed"] for each in manifests if "packed" in each.get("batch", {})}
    return bool(packed)


@pytest.mark.nightly(but=["plain", "recomputed", "kept outputs", "masked words", "classes of an encoder"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_curve_is_that_of_padded_rows(
    train: Callable[..., Path], way: tuple[str, ...], folder: dict[str, str]
) -> None:
    words = [word if "{method" in word else word.format(**folder) for word in way]
    packed = train(*words, "batch.packing=true", name="packed")
    padded = train(*words, "batch.packing=false", name="padded")
    assert is_packed(packed) and not is_packed(padded)
    assert read_losses(packed) == pytest.approx(read_losses(padded), rel=2e-5)


MEMBERS: dict[str, tuple[str, ...]] = {
    "folds of an encoder": ("model.id={classifier}", *FOLDS),
    "folds of a causal model": ("model.id={model}", *FOLDS),
    "folds one after another": ("model.id={model}", *FOLDS, "folds.together=false"),
    "classes of a sweep": (*OF_AN_ENCODER, *SWEEP, "of=classify"),
    "texts of a sweep": ("adapter.dropout=0.3", *SWEEP),
    "pairs of a sweep": ("data.train={pairs}", *SWEEP, "of=prefer"),
}


@pytest.mark.nightly(but=["folds of an encoder", "texts of a sweep"])
@pytest.mark.parametrize("way", MEMBERS.values(), ids=MEMBERS)
def test_the_curves_of_members_are_those_of_padded_rows(
    train: Callable[..., Path], way: tuple[str, ...], folder: dict[str, str], short_stories: str
) -> None:
    words = [word.format(**folder, model=short_stories) for word in way]
    packed = train(*words, "batch.packing=true", name="packed")
    padded = train(*words, "batch.packing=false", name="padded")
    members = [path.relative_to(packed) for path in sorted(packed.rglob("metrics.jsonl")) if path.parent != packed]
    assert len(members) >= 2 and is_packed(packed) and not is_packed(padded)
    for member in members:
        curves = [read_losses((run / member).parent) for run in (packed, padded)]
        assert curves[0] == pytest.approx(curves[1], rel=2e-5)


SOME = {
    "plain": ("adapter.dropout=0.3",),
    **{name: (*WAYS[name], "adapter.dropout=0.3") for name in ("means of texts", "a teacher", "peers")},
}


@pytest.mark.nightly(but=["plain", "peers"])
@pytest.mark.parametrize("way", SOME.values(), ids=SOME)
def test_a_stopped_run_has_the_same_bits_and_may_go_on_padded(
    train: Callable[..., Path], way: tuple[str, ...], folder: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["batch.packing=true", *(word.format(**folder) for word in way)]
    whole = train(*words, name="whole")
    padded_later = [("other", ["batch.packing=false"])] if way == SOME["plain"] else []
    for name, more in [("stopped", list[str]()), *padded_later]:
        with monkeypatch.context() as patch:
            stop_after(patch, step=3)
            with pytest.raises(Stopped):
                train(*words, name=name)
        found = train(*words, *more, name=name, resume=True)
        if more:
            assert read_losses(found) == pytest.approx(read_losses(whole), rel=1e-5)
            continue
        assert read_losses(found) == read_losses(whole)
        tensors, wanted = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (found, whole))
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.nightly(but=["plain", "means of texts"])
@pytest.mark.parametrize("way", SOME.values(), ids=SOME)
def test_micro_batches_of_packed_rows_change_nothing(
    train: Callable[..., Path], way: tuple[str, ...], folder: dict[str, str]
) -> None:
    words = ["batch.packing=true", "train.steps=3", *(word.format(**folder) for word in way)]
    small, large = (train(*words, f"batch.tokens_per_device={tokens}", name=str(tokens)) for tokens in (100, 4000))
    assert read_losses(small) == pytest.approx(read_losses(large), rel=2e-5)


def test_padding_is_what_a_count_of_the_first_steps_finds() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 300)
    steps = [global_batch(step, rows=300, size=16, seed=3) for step in range(packing.STEPS)]
    real = computed = 0
    for rows in steps:
        for part in PADDED.cut(rows, lengths, tokens=200):
            real, computed = real + lengths[part].sum(), computed + len(part) * lengths[part].max()
    assert packing.padding([lengths[rows] for rows in steps], tokens=200) == pytest.approx(1 - real / computed)
    assert packing.padding([np.full(300, 7)], tokens=200) == 0


@pytest.mark.parametrize(("compute", "some", "much"), [("float32", 0.02, 0.04), ("bfloat16", 0.11, 0.13)])
def test_auto_packs_from_the_share_of_padding_from_which_it_is_faster(compute: str, some: float, much: float) -> None:
    assert not packing.pays(some, compute=getattr(torch, compute), at_once=False)
    assert packing.pays(much, compute=getattr(torch, compute), at_once=False)
    assert not packing.pays(0.9, compute=torch.float16, at_once=False)


def test_auto_packs_nothing_where_nobody_has_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "device", lambda: torch.device("cuda"))
    assert not packing.pays(0.9, compute=torch.bfloat16, at_once=False)
    assert packing.pays(0.12, compute=torch.bfloat16, at_once=True)
    assert not packing.pays(0.11, compute=torch.bfloat16, at_once=True)


def test_auto_decides_by_the_rows(train: Callable[..., Path], tmp_path: Path) -> None:
    answer = {"question": "How many?", "answer": "Twelve of them."}
    same, ragged = tmp_path / "same.jsonl", tmp_path / "ragged.jsonl"
    write_lines(same, (answer | {"question": f"How many {n}?"} for n in range(100, 140)))
    words = " ".join(["again"] * 30)
    write_lines(ragged, (answer | {"question": f"{words[: 6 * (n % 30)]} {n}?"} for n in range(40)))
    few = ["train.steps=2"]
    assert not is_packed(train(*few, f"data.train={same}", name="same"))
    assert is_packed(train(*few, f"data.train={ragged}", name="ragged"))
    refused = train(*few, f"data.train={ragged}", "adapter={method: prefix}", "train.learning_rate=1e-2", name="prefix")
    assert not is_packed(refused)


def test_auto_decides_by_single_texts(train: Callable[..., Path], folder: dict[str, str], tmp_path: Path) -> None:
    """Not by all that a row compares: these rows have the same number of tokens, and then the same texts or others."""
    words = [word.format(**folder) for word in (*EMBED, "model.id={encoder}", "train.steps=2")]
    for name, several in (("even", (3, 3)), ("uneven", (1, 5))):
        texts = [
            [" ".join([*["so"] * many, *pair]) for pair, many in zip((row, row[::-1]), several, strict=True)]
            for row in itertools.product("abcdefgh", "12345")
        ]
        path = tmp_path / f"{name}.jsonl"
        write_lines(path, (dict(zip(("anchor", "positive"), each, strict=True)) for each in texts))
        assert is_packed(train(*words, f"data.train={path}", name=name)) == (name == "uneven")
