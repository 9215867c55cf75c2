"""Section `rewards`: how good an answer is, by functions, verifiers and reward models (a class each); and `reward`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ByteSize, Field, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from workbench.config.sections.basic_sections import ServerAddress
from workbench.schema import CodeFile, MayExecute, Section, Tagged, Unit

Aggregate = Literal["min", "product", "mean", "last"]
"""How the probabilities of the steps of an answer, that each is right, become one number."""


class RewardConfig(Section):
    """The reward model that recipe reward trains."""

    kind: Literal["outcome", "process"] = "outcome"
    """outcome: one number for a whole answer, learnt from pairs of answers. process: for each step of an answer the
    probability that it is right, learnt from rows with `completions`, a list of steps, and `labels`, one for each
    (Lightman et al. 2023, arXiv:2305.20050)."""
    centre: NonNegativeFloat = 0.01
    """kind=outcome: factor of the squared sum of a pair's two rewards, which is added to its loss: comparisons leave
    open what all rewards have in common, and this keeps it near 0 (Eisenstein et al. 2023). 0: nothing is added."""
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """kind=process: stands between the steps of a row, and parts an answer into steps where there is none but its
    text."""
    aggregate: Aggregate = "min"
    """kind=process: the reward of a whole answer from the probabilities of its steps, for `sample`, `reinforce` and
    scores of answers: the lowest (Wang et al. 2024, arXiv:2312.08935), their product (Lightman et al. 2023), mean, or
    the last."""


KINDS: dict[str, type[RewardSource]] = {}
"""Every `kind` and the section that configures it; `register` fills it."""


class RewardSource(Tagged):
    """Base of every kind of reward. A subclass has `kind: Literal[...]` and its settings."""

    tag: ClassVar[str] = "kind"
    untagged: ClassVar[str] = "function"
    compares: ClassVar[bool] = False
    """Whether it compares the answers to a prompt with each other, and says nothing of one by itself."""
    relative: ClassVar[bool] = False
    """Whether the rewards of all answers to a prompt have the same mean, however good they are."""
    reads_likelihood: ClassVar[bool] = False
    """Whether it reads how likely an answer is to its writer."""
    choices: ClassVar[Mapping[str, type[Section]]] = KINDS

    kind: str = "function"
    weight: FiniteFloat = 1.0
    """Factor of this reward in the sum of all."""

    @property
    def name(self) -> str:
        """Name in messages, metrics and reports."""
        return self.kind

    @property
    def sampled_alone(self) -> str:
        """Why it scores the answers of `sample` and `distill.answers` alone; empty where it scores any."""
        if self.compares:
            return "compares several answers to a prompt"
        return "reads how likely an answer was to its writer" if self.reads_likelihood else ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a row that are read beside its prompt, by their names in the file."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Files, and folders of models, on which it depends."""
        return ()

    @classmethod
    def misplaced(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        section = cls.section_for(values)
        for key in values:
            able = [name for name, other in KINDS.items() if key in other.model_fields]
            if able and key not in section.model_fields:
                kind = values.get(cls.tag, cls.untagged)
                yield f"rewards.{key}", f"is for kind={'|'.join(able)}, not for {kind}. Leave it out."


def register(section: type[RewardSource]) -> type[RewardSource]:
    """Make the kind of `section` known by its name; use it as a decorator."""
    KINDS[section.model_fields["kind"].default] = section
    return section


@register
class FunctionReward(RewardSource):
    """A function of a Python file: `def reward(answers: list[Answer]) -> list[float]`."""

    kind: Literal["function"] = "function"
    file: CodeFile
    """The Python file. Only one you trust: it runs in this process."""
    function: str = "reward"
    """Name of the function in it."""
    timeout: Annotated[PositiveFloat, Unit("seconds")] = 300.0
    """Seconds in which it must score the answers of one call."""

    @property
    def name(self) -> str:
        return self.function

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,)


