"""The section `distill`: teacher, student, and the tensors that are compared."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from workbench.config.sections.basic_sections import ServerAddress
from workbench.config.sections.rewards_config import RewardSource
from workbench.config.task_facts import TaskFacts
from workbench.schema import MayExecute, Section, Unit

Share = Annotated[float, Field(ge=0, le=1)]
Divergence = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "skew_forward_kl",
    "skew_reverse_kl",
    "total_variation",
    "universal",
    "gold",
    "alm",
]
OTHER_TOKENS = ("universal", "gold", "alm")
"""Losses between models of different vocabularies."""
Distance = Literal["cosine", "mse", "relation", "margin_mse"]
Match = Literal["hidden_mse", "hidden_cosine", "relation", "attention"]

BACKBONE, TEACHER = "backbone", "teacher"
"""As distill.teacher.id: the student's own backbone, adapter off. As model.id: a student with its teacher's weights."""
STUDENT = "student"
"""Where, in a run directory, a student's backbone stands that was made of another one."""

_LAYERS = re.compile(r"(every|first|last|important)-([1-9]\d*)|(important)-(100|[1-9]\d?)%")
_SHARE = re.compile(r"(100|[1-9]\d?)%")


class TeacherConfig(Section):
    """The model, run or runs that teach."""

    id: str | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A run directory (a fine-tuned model; of a cross-validation all adapters together), a folder or hub id of a model,
    several of these, whose mean teaches, or `backbone`: the student's own, its adapter off. With `url`, the model's
    name there."""
    url: ServerAddress | None = None
    """Address of a server that teaches, such as http://localhost:8000/v1: `workbench serve`, vLLM, or another that has
    OpenAI's completions with echo and writes tokens as token_id:NUMBER. It is sent the training rows, and the key that
    OPENAI_API_KEY in the environment holds."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8", "nf4", "fp4", "fp8"] | None = None
    """How its weights are stored; null: as those of `model`, but quantised where it was trained so."""
    shares: Literal["held_out", "confidence"] | Annotated[tuple[PositiveFloat, ...], Field(min_length=2)] | None = None
    """How much each of several models of tokens counts in their mean; null: alike. Numbers such as [3, 1], in the order
    of `id`; held_out: by the likelihood of a held-out token; confidence: at each token, the less entropy the more."""
    out_of_fold: bool = False
    """With a cross-validation as teacher: label a training row by the adapters that did not train on it."""
    trust: MayExecute = False
    """Execute the Python code that the teacher's run directory names. Only of those whom you trust."""


