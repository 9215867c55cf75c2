"""What is known of a task, and of a recipe over tasks, before torch is imported: their facts, and who has registered.

A task (`sft`, `classify`, `tag`, ...) states its facts in its folder of `recipes/tasks/`; a recipe over tasks (`sweep`,
`crossval`, ...) in `recipes/over/`. Checks, verbs, layouts and plans ask facts and never for a name, so a new task
changes none of them. A user's file that `plugins` names registers in the same way (`scripts/my_task.py`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.schema import Section

Sentences = Mapping[str, str]
"""From the dotted key of a setting to the sentence that refuses it: why, and what to write instead."""


DIVERGENCES = ("reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "total_variation")
"""Values of `distill.loss` that compare probabilities, besides `forward_kl`."""


BY_PROCESSOR: Sentences = {
    f"image.{key}": f"image.{key}: pictures beside text are read as the backbone's own processor reads them, and "
    "image.folder and image.max_pixels are all that is asked. Leave it out."
    for key in ("column", "size", "prepare", "augment", "depth", "workers")
}
"""What tasks refuse whose rows may hold pictures beside text."""


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """Facts about a task."""

    name: str
    """The word of `recipe:` and `of:`."""
    line: str
    """What it learns, in one line."""
    module: str
    """Module whose `TASK` carries it out; imported, with torch, when something runs."""

    # Its model and its rows.
    head: Literal["text", "masked", "classes", "tokens", "hidden"]
    """Output of the backbone: next tokens, hidden tokens, classes of a row, classes of each token, or none."""
    output: str | None = None
    """Name of the one output of a head that gives a row one number, such as a reward."""
    media: tuple[str, ...] = ()
    """Values of `data.format` with which its rows are files in place of texts: pictures, recordings."""
    pictured: bool = False
    """Whether its rows may hold pictures beside text."""
    writes_text: bool = False
    """Whether its model answers prompts: `generate`, `serve`, `sample` and text predictions."""
    answers: bool = False
    """Whether its rows are prompts and answers, so that rules about answers (`data.clean`) have something to judge."""
    learns_answers: tuple[str, ...] = ()
    """Kinds of rows of sampled answers (`sample --to`) that it learns from, the usual one first."""
    margins: bool = False
    """Whether a column of margins between two answers is read."""
    labelled: bool = False
    """Whether it learns the labels of whole rows (`LabelledSet`), as a class, several, or a number."""
    judged: Callable[[Any], str | None] = field(default=lambda config: None)
    """Kind of the labels that `evaluate.metric` judges, by the configuration; None: no metric applies."""
    format: str | None = None
    """The one `data.format` that its rows have besides `auto`; None: the task's own check says it, or any."""

    reads: Callable[[Any], Collection[str] | None] = field(default=lambda config: ())
    """Columns that it reads besides those of its rows' format, by the configuration; None: any."""

    readable: Callable[[Any, int | None], object] | None = None
    """Reads the rows of the files of a configuration as its run does, as far as that needs no tokenizer, and raises
    DataError where they are malformed: all rows, or so many of each file. None: rows are told of once torch is there.
    """

    # Its loss.
    tokens: bool = False
    """Whether the loss is a mean over tokens that the model predicts from its vocabulary."""
    compares: str | None = None
    """Objects that its loss compares with one another, in words; None for losses of single rows."""
    uncached: str | None = None
    """Why outputs of frozen blocks cannot be kept from epoch to epoch; None where they can."""
    records_losses: bool = False
    """Whether the loss of each row is recorded while it trains (`evaluate.dynamics`)."""
    likelihoods: str | None = None
    """What it does with log-probabilities as they are, which noise would change; None where it does nothing."""

    # What can be done with its rows.
    packs: bool = False
    """Whether rows can be packed into one sequence (`batch.packing`)."""
    shares_prefixes: bool = False
    """Whether what rows begin with can be computed once (`batch.shared_prefix`); these rows also have an order of
    tokens that can be cut to a growing length (`data.length_warm_up`)."""
    chooses: frozenset[str] = frozenset()
    """Values of `data.select.by` with which the backbone chooses rows."""
    own_choice: bool = False
    """Whether its own check refuses every choice of rows in words of its own."""
    difficulties: Mapping[str, str] = field(default_factory=dict)
    """Values of `data.curriculum.by` that ask the backbone how hard rows are, with what is asked."""
    token_sampling: str | None = "learns labels of whole rows"
    """Why tokens cannot be sampled by their loss (`data.sampling.by=tokens`); None where they can."""
    folds: bool = False
    """Whether held-out rows may be a fold (`data.fold`)."""
    averages: Callable[[Any], bool] = field(default=lambda config: False)
    """Whether adapters of several folds answer together, as the mean of their outputs, by the configuration."""
    views: tuple[str, ...] = ()
    """Views (`tta.views`) in which its rows are read at test time; empty: in none."""
    word_stages: bool = False
    """Whether its runs are `WordRun`s: folds label rows without labels for one another, and merge views of words."""
    one_source_batches: bool = False
    """Whether a batch of rows of one source has a meaning (`data.mix.batches`)."""
    generates_rows: bool = False
    """Whether the model writes the rows of a step itself."""

    # Where it runs.
    devices: bool = False
    """Whether several devices can train it together."""
    cut: Callable[[Any], str | None] = field(default=lambda config: None)
    """Why devices cannot cut its weights (ZeRO 3, FSDP2), in words after the recipe; None where they can."""
    tensor: str | None = None
    """Why devices cannot cut its blocks (`distributed.tensor`): words after "which"; None where they can."""
    pipeline: str | None = "was not tried with stages"
    """Why devices cannot hold different blocks (`distributed.pipeline`); None where they can."""
    sequence: str | None = "was not tried with rows in parts"
    """Why devices cannot compute different tokens of a row (`distributed.sequence`); None where they can."""
    grows: bool = False
    """Whether its backbone may begin with few blocks (`grow`)."""
    banked: bool = False
    """Whether several adapters train together over one backbone (`Task.bank`)."""
    fleets: bool = False
    """Whether members with rows of their own train together."""
    students: str | None = None
    """Module of recipe `distill` for it: `taught` looks at a student's rows and its teacher, `teach` trains it. None:
    nobody can teach it."""
    student_losses: tuple[str, ...] = ("forward_kl", *DIVERGENCES, "universal", "gold", "alm")
    """Values of `distill.loss` for it, the usual one first."""
    one_device_scores: str | None = None
    """Why a finished run is scored on one device; None where several score it together."""

    # Its sections and words.
    sections: tuple[str, ...] = ()
    """Sections of the configuration that it reads, besides those of every run."""
    section: type[Section] | None = None
    """A section of its own, declared in its folder, whose key is the task's name."""
    refuses: Sentences = field(default_factory=dict)
    """Settings that it has no use for, each with the sentence that refuses it."""
    check: Callable[[Any], Any] | None = None
    """Yields a sentence for each contradiction that no fact can say."""
    serves: bool = False
    """Whether `workbench serve` answers for its runs."""
    start: str | None = None
    """Section that names, as `start`, a run that training may go on from."""
    predicts: tuple[str, str] | None = ("answers.csv", "answer every row of a file")
    """A name for what `predict` writes, and what it does; None where nothing is predicted."""
    answer: str | None = None
    """Column of predictions that is the answer for a row, as a leaderboard wants it; None where no one column is."""
    report: Literal["text", "classes", "tags", "retrieval", "preferences", "rewards", "reinforcement"] = "text"
    """Kind of the report's pages and of the console's closing tables."""
    score: str = "loss"
    """The main score."""
    higher_is_better: bool = False
    steps_on_rows: Callable[[Any], int] = field(default=lambda config: 1)
    """Optimizer steps on the same rows, by the configuration."""
    rows_of_draw: Callable[[Any], int] = field(default=lambda config: 1)
    """Rows that the model reads for each example that a step samples, by the configuration."""


