"""`workbench init`: a first recipe of a person's own rows, which the plan says will fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.config import RunConfig
from workbench.config.yaml_text import dump_yaml
from workbench.data.images import picture_sources
from workbench.data.rows import read_rows
from workbench.errors import ConfigError, WorkbenchError
from workbench.recipes import editor_line
from workbench.recipes.inspection import Inspection
from workbench.recipes.load import load
from workbench.recipes.verbs import leaderboard
from workbench.recipes.verbs.check import check
from workbench.recipes.verbs.leaderboard import Leaderboard
from workbench.recipes.verbs.plans.plan import solve
from workbench.runs import files, units


@dataclass(frozen=True)
class Goal:
    """A thing to learn, and the shipped recipe that a first one of it begins with."""

    says: str
    base: str
    model: str = "starter"


GOALS = {
    "answers": Goal("write answers like those of the rows", "sft/chat"),
    "classes": Goal("name the class of a text", "classify/quickstart"),
    "folds": Goal(
        "name the class of a text as well as possible: five folds, answering together", "crossval/quickstart"
    ),
    "judged": Goal("prefer the better of two answers", "prefer/quickstart"),
    "rewards": Goal("say how good an answer is", "reward/quickstart"),
    "embeddings": Goal("put texts of one meaning close together", "embed/quickstart"),
    "pictures": Goal("name the class of a picture", "vision/quickstart", "starter/vision"),
    "picture-folds": Goal("name the class of a picture as well as possible", "crossval/pictures", "starter/vision"),
}
RATE = 2e-4
"""Learning rate of other backbones than the shipped ones, whose recipes have rates for 6 M parameters."""
COVERED = 0.99
"""Share of the rows that are read whole."""
STEPS = 100
"""Steps of a run over few rows."""
LENGTHS = ("train.epochs=", "train.steps=")
"""Settings by which a person says how long it trains."""
READ = 4096
"""Tokens to which rows are cut while their lengths are looked at."""


@dataclass(frozen=True)
class Wishes:
    """Answers to five questions."""

    rows: str
    """A file, a folder, or a hub data set."""
    goal: str
    model: str
    memory: int | None = None
    """Bytes of the device; None: what is free here, or the card's."""
    time: str | None = None
    """As `budget.time`; None: one pass over the rows, or what the shipped recipe does."""
    overrides: Sequence[str] = ()
    """`key=value` words on top of the answers."""
    leaderboard: Leaderboard | None = None
    """The competition that the rows are of."""
    device: str | None = None
    """A card by name, such as `4090`, that need not be here."""


def suggested(rows: str) -> str:
    """The goal that the first row suggests.

    Raises:
        WorkbenchError: The rows cannot be read.
    """
    path = Path(rows).expanduser()
    if (competition := leaderboard.found(rows)) is not None:
        return "picture-folds" if competition.pictures else "folds"
    if path.is_dir() or path.suffix in (".zip", ".tar"):
        try:
            next(iter(picture_sources.read_rows(rows)))
        except WorkbenchError:
            pass
        else:
            return "pictures"
    columns = {*next(iter(read_rows(rows))).columns}
    if columns >= {"chosen", "rejected"} or (columns & {"messages", "completion"} and "label" in columns):
        return "judged"
    if columns >= {"text", "label"}:
        return "classes"
    if columns >= {"image", "label"}:
        return "pictures"
    return "embeddings" if columns >= {"anchor", "positive"} or columns >= {"sentence1", "sentence2"} else "answers"


