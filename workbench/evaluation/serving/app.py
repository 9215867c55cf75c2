"""The addresses of a server, as an ASGI application: OpenAI's interface, some of vLLM's, and /health."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from workbench.errors import WorkbenchError
from workbench.evaluation.serving import openai_format
from workbench.evaluation.serving.openai_format import (
    AnswerForm,
    ChatForm,
    ChatRequest,
    ClassifyRequest,
    CompletionForm,
    CompletionRequest,
    EmbeddingRequest,
    Generation,
    LoadAdapterRequest,
    Refusal,
    TranscriptionRequest,
    UnloadAdapterRequest,
    Written,
)
from workbench.evaluation.serving.scheduler import (
    AnswerInProgress,
    AnswerPiece,
    Interrupted,
    QueueFull,
    Sampling,
    TimedOut,
)
from workbench.evaluation.serving.served_models import (
    AdapterLoader,
    ClassModel,
    EmbeddingModel,
    ServedModel,
    SpeechModel,
    TextModel,
    Turns,
)
from workbench.runs.http_server import LOOPBACK, TooLarge, body_of, without_port

GONE = 499  # status of a response whose client has hung up
_log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")
ModelT = TypeVar("ModelT", bound=ServedModel)
Answer = Callable[[Request], Awaitable[Response]]


class Job:
    """All answers to one request, sent whole or as a stream. Always end it by `cancel`."""

    def __init__(self, model: TextModel, request: Generation, prompts: list[list[int]], *, seconds: float) -> None:
        self._request, self._scheduler = request, model.scheduler
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, AnswerPiece | Interrupted]] = asyncio.Queue()
        self.form: AnswerForm
        begins = [""] * len(prompts)  # text that the answers to each prompt begin with
        scored = request.scores is not None
        if isinstance(request, CompletionRequest):
            self.form = CompletionForm(model.tokenizer, scored=scored, numbered=request.return_tokens_as_token_ids)
            if request.echo:
                pairs = zip(request.prompts, prompts, strict=True)
                begins = [asked if isinstance(asked, str) else str(model.tokenizer.decode(ids)) for asked, ids in pairs]
        else:
            self.form = ChatForm(model.tokenizer, scored=scored)
        self.head = {"id": f"{self.form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
        self.answers = [
            self._answer(model, prompt, place * request.n + number, number, seconds)
            for place, prompt in enumerate(prompts)
            for number in range(request.n)
        ]
        self.written = [Written(text=text) for text in begins for _ in range(request.n)]
        self._read = sum(map(len, prompts))

    def _answer(self, model: TextModel, prompt: list[int], index: int, number: int, seconds: float) -> AnswerInProgress:
        request = self._request
        sampling = Sampling(
            max_tokens=request.most or model.context - len(prompt),
            temperature=request.temperature,
            top_p=request.top_p,
            seed=None if request.seed is None else (request.seed % 2**64, number),
            logprobs=request.scores,
            echo=isinstance(request, CompletionRequest) and request.echo,
        )

        def listen(event: AnswerPiece | Interrupted) -> None:
            with suppress(RuntimeError):  # the loop has ended, and the client's connection with it
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return model.answer(prompt, request, sampling, listen, seconds=seconds)

    def submit(self) -> None:
        """Queue the answers; raises as `Scheduler.submit`."""
        self._scheduler.submit(self.answers)

    def cancel(self) -> None:
        """Cancel unfinished answers."""
        if any(each.reason is None for each in self.written):
            self._scheduler.cancel(self.answers)

    async def pieces(self) -> AsyncIterator[tuple[int, AnswerPiece]]:
        """Pieces as they come, each with its answer's number; raises Interrupted where an answer is interrupted."""
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
        """Numbers of tokens of prompts and answers."""
        written = sum(each.tokens for each in self.written)
        return {"prompt_tokens": self._read, "completion_tokens": written, "total_tokens": self._read + written}

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
            yield _event(openai_format.refusal_of(error).body)
            return
        if usage:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A stream of server-sent events that cancels its job however it ends."""

    def __init__(self, job: Job) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(job.events(), media_type="text/event-stream", headers=headers)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the job ends or the client hangs up."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def unless_gone(request: HttpRequest, job: Job) -> Response:
    """The whole response of a job; hanging up cancels the job."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.ensure_future(job.whole()), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=GONE)
    finally:
        answer.cancel()
        gone.cancel()
        job.cancel()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server for its clients."""

    api_key: str | None = None
    """Clients send it as `Authorization: Bearer KEY`; None: no key, and only requests to this machine's own names."""
    seconds: float = 600.0
    """Most time of a request, from its arrival to the end of its answers."""
    body_bytes: int = 8 * 2**20
    """Largest size of a request."""
    body_seconds: float = 30.0
    """Seconds in which a request must have come."""
    loads_adapters: bool = False
    """Whether clients may load adapters from the server's disk, and unload them."""


