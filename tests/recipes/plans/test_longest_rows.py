"""The longest row that fits: a step on a row of so many tokens, and not on one that is much longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.models import tiled_mlp
from workbench.recipes.load import load
from workbench.recipes.plans import longest_rows
from workbench.recipes.plans.plan import longest_row, of_row

SLOPE, FIXED = 1000, 5_000_000


@dataclass
class _Plan:
    """A plan by a formula: bytes grow evenly with tokens, but for the first few."""

    tokens: int
    memory: int

    @property
    def needed(self) -> int:
        return FIXED + SLOPE * self.tokens - min(self.tokens, 3000) * 200

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    @property
    def host(self) -> int:
        return 7 * self.tokens


def _config(model: str, *words: str) -> RunConfig:
    return load("sft/quickstart", [f"model.id={model}", *words])


@pytest.mark.parametrize("memory", [20_000_000, 50_000_000, 3_000_000_000])
def test_nearly_the_whole_memory_is_used_after_few_trials(memory: int, short_stories: str) -> None:
    tried: list[tuple[RunConfig, int]] = []

    def plan(config: RunConfig, tokens: int) -> Any:
        tried.append((config, tokens))
        return _Plan(tokens, memory)

    found = longest_rows.find(_config(short_stories), plan, accelerated=True)
    assert 0.99 * memory <= found.needed <= memory and found.host == 7 * found.tokens
    assert len(tried) <= 4
    for config, tokens in tried:
        assert config.batch.size == 1 and config.batch.tokens_per_device == tokens
        assert config.train.checkpointing is True and config.train.offload_activations is True
    assert found.limit is not None and f"made for at most {found.limit:,}" in found.sentence


def test_where_no_row_fits_it_says_so(short_stories: str) -> None:
    found = longest_rows.find(_config(short_stories), lambda _, tokens: _Plan(tokens, 1), accelerated=True)  # type: ignore[arg-type, return-value]
    assert found.tokens == 0 and "none" in found.sentence


def test_what_the_configuration_says_is_kept_and_a_cpu_keeps_its_inputs(short_stories: str) -> None:
    seen: list[tuple[object, object]] = []

    def plan(config: RunConfig, tokens: int) -> Any:
        seen.append((config.train.checkpointing, config.train.offload_activations))
        return _Plan(tokens, 30_000_000)

    longest_rows.find(_config(short_stories, "train.checkpointing=false"), plan, accelerated=True)
    longest_rows.find(_config(short_stories), plan, accelerated=False)
    assert set(seen) == {(False, "auto"), (True, "auto")}


def test_recipes_that_compare_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="--longest-row: recipe=prefer"):
        longest_row(load("prefer/quickstart", []))


@pytest.mark.slow
def test_of_a_real_backbone_it_fits_and_a_longer_one_does_not(short_stories: str) -> None:
    config, memory = _config(short_stories, "model.weights=bfloat16"), 120_000_000
    found = longest_row(config, memory=memory, elsewhere=True)
    assert found.tokens > 5000 and found.needed <= memory
    saved = longest_rows._saving(config, accelerated=True)
    batch = {"size": 1, "tokens_per_device": found.tokens * 2}
    assert not of_row(
        saved.model_copy(update={"batch": saved.batch.model_copy(update=batch)}),
        round(found.tokens * 1.05),
        memory=memory,
        elsewhere=True,
    ).fits


@pytest.mark.slow
def test_few_tiles_take_the_memory_of_all(short_stories: str) -> None:
    words = (
        "train.checkpointing=true",
        "train.mlp_tile=16",
        "batch={size: 1, tokens_per_device: 400}",
        "data.max_tokens=400",
    )
    config = _config(short_stories, *words)
    whole = of_row(config, 400, memory=10**9, elsewhere=True).dry_run.at_peak
    with tiled_mlp.few_tiles():
        assert of_row(config, 400, memory=10**9, elsewhere=True).dry_run.at_peak == whole
