"""Which blocks keep what, in which order less is kept, and that a run learns the same in every way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import tiny, trains
from tests.stopping import stop_after
from tests.workbench.training.test_bank_trainer import head_outputs
from tests.workbench.training.together import Texts, Together, section
from workbench.config import RunConfig
from workbench.config.sections.basic_sections import Checkpointing
from workbench.errors import ConfigError, Stopped
from workbench.training import activation_checkpointing, activation_offload
from workbench.training.activation_checkpointing import ENOUGH, ActivationKeeping, ways
from workbench.training.bank_trainer import BankTrainer

RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: lora, rank: 4, dropout: 0.3}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8, tokens_per_device: 400}}
train: {{steps: 4, learning_rate: 5.0e-3}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "sft", "data": {"train": "x.jsonl"}, **sections})


@pytest.mark.parametrize(
    ("wanted", "whole", "elementwise"),
    [(False, 0, 0), ("auto", 0, 0), ("elementwise", 0, 8), (0.25, 2, 6), (0.3, 3, 5), (0.99, 7, 1), (True, 8, 0)],
)
def test_the_first_blocks_keep_least_and_the_last_is_never_one_of_a_share(
    wanted: Checkpointing, whole: int, elementwise: int
) -> None:
    found = ways(wanted, 8)
    assert found == ["whole"] * whole + ["elementwise"] * elementwise + ["kept"] * (8 - whole - elementwise)
    assert ways(0.5, 1) == ["elementwise"]


@pytest.mark.parametrize("longest", [100, 3 * ENOUGH])
def test_less_is_kept_before_micro_batches_are_too_small_to_be_fast(longest: int) -> None:
    keeping, tried = ActivationKeeping(config(), tiny("Llama")), list[tuple[Checkpointing, int]]()

    def compute(tokens: int) -> None:
        tried.append((keeping.now, tokens))
        raise torch.OutOfMemoryError("fake")

    with pytest.raises(torch.OutOfMemoryError):
        keeping.until_it_fits(compute, 4 * ENOUGH, longest=longest, retry=lambda _: None)
    floor = max(longest, ENOUGH)
    assert [tokens for now, tokens in tried if now is False] == (
        [4 * ENOUGH, 2 * ENOUGH, ENOUGH] if longest < ENOUGH else [4 * ENOUGH, longest]
    )
    assert tried[-2:] == [(0.5, longest), (True, longest)]
    partly = [tokens for now, tokens in tried if now == "elementwise"]
    assert partly[0] == floor and partly[-1] == longest and partly == sorted(partly, reverse=True)


@pytest.mark.parametrize(
    ("sections", "order"),
    [
        ({"train": {"checkpointing": "elementwise"}}, ["elementwise"]),
        ({"train": {"checkpointing": False}}, [False]),
        ({"train": {"compile": True}}, [False, True]),
        ({"adapter": {"method": "prefix"}}, [False]),
    ],
    ids=["asked", "refused", "compiled", "prefix"],
)
def test_what_was_written_or_does_not_go_is_not_tried(sections: dict[str, Any], order: list[object]) -> None:
    keeping = ActivationKeeping(config(**sections), tiny("Llama"))
    tried: dict[object, None] = {}

    def compute(_: int) -> None:
        tried[keeping.now] = None
        raise torch.OutOfMemoryError("fake")

    with pytest.raises(torch.OutOfMemoryError):
        keeping.until_it_fits(compute, 10, longest=10, retry=lambda _: None)
    assert list(tried) == order


def test_a_backbone_whose_blocks_are_recomputed_together_refuses_a_part() -> None:
    model = tiny("Llama")
    for number, block in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        model.model.layers[number] = cast(Any, torch.nn.Sequential(block.mlp))  # type: ignore[union-attr, index]
    part = config(train={"checkpointing": "elementwise"})
    assert not activation_checkpointing.by_block(part, model)
    with pytest.raises(ConfigError, match=r"train.checkpointing=elementwise .* Write train.checkpointing=true"):
        activation_checkpointing.require(part, model)
    activation_checkpointing.require(config(train={"checkpointing": True}), model)


@pytest.fixture
def losses(short_stories: str, questions: Path, tmp_path: Path) -> Callable[..., list[float]]:
    """The losses of a run."""
    train = trains(tmp_path, RECIPE, model=short_stories, train=questions)

    def run(name: str, *words: str, resume: bool = False) -> list[float]:
        done = train(*words, name=name, resume=resume)
        return [json.loads(line)["loss"] for line in (done / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("batch.packing=true",),
        pytest.param(("batch.packing=false", "model.weights=nf4"), marks=pytest.mark.slow),
        pytest.param(("adapter={method: dora, rank: 4}", "model.weights=int8"), marks=pytest.mark.slow),
        pytest.param(("adapter={method: houlsby, dropout: 0.2}",), marks=pytest.mark.nightly),
        pytest.param(("adapter={method: full}", "model.weights=bfloat16"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_way_gives_the_same_losses_to_the_last_bit(losses: Callable[..., list[float]], words: tuple[str]) -> None:
    """Half of the blocks whole, of the others elementwise operations alone."""
    assert losses("half", *words, "train.checkpointing=0.5") == losses("kept", *words)


def test_a_run_that_is_stopped_goes_on_in_its_way(
    losses: Callable[..., list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = losses("kept")
    with monkeypatch.context() as patch:
        stop_after(patch, step=2)
        with pytest.raises(Stopped):
            losses("stopped")
    manifest = tmp_path / "stopped" / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert facts["batch"]["checkpointing"] is False
    facts["batch"]["checkpointing"] = "elementwise"  # as where memory ran out
    manifest.write_text(json.dumps(facts))
    assert losses("stopped", resume=True) == kept
    assert json.loads(manifest.read_text())["batch"]["checkpointing"] == "elementwise"


@pytest.mark.slow
@pytest.mark.nightly(but=["offload"])
@pytest.mark.parametrize("saving", ["train.checkpointing=elementwise", "train.mlp_tile=16", "offload"])
def test_a_run_with_savings_that_is_stopped_goes_on_bit_for_bit(
    losses: Callable[..., list[float]], saving: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, copied = [saving], list[int]()
    if saving == "offload":  # a CPU has no other memory
        words = ["train.checkpointing=true", "train.offload_activations=true"]
        monkeypatch.setattr(activation_offload, "refusal", lambda _: None)
        monkeypatch.setattr(activation_offload, "PinnedCopies", lambda _: Clones(copied))
    straight = losses("straight", *words)
    with monkeypatch.context() as patch:
        stop_after(patch, step=2)
        with pytest.raises(Stopped):
            losses("stopped", *words)
    before = len(copied)
    assert losses("stopped", *words, resume=True) == straight
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("straight", "stopped")]
    first, second = map(load_file, files)
    assert all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())
    assert (len(copied) > before) is (saving == "offload")


class Clones:
    """Copies on a CPU."""

    def __init__(self, copied: list[int]) -> None:
        self._copied = copied

    def away(self, tensor: Tensor) -> Tensor:
        self._copied.append(tensor.nbytes)
        return tensor.clone()

    def back(self, kept: Tensor) -> Tensor:
        return kept.clone()

    def arrived(self) -> None:
        """It is there."""


def test_a_bank_recomputes_elementwise_operations_to_the_same_bits(tmp_path: Path) -> None:
    configs = [section(steps=3, seed=seed, adapter={"dropout": 0.3, "rank": 3 + seed}) for seed in range(2)]
    model, data = tiny("Llama").double().requires_grad_(False), [Texts(20, seed) for seed in range(2)]
    kept = Together(model, data, configs, tmp_path / "kept", head_outputs).fit()
    part = [
        each.model_copy(update={"train": each.train.model_copy(update={"checkpointing": "elementwise"})})
        for each in configs
    ]
    together, ways_kept = Together(model, data, part, tmp_path / "part", head_outputs), list[object]()

    @contextmanager
    def during(fit: BankTrainer) -> Iterator[None]:
        yield
        ways_kept.append(fit.keeping.now)

    together.during = during
    assert together.fit().losses == kept.losses and ways_kept == ["elementwise"]
