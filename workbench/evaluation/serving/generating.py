"""Answers to one request: handed to the engine, heard of, and sent whole or while they are written."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from workbench.evaluation.serving import refusals, responses
from workbench.evaluation.serving.answer_progress import AnswerInProgress, AnswerPiece, Interrupted, Sampling
from workbench.evaluation.serving.requests import ChatRequest, CompletionRequest, Generation
from workbench.evaluation.serving.responses import AnswerForm, ChatForm, CompletionForm, Written
from workbench.evaluation.serving.scheduler import Scheduler
from workbench.evaluation.serving.served_models import TextModel

GONE = 499
"""Status of an answer for which nobody waits any more; nobody reads it."""


class Job:
    """All answers to one request. Leave it by `cancel`, whatever happens."""

    def __init__(self, model: TextModel, request: Generation, prompts: list[list[int]], *, seconds: float) -> None:
        self._request, self._scheduler = request, model.scheduler
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, AnswerPiece | Interrupted]] = asyncio.Queue()
        self.form = _form(model, request)
        self.head = {"id": f"{self.form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
        self.answers = [
            self._answer(model, prompt, place * request.n + number, number, seconds)
            for place, prompt in enumerate(prompts)
            for number in range(request.n)
        ]
        echoed = _echoed(model, request, prompts)
        self.written = [Written(text=text) for text in echoed for _ in range(request.n)]
        self._read = sum(map(len, prompts))

    def _answer(self, model: TextModel, prompt: list[int], index: int, number: int, seconds: float) -> AnswerInProgress:
        request = self._request
        most = request.most if isinstance(request, ChatRequest) else request.max_tokens
        sampling = Sampling(
            max_tokens=most or model.context - len(prompt),
            temperature=request.temperature,
            top_p=request.top_p,
            seed=None if request.seed is None else (request.seed % 2**64, number),
            logprobs=_scores(request),
            echo=isinstance(request, CompletionRequest) and request.echo,
        )

        def listen(event: AnswerPiece | Interrupted) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it whoever waits
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return model.answer(prompt, request, sampling, listen, seconds=seconds)

    def submit(self) -> None:
        """Hand the answers to the engine; raises what `Scheduler.submit` does."""
        self._scheduler.submit(self.answers)

    def cancel(self) -> None:
        """Give the places of unfinished answers back."""
        if any(each.reason is None for each in self.written):
            self._scheduler.cancel(self.answers)

    async def pieces(self) -> AsyncIterator[tuple[int, AnswerPiece]]:
        """Pieces as they come, each with its answer's number; raises Interrupted where an answer will not end."""
        while any(each.reason is None for each in self.written):
            index, event = await self._events.get()
            if isinstance(event, Interrupted):
                raise event
            written = self.written[index]
            written.text += event.text
            written.tokens, written.reason = event.tokens, event.reason
            written.scores += event.scores
            yield index, event

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of prompts and answers."""
        return responses.usage(self._read, sum(each.tokens for each in self.written))

    async def whole(self) -> Response:
        """The response when all answers have ended."""
        async for _ in self.pieces():
            pass
        choices = [self.form.choice(index, each, chunk=False) for index, each in enumerate(self.written)]
        return JSONResponse({**self.head, "object": self.form.whole, "choices": choices, "usage": self.usage})

    async def events(self) -> AsyncIterator[str]:
        """The lines of a stream of server-sent events."""
        usage = {"usage": None} if self._request.stream_options.include_usage else {}
        head = {**self.head, "object": self.form.part}
        for index in range(len(self.answers)):
            if (opening := self.form.opening(index)) is not None:
                yield _event({**head, "choices": [opening], **usage})
        try:
            async for index, piece in self.pieces():
                new = Written(piece.text, piece.tokens, list(piece.scores), piece.reason)
                yield _event({**head, "choices": [self.form.choice(index, new, chunk=True)], **usage})
        except Interrupted as error:
            yield _event(refusals.of(error).body)
            return
        if usage:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A stream that gives its job's places back however it ends."""

    def __init__(self, job: Job) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(job.events(), media_type="text/event-stream", headers=headers)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, until it ends or the client hangs up."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def unless_gone(request: HttpRequest, job: Job) -> Response:
    """The whole response of a job, which is cancelled where the client hangs up."""
    answer = asyncio.ensure_future(job.whole())
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=GONE)
    finally:
        answer.cancel()
        gone.cancel()
        job.cancel()


async def _hung_up(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _form(model: TextModel, request: Generation) -> AnswerForm:
    scored = _scores(request) is not None
    if isinstance(request, CompletionRequest):
        return CompletionForm(model.tokenizer, scored=scored, numbered=request.return_tokens_as_token_ids)
    return ChatForm(model.tokenizer, scored=scored)


def _echoed(model: TextModel, request: Generation, prompts: list[list[int]]) -> list[str]:
    """Text that the answers to each prompt begin with."""
    if not (isinstance(request, CompletionRequest) and request.echo):
        return [""] * len(prompts)
    pairs = zip(request.prompts, prompts, strict=True)
    return [given if isinstance(given, str) else str(model.tokenizer.decode(ids)) for given, ids in pairs]


def _scores(request: Generation) -> int | None:
    if isinstance(request, ChatRequest):
        return request.scores
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def schedulers(models: list[TextModel]) -> list[Scheduler]:
    """The schedulers of models, each once."""
    return list({id(model.scheduler): model.scheduler for model in models}.values())