class StudentConfig(Section):
    """Blocks of the teacher's architecture that the student has."""

    layers: Annotated[Literal["all"] | str | tuple[NonNegativeInt, ...], Unit("numbers of layers")] = "all"
    """Which layers of the backbone the student has: important-N or important-50%, those without which the last hidden
    states of 64 training rows change most; every-N, first-N, last-N, or a list, the first layer being 0."""
    heads: Annotated[int | str, Unit("attention heads")] = "all"
    """Attention heads that each layer keeps: a number, a share such as 50%, or all. Heads that share their keys and
    values stay or go together."""
    neurons: Annotated[int | str, Unit("neurons")] = "all"
    """Neurons that the MLP of each layer keeps: a number, a share such as 50%, or all."""
    channels: Annotated[int | str, Unit("channels")] = "all"
    """Channels of the hidden states that are kept throughout: a number, a share such as 50%, or all."""
    importance: Literal["activations", "fisher"] = "activations"
    """Which heads, neurons and channels stay, by 64 training rows: those with the largest activations, or those with
    the largest squared product of value and gradient."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """Initial weights: those of model.id, or random ones."""

    @field_validator("heads", "neurons", "channels", mode="before")
    @classmethod
    def _counted(cls, kept: Any) -> Any:
        share = isinstance(kept, str) and (kept == "all" or _SHARE.fullmatch(kept))
        if not share and (type(kept) is not int or kept < 1):
            raise ValueError(f"{kept!r}: write all, a number such as 4, or a share such as 50%.")
        return kept

    @field_validator("layers")
    @classmethod
    def _known(cls, layers: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(layers, str):
            if layers != "all" and not _LAYERS.fullmatch(layers):
                raise ValueError(
                    f"{layers!r}: write all, important-4, important-50%, every-2, first-4, last-4, or a list such as "
                    "[0, 2, 4]."
                )
        elif not layers or sorted(set(layers)) != list(layers):
            raise ValueError(f"{list(layers)}: name each layer once, in rising order, such as [0, 2, 4].")
        return layers

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.by_importance and self.weights == "random":
            raise ValueError(f"layers={self.layers}: random weights are all alike. Write layers=first-N.")
        if self.importance != "activations" and (self.weights == "random" or not self.narrower):
            why = "all heads, neurons and channels stay. Leave importance out, or write distill.student.neurons=50%."
            why = "random weights are all alike. Leave importance out." if self.narrower else why
            raise ValueError(f"importance={self.importance}: {why}")
        return self

    @property
    def narrower(self) -> bool:
        """Whether heads, neurons or channels go."""
        return {self.heads, self.neurons, self.channels} != {"all"}

    def width(self, of: Literal["heads", "neurons", "channels"], whole: int, together: int = 1) -> int:
        """How many of `whole` heads, neurons or channels stay, which go `together` by so many. Raises ValueError where
        the setting leaves none, or asks for more or others."""
        wanted: int | str = getattr(self, of)
        if wanted == "all":
            return whole
        groups = wanted / together if isinstance(wanted, int) else round(whole * int(wanted[:-1]) / 100 / together)
        if groups == int(groups) and 0 < (kept := int(groups) * together) <= whole:
            return kept
        shared = f", of which {together} at a time share keys and values" if together > 1 else ""
        near = min(max(1, round(groups)) * together, whole)
        raise ValueError(
            f"distill.student.{of}={wanted}: the backbone has {whole} {of}{shared}, and this leaves "
            f"{'none' if groups == 0 else f'{groups * together:g}'}. Write distill.student.{of}={near}."
        )

    @property
    def by_importance(self) -> bool:
        """Whether training rows decide which layers stay, and the configuration only how many."""
        return isinstance(self.layers, str) and self.layers.startswith("important")

    def chosen(self, count: int) -> list[int]:
        """Which of `count` layers stay; of important ones as many, spread evenly. Raises ValueError where there are not
        so many."""
        if not isinstance(self.layers, str):
            chosen = list(self.layers)
        elif self.layers == "all":
            chosen = list(range(count))
        else:
            plain, number, important, percent = cast("re.Match[str]", _LAYERS.fullmatch(self.layers)).groups()
            how, every = plain or important, range(count)
            wanted = int(number) if plain else max(1, round(count * int(percent) / 100))
            if wanted > count:
                raise ValueError(
                    f"distill.student.layers={self.layers}: the backbone has {count} layers. Write {how}-N with a "
                    f"number up to {count}."
                )
            spread = [round(place * (count - 1) / max(1, wanted - 1)) for place in range(wanted)]
            chosen = list(
                {"every": every[::wanted], "first": every[:wanted], "last": every[-wanted:], "important": spread}[how]
            )
        if chosen[-1] >= count:
            raise ValueError(
                f"distill.student.layers: there is no layer {chosen[-1]}; the backbone has {count}, the last one being "
                f"{count - 1}."
            )
        return chosen


class MatchConfig(Section):
    """A part of the student that is to be like a part of the teacher."""

    what: Match
    """hidden_mse, hidden_cosine: hidden states, through a learned projection where widths differ. relation: how alike
    the queries, keys and values of a row's tokens are to one another (MiniLM v2). attention: its scores (TinyBERT)."""
    layers: Literal["last", "uniform"] | dict[NonNegativeInt, NonNegativeInt] = "last"
    """Student's layers to the teacher's, the first layer being 1 and 0 what enters it (the embeddings): {0: 0, 3: 6}.
    `uniform` spreads the student's layers evenly over the teacher's, embeddings included for hidden states."""
    weight: PositiveFloat = 1.0
    """Factor of this term in the loss."""
    heads: Annotated[PositiveInt | None, Unit("heads")] = None
    """Into how many heads `relation` cuts queries, keys and values; null: the teacher's attention heads."""


