"""Models that requests choose by name, and LoRA adapters that join or leave a running server.

Legend: U texts, D numbers of an embedding.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.data.text import media
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.media import Media
from workbench.data.text.messages import Message, messages_of
from workbench.errors import WorkbenchError
from workbench.evaluation.serving.engine import BankRoutes, Engine
from workbench.evaluation.serving.openai_format import ChatRequest, CompletionRequest, Generation, Refusal
from workbench.evaluation.serving.prompt_router import PromptRouter
from workbench.evaluation.serving.scheduler import (
    AnswerInProgress,
    AnswerText,
    Listener,
    QueueFull,
    Sampling,
    Scheduler,
    TimedOut,
)
from workbench.evaluation.transcription import Transcription
from workbench.models.picture_processor import PictureProcessor

AnswerT = TypeVar("AnswerT")
MOST_MEDIA = 16  # pictures or recordings in one request, whose bytes are limited besides
MOST_SECONDS = 3600.0  # of a recording, whose bytes are limited besides
_pictures = threading.Lock()
_ADDRESSES = ("http://", "https://")
_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter in PEFT's format; no others are read."""


@dataclass(frozen=True)
class ServedModel:
    """A model by its name."""

    name: str  # its name in requests
    root: str  # name of its backbone
    created: int  # seconds since 1970
    verb: ClassVar[str]  # the address that serves it

    @property
    def listed(self) -> dict[str, object]:
        """Its entry of /v1/models."""
        parent = None if self.name == self.root else self.root
        facts = {"id": self.name, "object": "model", "created": self.created, "owned_by": "peft-workbench"}
        return {**facts, "root": self.root, "parent": parent}


@dataclass(frozen=True)
class TextModel(ServedModel):
    """A model that generates answers."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatEncoder
    stop: frozenset[int]
    scheduler: Scheduler
    member: str  # name of its adapter in the engine
    context: int  # most tokens of a prompt and its answer together
    router: PromptRouter | None = field(default=None, compare=False)  # chooses which of `members` answers
    members: Mapping[str, TextModel] = field(default_factory=dict, compare=False)

    verb = "/v1/chat/completions or /v1/completions"

    @property
    def listed(self) -> dict[str, object]:
        return {**super().listed, "max_model_len": self.context}

    def prompts(self, request: Generation) -> list[list[int]]:
        """Token ids of each prompt; raises Refusal where one cannot be encoded or is too long."""
        chat = isinstance(request, ChatRequest)
        asked: Any = getattr(request, "messages" if chat else "prompts")
        if isinstance(request, ChatRequest):
            try:
                messages = messages_of(request.messages, "messages")
            except WorkbenchError as error:
                raise Refusal(str(error), param="messages") from None
            messages = self._sent(messages)
            asked = [{key: value for key, value in each.items() if key != media.KEY} for each in messages]
        if (size := _characters(asked)) > self.context * self.longest_token:
            raise Refusal(
                f"This model reads and writes at most {self.context:,} tokens, which cannot hold the {size:,} "
                "characters of the prompt. Shorten it.",
                param="messages" if chat else "prompt",
                code="context_length_exceeded",
            )
        try:
            if chat:
                prompt_ids = [self._conversation(messages)]
            else:
                assert isinstance(request, CompletionRequest)
                prompt_ids = [self._completion(prompt) for prompt in request.prompts]
        except WorkbenchError as error:
            raise Refusal(str(error), param="messages") from None
        except (UnicodeError, TypeError) as error:
            raise Refusal(f"The prompt cannot be tokenised: {error}", param="messages") from None
        for ids in prompt_ids:
            if not ids:
                raise Refusal("The prompt is empty. Write at least one token.", param="prompt")
            most = request.most or 1
            if len(ids) + most > self.context:
                raise Refusal(
                    f"This model reads and writes at most {self.context:,} tokens. The prompt has {len(ids):,}, and "
                    f"{most:,} are asked for. Shorten one of them.",
                    param="messages" if isinstance(request, ChatRequest) else "prompt",
                    code="context_length_exceeded",
                )
        return prompt_ids

    def chosen(self, request: Generation) -> TextModel:
        """The model that answers: this one, or the member that the router chooses by the first prompt."""
        if self.router is None:
            return self
        (name,) = self.router.chosen(self.scheduler.feature(self.prompts(request)[0])[None])
        return self.members[name]

    def answer(
        self, prompt: Sequence[int], request: Generation, sampling: Sampling, listener: Listener, *, seconds: float
    ) -> AnswerInProgress:
        """An answer to be generated within `seconds`."""
        return AnswerInProgress(
            prompt=prompt,
            member=self.member,
            sampling=sampling,
            text=AnswerText(self.tokenizer, [max(0, each) for each in prompt], request.stops),
            stop=self.stop | frozenset(request.stop_token_ids),
            known=len(self.tokenizer),
            listener=listener,
            deadline=time.monotonic() + seconds,
        )

    @cached_property
    def longest_token(self) -> int:
        """Characters that a token stands for at most."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _sent(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the pictures and recordings that they hold. Refuses those that are too many, or that stand
        on this machine or, unless data.fetch=true, elsewhere."""
        if len(shown := media.of_messages(messages)) > MOST_MEDIA:
            raise Refusal(
                f"A request has at most {MOST_MEDIA} pictures or recordings, and this one has {len(shown)}. Leave some "
                "out.",
                param="messages",
            )
        processor = self.template.processor
        fetches = isinstance(processor, PictureProcessor) and processor.fetch

        def sent(each: Media) -> Media:
            if isinstance(each.value, str) and each.value.startswith(("data:", *_ADDRESSES[: 2 * fetches])):
                return each
            with suppress(ValueError):  # base64 alone, as OpenAI's input_audio has it: never a path
                return replace(each, value=base64.b64decode(each.value, validate=True))
            kind = media.KINDS[each.kind]
            addresses = " An address is read where the run was trained with data.fetch=true." * (not fetches)
            raise Refusal(
                f"A {kind.noun} is sent as {kind.sent}; files of the server are not read.{addresses}", param="messages"
            )

        if not isinstance(processor, PictureProcessor):
            return list(messages)  # the template says why it reads none
        return [
            {**each, media.KEY: [sent(own) for own in each[media.KEY]]} if media.KEY in each else each
            for each in messages
        ]

    def _conversation(self, messages: Sequence[Message]) -> list[int]:
        """Ids that an answer starts from, those of pictures with what the tower says of them."""
        processor = self.template.processor
        if not media.of_messages(messages) or not isinstance(processor, PictureProcessor):
            return self.template.prompt(messages)
        with _pictures:  # what is made of them is forgotten once the tower has seen it
            ids, key = self.template.prompt(messages), self.template.pictures_of(Example("messages", tuple(messages)))
            try:
                return self.scheduler.pictured(ids, key, processor, self.member)
            finally:
                processor.forget(key)

    def _completion(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.template.question(Example("the prompt", text=((prompt, False),)))
        if max(prompt) >= len(self.tokenizer):
            raise Refusal(f"prompt: token {max(prompt)} is none of {len(self.tokenizer):,}.", param="prompt")
        return list(prompt)


def _characters(value: Any) -> int:
    """Characters of the longest text, or of all texts of a conversation."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return max(map(_characters, value), default=0) if isinstance(value, list | tuple) else 0


