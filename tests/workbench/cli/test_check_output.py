"""What `check` says of a run is what its policy, its budget and its optimizer will do."""

from __future__ import annotations

import math
import re

import pytest

import workbench
from workbench.cli import check_output
from workbench.config import RunConfig
from workbench.config.freeze_config import Moment

BLOCKS = 6


def configured(**sections: object) -> RunConfig:
    base = {"recipe": "sft", "data": {"train": "a.jsonl"}}
    return RunConfig.model_validate({**base, **sections})


def said(steps: int | None = 100, **sections: object) -> str:
    return " ".join(check_output.outlook(configured(**sections), steps=steps, blocks=BLOCKS))


def test_of_a_plain_run_nothing_is_said() -> None:
    assert check_output.outlook(configured(), steps=100, blocks=None) == []


@pytest.mark.parametrize(
    ("layers", "named"),
    [(1, "block 1 of 6"), (3, "blocks 1 to 3 of 6"), (0.5, "blocks 1 to 3 of 6"), (6, "blocks 1 to 6 of 6")],
)
def test_a_fixed_prefix_is_named(layers: float, named: str) -> None:
    count = round(layers * BLOCKS) if isinstance(layers, float) else layers
    share = f"{100 * (count + 1) / (BLOCKS + 2):.0f} % of the layer-steps are frozen."
    text = said(freeze={"policy": "static", "layers": layers})
    assert text == f"freeze.policy=static: the embeddings and {named} never train; {share}"


def test_the_first_and_the_last_step_of_a_plan_are_told() -> None:
    assert "at first block 6 and the head may train, at the end all layers" in said(freeze={"policy": "gradual"})
    assert "at first all layers may train, at the end block 6 and the head" in said(freeze={"policy": "freezeout"})
    # Its last layers thaw at the very end, after the last step began.
    text = said(steps=10, freeze={"policy": "gradual", "until": 1.0})
    assert "at the end blocks 1 to 6 and the head" in text


@pytest.mark.parametrize("seed", range(5))
def test_layers_that_take_turns_are_those_that_are_drawn(seed: int) -> None:
    config = configured(freeze={"policy": "lisa", "active": 3}, seed=seed)
    (text,) = check_output.outlook(config, steps=100, blocks=BLOCKS)
    assert "5 of 8 layers may train at a time" in text
    (named,) = re.findall(r"at first the embeddings, blocks? (.*) and the head;", text)
    spans = [[int(number) for number in span.split(" to ")] for span in named.split(", ")]
    found = {block for span in spans for block in range(span[0], span[-1] + 1)}
    trains = config.freeze.plan(Moment(0, 0.0, seed), blocks=BLOCKS).trains
    assert found == {layer for layer in range(1, BLOCKS + 1) if trains[layer]} and len(found) == 3


@pytest.mark.parametrize(
    ("freeze", "earliest"),
    [
        ({"policy": "autofreeze", "every": 7}, 14),
        ({"policy": "egeria", "every": 7, "window": 4}, 28),
    ],
)
def test_a_run_that_is_too_short_to_decide_is_told(freeze: dict[str, object], earliest: int) -> None:
    assert f"after step {earliest} at the earliest" in said(steps=earliest + 1, freeze=freeze)
    assert f"after step {earliest} at the earliest" in said(steps=None, freeze=freeze)
    assert f"none of {earliest} steps has a frozen layer" in said(steps=earliest, freeze=freeze)


@pytest.mark.parametrize(
    ("budget", "steps", "end"),
    [
        ({"time": "90m"}, 30, "Ends after 30 steps or 1 h 30 min, whichever comes first; scores and reports are part"),
        ({"time": "90m"}, None, "Ends after 1 h 30 min; scores and reports are part of the time."),
        ({"tokens": 5000}, None, "Ends after 5,000 tokens."),
        ({"tokens": 5000, "time": 45}, 30, "Ends after 30 steps, 5,000 tokens or 45 s, whichever comes first; scores"),
        ({"energy": 30, "power": 200}, None, "Ends after 9 min; scores"),
        ({"money": 3, "price": 1.5, "time": "1h"}, None, "Ends after 1 h; scores"),
    ],
)
def test_what_ends_a_run_is_told(budget: dict[str, object], steps: int | None, end: str) -> None:
    assert said(steps=steps, budget=budget).startswith(end)


def test_a_job_of_slurm_ends_it() -> None:
    assert "the time of its Slurm job" in said(steps=None, budget={"time": "slurm"})


def test_the_optimizer_is_told_where_it_is_not_plain() -> None:
    assert said(optimizer={"name": "lion"}) == "Optimizer: lion."
    assert said(optimizer={"sam": 0.05}) == "Optimizer: adamw, SAM in each step."
    text = said(optimizer={"sam": 0.05, "sam_every": 3, "lookahead": 5, "layer_decay": 0.9})
    assert text.endswith(
        "SAM every 3 steps, Lookahead every 5 steps, each layer at 0.9 times the rate of the one above it."
    )
    look = {"sam": 0.05, "sam_every": 5, "sam_reuse": 0.7, "gradient_share": 0.1, "noise_scale": 9}
    assert said(optimizer=look, batch={"growth": 512}, train={"steps": 9}).endswith(
        "SAM every 5 steps, LookSAM between them, the largest 10 % of the gradient in each step, batches that grow "
        "with the noise to 512 rows at most."
    )
    rate = 2e-3 * math.sqrt(64 / 16)
    scaled = said(
        optimizer={"scaling": "sqrt", "reference_batch": 16}, batch={"size": 64}, train={"learning_rate": 2e-3}
    )
    assert scaled == f"Optimizer: adamw, learning rate 0.002 of 16 rows scaled to {rate:.3g}."


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "prefer", "reward", "tag"])
def test_the_sizes_of_every_kind_of_rows_are_printed(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_output.numbers(workbench.check(f"{recipe}/quickstart"))
    said = capsys.readouterr().out
    assert "held-out" in said and ("No held-out row equals a training row." in said) is (recipe in ("sft", "prefer"))