class CacheConfig(Section):
    """A teacher's logits on disk."""

    folder: Path | None = None
    """Folder of the teacher's outputs for the training rows; null: the teacher runs in every step."""
    k: Annotated[PositiveInt | None, Unit("tokens")] = None
    """Likeliest tokens that are kept of each position, with the mass of all others; or draws, where `sampled`. null:
    64, or as many as `gap` asks for."""
    gap: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the live divergence that the cache may lose, such as 0.01: the smallest k that keeps the others, for the
    student at its start, on 256 tokens of 8 rows."""
    dtype: Literal["float16", "float32"] = "float16"
    """Type of the log-probabilities in the cache."""
    sampled: bool = False
    """Keep k draws instead of the k likeliest tokens: an unbiased estimate of forward_kl (Anshumann et al. 2025)."""

    @property
    def kept(self) -> int:
        """`k`, or its default; not to be asked where `gap` is to find it."""
        return 64 if self.k is None else self.k

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.gap is None:
            return self
        if self.k is not None:
            raise ValueError(f"gap={self.gap:g} finds the smallest k, and k={self.k} is given. Leave one of them out.")
        if self.sampled:
            raise ValueError("gap is of the likeliest tokens; draws lose nothing on average. Leave gap or sampled out.")
        if self.folder is None:
            raise ValueError("gap is of a cache, and there is none. Write distill.cache.folder=FOLDER.")
        return self


class OnPolicyConfig(Section):
    """Answers that the student writes and the teacher judges."""

    share: Share = 0.0
    """Share of the rows whose answer the student writes itself, for the teacher to judge (GKD, Agarwal et al. 2024)."""
    max_new_tokens: Annotated[PositiveInt, Unit("tokens")] = 64
    """Longest answer that the student writes."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the student."""


class RequestLimits(Section):
    """How a server is asked for answers."""

    at_once: Annotated[int, Field(ge=1, le=100), Unit("requests")] = 4
    """Requests that run at the same time."""
    retries: Annotated[NonNegativeInt, Unit("requests")] = 7
    """How often a request is sent again after a failure that may pass: no connection, no answer in time, status 408,
    429 or 5xx. The waits between double from 0.5 s to 32 s, or are what the server asks for (Retry-After)."""
    timeout: Annotated[PositiveFloat, Unit("seconds")] = 600.0
    """Longest wait for an answer."""
    price: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """What a million tokens cost that the server reads, and that it writes, so that the cost is told."""

    @field_validator("price", mode="before")
    @classmethod
    def _two(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, (list, tuple)) and len(value) == 2):
            raise ValueError(f"{value}: write two prices, of tokens that are read and written, such as [0.5, 1.5].")
        return value


class AnswersConfig(Section):
    """Answers that the teacher writes to the training prompts, which the student learns in place of the rows' own."""

    n: Annotated[PositiveInt, Unit("answers to a prompt")] = 1
    """How many are written to each prompt."""
    to: Literal["best", "accepted"] = "best"
    """Which are learnt: the best to each prompt, or all different ones. One that reached max_new_tokens is left out."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it; near 0 the likeliest tokens are written."""
    max_new_tokens: Annotated[PositiveInt, Unit("tokens")] = 256
    """Most tokens of an answer, the one that ends it included."""
    score: tuple[SerializeAsAny[RewardSource], ...] = ()
    """Rewards that say which answers are good, summed; each has a kind: function, number, regex, json, unit_tests,
    vote, likelihood or model."""
    least: float | None = None
    """Lowest reward of an answer that is learnt; null: any."""
    requests: RequestLimits = RequestLimits()
    """For `teacher.url`."""

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.least is not None and not self.score:
            raise ValueError("least is a reward, and none is given. Write score=[{kind: number}], or leave least out.")
        if self.n < 2 and (alone := [source.kind for source in self.score if source.compares]):
            raise ValueError(
                f"score: kind={alone[0]} compares answers to a prompt, and n is 1. Write distill.answers.n=2."
            )
        return self