def write(wishes: Wishes, out: Path) -> str:
    """Write the recipe to `out`, which must not exist; returns what the plan says of it.

    Raises:
        WorkbenchError: The rows or the backbone cannot be read, the run would be refused, or nothing fits.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another file, or delete it first.")
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{out}: a recipe's name ends in .yaml.")
    if wishes.goal not in GOALS:
        raise ConfigError(f"--goal {wishes.goal}: expected {', '.join(GOALS)}.")
    config = load(GOALS[wishes.goal].base, [*_words(wishes)])
    config, steps, comments = _with_lengths(config)
    if not any(word.startswith(LENGTHS) for word in wishes.overrides):
        config, comments = _long_enough(config, steps, comments)
    devices = None if wishes.memory is None else 1
    decided = solve(config, devices=devices, memory=wishes.memory, device=wishes.device).require()
    weights, again = decided.plan.weights, decided.plan.checkpointing
    values = config.model_dump(mode="json", exclude_unset=True)
    values.setdefault("model", {})["weights"] = weights
    values.setdefault("train", {})["checkpointing"] = again
    if decided.config.train.offload_activations is True:
        values["train"]["offload_activations"] = True
    peak, memory = units.size(decided.plan.peak), units.size(decided.plan.memory)
    card = "" if decided.plan.card is None else f" a {decided.plan.card.name}"
    comments |= {
        "model.weights": f"the fastest that fits{card}: {peak} of {memory} by the plan",
        "train.checkpointing": "as the plan chose",
        "train.learning_rate": f"`workbench lr {out}` finds one",
        "data.held_out": "this share of the rows measures what was learnt",
        "budget.time": "the schedule ends with it",
    }
    lines = [
        *commands(wishes, out),
        f"To {GOALS[wishes.goal].says}; begun from {GOALS[wishes.goal].base}.",
    ]
    head = "".join(f"# {line}\n" for line in lines)
    files.write_bytes(out, (head + editor_line() + commented(dump_yaml(values), comments)).encode())
    return f"{peak} of {memory}, {_seconds(decided.plan.seconds)}weights in {weights}"


def commands(wishes: Wishes, out: Path) -> list[str]:
    """What to run after the recipe is written."""
    if wishes.leaderboard is not None:
        return wishes.leaderboard.commands(out)
    return [f"workbench check {out}", f"workbench run {out}"]


def _words(wishes: Wishes) -> Iterator[str]:
    competition = wishes.leaderboard
    yield from (f"data.train={competition.train if competition else wishes.rows}", f"model.id={wishes.model}")
    if competition is not None:
        yield from competition.words
        if load(GOALS[wishes.goal].base).pseudo_label.unlabelled is not None and not competition.several:
            yield f"pseudo_label.unlabelled={competition.test}"
    if not wishes.model.startswith("starter"):
        yield f"train.learning_rate={RATE}"
    if wishes.time is not None:
        yield f"budget.time={wishes.time}"
    yield from wishes.overrides


def _with_lengths(config: RunConfig) -> tuple[RunConfig, int | None, dict[str, str]]:
    """The recipe with rows cut where almost all are whole, its steps, and what there is to say of its keys."""
    if not config.task.writes_text or config.task.head != "text":
        found = check(config)
        return found.config, getattr(found, "steps", None), {}
    data = config.data.model_copy(update={"max_tokens": READ})
    inspection = check(
        RunConfig.model_validate(config.model_dump(exclude_unset=True) | {"data": data.model_dump(exclude_unset=True)})
    )
    assert isinstance(inspection, Inspection)
    lengths = inspection.data.train.lengths
    covers = max(64, -(-int(np.quantile(lengths, COVERED)) // 64) * 64)
    values = config.model_dump(exclude_unset=True)
    values["data"]["max_tokens"] = covers
    half = int(np.median(lengths))
    says = f"{COVERED:.0%} of your {len(lengths):,} training rows are no longer; half have {half:,} or fewer"
    return RunConfig.model_validate(values), inspection.steps, {"data.max_tokens": says}


def _long_enough(config: RunConfig, steps: int | None, comments: dict[str, str]) -> tuple[RunConfig, dict[str, str]]:
    """The recipe with more passes over rows that are too few to move an adapter in one, unless a budget ends it."""
    if steps is None or not config.schedule.about_short(steps):
        return config, comments
    values = config.model_dump(exclude_unset=True)
    values["train"] = {key: value for key, value in values["train"].items() if key != "epochs"} | {"steps": STEPS}
    says = f"with so few rows {'one pass has' if steps == 1 else 'its passes have'} {steps} step{'s' * (steps > 1)}"
    return RunConfig.model_validate(values), comments | {"train.steps": says}


def _seconds(seconds: float | None) -> str:
    return f"{units.step(seconds)} a step, " if seconds else ""


def commented(text: str, comments: Mapping[str, str]) -> str:
    """Block YAML with a comment behind each of these keys."""
    lines, place = [], list[str]()
    for line in text.splitlines():
        key, colon, _ = line.strip().partition(":")
        depth = (len(line) - len(line.lstrip())) // 2
        if colon and not line.lstrip().startswith("- "):
            place[depth:] = [key]
        comment = comments.get(".".join(place)) if colon else None
        lines.append(line if comment is None else f"{line:<32}  # {comment}")
    return "\n".join(lines) + "\n"
