"""A plan from few blocks against the plan from all of them, over families that repeat their blocks in unlike ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from workbench.planning import depth
from workbench.planning.depth import Depths
from workbench.planning.dry_run import DryRun
from workbench.planning.plan import Plan
from workbench.planning.sharded_memory import Contents
from workbench.recipes.load import load
from workbench.recipes.verbs.plans import plan_parts
from workbench.recipes.verbs.plans.plan import plan

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 40,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_layer": 40, "n_embd": 32, "n_head": 4},
    "phi3": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [0, 1]},
    "gemma2": {},
    "gemma3_text": {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 16, "num_hidden_layers": 96},
    "gpt_oss": EXPERTS,
}
OF_KINDS = ("gemma3_text", "qwen3_moe")
WAYS = {
    "lora": [],
    "full": ["adapter={method: full}"],
    "nf4, recomputed": ["model.weights=nf4", "train.checkpointing=true"],
    "a quarter recomputed": ["train.checkpointing=0.25"],
    "elementwise recomputed, a device": ["train.checkpointing=elementwise"],
}


def folder(path: Path, stories: str, family: str, **sizes: Any) -> str:
    """A configuration and a tokenizer, without weights."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    known = {} if family == "gpt2" else SIZES
    AutoConfig.for_model(family, vocab_size=len(tokenizer), **{**known, **sizes}).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def planned(model: str, *words: str) -> Plan:
    few = ["data.limit=24", "data.max_tokens=128", "train.steps=3", "evaluate.answers=0", "batch.size=8"]
    plain = ["model.weights=bfloat16", f"model.id={model}", *few]
    adapter = [] if any(each.startswith("adapter") for each in words) else ["adapter={method: lora, rank: 4}"]
    return plan(load("sft/quickstart", [*plain, *adapter, *words]))


def both(monkeypatch: pytest.MonkeyPatch, model: str, *words: str) -> tuple[Plan, Plan]:
    """From few blocks and from all; the first has to be one."""
    found = list[Depths | None]()

    def noting(kinds: list[Hashable], *, multiple: int, depths: Any = depth.depths) -> Depths | None:
        found.append(depths(kinds, multiple=multiple))
        return found[-1]

    with monkeypatch.context() as patched:
        patched.setattr(plan_parts, "_DEPTHS", {})
        patched.setattr(depth, "depths", noting)
        few = planned(model, *words)
        patched.setattr(depth, "depths", lambda *_, **__: None)
        for known in ("_DEPTHS", "_EVALUATED"):
            patched.setattr(plan_parts, known, {})
        whole = planned(model, *words)
    assert found and found[0] is not None
    return few, whole


def require_same(few: Plan, whole: Plan, *, above: float = 1.0) -> None:
    """`above`: bytes while blocks recompute, of the plan of few over the whole, at most; only FSDP2 reads them."""
    recomputing = whole.dry_run.at_recomputing
    assert recomputing <= few.dry_run.at_recomputing <= above * recomputing
    assert few.at_peak == whole.at_peak and few.evaluation == whole.evaluation
    assert few.size == whole.size and few.tokens_per_device == whole.tokens_per_device
    assert few.dry_run.flops_per_token == pytest.approx(whole.dry_run.flops_per_token, rel=1e-12)
    for name in ("at_gradients", "offloaded", "micro_batches", "padded_tokens"):
        assert getattr(few.dry_run, name) == getattr(whole.dry_run, name), name
    for name in ("trained", "frozen", "blocks"):
        assert Counter(getattr(few.contents, name)) == Counter(getattr(whole.contents, name)), name
    assert few.contents.whole == whole.contents.whole and few.contents.added_up == whole.contents.added_up
    assert few.contents.optimizer == pytest.approx(whole.contents.optimizer)
    assert few.work.weight_bytes == whole.work.weight_bytes


@pytest.mark.slow
@pytest.mark.nightly(but=["gemma2-lora", "phi3-nf4, recomputed"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_few_blocks_say_what_all_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stories: str, family: str, way: str
) -> None:
    plans = both(monkeypatch, folder(tmp_path, stories, family, **FAMILIES[family]), *WAYS[way])
    # Of blocks of several kinds others recompute in a deeper backbone.
    require_same(*plans, above=1.15 if family in OF_KINDS and way == "a quarter recomputed" else 1.0)


@pytest.mark.parametrize(
    "words", [["freeze={policy: static, layers: 0.5, cache: off}"], ["layer_drop.rate=0.2"]], ids=["frozen", "dropped"]
)
def test_blocks_that_a_setting_numbers_are_all_carried_out(words: list[str]) -> None:
    assert depth.multiple_of(load("sft/quickstart", words)) is None


def test_blocks_repeat_after_the_first_and_to_the_end() -> None:
    assert depth.depths(["a"] * 64) == Depths(4, 5, 60)
    assert depth.depths(["a", "b"] * 32, multiple=4) == Depths(8, 12, 14)
    assert depth.depths(["a", "a", "b"] * 20 + ["a", "a"]) == Depths(5, 8, 19)
    assert depth.depths([*["a"] * 63, "b"]) is None, "the last is another"
    assert depth.depths(["a"] * 16) is None and depth.depths([]) is None, "too few to save much"
    assert depth.depths(list(range(64))) is None


def test_tensors_that_grow_with_the_blocks_are_not_multiplied() -> None:
    few, more = Contents(trained=(5, 7, 7, 40), element=4), Contents(trained=(5, 7, 7, 7, 50), element=4)
    assert depth.contents(few, more, 3) is None
    whole = depth.contents(few, Contents(trained=(5, 7, 7, 7, 40), element=4), 3)
    assert whole is not None and Counter(whole.trained) == Counter({5: 1, 40: 1, 7: 5})


def test_bytes_that_a_deeper_one_holds_fewer_of_end_at_none() -> None:
    """They are no room for activations."""
    runs = [
        DryRun(
            {"weights": 100}, 0, 1, 10, 1.0, phases={("update", "", 0): {"weights": 100 + more, "activations": left}}
        )
        for more, left in ((0, 52), (10, 41))
    ]
    found = depth.dry_run(*runs, 28)
    assert dict(found.phases["update", "", 0]) == {"weights": 380, "activations": 0}
