"""Outputs of frozen blocks are cached where that pays, and change no result."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import FAMILIES, tiny
from tests.workbench.training.freezing.fits import Trained, assert_same_bits, build, configured, interrupted, train
from tests.workbench.training.freezing.prefixes import ENCODERS, OTHERS, installed, prefix_of, stack
from tests.workbench.training.freezing.prefixes import build as bare
from tests.workbench.training.together import LabelledSet, Texts
from workbench.adapters import Lora, attach
from workbench.adapters.banks import bank
from workbench.config import ModelConfig
from workbench.data.batching import Indices, MicroBatch, Row, collate, encoder_inputs
from workbench.errors import ConfigError
from workbench.models import backbones
from workbench.recipes.load import load
from workbench.training.freezing import prefix_cache
from workbench.training.freezing.cached_prefix import CachedPrefix, UnpaddedRows, reader
from workbench.training.freezing.hidden_state_store import MemoryStore
from workbench.training.freezing.prefix_cache import (
    CacheEstimate,
    DataProfile,
    PrefixBatches,
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
    table, model = Table(rows, masked), bare("Bert" if masked else "Llama").requires_grad_(False)
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
    model = bare("Llama", num_hidden_layers=8)
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
    said = "dropout is random in the frozen blocks"
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
    model, still = bare(name, **{setting: 0.25}), bare(name)
    assert lot(model) is None
    assert lot(still.train()) is None
    model.train()
    said = lot(model)
    assert said is not None and said.endswith("is random in the frozen blocks, with a probability of 25 %")
    for block in stack(model)[:1]:
        block.eval()
    outside = {"Bert": ["embeddings"], "DebertaV2": ["embeddings", "encoder.conv"]}.get(name, [])
    if setting == "hidden_dropout_prob":
        assert lot(model) is not None
        for path in outside:
            model.base_model.get_submodule(path).eval()
    assert lot(model) is None and lot(model, 2) is not None


def test_layers_that_are_left_out_by_lot() -> None:
    model = bare("OPT", layerdrop=0.5).train()
    for block in stack(model):
        block.eval()
    assert lot(model) == "decoder is random in the frozen blocks, with a probability of 50 %"


def test_an_adapters_dropout(llama: PreTrainedModel) -> None:
    attach(llama, Lora(dropout=0.1), seed=0).train()
    said = lot(llama)
    assert said is not None and said.startswith("layers.0.") and "lora_dropout" in said
    stack(llama)[0].eval()
    assert lot(llama) is None


def test_rows_that_change() -> None:
    said = lot(bare("Bert"), changing="image.augment")
    assert said == "image.augment changes the rows in each epoch, so that none comes twice"


def refused(model: PreTrainedModel, depth: int = 1) -> str | None:
    modes = [module.training for module in model.modules()]
    said = refusal(model, blocks=stack(model), depth=depth)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return said


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS, *ENCODERS])
def test_families_that_work(name: str) -> None:
    model = bare(name).requires_grad_(False)
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
    model = bare("Llama").requires_grad_(False)
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
    model = bare(name, tie_word_embeddings=True).requires_grad_(False)
    stack(model)[3].requires_grad_(True)
    assert refused(model) is None
    model.get_submodule(path).requires_grad_(True)
    assert refused(model) == f"{path}.weight trains, and the frozen blocks read it"


def test_members_of_a_bank_have_no_adapters_below(llama: PreTrainedModel) -> None:
    llama.requires_grad_(False)
    made = bank.attach(llama, [Lora(rank=2), Lora(rank=3)], seeds=[0, 1])
    with made.only(made.members[0]):
        assert refused(llama) == "each member of a bank has an adapter of its own in the frozen blocks"


Read = Callable[[Mapping[str, Any]], UnpaddedRows | None]


class Twice(LabelledSet):
    """Its second half repeats its first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows[self.rows // 2 :] = self._rows[: self.rows // 2]
        self.lengths = np.array([len(row) for row in self._rows])


class Paired(LabelledSet):
    """Each example is two rows, the second one that of the next example."""

    def batch(self, indices: np.ndarray[Any, Any], *, epoch: int = 0) -> Any:
        both = np.stack([indices, (indices + 1) % self.rows], axis=1).reshape(-1)
        return super().batch(both, epoch=epoch)


def _keys(read: Read, rows: Texts) -> list[bytes]:
    found = read(rows.batch(np.arange(len(rows))).inputs)
    assert found is not None
    return found.keys


def test_each_row_is_in_one_batch_which_all_rows_of_it_name() -> None:
    """Rows come twice in a set, and those of one set in another again."""
    read = reader(tiny("Bert", head="MaskedLM"), trailing=0)
    sets = [Twice(24, 1), LabelledSet(15, 2), Twice(24, 1)]
    found = PrefixBatches(sets, read, tokens=60)
    keys = {key for rows in sets for key in _keys(read, rows)}
    seen: dict[bytes, frozenset[bytes]] = {}
    for key in keys:
        rows = found.of(key)
        assert rows is not None and key in rows.keys and len(set(rows.keys)) == len(rows.keys)
        assert len(rows.keys) * max(rows.lengths) <= 60
        seen[key] = frozenset(rows.keys)
    assert all(seen[other] == batch for batch in seen.values() for other in batch)
    assert sum(len(batch) for batch in set(seen.values())) == len(keys) == 12 + 15
    assert len(set(seen.values())) > 4
    assert found.of(bytes(16)) is None


def test_rows_of_examples_that_have_several_are_in_one_batch_each() -> None:
    read, rows = reader(tiny("Bert", head="MaskedLM"), trailing=0), Paired(14, 3)
    found = PrefixBatches([rows, rows], read, tokens=60)
    batches = {key: found.of(key) for key in _keys(read, rows)}
    seen = {key: frozenset(each.keys) for key, each in batches.items() if each is not None}
    assert len(seen) == 14 and all(len(set(each.keys)) == len(each.keys) for each in batches.values() if each)
    assert all(seen[other] == batch for batch in seen.values() for other in batch)
    assert sum(len(batch) for batch in set(seen.values())) == 14


def test_what_is_kept_of_a_row_is_the_same_whichever_row_came_first(stories: str) -> None:
    """Single rows and all at once, whose products have other shapes and so other last bits."""
    model = AutoModelForCausalLM.from_pretrained(stories).requires_grad_(False).eval()
    rows = Texts(17, 1, vocabulary=500)
    read = reader(model, trailing=0)

    def kept(order: list[np.ndarray[Any, Any]], *, dealt: bool) -> list[torch.Tensor]:
        states = MemoryStore(torch.float32)
        batch_of = PrefixBatches([rows], read, tokens=30).of if dealt else (lambda _: None)
        cached = CachedPrefix(model, blocks=stack(model), depth=3, states=states, batch_of=batch_of)
        cached.install()
        try:
            with torch.no_grad():
                for indices in order:
                    model(**rows.batch(indices).inputs)
        finally:
            cached.remove()
        assert cached.computed == 17
        return [states.get([key], length) for key, length in zip(_keys(read, rows), rows.lengths, strict=True)]

    together, alone = [np.arange(17)], [np.array([row]) for row in range(16, -1, -1)]
    first, second = kept(together, dealt=True), kept(alone, dealt=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loose = kept(alone, dealt=False)
    assert not all(torch.equal(a, b) for a, b in zip(first, loose, strict=True)), "bits never depend on the shape here"
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, loose, strict=True))


METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 3, "alpha": 6},
    "full": {"method": "full"},
}
ROWS = 24 + 9
"""Different ones, held-out rows included."""


@pytest.fixture(scope="module")
def stories_model(short_stories: str) -> PreTrainedModel:
    """Real weights, whose products have other last bits in other shapes."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(short_stories)
    return model


def assert_close(trained: Trained, wanted: Trained, *, rel: float) -> None:
    """The same curve; and the same weights, but for biases.

    Softmax ignores those of keys, so that their gradients are noise, which Adam scales up to whole steps. How much
    rounding differs between shapes depends on the processor.
    """
    assert len(trained.losses) == len(wanted.losses) == 8 and len(trained.held_out) == 2
    assert trained.losses == pytest.approx(wanted.losses, rel=100 * rel)
    assert trained.held_out == pytest.approx(wanted.held_out, rel=100 * rel)
    for name, tensor in wanted.shipped.items():
        if not name.endswith("bias"):
            assert (trained.shipped[name] - tensor).norm() <= 1000 * rel * (1 + tensor.norm()), name


@pytest.mark.nightly(but=["Llama-lora", "GPT2-full", "Gemma3Text-full", "Bert-lora"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2", "Gemma3Text", "Bert"])
def test_kept_outputs_give_the_same_curve_over_two_epochs(family: str, method: str, tmp_path: Path) -> None:
    """With an adapter's dropout above the line, which draws the same numbers; each row is computed once."""
    model = build(family)
    found = {
        cache: train(
            model,
            configured(adapter=METHODS[method], freeze={"policy": "static", "cache": cache}),
            tmp_path / cache,
        )
        for cache in ("off", "memory", "disk")
    }
    assert not found["off"].callback.prefixes and found["off"].losses[-1] != found["off"].losses[0]
    for cache in ("memory", "disk"):
        assert_close(found[cache], found["off"], rel=1e-6)
        (cached,) = found[cache].callback.prefixes
        assert (cached.computed, cached.read, cached.passed) == (ROWS, 2 * 24 + 2 * 9, 0)