class Turns:
    """Requests of a model that answers one at a time; `queue` more may wait."""

    def __init__(self, queue: int) -> None:
        self._turn = asyncio.Lock()
        self._most, self._here = queue + 1, 0

    async def taken(self, answer: Callable[[], AnswerT], *, seconds: float) -> AnswerT:
        """Result of `answer`, run in a thread when its turn comes.

        Raises:
            QueueFull: Too many wait already.
            TimedOut: Its turn does not come within `seconds`.
        """
        if self._here >= self._most:
            raise QueueFull
        self._here += 1
        try:
            await asyncio.wait_for(self._turn.acquire(), seconds)
        except TimeoutError:
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
    tokens: int  # tokens of all texts


@dataclass(frozen=True)
class EmbeddingModel(ServedModel):
    """A model that embeds texts."""

    turns: Turns
    embed: Callable[[Sequence[str], bool, int | None], Embedded]
    """Embeds texts: (texts, whether they are passages, dimensions); raises WorkbenchError where it cannot."""

    verb = "/v1/embeddings"


@dataclass(frozen=True)
class ClassModel(ServedModel):
    """A model that classifies rows, or the words of rows."""

    turns: Turns
    classify: Callable[[Sequence[str | dict[str, str]]], list[dict[str, Any]]]
    """What the response says of each row; raises WorkbenchError for rows that it cannot read."""
    names: tuple[str, ...]
    """The classes, in the order of the probabilities."""

    verb = "/classify"

    @property
    def listed(self) -> dict[str, object]:
        return {**super().listed, "classes": list(self.names)}


class Transcript(NamedTuple):
    """What a model heard in a recording."""

    said: Transcription
    language: str | None  # its name, such as english, where the model has a token of it
    seconds: float  # of the recording


@dataclass(frozen=True)
class SpeechModel(ServedModel):
    """A model that writes what it hears."""

    turns: Turns
    transcribe: Callable[[bytes, str | None, bool, Callable[[], bool]], Transcript]
    """Transcribes a sound file: (its bytes, language or None, whether with times, what is called at each token); raises
    WorkbenchError where it cannot."""
    timed: bool
    """Whether it has tokens of times."""

    verb = "/v1/audio/transcriptions"


class AdapterLoader:
    """Loads adapters into the bank of a running engine, as vLLM's /v1/load_lora_adapter does, and unloads them. `bare`:
    the served backbone, whose tokenizer and template new adapters use."""

    def __init__(self, routes: BankRoutes, engine: Engine, bare: TextModel) -> None:
        self._routes, self._engine, self.bare = routes, engine, bare

    def load(self, name: str, folder: Path) -> TextModel:
        """Load the adapter in `folder` as the model `name`, between two tokens of the engine. Raises Refusal: the
        folder has no LoRA adapter for this backbone."""
        if missing := [file for file in _FILES if not (folder / file).is_file()]:
            raise Refusal(
                f"{folder}: there is no {missing[0]} here. Name a folder in PEFT's format that this server can read.",
                param="lora_path",
            )

        def joined() -> str:
            member = self._routes.join(folder)
            try:
                self._engine.admit(member)
            except WorkbenchError:
                self._routes.leave(member)
                raise
            return member

        try:
            member = self.bare.scheduler.between(joined)
        except WorkbenchError as error:
            raise Refusal(str(error), param="lora_path") from None
        return replace(self.bare, name=name, created=int(time.time()), member=member)

    def unload(self, model: TextModel) -> None:
        """Unload an adapter; raises Refusal while it generates answers."""

        def leave() -> bool:
            if self.bare.scheduler.writes(model.member):
                return False
            self._routes.leave(model.member)
            return True

        if not self.bare.scheduler.between(leave):
            raise Refusal(f"{model.name} is writing answers. Unload it when they have ended.", status=409)
