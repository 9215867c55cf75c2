"""Models that requests choose by name.

Legend: U texts, D numbers of an embedding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.messages import messages_of
from workbench.errors import WorkbenchError
from workbench.evaluation.serving.answer_progress import AnswerInProgress, Listener, Sampling, TimedOut
from workbench.evaluation.serving.answer_text import AnswerText
from workbench.evaluation.serving.refusals import Refusal
from workbench.evaluation.serving.requests import ChatRequest, CompletionRequest, Generation
from workbench.evaluation.serving.scheduler import QueueFull, Scheduler

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class ServedModel:
    """A model by its name."""

    name: str
    """By which requests ask for it."""
    root: str
    """Its backbone."""
    created: int
    """Seconds since 1970."""

    @property
    def verb(self) -> str:
        """The address that asks it."""
        raise NotImplementedError

    @property
    def listed(self) -> dict[str, object]:
        """Its entry of /v1/models."""
        parent = None if self.name == self.root else self.root
        facts = {"id": self.name, "object": "model", "created": self.created, "owned_by": "peft-workbench"}
        return {**facts, "root": self.root, "parent": parent}


@dataclass(frozen=True)
class TextModel(ServedModel):
    """A model that writes answers."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatEncoder
    stop: frozenset[int]
    scheduler: Scheduler
    member: str
    """Its adapter in the engine."""
    context: int
    """Most tokens of a prompt and its answer together."""

    @property
    def verb(self) -> str:
        """See ServedModel."""
        return "/v1/chat/completions or /v1/completions"

    @property
    def listed(self) -> dict[str, object]:
        """See ServedModel."""
        return {**super().listed, "max_model_len": self.context}

    def prompts(self, request: Generation) -> list[list[int]]:
        """Token ids of each prompt; raises Refusal where one cannot be written or is too long."""
        try:
            if isinstance(request, ChatRequest):
                prompt_ids = [self.template.prompt(messages_of(request.messages, "messages"))]
            else:
                assert isinstance(request, CompletionRequest)
                prompt_ids = [self._raw(prompt) for prompt in request.prompts]
        except WorkbenchError as error:
            raise Refusal(str(error), param="messages") from None
        except (UnicodeError, TypeError) as error:
            raise Refusal(f"The prompt cannot be tokenised: {error}", param="messages") from None
        for ids in prompt_ids:
            self._require_room(len(ids), request)
        return prompt_ids

    def answer(
        self, prompt: Sequence[int], request: Generation, sampling: Sampling, listener: Listener, *, seconds: float
    ) -> AnswerInProgress:
        """An answer to be written, in so many seconds at most."""
        return AnswerInProgress(
            prompt=prompt,
            member=self.member,
            sampling=sampling,
            text=AnswerText(self.tokenizer, prompt, request.stops),
            stop=self.stop | frozenset(request.stop_token_ids),
            known=len(self.tokenizer),
            listener=listener,
            deadline=time.monotonic() + seconds,
        )

    def _raw(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.template.question(Example("the prompt", text=((prompt, False),)))
        if max(prompt) >= len(self.tokenizer):
            raise Refusal(f"prompt: token {max(prompt)} is none of {len(self.tokenizer):,}.", param="prompt")
        return list(prompt)

    def _require_room(self, tokens: int, request: Generation) -> None:
        if not tokens:
            raise Refusal("The prompt is empty. Write at least one token.", param="prompt")
        most = request.most if isinstance(request, ChatRequest) else request.max_tokens
        if tokens + (most or 1) > self.context:
            raise Refusal(
                f"This model reads and writes at most {self.context:,} tokens. The prompt has {tokens:,}, and "
                f"{most or 1:,} are asked for. Shorten one of them.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )


class Turns:
    """Requests of a model that answers one after the other; so many may wait."""

    def __init__(self, queue: int) -> None:
        self._turn = asyncio.Lock()
        self._most, self._here = queue + 1, 0

    async def taken(self, answer: Callable[[], AnswerT], *, seconds: float) -> AnswerT:
        """Result of `answer`, in a thread, when its turn comes.

        Raises:
            QueueFull: Too many wait already.
            TimedOut: Its turn does not come in time.
        """
        if self._here >= self._most:
            raise QueueFull
        self._here += 1
        try:
            await asyncio.wait_for(self._turn.acquire(), seconds)
        except asyncio.TimeoutError:
            self._here -= 1
            raise TimedOut from None
        try:
            return await asyncio.to_thread(answer)
        finally:
            self._turn.release()
            self._here -= 1


class Embedded(NamedTuple):
    """Embeddings of texts."""

    embeddings_UD: Tensor
    tokens: int
    """Tokens of all texts."""


@dataclass(frozen=True)
class EmbeddingModel(ServedModel):
    """A model that embeds texts."""

    turns: Turns
    embed: Callable[[Sequence[str], bool, int | None], Embedded]
    """Embeds texts, as passages or not, in so many numbers; raises WorkbenchError for texts that it cannot embed."""

    @property
    def verb(self) -> str:
        """See ServedModel."""
        return "/v1/embeddings"


class Classified(NamedTuple):
    """One row's prediction."""

    label: Any
    """Name of a class, several of them, or a number."""
    probs: list[float]
    """Probability of each class; the number itself where the labels are numbers."""


@dataclass(frozen=True)
class ClassModel(ServedModel):
    """A model that names the classes of rows."""

    turns: Turns
    classify: Callable[[Sequence[str | dict[str, str]]], list[Classified]]
    """Predicts rows; raises WorkbenchError for rows that it cannot read."""
    names: tuple[str, ...]
    """The classes, in the order of the probabilities."""

    @property
    def verb(self) -> str:
        """See ServedModel."""
        return "/classify"

    @property
    def listed(self) -> dict[str, object]:
        """See ServedModel."""
        return {**super().listed, "classes": list(self.names)}