@pytest.mark.nightly(but=["dora", "bitfit"])
@pytest.mark.parametrize(
    "adapter",
    [
        {"method": "lora", "rank": 3, "dropout": 0.2},
        {"method": "dora", "rank": 3},
        {"method": "houlsby"},
        {"method": "bitfit"},
        {"method": "last-layers", "layers": 2},
        {"method": "linear-probe"},
    ],
    ids=lambda adapter: str(adapter["method"]),
)
def test_with_other_methods_and_dropout_above_the_line(adapter: dict[str, Any], tmp_path: Path) -> None:
    """Methods that freeze the first layers by themselves need no policy."""
    policy = {} if adapter["method"] in ("last-layers", "linear-probe") else {"policy": "static"}
    wanted, found = (
        train(build("Bert"), configured(adapter=adapter, freeze={**policy, "cache": cache}), tmp_path / cache)
        for cache in ("off", "memory")
    )
    assert_close(found, wanted, rel=1e-6)
    assert [cached.computed for cached in found.callback.prefixes] == [ROWS] and not wanted.callback.prefixes


@pytest.mark.nightly(but=["lora"])
@pytest.mark.parametrize("method", METHODS)
def test_with_activations_that_are_recomputed(method: str, tmp_path: Path) -> None:
    model = build("Llama")
    found = {
        f"{cache} {again}": train(
            model,
            configured(
                adapter=METHODS[method],
                freeze={"policy": "static", "cache": cache},
                train={"checkpointing": again},
            ),
            tmp_path / f"{cache}-{again}",
        )
        for cache in ("off", "memory")
        for again in (False, True)
    }
    for each in found.values():
        assert_close(each, found["off False"], rel=1e-6)
    assert [cached.computed for cached in found["memory True"].callback.prefixes] == [ROWS]


@pytest.mark.nightly(but=["compute-0.0001"])
@pytest.mark.parametrize(("stored", "rel"), [("compute", 1e-4), ("bfloat16", 2e-2)])
def test_over_quantised_weights(stored: str, rel: float, short_stories: str, tmp_path: Path) -> None:
    asked = ModelConfig.model_validate({"id": short_stories, "weights": "nf4", "compute": "float32"})
    model = backbones.load(asked, backbones.tokenizer(asked)).model
    wanted, found = (
        train(
            model,
            configured(
                model={"weights": "nf4"},
                freeze={"policy": "static", "cache": cache, "stored": stored},
                train={"learning_rate": 1e-2},
            ),
            tmp_path / cache,
        )
        for cache in ("off", "memory")
    )
    assert found.losses == pytest.approx(wanted.losses, rel=rel)
    assert found.held_out == pytest.approx(wanted.held_out, rel=rel) and found.held_out[-1] < found.held_out[0]
    assert [cached.computed for cached in found.callback.prefixes] == [ROWS]


def test_half_precision_is_kept_as_it_was_computed(tmp_path: Path) -> None:
    model = build("Llama").bfloat16()
    wanted, found = (
        train(
            model,
            configured(model={"compute": "bfloat16"}, freeze={"policy": "static", "cache": cache}),
            tmp_path / cache,
            compute=torch.bfloat16,
        )
        for cache in ("off", "memory")
    )
    assert_close(found, wanted, rel=1e-3)
    assert {cached.states.dtype for cached in found.callback.prefixes} == {torch.bfloat16}
    assert {tensor.dtype for tensor in found.shipped.values()} == {torch.float32}


MOVING: list[dict[str, Any]] = [
    {"policy": "static"},
    {"policy": "autofreeze", "every": 1, "percentile": 90},
    {"policy": "freezeout", "first": 0.2},
    {"policy": "gradual", "until": 0.9},
]


@pytest.mark.nightly(but=["freezeout", "gradual"])
@pytest.mark.parametrize("policy", MOVING, ids=lambda policy: str(policy["policy"]))
def test_a_line_that_moves_changes_nothing_either(policy: dict[str, Any], tmp_path: Path) -> None:
    model = build("Llama")
    wanted, found = (
        train(model, configured(adapter=METHODS["full"], freeze={**policy, "cache": cache}), tmp_path / cache)
        for cache in ("off", "disk")
    )
    assert_close(found, wanted, rel=1e-6)
    assert len(found.callback.prefixes) >= (1 if policy["policy"] in ("static", "autofreeze") else 2)
    assert not (tmp_path / "disk" / "prefix").exists(), "what no other run can use is removed"