class DistillConfig(Section):
    """A student that learns from a teacher, beside or in place of labels."""

    teacher: TeacherConfig = TeacherConfig()
    student: StudentConfig = StudentConfig()
    loss: Divergence | Distance = "forward_kl"
    """Divergence of the student's probabilities from the teacher's. Between vocabularies: `gold`, token by
    token where both have it (TRL), `alm`, the likelihood of each piece of text (Minixhofer et al. 2025), `universal`,
    sorted probabilities (ULD). Of
    embeddings `cosine` (the usual one), `mse`, or `relation`: the similarities of every two texts of a batch, in any
    size. Of rerankers a divergence over the candidates of a query, `margin_mse`, or `mse`."""
    beta: Share = 0.5
    """For `jsd`: 0 is forward_kl, 1 reverse_kl (GKD)."""
    skew: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """For the skewed divergences: share of a distribution in the mixture that it is compared with (DistiLLM)."""
    temperature: PositiveFloat | tuple[PositiveFloat, PositiveFloat] = 1.0
    """Divides both models' logits; the divergence is multiplied by its square. Two numbers: from, to over the run."""
    alpha: Share | tuple[Share, Share] = 0.5
    """Share of the divergence in the loss; the labels have the rest. Two numbers: from, to over the run."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How `temperature` and `alpha` go from their first number to their second: evenly, or by half a cosine, slowly at
    both ends."""
    match: tuple[MatchConfig, ...] = ()
    """Hidden states and attention of the teacher that the student also learns; added to the loss."""
    cache: CacheConfig = CacheConfig()
    on_policy: OnPolicyConfig = OnPolicyConfig()
    answers: AnswersConfig | None = None
    """Learn what the teacher writes instead of what it says of the rows' own answers (sequence-level distillation, Kim
    and Rush 2016); any teacher that writes, whatever its tokens. `answers: {}` has every setting as it is by itself."""
    unlabelled: str | None = Field(default=None, min_length=1)
    """Of labelled rows: a file of rows without labels, for which the student learns the teacher's outputs alone."""
    peers: Annotated[Annotated[int, Field(ge=2)] | None, Unit("adapters")] = None
    """Adapters in one bank that teach each other instead of a teacher; the best is shipped (Zhang et al. 2018)."""

    control: bool | Literal["auto"] = "auto"
    """Train the same student on labels alone, too, to tell what the teacher is worth; auto: where that takes less than
    a third of the run's time, by the sizes of the two models, and beside answers that are written."""

    def alpha_at(self, progress: float) -> float:
        """`alpha` at a share of the run between 0 and 1."""
        return self._at(self.alpha, progress)

    def temperature_at(self, progress: float) -> float:
        """`temperature` at a share of the run between 0 and 1."""
        return self._at(self.temperature, progress)

    def _at(self, value: float | tuple[float, float], progress: float) -> float:
        if not isinstance(value, tuple):
            return value
        done = (1 - math.cos(math.pi * progress)) / 2 if self.schedule == "cosine" else progress
        return value[0] + (value[1] - value[0]) * done

    @property
    def across(self) -> bool:
        """Whether the teacher reads other tokens than the student."""
        return self.loss in OTHER_TOKENS

    @property
    def asks_teacher(self) -> bool:
        """Whether the teacher counts at all."""
        return self.answers is None and (bool(self.match) or self.alpha not in (0, (0, 0)))

    @field_validator("temperature", "alpha", mode="before")
    @classmethod
    def _one_or_two(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) != 2:
            raise ValueError(f"{list(value)}: write one number, or two: from, to over the run.")
        return value

    def misfit(self, task: TaskFacts) -> str | None:
        """Reason why values do not go together, or not with what the student learns; None where they do."""
        if self.answers is not None:
            return self._answers_misfit(task)
        if self.loss not in task.student_losses:
            losses = "|".join(task.student_losses)
            return f"of={task.name} does not take distill.loss={self.loss}. Write distill.loss={losses}."
        if self.temperature != 1 and self.loss in get_args(Distance):
            return f"temperature is for probabilities, and distill.loss={self.loss} compares numbers. Leave it out."
        if self.teacher.url is not None and (reason := self._served_misfit(task)):
            return reason
        if self.schedule != "linear" and not any(isinstance(each, tuple) for each in (self.alpha, self.temperature)):
            return f"schedule={self.schedule} is for two numbers: write distill.alpha='[0.9, 0.1]', or leave it out."
        if self.teacher.shares is not None and not task.tokens:
            return f"of={task.name} takes the plain mean of its teachers: leave distill.teacher.shares out."
        cached, has_teacher = self.cache.folder is not None, self.teacher.id is not None
        if self.peers is not None and has_teacher:
            return "peers teach each other: leave distill.teacher.id out, or distill.peers."
        if self.peers is not None and (cached or self.match or self.on_policy.share):
            return "peers compare their outputs alone: leave distill.cache, match and on_policy out."
        if cached and self.match:
            return "a cache holds what the teacher says, not its layers: leave distill.cache.folder out, or match."
        if cached and self.on_policy.share:
            return "a cache knows nothing of answers still to be written: leave distill.cache.folder or on_policy out."
        if cached and isinstance(self.temperature, tuple):
            return "a cache is made at one temperature: write distill.temperature as one number."
        if self.cache.sampled and self.loss != "forward_kl":
            return "samples estimate forward_kl without bias, and no other divergence: write distill.loss=forward_kl."
        if self.across and (reason := self._across_misfit()):
            return reason
        if not task.tokens and (cached or self.on_policy.share or self.across):
            return (
                f"of={task.name} asks the teacher once for each row and keeps that in the run: leave distill.cache and "
                "on_policy out, and write another loss than universal, gold and alm."
            )
        if not task.tokens and self.peers:
            return "peers compare what they say of tokens: leave distill.peers out, or write of=sft."
        if not task.tokens and not task.labelled and (self.match or self.teacher.out_of_fold):
            return f"of={task.name} compares outputs alone: leave distill.match and teacher.out_of_fold out."
        if task.tokens and (self.unlabelled or self.teacher.out_of_fold):
            return "distill.unlabelled and teacher.out_of_fold are for of=classify: leave them out."
        if task.head == "masked" and (cached or self.on_policy.share or self.across):
            return f"of={task.name} {task.uncached}: leave cache and on_policy out, and loss={self.loss}."
        return None

    def _across_misfit(self) -> str | None:
        """Reason against a teacher of other tokens."""
        if self.match or self.peers:
            return f"loss={self.loss} compares what two models say of a text: leave distill.match and peers out."
        if self.teacher.url is not None:
            return f"loss={self.loss} compares models that are loaded here: leave distill.teacher.url out."
        if self.cache.folder is not None and self.loss == "universal":
            return "loss=universal compares whole distributions: write distill.loss=gold or alm, or leave cache out."
        if self.cache.gap is not None:
            return f"cache.gap is not measured of loss={self.loss}: write distill.cache.k=64 instead."
        return None

    def _answers_misfit(self, task: TaskFacts) -> str | None:
        """Reason against learning what the teacher writes."""
        if not task.writes_text:
            return "answers are texts: write of=sft, or leave distill.answers out."
        if self.peers is None and not isinstance(self.teacher.id, str):
            return "answers: one teacher writes them. Name one run, folder or hub id as distill.teacher.id."
        if self.teacher.url is not None and (reason := self._elsewhere()):
            return reason
        plain = DistillConfig()
        read = set(type(self).model_fields) - {"teacher", "student", "answers", "control"}
        if unread := sorted(name for name in read if getattr(self, name) != getattr(plain, name)):
            return f"what the teacher writes is learnt as rows are. Leave {' and '.join(unread)} out, or answers."
        return None

    def _elsewhere(self) -> str | None:
        """Reason against how a teacher at an address is named."""
        if not isinstance(self.teacher.id, str) or self.teacher.id == BACKBONE:
            return "teacher.url: write the name of one model there as distill.teacher.id."
        if self.teacher != TeacherConfig(id=self.teacher.id, url=self.teacher.url):
            return "teacher.url: the teacher is loaded elsewhere. Leave all of distill.teacher but url and id out."
        return None

    def _served_misfit(self, task: TaskFacts) -> str | None:
        """Reason against a teacher that a server answers for."""
        if reason := self._elsewhere():
            return reason
        if not task.writes_text:
            return "teacher.url: a server tells what follows in a text. Write of=sft, or leave the url out."
        if self.cache.folder is None:
            return "teacher.url: the server is asked once, before training. Write distill.cache.folder=FOLDER."
        if self.cache.sampled:
            return "teacher.url: a server tells the likeliest tokens, and draws none. Leave distill.cache.sampled out."
        if self.cache.gap is not None:
            return "teacher.url: a server does not tell what the other tokens lose. Write distill.cache.k=20, not gap."
        if self.temperature != 1:
            return "teacher.url: a server tells probabilities at temperature 1. Leave distill.temperature out."
        return None
