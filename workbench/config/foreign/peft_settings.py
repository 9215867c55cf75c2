"""Settings of low-rank adapters, as Axolotl and LLaMA-Factory name them."""

from __future__ import annotations

from typing import Any

from workbench.config.foreign.translation import Translation

LISTS = ("all", "all-linear")


def low_rank(found: Translation, *, rank: str, targets: Any, default_rank: int) -> None:
    """LoRA with its variants; a scale that the file leaves out is twice the rank, as in LLaMA-Factory."""
    named = found.whole(rank)
    size = default_rank if named is None else named
    found.give("adapter.method", _method(found))
    found.give("adapter.rank", size)
    found.give("adapter.alpha", found.number("lora_alpha", 2 * size))
    found.move("lora_dropout", "adapter.dropout", found.number)
    place(found, targets)
    if found.recipe["adapter"]["method"] == "lora+":
        found.give("adapter.rate_ratio", found.number("loraplus_lr_ratio"))


def _method(found: Translation) -> str:
    """The variant; of several that were combined there, one is taken and the others are told."""
    wanted = {
        "dora": any([found.take("use_dora"), found.take("peft_use_dora")]),
        "rslora": any([found.take("use_rslora"), found.take("peft_use_rslora")]),
        "pissa": bool(found.take("pissa_init")),
        "lora+": found.left.get("loraplus_lr_ratio") is not None,
    }
    chosen = [name for name, on in wanted.items() if on]
    if len(chosen) > 1:
        found.look(f"{' and '.join(chosen)} together: here each is a method of its own; {chosen[0]} is written.")
    return chosen[0] if chosen else "lora"


def place(found: Translation, targets: Any) -> None:
    """Layers that are changed: a role, or names."""
    if isinstance(targets, str) and targets in LISTS:
        found.give("adapter.targets", "all-linear")
    elif isinstance(targets, str) and any(sign in targets for sign in "*[(\\|"):
        found.look(f"Layers by a pattern, {targets}: write a role or names to adapter.targets; here all-linear.")
    elif targets:
        names = targets.split(",") if isinstance(targets, str) else list(targets)
        found.give("adapter.targets", [str(name).strip() for name in names])
