"""A run that learnt from rewards of its own answers: its verdict, signs that a reward was outwitted, and its curves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from workbench.report.embed_section import Searches
from workbench.report.plots import Axis, Plot, Series, draw, lines
from workbench.report.run_record import RunRecord
from workbench.runs import units

SCORES: dict[str, tuple[str, Literal["low", "high"]]] = {
    "reward": ("Reward", "high"),
    "answer_tokens": ("Tokens of an answer", "low"),
    "repetition": ("Repeated runs of four words", "low"),
}
"""Title of each score of answers, and which direction is better."""
SHOWN = 20
"""Answers that are shown, at most."""
MANY = 0.5
"""Share of prompts without signal, or of answers that are cut, from which on the report warns."""
LOOSE = 0.1
"""Growth of the share of repeated sequences from which on it warns."""
_STEP = Axis("step", "count")


class Sign(NamedTuple):
    """A finding, and whether it is bad."""

    tone: Literal["warning", "plain"]
    text: str


def verdict(run: RunRecord) -> str:
    """Outcome of the run in one sentence."""
    before, after = (run.scores[when] for when in ("before", "after"))
    went = "rose" if after["reward"] > before["reward"] else "did not rise"
    text = f"The mean reward of held-out answers {went}: {before['reward']:.3f} before, {after['reward']:.3f} after"
    return f"{text} (95 %: {run.interval('reward')}), with {after['answer_tokens']:.0f} tokens in an answer."


def signs(run: RunRecord) -> Iterator[Sign]:
    """Yield what the rewards alone do not tell: answers that repeat, are cut, or teach nothing."""
    if not run.reinforces:
        return
    before, after = (run.scores.get(when, {}) for when in ("before", "after"))
    if after.get("repetition", 0) - before.get("repetition", 0) > LOOSE:
        shares = f"{units.percent(before['repetition'])} before and {units.percent(after['repetition'])} after"
        yield Sign(
            "warning", f"Answers repeat themselves: {shares} of their sequences came before. A reward is outwitted."
        )
    first, last = _ends(run, "reward[mean]")
    if (chance := run.chance("reward")) is not None and "reward" in after:
        gain = after["reward"] - before["reward"]
        if gain - chance <= 0 and gain + chance < last - first:
            interval = f"{gain - chance:+.3f} to {gain + chance:+.3f}"
            text = f"The reward rose by {last - first:.3f} in training, and by {gain:.3f} on held-out prompts"
            yield Sign("warning", f"{text} (95 %: {interval}, over prompts).")
    _, cut = _ends(run, "answers[cut]")
    if cut > MANY:
        yield Sign(
            "warning", f"{units.percent(cut)} of the last answers were cut. Write more reinforce.max_new_tokens."
        )
    _, dull = _ends(run, "answers[no signal]")
    if dull > MANY:
        text = f"{units.percent(dull)} of the last prompts had one reward for all answers: comparison teaches nothing."
        yield Sign("plain", f"{text} reinforce.resample replaces such prompts.")


def answers(run: RunRecord) -> Searches | None:
    """Held-out prompts with their answers before and after, the lowest rewards first; None: there are none."""
    table: Any = run.predictions
    if not run.reinforces or table.empty:
        return None
    names = ["row", "prompt", "before", "after", "reward_before", "reward_after"]
    first = table.sort_values("reward_after", kind="stable").head(SHOWN)
    return Searches.of(f"Answers with the lowest rewards: {len(first):,} of {len(table):,}", first, names)


def plots(run: RunRecord) -> list[Plot]:
    """Rewards, answers and updates in each step; none of a run without them."""
    if not run.reinforces or "reward[mean]" not in run.metrics:
        return []
    own = [name for name in run.named("reward") if name not in ("mean", "spread")]
    reward = lines(run.metrics, "reward", ["mean", *own])
    for name in run.named("held_out_reward"):
        watched = run.metrics.dropna(subset=[f"held_out_reward[{name}]"])
        step, held_out = (np.asarray(watched[key], float) for key in ("step", f"held_out_reward[{name}]"))
        of_set = "" if name == "mean" else f", {name}"
        reward.append(Series(f"held out, greedy{of_set}", step, held_out, "marked", len(reward)))
    shares = [name for name in ("no signal", "cut", "repetition") if name in run.named("answers")]
    updates = [name for name in ("clipped", "capped", "accuracy") if name in run.named("update")]
    charts = [
        draw("Reward", reward, x=_STEP, y=Axis("reward"), caption="Mean over the answers of a step."),
        draw(
            "Spread of the rewards",
            lines(run.metrics, "reward", ["spread"]),
            x=_STEP,
            y=Axis("reward", from_zero=True),
            caption="Standard deviation over the answers of a step: nothing is learnt where it is 0.",
        ),
        draw(
            "Tokens of an answer",
            lines(run.metrics, "answers", ["tokens"]),
            x=_STEP,
            y=Axis("tokens", from_zero=True),
            caption="Answers that grow while rewards do not are a sign of a reward that is outwitted.",
        ),
        draw(
            "Answers",
            lines(run.metrics, "answers", shares),
            x=_STEP,
            y=Axis("share", from_zero=True),
            caption="Prompts whose answers all have one reward; answers that reached their limit; sequences of four "
            "tokens that came before in the same answer.",
        ),
        draw(
            "Updates",
            lines(run.metrics, "update", updates),
            x=_STEP,
            y=Axis("share", from_zero=True),
            caption="Tokens whose ratio was clipped, or whose weight for who drew them was cut to its cap (capped); or "
            "pairs whose better answer has the higher log-ratio.",
        ),
    ]
    drift = [name for name in ("kl", "entropy") if name in run.named("update")]
    caption = "Entropy of the model on its answers, and divergence from the reference where it is measured (kl)."
    return [
        *charts,
        draw("Drift", lines(run.metrics, "update", drift), x=_STEP, y=Axis("nats per token"), caption=caption),
    ]


def _ends(run: RunRecord, name: str) -> tuple[float, float]:
    """Means of the first and of the last quarter of the steps; 0 where there are none."""
    if name not in run.metrics or run.metrics[name].dropna().empty:
        return 0.0, 0.0
    values = run.metrics[name].dropna().to_numpy()
    part = max(1, len(values) // 4)
    return float(values[:part].mean()), float(values[-part:].mean())
