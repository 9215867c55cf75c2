"""Task `prefer`: preference pairs make better answers likelier (DPO, KTO, ORPO and more)."""

from collections.abc import Iterator
from typing import Any

from workbench.config.sections.basic_sections import MARGIN
from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import BY_PROCESSOR, TaskFacts, register


def _check(config: RunSections) -> Iterator[str]:
    yield from config.prefer.misfits(margin=any(MARGIN in own.columns for own in config.data.training_files.values()))
    data = config.data
    if data.row_format not in ("auto", "preference"):
        yield f"data.format={data.format} judges no answers. recipe=prefer reads data.format=preference; leave it out."
    if data.loss_on != "assistant":
        yield "recipe=prefer compares answers, and nothing else carries loss: leave data.loss_on out."
    unread: dict[str, Any] = {
        "data.select": data.select.by != "all",
        "data.sampling": data.sampling.by != "all",
        "data.curriculum": data.curriculum.by != "none",
        "data.length_warm_up": data.length_warm_up.start is not None,
        "data.augment": data.augment.is_on,
    }
    for key, given in unread.items():
        if given:
            yield f"{key} is for rows of one answer, and recipe=prefer compares two. Leave {key} out."
    regularise = config.regularise
    for key in ("neftune", "stochastic_depth", "r_drop", "label_smoothing", "z_loss"):
        if getattr(regularise, key):
            yield (
                f"regularise.{key} is for recipe=sft|mlm: recipe=prefer compares log-probabilities as they are. "
                "Leave it out."
            )
    if config.model.new_tokens and config.prefer.compares:
        yield (
            "model.new_tokens are unknown to the reference of recipe=prefer. Teach them with recipe=sft, merge that "
            "run, and write its folder as model.id."
        )

    if config.prefer.start is not None and config.adapter.method == "full":
        yield (
            "prefer.start goes on from an adapter, and adapter.method=full has none. "
            "Write model.id=RUN/adapter, the folder of what that run saved."
        )
    if config.prefer.loss == "kto" and config.adapter.looks:
        yield (
            f"adapter.method={config.adapter.method} looks at the loss of single rows, and that of prefer.loss=kto "
            f"compares rows. Write {config.adapter.without_looking}."
        )
    if config.prefer.loss == "kto" and config.optimizer.noise_scale is not None:
        yield "optimizer.noise_scale computes a batch in parts, and prefer.loss=kto needs it whole. Leave it out."
    if config.prefer.loss == "kto" and config.optimizer.sam is not None:
        yield "optimizer.sam moves the weights within a step, and with them kto's reference point. Leave it out."


def _readable(config: RunSections, limit: int | None) -> None:
    from workbench.data.text import preference_pairs, tokenized

    tokenized.require_readable(config.data, limit, conversion=preference_pairs.convert)


FACTS = register(
    TaskFacts(
        name="prefer",
        line="preference pairs: DPO, KTO, ORPO and more",
        module="workbench.recipes.tasks.prefer.task",
        readable=_readable,
        head="text",
        pictured=True,
        writes_text=True,
        serves=True,
        answers=True,
        learns_answers=("pairs",),
        margins=True,
        compares="answers",
        uncached="computes two together",
        likelihoods="compares them as they are",
        packs=True,
        own_choice=True,
        folds=True,
        devices=True,
        pipeline=None,
        banked=True,
        one_device_scores="compares answers with a reference, which one device reads",
        sections=("prefer", "image"),
        check=_check,
        refuses=BY_PROCESSOR,
        start="prefer",
        report="preferences",
    )
)
