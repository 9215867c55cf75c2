"""A few steps of recipe sft before rewards: where recipe reinforce starts from."""

from __future__ import annotations

from workbench.adapters import Full
from workbench.config import DataConfig, RunConfig
from workbench.config.sections.basic_sections import EvaluateConfig, SaveConfig, TrainConfig
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.errors import ConfigError
from workbench.recipes.single import start_adapter
from workbench.recipes.tasks.sft import text_run
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

FOLDER = "start"
"""Folder of the warm-up in a run directory."""
HELD_OUT = 0.1
"""Share of its rows that are held out, at the least one."""


def require(config: RunConfig) -> None:
    """Raise ConfigError where training cannot go on from what the warm-up teaches."""
    method = config.adapter.method
    if config.reinforce.warm_up is None or isinstance(config.adapter, Full) or method in start_adapter.METHODS:
        return
    raise ConfigError(
        f"reinforce.warm_up: adapter.method={method} changes the backbone itself when it starts, so that training "
        f"cannot go on from it. Write adapter.method={'|'.join((*start_adapter.METHODS, 'full'))}; or run recipe=sft, "
        "`workbench merge` it, and write its folder as model.id."
    )


def warmed_up(config: RunConfig, run: Run, callback: Callback) -> RunConfig:
    """The same run, which starts from what the rows of `reinforce.warm_up` taught; that happens once in a run."""
    section = config.reinforce
    if section.warm_up is None:
        return config
    own = run.own(FOLDER)
    saved = own.path / "adapter"
    if not saved.exists():
        assert section.warm_up is not None
        rows = {"train": section.warm_up, "held_out": HELD_OUT, "max_tokens": config.data.max_tokens}
        rate = section.warm_up_rate or config.train.learning_rate
        train = {**config.train.model_dump(), "steps": section.warm_up_steps, "epochs": None, "learning_rate": rate}
        taught = config.model_copy(
            update={
                "recipe": "sft",
                "reinforce": ReinforceConfig(),
                "rewards": (),
                "data": DataConfig.model_validate(rows),
                "train": TrainConfig.model_validate(train),
                "evaluate": EvaluateConfig(every=None, answers=0),
                "save": SaveConfig(every=None),
            }
        )
        callback.say(f"Warm-up: {section.warm_up_steps} steps of recipe sft on {section.warm_up} ...")
        tokenizer, template, data = text_run.prepare(taught, own)
        text_run.TextRun(taught, own, callback, tokenizer, template, data).train()
    if isinstance(config.adapter, Full):
        model = config.model.model_copy(update={"id": str(saved.resolve()), "revision": None})
        return config.model_copy(update={"model": model})
    section = config.reinforce.model_copy(update={"start": str(saved.parent)})
    return config.model_copy(update={"reinforce": section})
