"""The rounds of a recipe: the run that each of them is, from the adapter of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.config.expansions import member_runs
from workbench.config.expansions.member_runs import Run, Trial
from workbench.config.sections.run_sections import RunSections

ROWS, HELD_OUT = "rows.jsonl", "held_out.jsonl"
"""What a round learns, and what its held-out loss is measured on, in its own folder."""
WARM_UP = "warm-up"
"""Folder of the run that comes before the first round."""
_PROMPTS = ("sampling", "curriculum", "length_warm_up", "augment", "clean", "drop_suspects", "loss_on")
"""Keys of `data` that ask for an answer, which prompts have not."""
_LEARNT = ("max_tokens", "truncate")
"""Keys of `data` with which answers are read as they are learnt."""


def trials(config: Run, home: Path = Path()) -> list[Trial[Run]]:
    """The run of each round, in order. `home`: the run directory of all.

    Raises:
        Mistakes: all that is wrong with any of them.
    """
    member_runs.require([*_misfits(config)])
    base = {**config.model_dump(mode="json"), **config.as_task(), "rounds": {}}
    base["data"] = {key: base["data"][key] for key in _LEARNT} | {"on_bad_row": "skip", "seed": config.rows_seed}
    folders = [home / "members" / f"round-{number + 1}" for number in range(config.rounds.count)]
    wanted, before = list[dict[str, Any]](), home / WARM_UP if config.rounds.warm_up is not None else None
    for folder in folders:
        start = f"{config.task.start}.start"
        own = {} if before is None else {start: str(before), f"{config.task.start}.trust": True}
        wanted.append({"data.train": str(folder / ROWS), "data.held_out": str(folder / HELD_OUT), **own})
        before = folder
    return member_runs.trials(config, base, [folder.name for folder in folders], wanted, section="rounds")


def warm_up(config: Run) -> Run:
    """The run of recipe sft before the first round; raises Mistakes: all that is wrong with it."""
    rounds, values = config.rounds, {**config.model_dump(mode="json"), "recipe": "sft", "of": None}
    rows = {"train": rounds.warm_up, "held_out": 0.1, "max_tokens": config.data.max_tokens, "on_bad_row": "skip"}
    rate = rounds.warm_up_rate or config.train.learning_rate
    values |= {name: {} for name in ("rounds", *config.task.sections)} | {"data": rows, "save": {"every": None}}
    values["train"] |= {"steps": rounds.warm_up_steps, "epochs": None, "learning_rate": rate}
    values["evaluate"] |= {"every": None, "answers": 0}
    (trial,) = member_runs.trials(config, values, [WARM_UP], [{}], section="rounds.warm_up")
    return trial.config


def kind(config: RunSections) -> str:
    """What is learnt of the answers to a prompt; see `sampled_answers.rows_to_write`."""
    return config.task.learns_answers[0] if config.rounds.to == "auto" else config.rounds.to


def _misfits(config: RunSections) -> Iterator[tuple[str, str]]:
    rounds, task, data = config.rounds, config.task, config.data
    if not rounds.score:
        yield "rounds.score", "nothing says which answers are good. Write rounds.score='[{kind: number}]'."
    if kind(config) not in task.learns_answers:
        yield "rounds.to", f"of={task.name} learns {' or '.join(task.learns_answers)}. Write one of these, or auto."
    elif kind(config) == "accepted" and rounds.least is None:
        yield "rounds.to", "accepted keeps answers with a reward of rounds.least. Write rounds.least=1."
    if rounds.margin and kind(config) != "pairs":
        yield "rounds.margin", f"is for pairs, and to={kind(config)} keeps single answers. Leave it out."
    if rounds.count > 1 and config.adapter.method == "full":
        yield (
            "adapter.method",
            "full has no adapter for the next round to begin with. Write adapter.method=lora, or rounds.count=1.",
        )
    if rounds.warm_up is not None and getattr(config, str(task.start)).start is not None:
        yield "rounds.warm_up", f"and {task.start}.start both say what rounds begin with. Leave one of them out."
    for key in _PROMPTS:
        if data.differs(key):
            yield f"data.{key}", "is for rows with an answer, and rounds write the answers to prompts. Leave it out."
    if data.select.by_backbone:
        yield "data.select", f"by={data.select.by} reads answers. Write {data.select.random_instead}."
    for name, given in {"sources": data.sources, "test": data.test}.items():
        if given:
            cure = "Write data.train=FILE" if name == "sources" else "`workbench sample` scores the run on it later"
            yield f"data.{name}", f"a round asks the prompts of one file, and of data.held_out. {cure}; leave it out."
    if data.fold.of is not None or data.streaming.on:
        name = "streaming" if data.streaming.on else "fold"
        yield f"data.{name}", "rounds read all prompts. Leave it out."
    if config.media is not None:
        yield f"data.format={data.format}", "rounds write answers to prompts of text. Leave it out."
    if config.budget.timed:
        yield "budget", "rounds cannot end in time. Write train.steps or train.epochs, of each round."
    if config.trackers:
        yield "trackers", "rounds send nothing anywhere. Leave it out."
