"""PEFT's own list of methods: each is offered, or refused with a reason that a user reads."""

from __future__ import annotations

import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from workbench.adapters import METHODS, NOT_OFFERED
from workbench.adapters.method import LORA_OPTIONS
from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.schema import parse

OFFERED: dict[str, tuple[str, ...]] = {
    "ADALORA": ("adalora",),
    "BEFT": ("beft",),
    "BOFT": ("boft",),
    "C3A": ("c3a",),
    "DEFT": ("deft",),
    "DELORA": ("delora",),
    "FOURIERFT": ("fourierft",),
    "GLORA": ("glora",),
    "GRALORA": ("gralora",),
    "HIRA": ("hira",),
    "HRA": ("hra",),
    "IA3": ("ia3",),
    "LN_TUNING": ("layernorm",),
    "LOHA": ("loha",),
    "LOKR": ("lokr",),
    "LORA": ("lora", "rslora", "dora", "lora+", "alora", "pissa", "olora", "corda", "eva", "lora-ga", "loftq"),
    "MISS": ("miss",),
    "OFT": ("oft",),
    "OSF": ("osf",),
    "PEANUT": ("peanut",),
    "PREFIX_TUNING": ("prefix", "p-tuning-v2"),
    "PROMPT_TUNING": ("prompt",),
    "PSOFT": ("psoft",),
    "PVERA": ("pvera",),
    "P_TUNING": ("p-tuning",),
    "RANDLORA": ("randlora",),
    "ROAD": ("road",),
    "SHIRA": ("shira",),
    "SUPERTUNING": ("super", "sparse"),
    "TINYLORA": ("tinylora",),
    "TRAINABLE_TOKENS": ("trainable-tokens",),
    "UNILORA": ("uni-lora",),
    "VBLORA": ("vb-lora",),
    "VERA": ("vera",),
    "WAVEFT": ("waveft",),
}
"""PEFT's name of each method that is offered, and ours; what shares PEFT's tuner stands together."""


def _by_peft() -> set[str]:
    """Names of PEFT's own methods, without those that are registered beside them."""
    own = {kind for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if config.__module__.startswith("peft.")}
    return {str(kind).removeprefix("PeftType.") for kind in own}


def test_each_method_of_peft_is_offered_or_refused_by_reason() -> None:
    """A new version of PEFT with a method more fails here."""
    refused = {name.upper().replace("-", "_") for name in NOT_OFFERED.keys() - LORA_OPTIONS.keys()}
    assert _by_peft() == {*OFFERED} | refused
    assert not {*OFFERED} & refused
    print(f"PEFT has {len(_by_peft())} methods: {len(OFFERED)} are offered, {len(refused)} refused by reason")


def test_all_that_is_offered_is_a_method() -> None:
    names = [name for each in OFFERED.values() for name in each]
    assert len(names) == len(set(names)) and set(names) <= set(METHODS)
    assert not set(NOT_OFFERED) & set(METHODS)


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_who_asks_for_a_refused_method_reads_the_reason_and_a_cure(name: str) -> None:
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "adapter": {"method": name, "rank": 4}}
    with pytest.raises(ConfigError) as caught:
        parse(RunConfig, values, source="here")
    assert f"adapter.method: {name} is not offered: {NOT_OFFERED[name]}" in str(caught.value)
    assert "Take adapter.method=" in NOT_OFFERED[name] or "Train these with" in NOT_OFFERED[name]