@pytest.mark.nightly(but=["static", "freezeout"])
@pytest.mark.parametrize("policy", MOVING[:-1], ids=lambda policy: str(policy["policy"]))  # gradual has thawed by then
def test_a_resumed_run_computes_what_was_kept_to_the_same_bits(
    policy: dict[str, Any], stories_model: PreTrainedModel, tmp_path: Path
) -> None:
    """Stopped in the second epoch: its memory is empty, and the rows come in other batches than in the first."""
    config = configured(freeze={**policy, "cache": "memory"}, batch={"tokens_per_device": 20}, adapter=METHODS["lora"])
    whole = train(stories_model, config, tmp_path / "whole")
    broken = interrupted(stories_model, config, tmp_path / "broken", after=5)
    assert whole.callback.prefixes and broken.callback.prefixes
    assert_same_bits(broken, whole)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"policy": "static"}, True),
        ({"policy": "autofreeze", "every": 1}, True),
        ({"policy": "gradual", "until": 1.0}, False),
        ({"policy": "lisa", "every": 2, "active": 1}, False),
    ],
    ids=lambda value: str(value["policy"]) if isinstance(value, dict) else "",
)
def test_by_itself_it_keeps_what_comes_again_before_the_line_moves(
    policy: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    """Three epochs; gradual unfreezing of four blocks moves the line three times in them, LISA at every other step."""
    config = configured(freeze=policy, train={"epochs": 3}, adapter=METHODS["full"])
    found = train(build("Llama"), config, tmp_path)
    assert bool(found.callback.prefixes) == kept
    if policy["policy"] == "lisa":
        assert found.callback.said == []
    elif not kept:
        assert {said.split(": ")[1] for said in found.callback.said} == {"each row is seen only once."}


def test_what_it_decides_does_not_depend_on_where_a_run_was_stopped(tmp_path: Path) -> None:
    """Late in a run little is left to save; had it then decided otherwise, last bits would differ."""
    config = configured(freeze={"policy": "static"}, train={"epochs": 3}, adapter=METHODS["full"])
    model = build("Llama")
    whole = train(model, config, tmp_path / "whole")
    late = interrupted(model, config, tmp_path / "late", after=11)
    assert whole.callback.said[0] in late.callback.said
    assert len(late.callback.prefixes) == 1


def test_how_often_rows_come_is_known_from_tokens_too(tmp_path: Path) -> None:
    for tokens, kept in ((150, False), (800, True)):
        config = configured(
            adapter=METHODS["full"], freeze={"policy": "static"}, train={"epochs": None}, budget={"tokens": tokens}
        )
        found = train(build("Llama"), config, tmp_path / str(tokens))
        assert bool(found.callback.prefixes) == kept


def test_dropout_below_the_line_is_an_obstacle_that_is_told(tmp_path: Path) -> None:
    model = build("Llama", attention_dropout=0.1)
    found = train(model, configured(freeze={"policy": "static"}), tmp_path / "auto")
    assert not found.callback.prefixes and "is random in the frozen blocks" in found.callback.said[0]
    with pytest.raises(ConfigError, match=r"(?s)freeze\.cache=memory cannot be: .*is random.*freeze\.cache=off"):
        train(model, configured(freeze={"policy": "static", "cache": "memory"}), tmp_path / "memory")


def test_numbers_are_finite_where_every_block_is_frozen(tmp_path: Path) -> None:
    """Only the head learns."""
    found = {
        cache: train(
            build("Bert"),
            configured(adapter=METHODS["full"], freeze={"policy": "static", "layers": 4, "cache": cache}),
            tmp_path / cache,
        )
        for cache in ("off", "memory")
    }
    assert_close(found["memory"], found["off"], rel=1e-6)
    (cached,) = found["memory"].callback.prefixes
    assert cached.computed == ROWS
    assert {name.split(".")[-2] for name in found["memory"].fit.masters.named()} == {"dense", "classifier"}


@pytest.mark.parametrize("recipe", ["embed", "mlm", "prefer", "reinforce", "rerank", "reward"])
def test_layers_freeze_where_rows_have_no_outputs_to_keep(recipe: str) -> None:
    """Left to itself, the cache is not one more setting to write; asked for, it is refused (`tests/mistakes`)."""
    config = load(f"{recipe}/quickstart", ["freeze.policy=static", "freeze.layers=2"])
    assert config.freeze.cache == "auto" and config.task.uncached
    assert prefix_cache.of_recipe(config) == f"recipe={recipe} {config.task.uncached}"
