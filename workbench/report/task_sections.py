"""What a page says of each task: titles of its scores, a verdict in one sentence, tables of rows, and curves.

In this order: embeddings, reward models, preference pairs, reinforcement; then the tables that any run may have,
of tasks of lm-eval and of win rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from workbench.report import picture_section
from workbench.report.picture_section import Picture
from workbench.report.plots import STEP, Axis, Plot, Series, draw, floats, lines
from workbench.report.run_record import RunRecord
from workbench.runs import score_files, units

SHOWN = 20
"""Rows of a table, at most."""
MANY = 0.5
"""Share of prompts without signal, or of answers that are cut, from which on the report warns."""
LOOSE = 0.1
"""Growth of the share of repeated sequences from which on it warns."""


class RowTable(NamedTuple):
    """Rows that a run got wrong, or what it answered."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    pictures: Mapping[str, Sequence[Picture]] = {}
    """Of rows, by their places, which stand in a cell."""


def rows(run: RunRecord) -> RowTable | None:
    """The rows that the page of a task lists; None where it lists none, or nothing was scored."""
    table: Any = run.predictions
    if table.empty:
        return None
    if run.embeds:
        return _wrong_neighbours(table)
    if run.rewards:
        return _wrong_steps(table) if run.rates_steps else _wrong_pairs(table)
    if run.reinforces:
        names = ["row", "prompt", "before", "after", "reward_before", "reward_after"]
        first = table.sort_values("reward_after", kind="stable").head(SHOWN)
        listed = _row_table(f"Answers with the lowest rewards: {len(first):,} of {len(table):,}", first, names)
        return listed._replace(pictures=picture_section.beside_rows(run.pictures, first["row"]))
    return _wrong_tags(table) if run.tags else None


def _wrong_tags(table: Any) -> RowTable | None:
    """Entities that were missed, made up, or of another type or extent, by how often; or wrong plain tags."""
    from collections import Counter

    from workbench.data.tagged_rows import spans_of
    from workbench.evaluation.entity_scores import wrong_spans

    kind: tuple[str, str, str]
    true, found = ([cell.split(" ") for cell in table[name]] for name in ("label", "predicted"))
    words = [text.split(" ") for text in table["text"]]
    counted: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], str] = {}
    if "entities" in table:
        for each in wrong_spans(true, found):
            span = each.true or each.predicted
            assert span is not None
            kind = (
                str(each.kind),
                each.true.label if each.true else "none",
                each.predicted.label if each.predicted else "none",
            )
            counted[kind] += 1
            examples.setdefault(
                kind, f"{' '.join(words[each.row][span.start : span.end])} ({table['row'].iloc[each.row]})"
            )
        right = sum(len(set(spans_of(one)) & set(spans_of(other))) for one, other in zip(true, found, strict=True))
        title = f"Wrong entities: {sum(counted.values()):,}, beside {right:,} right ones"
    else:
        for number, (one, other) in enumerate(zip(true, found, strict=True)):
            for place, (tag, said) in enumerate(zip(one, other, strict=False)):
                if tag != said:
                    kind = ("wrong tag", tag, said or "none")
                    counted[kind] += 1
                    examples.setdefault(
                        kind,
                        f"{words[number][place] if place < len(words[number]) else ''} ({table['row'].iloc[number]})",
                    )
        title = f"Wrong tags: {sum(counted.values()):,} of {sum(map(len, true)):,} words"
    if not counted:
        return None
    rows = [[*kind, f"{count:,}", examples[kind]] for kind, count in counted.most_common(SHOWN)]
    return RowTable(title, ["kind", "true", "predicted", "times", "such as"], rows)


def _row_table(title: str, table: Any, names: list[str]) -> RowTable:
    """The columns `names` of a table, numbers with three decimals."""
    rows = [[f"{each:.3f}" if isinstance(each, float) else str(each) for each in row] for row in table[names].values]
    return RowTable(title, names, rows)


# Embeddings and re-rankers


def embed_verdict(run: RunRecord) -> str:
    """Outcome of a run that was scored, in one sentence."""
    if (name := _decisive(run)) is not None:
        return f"{_moved(run, name)}."
    before, after = (run.scores[when]["loss"] for when in ("before", "after"))
    return f"Held-out loss went from {before:.2f} to {after:.2f}."


def _decisive(run: RunRecord) -> str | None:
    """The first score with a title that was measured before and after."""
    return next((name for name in run.titles if run.difference(name) is not None), None)