class _Compared(RewardSource):
    """Base of verifiers that compare an answer with a column of its row."""

    answer: str = "answer"
    """Column of the row that holds the right answer, by its name in the file."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.answer,)


@register
class NumberReward(_Compared):
    r"""1 where the final answer is that of the row, else 0: it stands behind `####` or in `\boxed{}`, or is the last
    number of the text. Fractions, powers, percent and grouped digits are read, units are left out; sets, intervals and
    formulas need math-verify. The row must hold one number or one formula."""

    kind: Literal["number"] = "number"
    tolerance: NonNegativeFloat = 0.0
    """By how much two numbers may differ; 0: they are equal, as exact fractions."""


@register
class VoteReward(RewardSource):
    """The share of the answers to the same prompt that say the same (self-consistency, Wang et al. 2023,
    arXiv:2203.11171): have the same final answer, as kind=number reads it, or else the same words."""

    compares = True
    kind: Literal["vote"] = "vote"


@register
class LikelihoodReward(RewardSource):
    """The mean log-probability of an answer's tokens by the model that wrote it, in nats, at temperature 1: at most 0.
    Of several wordings of a prompt their mean, where the model is loaded here."""

    reads_likelihood = True
    kind: Literal["likelihood"] = "likelihood"


@register
class PatternReward(RewardSource):
    """1 where a regular expression is found in the answer, else 0."""

    kind: Literal["regex"] = "regex"
    pattern: str
    """As Python's module re reads it; flags stand in it, such as (?is)."""
    whole: bool = False
    """Whether all of the answer must match, not a part of it."""
    answer: str | None = None
    """Column of the row that the pattern's first group must be equal to, white space around it aside."""
    timeout: Annotated[PositiveFloat, Unit("seconds")] = 60.0
    """Seconds in which the answers of one call must be searched: some patterns take for ever on some texts."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}. Correct it.") from None
        return pattern

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.answer is None else (self.answer,)


@register
class JsonReward(RewardSource):
    """1 where the answer is JSON that fits a schema, else 0; in a fenced block, or all of the answer."""

    kind: Literal["json"] = "json"
    json_schema: Path | dict[str, Any]
    """A JSON file with the schema, or the schema itself."""
    timeout: Annotated[PositiveFloat, Unit("seconds")] = 60.0
    """Seconds in which the answers of one call must be checked: a schema's patterns may take for ever on a text."""

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.json_schema,) if isinstance(self.json_schema, Path) else ()


@register
class UnitTestReward(RewardSource):
    """The share of a row's tests that the code in the answer passes, or whether it passes all, in a sandbox.

    The code is the last fenced block of the answer, or all of it. It runs in a process of its own that can write
    nothing outside of a temporary folder, opens no socket and starts no program.
    """

    kind: Literal["unit_tests"] = "unit_tests"
    tests: str = "tests"
    """Column of the row with the tests, by its name in the file: Python code that raises where the answer is wrong,
    or a list of such pieces, each of which is a test."""
    score: Literal["all", "share"] = "all"
    """1 where all tests pass and else 0; or the share of those that pass."""
    seconds: Annotated[PositiveInt, Unit("seconds")] = 5
    """Processor time of an answer, and half of what it may take by the clock."""
    memory: Annotated[ByteSize, Unit("bytes")] = ByteSize(512 * 2**20)
    """Address space of the process, such as 512MiB."""
    output: Annotated[ByteSize, Unit("bytes")] = ByteSize(2**20)
    """Bytes that it may write into its folder; what it prints is dropped."""
    threads: Annotated[PositiveInt | Literal["auto"], Unit("threads")] = "auto"
    """Answers that are tested at the same time; `auto`: as many as there are processors, 8 at most."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.tests,)


CRITERIA = (
    "Judge how well each answers it: first whether it is right, then whether it is complete, then if it is clear."
)
"""What a judge looks at by itself."""


@register
class JudgeReward(RewardSource):
    """The share of the other answers to the same prompt that an answer beats, by a model at an address with OpenAI's
    interface. It sees each pair in both orders; equal verdicts win, others are ties. Verdicts are kept on disk. n
    different answers to a prompt take n (n - 1) requests."""

    compares = True
    relative = True
    kind: Literal["judge"] = "judge"
    url: ServerAddress
    """Address of the server, up to /v1. OPENAI_API_KEY in the environment is sent as its key."""
    model: str
    """Name of the model there."""
    criteria: str = CRITERIA
    """What it is told to look at, in a sentence or more."""
    max_tokens: Annotated[PositiveInt, Unit("tokens")] = 1024
    """Longest verdict, its reasons included."""
    at_once: Annotated[int, Field(ge=1, le=100), Unit("requests")] = 4
    """Requests that run at the same time."""
    timeout: Annotated[PositiveFloat, Unit("seconds")] = 600.0
    """Longest wait for a verdict."""


@register
class ModelReward(RewardSource):
    """The reward of a reward model, or of several: their mean less `pessimism` times their standard deviation."""

    kind: Literal["model"] = "model"
    run: Path | Annotated[tuple[Path, ...], Field(min_length=1)]
    """A finished run of recipe reward, or several of them: an ensemble, whose disagreement tells how sure it is. A
    sweep over folds is such an ensemble."""
    pessimism: NonNegativeFloat = 0.0
    """How many standard deviations of the ensemble are taken off its mean (Coste et al. 2024)."""
    aggregate: Aggregate | None = None
    """The reward of an answer by a process reward model, which rates its steps: the lowest rating (min), their
    product, mean, or the last. null: as `reward.aggregate` of the run says."""
    trust: MayExecute = False
    """Execute the Python code that the configuration of `run` names."""

    @property
    def runs(self) -> tuple[Path, ...]:
        """The run directories."""
        return self.run if isinstance(self.run, tuple) else (self.run,)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(run / name for run in self.runs for name in ("adapter", "sweep.json"))
