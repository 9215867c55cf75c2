"""A run that learnt from judged answers: its verdict, and curves of its rewards and log-probabilities."""

from __future__ import annotations

from typing import Literal

import numpy as np

from workbench.report.plots import Axis, Plot, Series, draw, lines
from workbench.report.run_record import RunRecord
from workbench.runs import units

SCORES: dict[str, tuple[str, Literal["low", "high"]]] = {
    "accuracy": ("Preference accuracy", "high"),
    "likelier": ("Chosen answers with likelier tokens", "high"),
    "margin": ("Reward of chosen over rejected", "high"),
    "reward_chosen": ("Reward, chosen", "high"),
    "reward_rejected": ("Reward, rejected", "low"),
    "log_p_chosen": ("Log-probability of a chosen token, nats", "high"),
    "log_p_rejected": ("Log-probability of a rejected token, nats", "low"),
    "reward_good": ("Reward, good answers", "high"),
    "reward_bad": ("Reward, bad answers", "low"),
    "log_p_good": ("Log-probability of a token of good answers, nats", "high"),
    "log_p_bad": ("Log-probability of a token of bad answers, nats", "low"),
    "answer_tokens": ("Tokens of written answers", "low"),
    "repetition": ("Runs of four words that written answers repeat", "low"),
}
"""Title of each score of judged answers, and which direction is better."""
_STEP = Axis("step", "count")


def verdict(run: RunRecord) -> str:
    """Outcome of the run in one sentence."""
    before, after = run.scores["before"], run.scores["after"]
    interval = f"{units.percent(after['accuracy_low'])} to {units.percent(after['accuracy_high'])}"
    text = (
        f"The better answer has the higher reward in {units.percent(after['accuracy'])} of the held-out cases "
        f"(95 % interval {interval}); held-out loss {before['loss']:.3f} before, {after['loss']:.3f} after"
    )
    if "answer_tokens" in after and "answer_tokens" in before:
        text += f"; written answers have {after['answer_tokens']:.0f} tokens, {before['answer_tokens']:.0f} before"
    if "repetition" in after and "repetition" in before:
        now, then = units.percent(after["repetition"]), units.percent(before["repetition"])
        text += f", and repeat {now} of their runs of four words, {then} before"
    return f"{text}."


def plots(run: RunRecord) -> list[Plot]:
    """Rewards, how often they are right, and log-probabilities in each step; none of a run without them."""
    rewards = [name for name in run.named("reward") if name not in ("accuracy", "margin")]
    if not run.prefers or not rewards:
        return []
    charts = [
        draw(
            "Rewards",
            lines(run.metrics, "reward", [*rewards, *(["margin"] if "margin" in run.named("reward") else [])]),
            x=_STEP,
            y=Axis("nats, times beta", marks=(0.0,)),
            caption="A reward is beta times log p of the model over log p of the reference. Both may fall while the "
            "margin grows: answers of both kinds become less likely.",
        ),
        draw(
            "Log-probability of a token",
            lines(run.metrics, "log_p", run.named("log_p")),
            x=_STEP,
            y=Axis("nats"),
            caption="Mean over the tokens of an answer, then over answers.",
        ),
    ]
    if scales := run.named("scale"):
        caption = "Goes from prefer.beta to prefer.beta_end in a straight line over the run."
        charts.append(
            draw("Scale of rewards", lines(run.metrics, "scale", scales), x=_STEP, y=Axis("beta"), caption=caption)
        )
    if "accuracy" in run.named("reward"):
        watched = run.metrics.dropna(subset=["held_out_loss"])
        series = lines(run.metrics, "reward", ["accuracy"])
        if "accuracy" in run.named("held_out_preference"):
            step, right = watched["step"], watched["held_out_preference[accuracy]"]
            series.append(Series("held out", np.asarray(step, float), np.asarray(right, float), "marked", 1))
        charts.append(
            draw(
                "Pairs whose chosen answer has the higher reward",
                series,
                x=_STEP,
                y=Axis("share of pairs", marks=(0.5,)),
                caption="Chance is a half (dashed).",
            )
        )
    return [*charts, *_held_out(run)]


def _held_out(run: RunRecord) -> list[Plot]:
    """Plots of the figures of evaluations: the divergence from the reference and the length of written answers."""
    held_out_plots = []
    if divergence := _watched(run, "held_out_divergence", run.named("held_out_divergence")):
        held_out_plots.append(
            draw(
                "Divergence from the reference",
                divergence,
                x=_STEP,
                y=Axis("nats per token", marks=(0.0,)),
                caption="Mean log p of the reference minus that of the model, over tokens of held-out answers: an "
                "estimate of KL(reference || model) on texts that neither wrote. Below 0 the model finds them "
                "likelier.",
            )
        )
    if tokens := _watched(run, "held_out_answers", ["tokens"]):
        held_out_plots.append(
            draw(
                "Tokens of written answers",
                tokens,
                x=_STEP,
                y=Axis("tokens", from_zero=True),
                caption="Greedy answers to the same few held-out prompts, cut at evaluate.max_new_tokens.",
            )
        )
    return held_out_plots


def _watched(run: RunRecord, measure: str, names: list[str]) -> list[Series]:
    """Lines over the steps that had an evaluation; empty where no evaluation told such a figure."""
    if not set(names) <= set(run.named(measure)):
        return []
    return lines(run.metrics.dropna(subset=["held_out_loss"]), measure, names, "marked")