def _moved(run: RunRecord, name: str) -> str:
    """What a score did, with its interval, and whether that may be chance."""
    before, after = (run.scores[when][name] for when in ("before", "after"))
    went = "rose" if after > before else "fell" if after < before else "stayed"
    interval = f" (95 %: {run.interval(name)})" if run.interval(name) else ""
    chance = ": the interval holds what it was before" if run.may_be_chance(name) else ""
    return f"{run.titles[name][0].partition(':')[0]} {went} from {before:.3f} to {after:.3f}{interval}{chance}"


def tag_verdict(run: RunRecord) -> str:
    """Outcome of a run that was scored, in one sentence: its main score, and that of always the most frequent tag."""
    if (name := _decisive(run)) is None:
        return embed_verdict(run)
    guessed = run.scores["before"][name]
    return f"{_moved(run, name)}; always the most frequent tag gives {guessed:.3f}."


def _wrong_neighbours(table: Any) -> RowTable:
    """Texts whose first result is wrong, or whose similarity is farthest from its score."""
    if "score" in table:
        gap = (table["similarity"].rank(pct=True) - table["score"].rank(pct=True)).abs()
        chosen, title = table.loc[gap.sort_values(ascending=False).index], "Pairs that are ranked worst"
        names = ["row", "text", "other", "score", "similarity"]
    else:
        labelled = "label" in table
        wrong = table["label"] != table["nearest_label"] if labelled else ~table["right"]
        chosen, title = table[wrong], "Texts whose nearest neighbour is wrong"
        names = ["row", "text", "nearest", *(["label", "nearest_label"] if labelled else [])]
    first = chosen.head(SHOWN)
    title = f"{title}: {len(first):,} of {len(chosen):,}" if len(first) else "No text finds a wrong one"
    return _row_table(title, first, names)


# Reward models


def reward_verdict(run: RunRecord) -> str:
    """Outcome of a run that was scored, in one sentence."""
    after: Any = run.scores["after"]
    if run.rates_steps:
        text = f"{after['accuracy']:.1%} of the held-out steps are rated rightly (95 %: {run.interval('accuracy')})"
        if "error_found" in after:
            text += f"; of answers with an error the first wrong step is found in {after['error_found']:.1%}"
        if "all_right" in after:
            text += f", and of answers without one {after['all_right']:.1%} are let pass"
        return f"{text}."
    text = f"The better answer has the higher reward in {after['accuracy']:.1%} of the held-out pairs"
    text += f" (95 %: {run.interval('accuracy')})"
    if "longer" in after:
        text += f"; the longer answer has it in {after['longer']:.1%}, and is the better one in "
        text += f"{after['longer_chosen']:.1%}"
    if folds := run.scores.get("out_of_fold"):
        low, high = (100 * folds[f"accuracy_{end}"] for end in ("low", "high"))
        text += f". Of all {folds['pairs']:,.0f} pairs, each rated by the member that did not train on it, "
        text += f"{folds['accuracy']:.1%} (95 %: {low:.1f} to {high:.1f} %)"
    return f"{text}."


def _wrong_steps(table: Any) -> RowTable:
    gap = (table["probability"] - table["label"]).abs()
    mistakes = table[(table["probability"] >= 0.5) != (table["label"] >= 0.5)]
    first = mistakes.loc[gap[mistakes.index].sort_values(ascending=False, kind="stable").index].head(SHOWN)
    title = f"Surest mistakes: {len(first):,} of {len(mistakes):,} steps" if len(first) else "No step is rated wrongly"
    return _row_table(title, first, ["row", "step", "text", "label", "probability"])


def _wrong_pairs(table: Any) -> RowTable:
    judged = table[~table["tie"]] if "tie" in table else table
    mistakes = judged[judged["margin"] <= 0].sort_values("margin")
    first = mistakes.head(SHOWN)
    title = f"Surest mistakes: {len(first):,} of {len(mistakes):,} pairs" if len(first) else "No pair is wrong"
    return _row_table(title, first, ["row", "text", "rejected", "chosen_reward", "rejected_reward"])


# Preference pairs


def preference_verdict(run: RunRecord) -> str:
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


