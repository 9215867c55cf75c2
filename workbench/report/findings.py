"""A finished, stopped or failed run in words: one verdict, and the findings that matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.config.sections.classes_config import rarest
from workbench.evaluation import frozen_features
from workbench.report import class_section, crossval_section, sweep_sections, task_sections
from workbench.report.run_record import RunRecord
from workbench.runs import units


@dataclass(frozen=True)
class Finding:
    """One sentence, and whether it is good news, a warning or neutral."""

    tone: Literal["good", "warning", "plain"]
    text: str


def verdict(record: RunRecord) -> str:
    """Outcome of the run in one sentence, from its numbers."""
    loss = record.difference("loss")
    if record.over is not None and not record.over.ships and loss is not None:
        return sweep_sections.fleet_verdict(record)
    if loss is None:
        return _unfinished(record)
    if record.crossvalidates:
        return crossval_section.verdict(record)
    if record.classifies:
        return class_section.verdict(record)
    if record.embeds:
        return task_sections.embed_verdict(record)
    if record.prefers:
        return task_sections.preference_verdict(record)
    if record.rewards:
        return task_sections.reward_verdict(record)
    if record.reinforces:
        return task_sections.reinforce_verdict(record)
    before, after = record.scores["before"]["loss"], record.scores["after"]["loss"]
    if abs(loss) < 0.005 * before:
        text = f"Held-out loss hardly moved: {before:.2f} nats per token before, {after:.2f} after"
    elif loss < 0:
        text = f"Held-out loss fell from {before:.2f} to {after:.2f} nats per token"
    else:
        text = f"Held-out loss did not fall: {before:.2f} nats per token before, {after:.2f} after"
    difference = record.difference("f1")
    if difference is not None:
        before, after = (record.scores[when]["f1"] for when in ("before", "after"))
        if f"{before:.2f}" == f"{after:.2f}":
            text += f"; the answers' F1 stayed at {after:.2f}"
        else:
            text += f"; the answers' F1 {'rose' if difference > 0 else 'fell'} from {before:.2f} to {after:.2f}"
    return f"{text}."


def findings(record: RunRecord) -> list[Finding]:
    """Findings to look at before the numbers are believed, most important first."""
    probed = frozen_features.sentence(record.probe, after=record.scores.get("after", {}).get("accuracy"))
    found = [
        *(Finding(tone, text) for tone, text in crossval_section.sentences(record)),
        *(Finding(tone, text) for tone, text in task_sections.reinforce_signs(record)),
        _teacher_comparison(record),
        Finding("plain", probed) if probed else None,
        _never_predicted(record),
        _chance(record),
        _grown(record),
        # The steps of a cross-validation are chosen before: what a better one would have been is no advice.
        None if record.crossvalidates else _best_step(record),
        _chosen_by_score(record),
        _clipping(record),
        *_rows(record),
    ]
    return [finding for finding in found if finding]


def _never_predicted(record: RunRecord) -> Finding | None:
    never = class_section.never_predicted(record)
    if not never:
        return None
    named = ", ".join(f"{name} ({rows:,} rows)" for name, rows in never[:10]) + (", ..." if never[10:] else "")
    # A setting that teaches rare classes and goes with the run's own: at most one setting balances classes.
    classes = record.config.get("classes", {})
    counts = list(record.manifest.get("data", {}).get("train", {}).get("classes", {}).values())
    if classes.get("kind") == "several":
        done, advice = bool(classes.get("gamma")), "classes.gamma=2 teaches rare classes."
    else:
        unset = {"weights": ("none",), "sampling": ("auto", "none"), "logit_adjustment": (0.0,)}
        balanced = classes.get("sampling") == "auto" and bool(counts) and rarest(counts) is not None
        done = balanced or any(key in classes and classes[key] not in values for key, values in unset.items())
        advice = "classes.sampling=even or classes.weights=balanced teaches rare classes."
    advice = "The settings favour rare classes already: more rows of these classes may help." if done else advice
    return Finding("warning", f"Never predicted: {named}. {advice}")


def _unfinished(record: RunRecord) -> str:
    steps, total = record.metrics["step"], record.manifest.get("batch", {}).get("steps")
    if steps.empty:
        where = "before its first step"
    else:
        # The steps of a cross-validation go on from round to round.
        of = f" of {total:,}" if total and not record.crossvalidates else ""
        where = f"at step {int(steps.iloc[-1]):,}{of}"
    status = record.manifest.get("status")
    text = {
        "failed": f"The run failed {where}",
        "stopped": f"The run was stopped {where}",
        "done": f"The run ended {where} and was not scored",
    }.get(str(status), f"Not finished: {where} when this page was written")
    if record.crossvalidates:
        return f"{text}{crossval_section.progress(record)}."
    best = record.best_step
    if best:
        text += f"; lowest held-out loss {best[1]:.2f} {record.unit} at step {best[0]:,}"
    before = record.scores.get("before", {}).get("loss")
    if before is not None:
        text += f" ({before:.2f} before training)" if best else f"; held-out loss {before:.2f} before training"
    return text + "."


def _chance(record: RunRecord) -> Finding | None:
    difference, chance = record.difference("f1"), record.chance("f1")
    if difference is None or chance is None:
        return None
    measured = f"F1 {units.signed(difference)} ± {units.number(chance)} (95 %) over {len(record.predictions):,} answers"
    if abs(difference) > chance:
        return Finding("good" if difference > 0 else "warning", f"The answers changed by more than chance: {measured}.")
    text = f"The change of the answers may be chance: {measured}. A larger evaluate.answers would tell."
    return Finding("warning", text)


def _teacher_comparison(record: RunRecord) -> Finding | None:
    """How a distilled student stands beside its teacher."""
    teacher, student = record.scores.get("teacher"), record.scores.get("after")
    if teacher is None or student is None:
        return None
    if "accuracy" in teacher:
        text = f"Held-out accuracy: teacher {teacher['accuracy']:.3f}, student {student['accuracy']:.3f}."
    else:
        text = f"Held-out loss: teacher {teacher['loss']:.2f}, student {student['loss']:.2f} {record.unit}."
    cache = record.manifest.get("distill", {}).get("cache")
    if cache is not None:
        text += f" What the teacher says was read from a cache of {cache['bytes_per_token']:.0f} bytes a token."
    return Finding("plain", text)


def _grown(record: RunRecord) -> Finding | None:
    """When blocks were stacked."""
    grow = record.manifest.get("grow")
    if not grow or not grow["stackings"]:
        return None
    whens = ", ".join(f"{each['blocks']} after step {each['step']:,}" for each in grow["stackings"])
    text = (
        f"{grow['first']} of {grow['stackings'][-1]['blocks']} blocks trained at first; they were stacked to {whens}."
    )
    return Finding("plain", f"{text} The loss jumps there, and the optimizer began anew.")


def _best_step(record: RunRecord) -> Finding | None:
    best = record.best_step
    if not best or len(record.held_out) < 2:
        return None
    step, lowest = best
    last_step, losses = int(record.held_out["step"].iloc[-1]), record.held_out["held_out_loss"]
    last, previous = float(losses.iloc[-1]), float(losses.iloc[-2])
    if step < 0.9 * last_step and last > 1.01 * lowest:
        text = f"Held-out loss was lowest ({lowest:.2f}) at step {step:,} and {last:.2f} at step {last_step:,}: "
        text += "the run overfits from there on. "
        if record.config.get("save", {}).get("ship") == "best":
            return Finding("warning", f"{text}That best adapter is the one saved.")
        return Finding("warning", f"{text}save.ship=best would save that adapter instead of the last.")
    if record.manifest.get("status") == "done" and step == last_step and last < 0.99 * previous:
        return Finding("plain", "Held-out loss was still falling at the end: more steps may help.")
    return None


def _chosen_by_score(record: RunRecord) -> Finding | None:
    """Whether the held-out rows chose what ships: then their scores flatter it."""
    after, save = record.scores.get("after", {}), record.config.get("save", {})
    averages = record.config.get("average", {}).get("method", "none") != "none"
    looks = len(record.judged)
    if record.crossvalidates or "loss" not in after or not looks:
        return None
    among = [f"the best of {looks} evaluations"] if save.get("ship") == "best" and looks > 1 else []
    among += ["the better of the values and their average"] if averages else []
    if not among:
        return None
    text = f"The held-out rows also chose what ships, {' and '.join(among)}, so that their scores flatter it. "
    text += (
        f"On the test rows, scored once, its loss is {record.scores['test']['loss']:.4f}."
        if "test" in record.scores
        else "data.test=FILE names rows that choose nothing."
    )
    return Finding("plain", text)


def _clipping(record: RunRecord) -> Finding | None:
    if record.clipped is None or record.clipped <= 0.5:
        return None
    limit, median = record.config["train"]["max_grad_norm"], record.metrics["grad_norm"].median()
    text = (
        f"Gradients were scaled down to train.max_grad_norm {limit:g} in {units.percent(record.clipped)} of the steps"
    )
    return Finding("plain", f"{text} (median norm {units.number(median)}).")


def _rows(record: RunRecord) -> list[Finding]:
    """How many training rows were cut, and how many left out."""
    # Splits of one file share what was left out of it: counting train alone counts every row once.
    data = record.manifest.get("data", {}).get("train") or {}
    found = []
    if data.get("rows") and data.get("truncated", 0) / data["rows"] > 0.05:
        text = f"{units.percent(data['truncated'] / data['rows'])} of the training examples were cut"
        limit = record.config.get("data", {}).get("max_tokens")
        text += f" at {limit:,} tokens. A larger data.max_tokens keeps them whole." if limit else "."
        found.append(Finding("warning", text))
    if skipped := data.get("skipped"):
        rows = "1 row of the training file was" if skipped == 1 else f"{skipped:,} rows of the training file were"
        found.append(Finding("warning", f"{rows} left out."))
    return found
