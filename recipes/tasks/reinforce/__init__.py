"""Task `reinforce`: rewards of the model's own answers (GRPO, RLOO and more)."""

from collections.abc import Collection, Iterator
from typing import Any, cast

from workbench.adapters.method import plain_lora
from workbench.config.sections.run_sections import RunSections
from workbench.config.task_facts import BY_PROCESSOR, TaskFacts, register

_OF_ROWS = ("sampling", "curriculum", "length_warm_up", "augment", "clean", "drop_suspects")
"""Keys of `data` that are for rows with an answer, or order them by it."""


def _check(config: RunSections) -> Iterator[str]:
    for source in config.rewards:
        if source.sampled_alone:
            yield f"rewards: kind={source.kind} {source.sampled_alone}. Leave it out; `workbench sample` takes it."
    yield from config.reinforce.misfits(
        noise=config.adapter.noise > 0 or config.adapter.facts.draws or config.model.dropout,
        prompts=config.batch.size,
    )
    if not (config.reinforce.rollouts.url is None or config.adapter.facts.plain_lora):
        cure = f"Write adapter.method={plain_lora()}, or leave reinforce.rollouts out."
        if config.adapter.method == "full":
            yield (
                "reinforce.rollouts.url: a server is given an adapter before each rollout, and adapter.method=full "
                f"trains the backbone itself, whose weights it cannot take. {cure}"
            )
        else:
            yield (
                "reinforce.rollouts.url: a server loads plain LoRA while it answers, and "
                f"adapter.method={config.adapter.method} is saved as something else. {cure}"
            )
    data = config.data
    if data.loss_on != "assistant":
        yield "recipe=reinforce learns from the answers that it writes, and from no other text: leave data.loss_on out."
    if given := [f"data.{key}" for key in _OF_ROWS if data.differs(key)]:
        yield f"recipe=reinforce reads prompts, and writes the answers itself: leave {', '.join(given)} out."
    if data.weighs:
        yield "data.columns names a weight, and prompts of recipe=reinforce count once each. Leave it out."
    if config.model.new_tokens:
        yield (
            "model.new_tokens are never drawn before they were learnt. Teach them with recipe=sft, merge that run, and "
            "write its folder as model.id."
        )
    for key in ("neftune", "stochastic_depth", "r_drop", "label_smoothing", "z_loss"):
        if getattr(config.regularise, key):
            yield (
                f"regularise.{key} is for recipe=sft|mlm: recipe=reinforce compares log-probabilities as they are. "
                "Leave it out."
            )
    if config.regularise.mixout and config.reinforce.remembers:
        yield (
            "regularise.mixout moves values in each step, and reinforce compares probabilities with those before the "
            "first update. Leave it out, or write reinforce.updates=1 and reinforce.kl=loss, and "
            "leave reinforce.kl_target out."
        )
    if config.freeze.policy != "none" and config.freeze.observes == "activations":
        yield (
            f"freeze.policy={config.freeze.policy} observes activations of rows, and recipe=reinforce has none before "
            "it writes some. Write freeze.policy=static."
        )
    if config.adapter.looks:
        yield (
            f"adapter.method={config.adapter.method} looks at the loss of rows before the training, and "
            f"recipe=reinforce has no answers by then. Write {config.adapter.without_looking}."
        )
    if config.optimizer.noise_scale is not None:
        yield (
            "optimizer.noise_scale compares parts of a batch as if their rows were drawn one by one, and answers to "
            "one prompt are compared with each other. Leave it out."
        )
    if config.evaluate.differs("max_new_tokens"):
        yield (
            "evaluate.max_new_tokens is for answers with a reference, and those of recipe=reinforce are as long as in "
            "training. Write reinforce.max_new_tokens."
        )
    if config.reinforce.start is not None and config.adapter.method == "full":
        yield (
            "reinforce.start goes on from an adapter, and adapter.method=full has none. "
            "Write model.id=RUN/adapter, the folder of what that run saved."
        )
    if config.reinforce.warm_up is not None and config.budget.timed:
        yield (
            "reinforce.warm_up trains before the clock of budget plans, so that budget.time, energy and money cannot "
            "end the run. Write train.steps or budget.tokens."
        )
    if config.reinforce.refers and config.adapter.method == "full":
        yield (
            "reinforce.beta compares with the model that training starts from, which is the backbone without its "
            "adapter, and adapter.method=full trains the backbone itself. Write reinforce.beta=0, or "
            "adapter.method=lora."
        )


def _columns(config: RunSections) -> Collection[str] | None:
    """Columns that rewards read; None where a Python function is given the whole row."""
    sources = config.rewards
    if any(source.kind == "function" for source in sources):
        return None
    return {name for source in sources for name in source.columns}


def _readable(config: RunSections, limit: int | None) -> None:
    from workbench.data.text import tokenized
    from workbench.data.text.prompts import PromptEncoder

    prompts = PromptEncoder(cast(Any, None))  # rows are read without their tokens
    tokenized.require_readable(config.data, limit, conversion=prompts.conversion, reader=prompts.reader)


FACTS = register(
    TaskFacts(
        name="reinforce",
        line="rewards of the model's own answers: GRPO, RLOO and more",
        module="workbench.recipes.tasks.reinforce.task",
        readable=_readable,
        head="text",
        writes_text=True,
        serves=True,
        answers=True,
        compares="rewards of answers",
        uncached="writes new answers in each step",
        likelihoods="compares them as they are",
        generates_rows=True,
        pictured=True,
        refuses=BY_PROCESSOR,
        devices=True,
        cut=lambda config: "writes with the whole model, and zero=3 and fsdp2 cut it",
        tensor="writes with the whole model",
        pipeline="writes with the whole model",
        one_device_scores="has its answers judged by rewards, on one device",
        sections=("rewards", "reinforce", "image"),
        check=_check,
        start="reinforce",
        report="reinforcement",
        score="reward",
        higher_is_better=True,
        reads=_columns,
        steps_on_rows=lambda config: config.reinforce.updates,
        rows_of_draw=lambda config: 1 if config.reinforce.pairs else config.reinforce.answers,
    )
)
