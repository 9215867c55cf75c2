"""The longest row that fits: a step on a row of so many tokens, and not on one that is much longer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.planning.test_depth import folder
from workbench.config import RunConfig
from workbench.errors import ConfigError
from workbench.losses import chunked_loss
from workbench.recipes.load import load
from workbench.recipes.verbs.plans import longest_rows, plan_parts
from workbench.recipes.verbs.plans.plan import longest_row, of_row

SLOPE, FIXED = 1000, 5_000_000


@dataclass
class _Plan:
    """A plan by a formula: bytes grow evenly with tokens, but for the first few."""

    tokens: int
    memory: int
    process: int = 0

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


def test_after_a_minute_it_answers_with_what_fits(short_stories: str) -> None:
    ticks = iter(range(0, 1000, 40))
    found = longest_rows.find(
        _config(short_stories),
        lambda _, tokens: _Plan(tokens, 3_000_000_000),  # type: ignore[arg-type, return-value]
        accelerated=True,
        clock=lambda: float(next(ticks)),
    )
    assert (found.tokens, found.tried, found.seconds) == (longest_rows.LONGER, 2, 80.0)
    assert "2 dry runs, 80 s of the processor" in found.sentence


def test_the_memory_is_that_of_the_first_dry_run(short_stories: str) -> None:
    free = iter([50_000_000, *[20_000_000] * 9])
    found = longest_rows.find(
        _config(short_stories),
        lambda _, tokens: _Plan(tokens, next(free)),  # type: ignore[arg-type, return-value]
        accelerated=True,
    )
    assert found.needed > 49_000_000


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
@pytest.mark.parametrize(("tokens", "memory"), [(400, 10**9), (8192, None)], ids=["tiles", "chunks of a CPU's loss"])
def test_few_parts_take_the_memory_of_all(tokens: int, memory: int | None, short_stories: str) -> None:
    words = (
        "train.checkpointing=true",
        f"train.mlp_tile={tokens // 25}",
        f"batch={{size: 1, tokens_per_device: {tokens}}}",
        "data.max_tokens=400",
    )
    config = _config(short_stories, *words)
    whole = of_row(config, tokens, memory=memory, elsewhere=memory is not None).dry_run
    with chunked_loss.few_parts():
        few = of_row(config, tokens, memory=memory, elsewhere=memory is not None).dry_run
    assert few.at_peak == whole.at_peak and few.evaluation == whole.evaluation


def test_an_evaluation_is_that_of_the_row_and_not_of_one_before(
    stories: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many blocks, of which few are carried out, and evaluations of the same rows once."""
    config = _config(folder(tmp_path, stories, "llama"), "model.weights=bfloat16", "data.limit=24")
    found = [of_row(config, tokens).evaluation for tokens in (400, 100)]
    monkeypatch.setattr(plan_parts, "_EVALUATED", {})
    assert found[1] == of_row(config, 100).evaluation < found[0]
