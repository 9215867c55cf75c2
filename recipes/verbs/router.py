"""`router`: a classifier that chooses which adapter of a fleet answers a prompt, from the members' own prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean

import numpy as np

from workbench.data import starter
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.prompts import read_prompts
from workbench.errors import ConfigError
from workbench.evaluation import metrics
from workbench.evaluation.serving import prompt_router
from workbench.evaluation.serving.prompt_router import PromptRouter
from workbench.recipes.single import sampled_answers
from workbench.runs import run_directory
from workbench.runs.trust import Trust

LEAST = 5
"""Prompts that a member has at least."""


def router(fleet: Path | str, *, trust: bool = False) -> dict[str, float]:
    """Fit a linear classifier of prompts to the members of a fleet, and write it into the fleet's run directory.

    It reads the mean of the frozen backbone's last hidden states over a prompt. `workbench serve FLEET` then answers
    `model: auto` through the member that it chooses, which the response names. What is written is fitted to all
    prompts; for the scores a fifth of them is left out.

    Args:
        fleet: A finished run of recipe fleet, whose members answer prompts.
        trust: Execute the Python code that the run's config.yaml names.

    Returns:
        `accuracy`, the share of prompts left out that go to a member that has them, with Wilson's 95 % interval;
        `likeliest`, that of always choosing the member with the most prompts; `accuracy NAME`, the share of a member's
        that go to it; and the number of `prompts`, and of those that several members have (`shared`).

    Raises:
        ConfigError: The run is no fleet, its members answer no prompts, or one has too few.
    """
    from sklearn.model_selection import train_test_split

    fleet, trusted = Path(fleet), Trust(trust)
    config = run_directory.read_config(fleet, trusted)
    members = sorted(path.parent for path in (fleet / "members").glob("*/adapter"))
    if config.over is None or config.over.ships or len(members) < 2:
        raise ConfigError(f"{fleet}: is no fleet of members to choose from. Name a finished run of recipe fleet.")
    if not config.task.writes_text or config.reads_sound:
        raise ConfigError(f"{fleet}: its members answer no prompts (of={config.task.name}). Name a fleet of sft.")
    # Prompts as a server writes them for the backbone, which has no words or template of its members.
    stock = config.model.model_copy(update={"chat_template": None, "new_tokens": ()})
    model = sampled_answers.stock(stock, config)
    assert isinstance(model.template, ChatEncoder)
    owners: dict[tuple[int, ...], set[str]] = {}
    for member in members:
        for data in run_directory.read_config(member, trusted).data.training_files.values():
            for each in islice(read_prompts(starter.resolve(data.train), data, []), data.limit):
                owners.setdefault(tuple(model.template.question(each)[: data.max_tokens]), set()).add(member.name)
    counts = Counter(name for names in owners.values() for name in names)
    if few := [member.name for member in members if counts[member.name] < LEAST]:
        raise ConfigError(f"{fleet}: {few[0]} has {counts[few[0]]} prompts, and a router needs {LEAST} of each member.")
    asked, shared = [*owners.values()], sum(len(names) > 1 for names in owners.values())
    feature_ND = np.stack([prompt_router.feature(model.model, model.head, ids) for ids in owners])

    def fitted(places: Sequence[int]) -> PromptRouter:
        pairs = [(place, name) for place in places for name in sorted(asked[place])]
        return PromptRouter.fitted(feature_ND[[place for place, _ in pairs]], [name for _, name in pairs])

    fitted(range(len(asked))).write(fleet)
    kept, aside = train_test_split(range(len(asked)), test_size=0.2, random_state=config.seed)
    choices = list(zip(fitted(kept).chosen(feature_ND[aside]), (asked[place] for place in aside), strict=True))
    accuracy = metrics.accuracy_interval(sum(name in names for name, names in choices), len(choices))
    scores = {"accuracy": accuracy.mean, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
    scores["likeliest"] = fmean(counts.most_common(1)[0][0] in names for _, names in choices)
    for own in sorted(counts):
        if told := [name == own for name, names in choices if own in names]:
            scores[f"accuracy {own}"] = fmean(told)
    return scores | {"prompts": float(len(asked)), "shared": float(shared)}
