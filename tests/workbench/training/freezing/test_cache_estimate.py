"""What is predicted is what a run does; a cache that would be wrong or hardly pay is declined with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import FAMILIES, tiny
from tests.workbench.training.freezing.prefixes import ENCODERS, OTHERS, build, installed, prefix_of, stack
from workbench.adapters import Lora, attach
from workbench.adapters.banks import bank
from workbench.data.batching import Indices, MicroBatch, Row, collate, encoder_inputs
from workbench.errors import ConfigError
from workbench.training.freezing import prefix_cache
from workbench.training.freezing.hidden_state_store import MemoryStore
from workbench.training.freezing.prefix_cache import (
    CacheEstimate,
    DataProfile,
    decide,
    estimate,
    nondeterministic,
    profile,
    refusal,
)

GIB = 2**30


@dataclass
class Table:
    """Rows of tokens, for a causal model or (with a mask) for an encoder."""

    rows: list[list[int]]
    masked: bool = False

    @property
    def lengths(self) -> Indices:
        return np.asarray([len(row) for row in self.rows])

    @property
    def supervised(self) -> Indices:
        return self.lengths - 1

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        return draws

    @property
    def difficulty(self) -> None:
        return None

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Table:
        return self

    def place(self, index: int) -> str:
        return f"row {index}"

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        chosen: list[npt.NDArray[np.int64]] = [np.asarray(self.rows[row]) for row in indices]
        batch = collate([Row(row, np.ones(len(row), bool)) for row in chosen], epoch=epoch)
        return replace(batch, inputs=encoder_inputs(chosen), lengths_B=None) if self.masked else batch


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_predicted_is_what_is_kept(masked: bool) -> None:
    rows = [[5, 6, 7], [8, 9], [5, 6, 7], [4, 0, 3, 0, 0]] + [[number, 3] for number in range(10, 60)] * 6
    table, model = Table(rows, masked), build("Bert" if masked else "Llama").requires_grad_(False)
    found = profile([table, Table([[7, 7], [8, 9]], masked)], causal=not masked)
    trailing = 0 if masked else 2
    tokens = 3 + 2 + (5 if masked else 3) + 50 * 2 + 2
    assert found == DataProfile(rows=54, tokens=tokens + 54 * trailing, trailing=trailing)
    kept = MemoryStore(torch.float32)
    with torch.no_grad(), installed(prefix_of(model, 2, kept, trailing=found.trailing)) as cached:
        for start in range(0, len(rows), 32):
            model(**table.batch(np.arange(start, min(start + 32, len(rows)))).inputs)
        model(**Table([[7, 7], [8, 9]], masked).batch(np.arange(2)).inputs)
    assert cached.computed == found.rows
    said = estimate(model, found, blocks=stack(model), depth=2, itemsize=4, passes=3, everything=True)
    assert said.bytes == sum(each.nbytes for each in kept._rows.values()) and said.rows == 54


@pytest.mark.parametrize("everything, speedup, shared", [(True, 2.0, 1.5), (False, 2.0, 4 / 3)])
def test_half_of_a_deep_backbone_for_many_epochs(everything: bool, speedup: float, shared: float) -> None:
    """The ceilings of freezing: `shared` times as fast as all trainable by itself, `speedup` with the cache."""
    model = build("Llama", num_hidden_layers=8)
    found = DataProfile(rows=100, tokens=900, trailing=0)
    said = estimate(
        model, found, blocks=stack(model), depth=4, itemsize=2, passes=1e9, everything=everything, supervised=0
    )
    assert said.bytes == 900 * 32 * 2
    assert 1 - said.saved == pytest.approx(shared / speedup)
    twice = estimate(
        model, found, blocks=stack(model), depth=4, itemsize=2, passes=2, everything=everything, supervised=0
    )
    assert twice.saved == pytest.approx(said.saved / 2)


def test_a_head_is_computed_too(llama: PreTrainedModel) -> None:
    found = DataProfile(rows=100, tokens=900, trailing=0)
    said = [
        estimate(
            llama, found, blocks=stack(llama), depth=1, itemsize=2, passes=3, everything=False, supervised=supervised
        )
        for supervised in (0.0, 0.5)
    ]
    block = sum(each.numel() for each in stack(llama)[0].parameters())
    assert said[0].saved == pytest.approx(2 / 3 * block / (3 * block))
    assert said[1].saved == pytest.approx(2 / 3 * block / (3 * block + 2 * 0.5 * 64 * 32))
    classes = tiny("Bert", head="SequenceClassification", num_labels=3)
    assert prefix_cache._head_size(classes) == 3 * 33


GOOD = CacheEstimate(rows=9003, bytes=GIB, passes=4, saved=0.25)


def chosen(wanted: Any, estimated: CacheEstimate = GOOD, *, memory: int = 64, disk: int = 64, **more: str) -> Any:
    return decide(estimated, wanted, available_memory=memory * GIB, free_disk=disk * GIB, **more)


@pytest.mark.parametrize(
    "wanted, memory, disk, where",
    [
        ("auto", 4, 0, "memory"),
        ("auto", 3, 2, "disk"),
        ("auto", 3, 1, "off"),
        ("memory", 4, 9, "memory"),
        ("memory", 3, 9, "off"),
        ("disk", 9, 2, "disk"),
        ("disk", 9, 1, "off"),
        ("off", 9, 9, "off"),
    ],
)
def test_where_there_is_room(wanted: str, memory: int, disk: int, where: str) -> None:
    assert chosen(wanted, memory=memory, disk=disk).where == where


def test_sentences() -> None:
    assert chosen("auto").sentence == (
        "Outputs of the frozen blocks are kept in memory, 1.1 GB of 9,003 rows: that saves 25 % of the computing."
    )
    assert chosen("auto", memory=2, disk=1).sentence == (
        "Outputs of the frozen blocks are not kept: they would take 1.1 GB, and in memory at most 536.9 MB (a quarter "
        "of what is available), and on disk at most 536.9 MB (half of what is free) may be filled. "
        "freeze.stored=bfloat16 halves float32."
    )


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"passes": 1.0, "saved": 0.0}, "each row is seen only once"),
        ({"saved": 0.049}, r"save 4\.9 % of the computing"),
    ],
)
def test_what_hardly_pays_is_done_where_it_is_asked_for(changed: dict[str, float], message: str) -> None:
    estimated = GOOD._replace(**changed)  # type: ignore[arg-type]
    declined = chosen("auto", estimated)
    assert declined.where == "off" and re.search(message, declined.sentence)
    assert chosen("disk", estimated).where == "disk"


def test_an_obstacle_is_told_and_where_it_was_asked_for_an_error() -> None:
    said = "dropout draws by lot below the line"
    declined = chosen("auto", obstacle=said)
    assert declined == ("off", f"Outputs of the frozen blocks are not kept: {said}.")
    assert chosen("off", obstacle=said).where == "off"
    for wanted in ("memory", "disk"):
        with pytest.raises(ConfigError, match=rf"freeze\.cache={wanted} cannot be: {said}.*\n.*freeze\.cache=off"):
            chosen(wanted, obstacle=said)


def lot(model: PreTrainedModel, depth: int = 1, **more: str) -> str | None:
    return nondeterministic(model, blocks=stack(model), depth=depth, **more)


@pytest.mark.parametrize(
    "name, setting",
    [
        ("Bert", "hidden_dropout_prob"),
        ("Bert", "attention_probs_dropout_prob"),
        ("Llama", "attention_dropout"),
        ("GPT2", "resid_pdrop"),
        ("OPT", "dropout"),
        ("Mixtral", "router_jitter_noise"),
        ("DebertaV2", "hidden_dropout_prob"),
    ],
)
def test_what_draws_by_lot_below_the_line(name: str, setting: str) -> None:
    model, still = build(name, **{setting: 0.25}), build(name)
    assert lot(model) is None
    assert lot(still.train()) is None
    model.train()
    said = lot(model)
    assert said is not None and said.endswith("draws by lot below the line, with a chance of 25 %")
    for block in stack(model)[:1]:
        block.eval()
    outside = {"Bert": ["embeddings"], "DebertaV2": ["embeddings", "encoder.conv"]}.get(name, [])
    if setting == "hidden_dropout_prob":
        assert lot(model) is not None
        for path in outside:
            model.base_model.get_submodule(path).eval()
    assert lot(model) is None and lot(model, 2) is not None


def test_layers_that_are_left_out_by_lot() -> None:
    model = build("OPT", layerdrop=0.5).train()
    for block in stack(model):
        block.eval()
    assert lot(model) == "decoder draws by lot below the line, with a chance of 50 %"


def test_an_adapters_dropout(llama: PreTrainedModel) -> None:
    attach(llama, Lora(dropout=0.1), seed=0).train()
    said = lot(llama)
    assert said is not None and said.startswith("layers.0.") and "lora_dropout" in said
    stack(llama)[0].eval()
    assert lot(llama) is None


def test_rows_that_change() -> None:
    said = lot(build("Bert"), changing="image.augment")
    assert said == "image.augment changes the rows in each epoch, so that none comes twice"


def refused(model: PreTrainedModel, depth: int = 1) -> str | None:
    modes = [module.training for module in model.modules()]
    said = refusal(model, blocks=stack(model), depth=depth)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return said


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS, *ENCODERS])
def test_families_that_work(name: str) -> None:
    model = build(name).requires_grad_(False)
    stack(model)[3].requires_grad_(True).train()
    assert refused(model, 1) is None and refused(model, 3) is None


def test_families_that_do_not(encoder_decoder: str) -> None:
    from transformers import AutoModelForSeq2SeqLM

    t5 = AutoModelForSeq2SeqLM.from_pretrained(encoder_decoder)
    assert refusal(t5, blocks=list(t5.encoder.block), depth=1) == (
        "T5ForConditionalGeneration is an encoder-decoder, whose blocks read two sequences"
    )
    assert (
        refused(tiny("Albert", head="MaskedLM"))
        == "AlbertForMaskedLM does not run its blocks one after the other, each once"
    )


def test_upper_blocks_that_read_more_than_hidden_states() -> None:
    model = build("Llama").requires_grad_(False)
    assert refusal(model, blocks=stack(model), depth=0) == "no block is frozen"
    lower, upper = stack(model)[:2]
    ordinary, shared = upper.forward, dict[str, torch.Tensor]()
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: shared.clear())
    lower.self_attn.v_proj.register_forward_hook(lambda _, __, output: shared.update(values=output))
    upper.forward = lambda hidden, **named: ordinary(hidden + shared["values"].mean(), **named)
    said = "the upper blocks of LlamaForCausalLM read more of the lower ones than hidden states"
    assert refusal(model, blocks=stack(model), depth=1) == said
    assert refusal(model, blocks=stack(model), depth=2) is None
    upper.forward = lambda hidden, **named: ordinary(hidden + shared.get("values", torch.zeros(1)).mean(), **named)
    said = "LlamaForCausalLM gives something else with outputs of its frozen blocks that were kept"
    assert refusal(model, blocks=stack(model), depth=1) == said


@pytest.mark.parametrize(
    "name, path", [("Llama", "model.embed_tokens"), ("DebertaV2", "deberta.encoder.rel_embeddings")]
)
def test_what_trains_may_not_be_read_below(name: str, path: str) -> None:
    """A tied head, and a table of positions that all blocks read."""
    model = build(name, tie_word_embeddings=True).requires_grad_(False)
    stack(model)[3].requires_grad_(True)
    assert refused(model) is None
    model.get_submodule(path).requires_grad_(True)
    assert refused(model) == f"{path}.weight trains, and the frozen blocks read it"


def test_members_of_a_bank_have_no_adapters_below(llama: PreTrainedModel) -> None:
    llama.requires_grad_(False)
    made = bank.attach(llama, [Lora(rank=2), Lora(rank=3)], seeds=[0, 1])
    with made.only(made.members[0]):
        assert refused(llama) == "each member of a bank has an adapter of its own in the frozen blocks"