@dataclass(frozen=True, kw_only=True)
class OverFacts:
    """Facts about a recipe that does something with trainings of a task, which the key `of` names."""

    name: str
    line: str
    module: str
    """Module whose `main` carries it out."""
    of: str
    """The task where none is named."""
    stages: str | None = None
    """Module whose `TASK` takes the place of one with labelled rows, whose folds are followed by stages."""
    able: Callable[[TaskFacts], str | None]
    """Why it does not take a task; None where it does."""
    sections: tuple[str, ...] = ()
    """Sections of the configuration that it reads."""
    members: Callable[[Any], list[Any]] | None = None
    """Configurations of its members, each of which is checked as the run that it is; None where they are no runs."""
    own_clock: bool = False
    """Whether `budget` limits all of it and not each member, which may end early."""
    completed: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Completes values as they are written, before they are read."""
    fresh: str | None = None
    """Why it cannot go on from another run (`TaskFacts.start`), in words after the recipe; None where it can."""
    table: str | None = None
    """File of a run directory that says which member is shipped."""
    spread: bool = False
    """Whether devices train different members, where they do not share weights."""
    shared: bool = False
    """Whether several devices train only where they share the backbone."""
    folds: bool = False
    """Whether every row is held out once, so that each is scored by an adapter that did not see it."""
    adapters: bool = True
    """Whether several adapters train."""
    ships: bool = True
    """Whether it ships one model, or only its members do."""
    inspects: str | None = None
    """Module whose `inspect` looks at a run for `check` where members have no rows before it begins; such members
    cannot be planned. None: the first member's rows are looked at."""
    read_by: str | None = None
    """The task that reads its files, where that is not the one that learns from what is made of them."""


