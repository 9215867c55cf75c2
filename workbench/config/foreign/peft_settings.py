"""Settings of low-rank adapters, as Axolotl and LLaMA-Factory name them."""

from __future__ import annotations

from typing import Any

from workbench.config.foreign.translation import Translation

LISTS = ("all", "all-linear")


def low_rank(translation: Translation, *, rank: str, targets: Any, default_rank: int) -> None:
    """LoRA with its variants; a scale that the file leaves out is twice the rank, as in LLaMA-Factory."""
    named = translation.whole(rank)
    size = default_rank if named is None else named
    wanted = {
        "dora": any([translation.take("use_dora"), translation.take("peft_use_dora")]),
        "rslora": any([translation.take("use_rslora"), translation.take("peft_use_rslora")]),
        "pissa": bool(translation.take("pissa_init")),
        "lora+": translation.left.get("loraplus_lr_ratio") is not None,
    }
    chosen = [name for name, on in wanted.items() if on]
    if len(chosen) > 1:
        translation.look(f"{' and '.join(chosen)} together: here each is a method of its own; {chosen[0]} is written.")
    translation.give("adapter.method", chosen[0] if chosen else "lora")
    translation.give("adapter.rank", size)
    translation.give("adapter.alpha", translation.number("lora_alpha", 2 * size))
    translation.move("lora_dropout", "adapter.dropout", translation.number)
    place(translation, targets)
    if translation.recipe["adapter"]["method"] == "lora+":
        translation.give("adapter.rate_ratio", translation.number("loraplus_lr_ratio"))


def place(translation: Translation, targets: Any) -> None:
    """Layers that are changed: a role, or names."""
    if isinstance(targets, str) and targets in LISTS:
        translation.give("adapter.targets", "all-linear")
    elif isinstance(targets, str) and any(sign in targets for sign in "*[(\\|"):
        translation.look(f"Layers by a pattern, {targets}: write a role or names to adapter.targets; here all-linear.")
    elif targets:
        names = targets.split(",") if isinstance(targets, str) else list(targets)
        translation.give("adapter.targets", [str(name).strip() for name in names])