class Server:
    """Answers requests, which choose a model by name."""

    def __init__(
        self, models: Sequence[ServedModel], limits: ServerLimits, loaders: Sequence[AdapterLoader] = ()
    ) -> None:
        self._loaders, self._loaded = loaders, dict[str, AdapterLoader]()
        self._loading = asyncio.Lock()
        self._models = {model.name: model for model in models}
        texts = (model for model in models if isinstance(model, TextModel))
        self._schedulers = list({id(model.scheduler): model.scheduler for model in texts}.values())
        self._limits = limits

    @property
    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._open(self._list), methods=["GET"]),
            Route("/v1/models/{name:path}", self._open(self._show), methods=["GET"]),
            Route("/v1/chat/completions", self._open(partial(self._generate, ChatRequest)), methods=["POST"]),
            Route("/v1/completions", self._open(partial(self._generate, CompletionRequest)), methods=["POST"]),
            Route("/v1/embeddings", self._open(self._embed), methods=["POST"]),
            Route("/v1/audio/transcriptions", self._open(self._transcribe), methods=["POST"]),
            Route("/classify", self._open(self._classify), methods=["POST"]),
            Route("/v1/load_lora_adapter", self._open(self._load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._open(self._unload), methods=["POST"]),
        ]
        handlers = {HTTPException: _no_address, Exception: _failed}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for scheduler in self._schedulers:
                await asyncio.to_thread(scheduler.close)

    def _open(self, answer: Answer) -> Answer:
        """`answer` behind the check of permission, with refusals in OpenAI's form."""

        async def guarded(request: Request) -> Response:
            try:
                if self._limits.api_key is not None:
                    scheme, _, given = request.headers.get("authorization", "").partition(" ")
                    right = hmac.compare_digest(given.strip().encode(), self._limits.api_key.encode())
                    if scheme.lower() != "bearer" or not right:
                        raise Refusal("Wrong or no API key. Send it as Authorization: Bearer KEY.", status=401)
                else:
                    # Any web page in a browser on this machine can reach the server: refuse other origins.
                    origin = request.headers.get("origin", "").rpartition("//")[2]
                    for name in (request.headers.get("host", ""), origin):
                        if name and without_port(name) not in LOOPBACK:
                            raise Refusal(f"{name} is not answered without an API key. Ask 127.0.0.1.", status=403)
                return await answer(request)
            except Refusal as refusal:
                return refusal.response
            except (QueueFull, Interrupted) as error:
                return openai_format.refusal_of(error).response
            except ClientDisconnect:
                return Response(status_code=GONE)

        return guarded

    async def _health(self, _: Request) -> Response:
        well = all(scheduler.alive for scheduler in self._schedulers)
        running, waiting = (sum(getattr(each, name) for each in self._schedulers) for name in ("running", "waiting"))
        facts = {"status": "ok" if well else "failed", "running": running, "waiting": waiting}
        return JSONResponse(facts, 200 if well else 503)

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model.listed for model in self._models.values()]})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._named(request.path_params["name"]).listed)

    async def _generate(self, form: type[ChatRequest | CompletionRequest], request: Request) -> Response:
        asked: Generation = openai_format.read_request(form, await self._body(request))
        model = await asyncio.to_thread(self._of_kind(asked.model, TextModel).chosen, asked)
        prompts = await asyncio.to_thread(model.prompts, asked)
        job = Job(model, asked, prompts, seconds=self._limits.seconds)
        job.submit()
        return EventStream(job) if asked.stream else await unless_gone(request, job)

    async def _embed(self, request: Request) -> Response:
        asked = openai_format.read_request(EmbeddingRequest, await self._body(request))
        model = self._of_kind(asked.model, EmbeddingModel)
        passages = asked.input_type == "passage"
        embedded = await self._in_turn(model.turns, lambda: model.embed(asked.texts, passages, asked.dimensions))
        as_floats = asked.encoding_format == "float"
        rows = embedded.embeddings_UD.numpy().astype("<f4")
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": row_D.tolist() if as_floats else base64.b64encode(row_D.tobytes()).decode(),
            }
            for index, row_D in enumerate(rows)
        ]
        used = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
        return JSONResponse({"object": "list", "model": model.name, "data": data, "usage": used})

    async def _classify(self, request: Request) -> Response:
        asked = openai_format.read_request(ClassifyRequest, await self._body(request))
        model = self._of_kind(asked.model, ClassModel)
        predictions = await self._in_turn(model.turns, lambda: model.classify(asked.rows))
        data = [{"index": index, **each} for index, each in enumerate(predictions)]
        head = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return JSONResponse({**head, "model": model.name, "data": data})

    async def _transcribe(self, request: Request) -> Response:
        form = request.headers.get("content-type", "")
        asked = openai_format.read_form(TranscriptionRequest, form, await self._body(request))
        model = self._of_kind(asked.model, SpeechModel)
        form, end = asked.response_format, time.monotonic() + self._limits.seconds
        if form in openai_format.SUBTITLES and not model.timed:
            raise Refusal(
                f"response_format: {model.name} writes no times, since its backbone has no tokens of them. Write json, "
                "text or verbose_json.",
                param="response_format",
            )

        def halt() -> bool:
            if time.monotonic() > end:
                raise TimedOut
            return False

        timed = model.timed and form not in ("json", "text")
        heard = await self._in_turn(
            model.turns, lambda: model.transcribe(asked.file, asked.language, timed, halt), param="file"
        )
        text, segments = heard.said
        if form in openai_format.SUBTITLES:
            return PlainTextResponse(openai_format.SUBTITLES[form](segments or ()))
        if form == "text":
            return PlainTextResponse(f"{text}\n")
        facts: dict[str, object] = {"text": text}
        if form == "verbose_json":
            facts |= {"task": "transcribe", "language": heard.language, "duration": round(heard.seconds, 3)}
            if segments is not None:
                facts["segments"] = [
                    {"id": number, **each._asdict(), "temperature": 0.0} for number, each in enumerate(segments)
                ]
        return JSONResponse(facts)

    async def _load(self, request: Request) -> Response:
        loader = self._require_loader()
        asked = openai_format.read_request(LoadAdapterRequest, await self._body(request))
        async with self._loading:
            if asked.lora_name in self._models:
                raise Refusal(f"A model is called {asked.lora_name!r}: it has already been loaded.", param="lora_name")
            model = await asyncio.to_thread(loader.load, asked.lora_name, Path(asked.lora_path))
            self._models[model.name], self._loaded[model.name] = model, loader
        return PlainTextResponse(f"Success: LoRA adapter '{model.name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        self._require_loader()
        name = openai_format.read_request(UnloadAdapterRequest, await self._body(request)).lora_name
        async with self._loading:
            if name not in self._loaded:
                raise Refusal(f"No adapter that was loaded is called {name!r}.", status=404, param="lora_name")
            model = self._models[name]
            assert isinstance(model, TextModel)
            await asyncio.to_thread(self._loaded[name].unload, model)
            del self._models[name], self._loaded[name]
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _require_loader(self) -> AdapterLoader:
        """The loader of the one backbone; raises Refusal where loading is off or the backbone is ambiguous."""
        if not self._limits.loads_adapters:
            raise Refusal("This server loads no adapters. Start it with --load-adapters.", status=403)
        if len(self._loaders) != 1:
            raise Refusal(
                f"Adapters are loaded over one backbone of LoRA adapters, and {len(self._loaders)} are served. Serve "
                "runs of recipe sft, prefer or reinforce with LoRA over one backbone."
            )
        return self._loaders[0]

    async def _in_turn(self, turns: Turns, answer: Callable[[], AnswerT], *, param: str = "input") -> AnswerT:
        try:
            return await turns.taken(answer, seconds=self._limits.seconds)
        except WorkbenchError as error:
            raise Refusal(str(error), param=param) from None
        except (UnicodeError, TypeError) as error:
            raise Refusal(f"The input cannot be tokenised: {error}", param="input") from None

    def _named(self, name: str) -> ServedModel:
        if name not in self._models:
            raise Refusal(
                f"No model is called {name!r}. There are: {', '.join(self._models)}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self._models[name]

    def _of_kind(self, name: str, kind: type[ModelT]) -> ModelT:
        model = self._named(name)
        if not isinstance(model, kind):
            raise Refusal(f"Model {name} is asked by {model.verb}.", param="model")
        return model

    async def _body(self, request: Request) -> bytes:
        most, seconds = self._limits.body_bytes, self._limits.body_seconds
        try:
            return await asyncio.wait_for(body_of(request, most=most), seconds)
        except TimeoutError:
            raise Refusal(f"The request has not come in {seconds:g} seconds.", status=408) from None
        except TooLarge:
            raise Refusal(f"The request has more than {most:,} bytes.", status=413, code="too_large") from None


async def _no_address(request: Request, error: HTTPException) -> Response:
    known = (
        "/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/audio/transcriptions, /v1/models, /classify, "
        "/health"
    )
    why = {404: f"No address is called {request.url.path}", 405: f"{request.url.path} knows no {request.method}"}
    message = why.get(error.status_code, str(error.detail))
    return Refusal(f"{message}. There are: {known}.", status=error.status_code).response


async def _failed(_: Request, error: Exception) -> Response:
    _log.error("A request failed", exc_info=error)
    return openai_format.refusal_of(Interrupted()).response