TASKS: dict[str, TaskFacts] = {}
"""Every task by its name."""
OVER: dict[str, OverFacts] = {}
"""Every recipe over tasks by its name."""
_REGISTERED: list[Callable[[TaskFacts], None]] = []


def register(facts: TaskFacts) -> TaskFacts:
    """Make a task known, under its name.

    In a file that `plugins` of a recipe names, every verb knows the task; `scripts/my_task.py` is one with a loss of
    its own.

    Args:
        facts: What is known of it before torch is imported; their `module` has the class that carries it out.

    Returns:
        The same facts.

    Raises:
        ValueError: The name is no word of lower-case letters, or another task has it.

    Examples:
        >>> import workbench
        >>> from dataclasses import replace
        >>> from workbench.recipes.tasks import sft
        >>> facts = workbench.register_task(replace(sft.FACTS, name="dialogue", line="sft under another name"))
        >>> workbench.load_recipe("sft/quickstart", ["recipe=dialogue"]).task.line
        'sft under another name'
    """
    if not re.fullmatch(r"[a-z][a-z_]*", facts.name) or facts.name in OVER:
        raise ValueError(f"{facts.name!r} cannot name a task: write lower-case letters, and no recipe's name.")
    if (other := TASKS.get(facts.name)) is not None and other.module != facts.module:
        raise ValueError(f"{facts.name!r} names the task of {other.module} already. Write another name.")
    TASKS[facts.name] = facts
    for accept in _REGISTERED:
        accept(facts)
    return facts


def register_over(facts: OverFacts) -> OverFacts:
    """Make a recipe over tasks known, under its name."""
    OVER[facts.name] = facts
    return facts


def on_register(accept: Callable[[TaskFacts], None]) -> None:
    """Call `accept` for each task that is known, and for each that registers later."""
    _REGISTERED.append(accept)
    for facts in list(TASKS.values()):
        accept(facts)


def load_all() -> None:
    """Import the facts of all tasks and recipes that come with the package."""
    for package in ("workbench.recipes.tasks", "workbench.recipes.over"):
        importlib.import_module(package)


def task_of(values: Mapping[str, Any]) -> TaskFacts | None:
    """The task of a configuration as plain values, such as those of a run's config.yaml; None where it is unknown."""
    name, over = str(values.get("recipe")), over_of(values)
    return TASKS.get(name if over is None else values.get("of") or over.of)


def over_of(values: Mapping[str, Any]) -> OverFacts | None:
    """The recipe over tasks of a configuration as plain values; None where it is a task."""
    return OVER.get(str(values.get("recipe")))


def sections() -> list[tuple[str, tuple[str, ...]]]:
    """Every task and recipe over tasks, with the sections that it reads besides those of every run."""
    tasks = [(name, facts.sections) for name, facts in TASKS.items()]
    return [*tasks, *((name, facts.sections) for name, facts in OVER.items())]


def names(fact: Callable[[TaskFacts], object]) -> str:
    """Names of the tasks that have a fact, for a sentence: sft|mlm."""
    return "|".join(name for name, facts in TASKS.items() if fact(facts))