def preference_plots(run: RunRecord) -> list[Plot]:
    """Rewards, how often they are right, and log-probabilities in each step; none of a run without them."""
    known = run.named("reward")
    rewards = [name for name in known if name not in ("accuracy", "margin")]
    if not run.prefers or not rewards:
        return []
    charts = [
        draw(
            "Rewards",
            lines(run.metrics, "reward", [*rewards, *(["margin"] if "margin" in known else [])]),
            x=STEP,
            y=Axis("nats, times beta", marks=(0.0,)),
            caption="A reward is beta times log p of the model over log p of the reference. Both may fall while the "
            "margin grows: answers of both kinds become less likely.",
        ),
        draw(
            "Log-probability of a token",
            lines(run.metrics, "log_p", run.named("log_p")),
            x=STEP,
            y=Axis("nats"),
            caption="Mean over the tokens of an answer, then over answers.",
        ),
    ]
    if scales := lines(run.metrics, "scale", run.named("scale")):
        caption = "Goes from prefer.beta to prefer.beta_end in a straight line over the run."
        charts.append(draw("Scale of rewards", scales, x=STEP, y=Axis("beta"), caption=caption))
    watched = run.metrics.dropna(subset=["held_out_loss"])
    if "accuracy" in known:
        series = lines(run.metrics, "reward", ["accuracy"])
        if "accuracy" in run.named("held_out_preference"):
            right = floats(watched["held_out_preference[accuracy]"])
            series.append(Series("held out", floats(watched["step"]), right, "marked", 1))
        title, axis = "Pairs whose chosen answer has the higher reward", Axis("share of pairs", marks=(0.5,))
        charts.append(draw(title, series, x=STEP, y=axis, caption="Chance is a half (dashed)."))
    if names := run.named("held_out_divergence"):
        charts.append(
            draw(
                "Divergence from the reference",
                lines(watched, "held_out_divergence", names, "marked"),
                x=STEP,
                y=Axis("nats per token", marks=(0.0,)),
                caption="Mean log p of the reference minus that of the model, over tokens of held-out answers: an "
                "estimate of KL(reference || model) on texts that neither wrote. Below 0 the model finds them "
                "likelier.",
            )
        )
    if "tokens" in run.named("held_out_answers"):
        charts.append(
            draw(
                "Tokens of written answers",
                lines(watched, "held_out_answers", ["tokens"], "marked"),
                x=STEP,
                y=Axis("tokens", from_zero=True),
                caption="Greedy answers to the same few held-out prompts, cut at evaluate.max_new_tokens.",
            )
        )
    return charts


# Reinforcement


def reinforce_verdict(run: RunRecord) -> str:
    """Outcome of the run in one sentence."""
    before, after = (run.scores[when] for when in ("before", "after"))
    went = "rose" if after["reward"] > before["reward"] else "did not rise"
    text = f"The mean reward of held-out answers {went}: {before['reward']:.3f} before, {after['reward']:.3f} after"
    return f"{text} (95 %: {run.interval('reward')}), with {after['answer_tokens']:.0f} tokens in an answer."


def reinforce_signs(run: RunRecord) -> Iterator[tuple[Literal["warning", "plain"], str]]:
    """Yield what the rewards alone do not tell, each with its tone: answers that repeat, are cut, or teach nothing."""
    if not run.reinforces:
        return
    before, after = (run.scores.get(when, {}) for when in ("before", "after"))
    if after.get("repetition", 0) - before.get("repetition", 0) > LOOSE:
        shares = f"{units.percent(before['repetition'])} before and {units.percent(after['repetition'])} after"
        yield "warning", f"Answers repeat themselves: {shares} of their sequences came before. A reward is outwitted."
    first, last = _ends(run, "reward[mean]")
    if (chance := run.chance("reward")) is not None and "reward" in after:
        gain = after["reward"] - before["reward"]
        if gain - chance <= 0 and gain + chance < last - first:
            interval = f"{gain - chance:+.3f} to {gain + chance:+.3f}"
            text = f"The reward rose by {last - first:.3f} in training, and by {gain:.3f} on held-out prompts"
            yield "warning", f"{text} (95 %: {interval}, over prompts)."
    _, cut = _ends(run, "answers[cut]")
    if cut > MANY:
        yield "warning", f"{units.percent(cut)} of the last answers were cut. Write more reinforce.max_new_tokens."
    _, dull = _ends(run, "answers[no signal]")
    if dull > MANY:
        text = f"{units.percent(dull)} of the last prompts had one reward for all answers: comparison teaches nothing."
        yield "plain", f"{text} reinforce.resample replaces such prompts."


