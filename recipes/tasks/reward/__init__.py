"""Task `reward`: a number for how good an answer is (from preference pairs), or each of its steps."""

from collections.abc import Iterator
from functools import partial

from workbench.config.sections.basic_sections import MARGIN
from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import BY_PROCESSOR, TaskFacts, register

_OF_ROWS = ("decontaminate", "select", "sampling", "curriculum", "length_warm_up", "augment")
"""Keys of `data` that are for rows of one answer."""


def _check(config: RunSections) -> Iterator[str]:
    data, process = config.data, config.reward.kind == "process"
    wanted, what = ("stepwise", "rates no steps") if process else ("preference", "judges no answers")
    if data.row_format not in ("auto", wanted):
        yield (
            f"data.format={data.format} {what}. recipe=reward with reward.kind={config.reward.kind} reads "
            f"data.format={wanted}; leave it out."
        )
    if data.loss_on != "assistant":
        yield "recipe=reward rates whole answers, of which no token carries loss: leave data.loss_on out."
    if given := [f"data.{key}" for key in _OF_ROWS if data.differs(key)]:
        yield f"recipe=reward reads rows that are judged: leave {', '.join(given)} out, for rows of one answer."
    if config.model.new_tokens:
        yield "recipe=reward trains no rows of new tokens: leave model.new_tokens out."
    for key in ("label_smoothing", "z_loss", "r_drop"):
        if getattr(config.regularise, key):
            yield f"regularise.{key} is for losses of tokens and classes, not for recipe=reward. Leave it out."

    reward, fields = config.reward, type(config.reward).model_fields
    keys, other = (("centre",), "outcome") if reward.kind == "process" else (("separator", "aggregate"), "process")
    for key in keys:
        if getattr(reward, key) != fields[key].default:
            yield f"reward.{key} is for reward.kind={other}, not for {reward.kind}. Leave it out."
    if reward.kind == "process" and config.tta.views:
        yield "tta reads whole answers in several views, and reward.kind=process rates their steps. Leave tta out."
    if reward.kind == "process" and any(MARGIN in own.columns for own in config.data.training_files.values()):
        yield "data.columns.margin compares two answers, and reward.kind=process rates steps. Leave it out."


def _readable(config: RunSections, limit: int | None) -> None:
    from workbench.data.text import preference_pairs, stepwise, tokenized

    data, steps = config.data, config.reward.kind == "process"
    conversion = partial(stepwise.convert, config.reward.separator, True) if steps else preference_pairs.convert
    columns = {name: own for name, own in data.columns.items() if steps or name != MARGIN}
    scored = data.model_copy(update={"columns": columns})
    tokenized.require_readable(data, limit, conversion=conversion, scored=scored)


FACTS = register(
    TaskFacts(
        name="reward",
        line="reward models, of preference pairs (outcome) or of steps (process)",
        module="workbench.recipes.tasks.reward.task",
        readable=_readable,
        head="classes",
        output="reward",
        pictured=True,
        answers=True,
        margins=True,
        compares="answers",
        uncached="computes two together",
        packs=True,
        own_choice=True,
        folds=True,
        averages=lambda config: config.reward.kind == "outcome",
        devices=True,
        pipeline=None,
        banked=True,
        views=("lower", "upper", "typos"),
        sections=("reward", "tta", "image"),
        check=_check,
        refuses=BY_PROCESSOR,
        report="rewards",
        predicts=("answers.csv", "rate every answer of a file"),
        answer="reward",
        score="accuracy",
        higher_is_better=True,
    )
)
