"""A finished, stopped or failed run in words: one verdict, and the findings that matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from workbench.config.sections.classes_config import rarest
from workbench.config.sections.schedule_config import ScheduleConfig
from workbench.evaluation import frozen_features, held_out_losses, simple_baseline
from workbench.report import class_section, crossval_section, sweep_sections, task_sections, teacher_worth
from workbench.report.crossval_section import Tone
from workbench.report.run_record import RunRecord
from workbench.runs import freezing_cost, units


class Finding(NamedTuple):
    """One sentence, and whether it is good news, a warning or neutral."""

    tone: Tone
    text: str


def verdict(record: RunRecord) -> str:
    """Outcome of the run in one sentence, from its numbers."""
    loss = record.difference("loss")
    if rounds := sweep_sections.rounds_verdict(record.folder):
        return rounds
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
    if record.tags:
        return task_sections.tag_verdict(record)
    if record.reinforces:
        return task_sections.reinforce_verdict(record)
    text = _of_losses(record, loss)
    difference = record.difference("f1")
    if difference is not None:
        before, after = (record.scores[when]["f1"] for when in ("before", "after"))
        if f"{before:.2f}" == f"{after:.2f}":
            text += f"; the answers' F1 stayed at {after:.2f}"
        else:
            text += f"; the answers' F1 {'rose' if difference > 0 else 'fell'} from {before:.2f} to {after:.2f}"
    if (difference := record.difference("wer")) is not None:
        before, after = (record.scores[when]["wer"] for when in ("before", "after"))
        moved = "rose" if difference > 0 else "fell" if difference < 0 else "stayed"
        text += f"; the word error rate {moved} from {before:.3f} to {after:.3f}"
    return f"{text}."


def _of_losses(record: RunRecord, change: float) -> str:
    """What held-out loss did, and whether that is beyond chance where the losses of rows were kept."""
    before, after = record.scores["before"]["loss"], record.scores["after"]["loss"]
    went = f"from {before:.2f} to {after:.2f} nats per token"
    found = held_out_losses.learnt(record.folder)
    if found is None or found.interval is None:
        if abs(change) < 0.005 * before:
            return f"Held-out loss hardly moved: {before:.2f} nats per token before, {after:.2f} after"
        if change < 0:
            return f"Held-out loss fell {went}"
        return f"Held-out loss did not fall: {before:.2f} nats per token before, {after:.2f} after"
    low, high = found.interval
    rows = f"95 % over {found.rows:,} rows"
    if low <= 0 <= high:
        return f"Held-out loss went {went}, which may be chance ({rows}: {low:+.2f} to {high:+.2f})"
    if high < 0:
        return f"Held-out loss fell {went}, by {-high:.2f} to {-low:.2f} ({rows})"
    return f"Held-out loss rose {went}, by {low:.2f} to {high:.2f} ({rows}): training made it worse"


def findings(record: RunRecord) -> list[Finding]:
    """Findings to look at before the numbers are believed, most important first."""
    return [Finding(tone, text) for tone, text in _findings(record)]


def _findings(record: RunRecord) -> Iterator[tuple[Tone, str]]:
    yield from crossval_section.sentences(record)
    yield from task_sections.reinforce_signs(record)
    if (worth := teacher_worth.worth(record)) is not None:
        tones: dict[str, Tone] = {"helped": "good", "harmed": "warning"}
        yield tones.get(worth.verdict, "plain"), worth.sentence
    manifest, after = record.manifest, record.scores.get("after", {})
    save, data = record.config.get("save", {}), manifest.get("data", {}).get("train") or {}

    yield from (("warning", sentence) for sentence in manifest.get("told") or ())
    if (steps := (manifest.get("batch") or {}).get("steps")) and not record.crossvalidates:
        schedule = ScheduleConfig.model_validate(record.config.get("schedule", {}))
        yield from (("warning", sentence) for sentence in schedule.about_short(steps))

    # Views at test time, of a run of one adapter.
    if (why := manifest.get("views")) and (record.config.get("tta") or {}).get("keep") is not False:
        chose = (
            " These rows chose it, so that their scores in views flatter a little; `plain` reads the same rows once."
            if "plain" in record.scores
            else ""
        )
        yield "plain", f"Test-time views, by the held-out rows: {why}{chose}"

    # A distilled student beside its teacher, and what the frozen backbone knows without any training.
    if (teacher := record.scores.get("teacher")) is not None and "after" in record.scores:
        if "accuracy" in teacher:
            text = f"Held-out accuracy: teacher {teacher['accuracy']:.3f}, student {after['accuracy']:.3f}."
        else:
            text = f"Held-out loss: teacher {teacher['loss']:.2f}, student {after['loss']:.2f} {record.unit}."
        if flattered := manifest.get("distill", {}).get("trained_on"):
            count, total = flattered["rows"], flattered["of"]
            text += f" The teacher was trained on {count:,} of these {total:,} rows: its score is too good."
        if (cache := manifest.get("distill", {}).get("cache")) is not None:
            text += f" What the teacher says was read from a cache of {cache['bytes_per_token']:.0f} bytes a token."
        if worth is None:
            text += " Whether the student needed the teacher was not measured: distill.control=true would tell."
        yield "plain", text
    if (blind := after.get("f1_of_other_pictures")) is not None:
        text = f"With the pictures of other rows the answers' F1 is {blind:.2f}, with their own {after['f1']:.2f}"
        yield "plain", f"{text}: that is what pictures are worth."
    if text := frozen_features.sentence(record.probe, after=after.get("accuracy")):
        yield "warning" if frozen_features.is_enough(record.probe, after.get("accuracy")) else "plain", text
    if facts := manifest.get("simple_baseline"):
        behind, text = simple_baseline.sentence(facts)
        yield "warning" if behind else "plain", text

    if never := class_section.never_predicted(record):
        named = ", ".join(f"{name} ({rows:,} rows)" for name, rows in never[:10]) + (", ..." if never[10:] else "")
        # A setting that teaches rare classes and goes with the run's own: at most one setting balances classes.
        classes, counts = record.config.get("classes", {}), list(data.get("classes", {}).values())
        if classes.get("kind") == "several":
            done, advice = bool(classes.get("gamma")), "classes.gamma=2 teaches rare classes."
        else:
            unset = {"weights": ("none",), "sampling": ("auto", "none"), "logit_adjustment": (0.0,)}
            balanced = classes.get("sampling") == "auto" and bool(counts) and rarest(counts) is not None
            done = balanced or any(key in classes and classes[key] not in values for key, values in unset.items())
            advice = "classes.sampling=even or classes.weights=balanced teaches rare classes."
        advice = "The settings favour rare classes already: more rows of these classes may help." if done else advice
        yield "warning", f"Never predicted: {named}. {advice}"

    for score, title, better in (("f1", "F1", 1), ("wer", "word error rate", -1)):
        difference, chance = record.difference(score), record.chance(score)
        if difference is None or chance is None:
            continue
        change = f"{title} {units.signed(difference)} ± {units.number(chance)}"
        text = f"{change} (95 %) over {len(record.predictions):,} answers"
        if abs(difference) > chance:
            tone: Tone = "good" if better * difference > 0 else "warning"
            yield tone, f"The answers changed by more than chance: {text}."
        else:
            rows = (manifest.get("data", {}).get("held_out") or {}).get("rows", 0)
            more = "A larger evaluate.answers" if rows > len(record.predictions) else "More held-out rows"
            yield "warning", f"The change of the answers may be chance: {text}. {more} would tell."

    if (found := frozen(record)) is not None:
        yield found.tone, found.text

    if (grow := manifest.get("grow")) and grow["stackings"]:
        blocks = grow["stackings"][-1]["blocks"]
        whens = ", ".join(f"{each['blocks']} after step {each['step']:,}" for each in grow["stackings"])
        text = f"{grow['first']} of {blocks} blocks trained at first; they were stacked to {whens}."
        yield "plain", f"{text} The loss jumps there, and the optimizer began anew."

    # The steps of a cross-validation are chosen before: what a better one would have been is no advice.
    if record.best_step and len(record.held_out) > 1 and not record.crossvalidates and record.judge is None:
        step, lowest = record.best_step
        last_step, losses = int(record.held_out["step"].iloc[-1]), record.held_out["held_out_loss"]
        last, previous = float(losses.iloc[-1]), float(losses.iloc[-2])
        if step < 0.9 * last_step and last > 1.01 * lowest:
            text = f"Held-out loss was lowest ({lowest:.2f}) at step {step:,} and {last:.2f} at step {last_step:,}: "
            text += "the run overfits from there on. "
            saved = "That best adapter is the one saved."
            unsaved = "save.ship=best would save that adapter instead of the last."
            yield "warning", text + (saved if save.get("ship") == "best" else unsaved)
        elif manifest.get("status") == "done" and step == last_step and last < 0.99 * previous:
            yield "plain", "Held-out loss was still falling at the end: more steps may help."

    # Where the held-out rows chose what ships, their scores flatter it.
    if not record.crossvalidates and "loss" in after and (looks := len(record.judged)):
        among = [f"the best of {looks} evaluations"] if save.get("ship") == "best" and looks > 1 else []
        if record.config.get("average", {}).get("method", "none") != "none":
            among.append("the better of the values and their average")
        if among:
            text = "data.test=FILE names rows that choose nothing."
            if "test" in record.scores:
                text = f"On the test rows, scored once, its loss is {record.scores['test']['loss']:.4f}."
            chosen = " and ".join(among)
            yield "plain", f"The held-out rows also chose what ships, {chosen}, so that their scores flatter it. {text}"

    if record.clipped is not None and record.clipped > 0.5:
        limit, median = record.config["train"]["max_grad_norm"], record.metrics["grad_norm"].median()
        text = f"Gradients were scaled down to train.max_grad_norm {limit:g} in {units.percent(record.clipped)} of the"
        yield "plain", f"{text} steps (median norm {units.number(median)})."

    # Splits of one file share what was left out of it: counting train alone counts every row once.
    if data.get("rows") and data.get("truncated", 0) / data["rows"] > 0.05:
        text = f"{units.percent(data['truncated'] / data['rows'])} of the training examples were cut"
        limit = record.config.get("data", {}).get("max_tokens")
        if record.equally_long:
            text += " (audio.on_long=cut): their beginning was read."
        else:
            text += f" at {limit:,} tokens. A larger data.max_tokens keeps them whole." if limit else "."
        yield "warning", text
    if skipped := data.get("skipped"):
        rows = "1 row of the training file was" if skipped == 1 else f"{skipped:,} rows of the training file were"
        yield "warning", f"{rows} left out."


def frozen(record: RunRecord) -> Finding | None:
    """What freezing saved or cost; None of a run without."""
    if not record.freezing:
        return None
    lost, text = freezing_cost.sentence(str(record.config["freeze"]["policy"]), record.freezing)
    return Finding("warning" if lost else "plain", text)


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