def _ends(run: RunRecord, name: str) -> tuple[float, float]:
    """Means of the first and of the last quarter of the steps; 0 where there are none."""
    if name not in run.metrics or run.metrics[name].dropna().empty:
        return 0.0, 0.0
    values = run.metrics[name].dropna().to_numpy()
    part = max(1, len(values) // 4)
    return float(values[:part].mean()), float(values[-part:].mean())


def reinforce_plots(run: RunRecord) -> list[Plot]:
    """Rewards, answers and updates in each step; none of a run without them."""
    if not run.reinforces or "reward[mean]" not in run.metrics:
        return []
    own = [name for name in run.named("reward") if name not in ("mean", "spread")]
    reward = lines(run.metrics, "reward", ["mean", *own])
    for name in run.named("held_out_reward"):
        watched = run.metrics.dropna(subset=[f"held_out_reward[{name}]"])
        step, held_out = floats(watched["step"]), floats(watched[f"held_out_reward[{name}]"])
        of_set = "" if name == "mean" else f", {name}"
        reward.append(Series(f"held out, greedy{of_set}", step, held_out, "marked", len(reward)))

    def known(measure: str, *names: str) -> list[Series]:
        return lines(run.metrics, measure, [name for name in names if name in run.named(measure)])

    share = Axis("share", from_zero=True)
    charts = (
        ("Reward", reward, Axis("reward"), "Mean over the answers of a step."),
        (
            "Spread of the rewards",
            lines(run.metrics, "reward", ["spread"]),
            Axis("reward", from_zero=True),
            "Standard deviation over the answers of a step: nothing is learnt where it is 0.",
        ),
        (
            "Tokens of an answer",
            lines(run.metrics, "answers", ["tokens"]),
            Axis("tokens", from_zero=True),
            "Answers that grow while rewards do not are a sign of a reward that is outwitted.",
        ),
        (
            "Answers",
            known("answers", "no signal", "cut", "repetition"),
            share,
            "Prompts whose answers all have one reward; answers that reached their limit; sequences of four "
            "tokens that came before in the same answer.",
        ),
        (
            "Updates",
            known("update", "clipped", "capped", "accuracy"),
            share,
            "Tokens whose ratio was clipped, or whose weight for who sampled them was cut to its cap (capped); or "
            "pairs whose better answer has the higher log-ratio.",
        ),
        (
            "Drift",
            known("update", "kl", "entropy"),
            Axis("nats per token"),
            "Entropy of the model on its answers, and divergence from the reference where it is measured (kl).",
        ),
    )
    episodes = (
        ("Episodes", known("episodes", "success"), share, "Share of the episodes with a reward of 1 or more."),
        (
            "Turns and calls",
            known("episodes", "turns", "calls", "errors"),
            Axis("of an episode", from_zero=True),
            "Turns that the model wrote, calls among them, and calls that failed, were cut or could not be read.",
        ),
    )
    drawn = (*charts, *(episodes if run.named("episodes") else ()))
    return [draw(title, series, x=STEP, y=axis, caption=caption) for title, series, axis, caption in drawn]


# Tables of any task


def benchmark_table(run: Path) -> tuple[list[dict[str, str]], str] | None:
    """Tasks of lm-eval that a run was asked, before and after, and a sentence on them; None where it was asked none."""
    results = score_files.read_tasks(run)
    if not results:
        return None
    limit = f"The first {results['limit']:,} documents of each task. " if results["limit"] else ""
    note = f"{limit}The same documents before and after; Student's 95 % interval of their mean difference."
    return [benchmark_row(row) for row in results["rows"]], note


def benchmark_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Scores of a task of lm-eval in words."""
    low, high = row["low"], row["high"]
    return {
        "task": str(row["task"]),
        "metric": str(row["metric"]),
        "documents": units.NOTHING if row["documents"] is None else f"{row['documents']:,}",
        "before": f"{row['before']:.4f}",
        "after": f"{row['after']:.4f}",
        "difference": f"{row['difference']:+.4f}",
        "interval": units.NOTHING if low is None else f"{low:+.4f} to {high:+.4f}",
    }


def win_rates(run: Path) -> Sequence[Mapping[str, str]]:
    """How often a run's answers beat those of other runs, a row each; empty where it was compared with none."""
    return [
        {
            "against": str(each["against"]),
            "by": str(each["by"]),
            "prompts": f"{each['count']:,} of {', '.join(each['prompts'])}",
            "wins": units.percent(each["win_rate"]),
            "interval": f"{units.percent(each['win_rate_low'])} to {units.percent(each['win_rate_high'])}",
            "ties": units.percent(each["ties"]),
            "longer": units.percent(each["longer"]) if "longer" in each else units.NOTHING,
        }
        for each in score_files.read_win_rates(run)
    ]
