"""The server of `workbench ui`: its addresses, who may ask, and the events that keep a page up to date."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workbench import bounds
from workbench.cli.ui import form
from workbench.cli.ui.job_queue import JobQueue, state_folder
from workbench.cli.ui.run_chat import Chat
from workbench.cli.ui.run_folder import RunFolder
from workbench.config.yaml_text import is_unicode, read_yaml
from workbench.errors import ConfigError, WorkbenchError, unnameable
from workbench.runs import evaluation_request, run_log, trust
from workbench.runs.http_server import LOOPBACK, TooLarge, body_of, without_port

STATIC = Path(__file__).parent / "static"
_REPORT = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; frame-ancestors 'self'"
)
"""Policy of a report, which may come from anybody: it is shown, but nothing in it is executed."""
_BODY = 2**20
_CHAT = 2**23
"""Most bytes of a request."""
_BODY_S = 30.0
"""Seconds in which a request must have come."""
_STREAMS, _CURVES = 64, 256
"""Streams of events at the same time, and curves of one of them."""
_ROWS = 200
"""Rows of a table in one answer."""
ANY = ("0.0.0.0", "::")
"""Addresses that mean all of a machine's addresses."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOOK_S = 0.5
"""Seconds between two looks at the files."""
_ALIVE_S = 15.0
"""Seconds of silence after which a page is told that the server is there."""
_LOG_BYTES = 2**18
"""Bytes of the end of a log that are sent at first."""


class Page:
    """A folder of runs, its queue and its chat, over HTTP. A user's mistake is answered as JSON with status 422."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._runs, self._access = RunFolder(folder), access
        self._queue, self._chat = JobQueue(folder), Chat(folder)
        self._comparing = asyncio.Lock()
        self._streams = asyncio.Semaphore(_STREAMS)

    @property
    def app(self) -> Starlette:
        """The application."""
        read = {
            "/": self._index,
            "/runs/{name}/report.html": self._report,
            "/api/about": self._about,
            "/api/events": self._events,
            "/api/runs/{name}": self._run,
            "/api/runs/{name}/tables/{table}": self._table,
            "/api/runs/{name}/samples": self._samples,
            "/api/runs/{name}/layers": self._layers,
            "/api/differences": self._differences,
            "/api/paired": self._paired,
            "/api/settings": self._settings,
            "/api/recipes": self._recipes,
            "/api/recipes/{name:path}": self._recipe,
            "/api/chat": self._chat_state,
        }
        written = {
            "/api/form/mistakes": self._mistakes,
            "/api/form/check": self._check,
            "/api/form/plan": self._plan,
            "/api/form/start": self._start,
            "/api/runs/{name}/resume": self._resume,
            "/api/runs/{name}/evaluate": self._evaluate,
            "/api/runs/{name}/notes": self._notes,
            "/api/form/data": self._data,
            "/api/form/file": self._file,
            "/api/jobs/{number:int}/stop": self._stop,
            "/api/chat/open": self._chat_open,
            "/api/chat/close": self._chat_close,
            "/api/chat/completions": self._chat_answer,
        }
        app = Starlette(
            routes=[
                Mount("/static", StaticFiles(directory=STATIC)),
                *(Route(path, _answered(handler)) for path, handler in read.items()),
                *(Route(path, _answered(handler), methods=["POST"]) for path, handler in written.items()),
            ],
            middleware=[Middleware(Guards, access=self._access)],
            exception_handlers={HTTPException: _no_address},  # type: ignore[dict-item]
            lifespan=self._lifespan,
        )
        app.state.closing = lambda: False
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        work = asyncio.create_task(self._work())
        try:
            yield
        finally:
            work.cancel()
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the chat and release the folder."""
        self._chat.close()
        self._queue.close()

    async def _work(self) -> None:
        while True:
            self._queue.go_on()
            await asyncio.sleep(0.5)

    async def _index(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _about(self, _: Request) -> Any:
        return {"folder": str(self._runs.path)}

    async def _events(self, request: Request) -> Response:
        words = [word.partition("//") for word in request.query_params.getlist("curve")]
        log = request.query_params.get("log", "")
        if len(words) > _CURVES:
            raise HTTPException(400, f"curve: {_CURVES} at most.")
        if self._streams.locked():
            raise HTTPException(503, f"{_STREAMS} pages are open already. Close one of them.")
        source = EventSource(
            self._runs,
            self._queue,
            Watched(
                [(run, curve) for run, _, curve in words],
                int(log) if re.fullmatch("[0-9]{1,9}", log) else None,
                request.query_params.get("run"),
            ),
            request.app.state.closing,
            positions(request.headers.get("last-event-id")),
        )

        async def counted() -> AsyncIterator[str]:
            async with self._streams:
                async for event in source.stream():
                    yield event

        return StreamingResponse(counted(), media_type="text/event-stream")

    def _named(self, request: Request) -> str:
        """The run in the address."""
        return self._known(request.path_params["name"])

    def _known(self, name: str) -> str:
        if self._runs.run(name) is None:
            raise HTTPException(404, f"No run is called {name}.")
        return name

    async def _run(self, request: Request) -> Any:
        name = self._named(request)
        run_page = await asyncio.to_thread(self._runs.page, name)
        return {**run_page, "ticket": self._access.ticket(f"/runs/{name}/report.html")}

    async def _report(self, request: Request) -> Response:
        path = self._runs.path / self._named(request) / "report.html"
        if not path.is_file():
            raise HTTPException(404, "The report comes when the run has ended.")
        return FileResponse(path, headers={"Content-Security-Policy": _REPORT})

    async def _table(self, request: Request) -> Any:
        name, first = self._named(request), request.query_params.get("first", "0")
        if not re.fullmatch("[0-9]{1,15}", first):
            raise HTTPException(400, "first: expected the number of a row.")
        table = request.path_params["table"]
        try:
            table_page = await asyncio.to_thread(self._runs.table, name, table, first=int(first), count=_ROWS)
        except (OSError, ValueError) as error:
            raise HTTPException(422, f"{table}.parquet: damaged ({error}).") from None
        if table_page is None:
            raise HTTPException(404, f"{name} has no {table}.parquet.")
        return table_page

    async def _samples(self, request: Request) -> Any:
        return await asyncio.to_thread(self._runs.samples, self._named(request))

    async def _layers(self, request: Request) -> Any:
        return await asyncio.to_thread(self._runs.layers, self._named(request))

    async def _differences(self, request: Request) -> Any:
        names = list(map(self._known, request.query_params.getlist("run")))
        return await asyncio.to_thread(self._runs.differences, names)

    async def _paired(self, request: Request) -> Any:
        names = list(map(self._known, request.query_params.getlist("run")))
        if len(names) < 2:
            raise HTTPException(400, "run: expected two names or more.")
        async with self._comparing:  # one process at a time, however many ask
            return await self._looked(request, form.paired, str(self._runs.path), names)

    async def _settings(self, _: Request) -> Any:
        return await asyncio.to_thread(form.settings)

    async def _recipes(self, _: Request) -> Any:
        return await asyncio.to_thread(form.names)

    async def _recipe(self, request: Request) -> Any:
        name = request.path_params["name"]
        recipe_form = await asyncio.to_thread(form.recipe, name)
        if recipe_form is None:
            raise HTTPException(404, f"No recipe is called {name}.")
        return {**recipe_form, "run": form.free_name(name, self._taken())}

    def _taken(self) -> list[str]:
        there = [path.name for path in self._runs.path.iterdir()]
        return [*there, *(job.run for job in self._queue.jobs if self._queue.busy(job.run))]

    async def _mistakes(self, request: Request) -> Any:
        name, answers, _ = _answers(await _body(request))
        errors = await asyncio.to_thread(form.mistakes, name, answers)
        return {"mistakes": errors, "code": {} if errors else form.code(name, answers)}

    async def _check(self, request: Request) -> Any:
        name, answers, _ = await _permitted(request)
        return await self._looked(request, form.inspect, name, form.words(answers))

    async def _plan(self, request: Request) -> Any:
        name, answers, _ = await _permitted(request)
        return await self._looked(request, form.plan, name, form.words(answers))

    async def _data(self, request: Request) -> Any:
        name, answers, _ = await _permitted(request)
        return await self._looked(request, form.hold, name, form.words(answers))

    async def _file(self, request: Request) -> Any:
        body = await _body(request, most=_CHAT)
        return await asyncio.to_thread(
            form.keep, state_folder(self._runs.path) / "files", body.get("name"), body.get("base64")
        )

    async def _looked(self, request: Request, ask: form.Ask, name: str, words: Sequence[str]) -> Any:
        """What `ask` finds in a process of its own, which ends when the page no longer waits for it."""
        answer = asyncio.ensure_future(form.answered(ask, name, words))
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            while not (answer.done() or gone.done() or request.app.state.closing()):
                await asyncio.wait({answer, gone}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else Response(status_code=503)
        finally:
            answer.cancel()
            gone.cancel()

    async def _start(self, request: Request) -> Any:
        name, answers, run = await _permitted(request)
        if errors := await asyncio.to_thread(form.mistakes, name, answers):
            return _Json({"mistakes": errors}, 422)
        form.require_name(run, self._taken())
        words = [name, *form.words(answers), "--out", str(self._runs.path / run)]
        return {"job": self._queue.add("run", words, run=run).number, "run": run}

    async def _resume(self, request: Request) -> Any:
        name = self._named(request)
        page = await asyncio.to_thread(self._runs.page, name)
        if not page["resumable"] or self._queue.busy(name):
            raise ConfigError(f"{name} is {page['status']}: there is nothing to resume.")
        path = self._runs.path / name
        if code := trust.code(read_yaml(path / "config.yaml")):
            raise ConfigError(f"{name} names Python code ({', '.join(code)}). Resume it in a terminal.")
        job = self._queue.add("run", [str(path / "config.yaml"), "--out", str(path), "--resume"], run=name)
        return {"job": job.number, "run": name}

    async def _evaluate(self, request: Request) -> Any:
        name = self._named(request)
        if (await asyncio.to_thread(self._runs.summary, name))["status"] == "running":
            evaluation_request.ask(self._runs.path / name, self._runs.config(name))
            return {"asked": True}
        if not (self._runs.path / name / "adapter").is_dir():
            raise ConfigError(f"{name} has no adapter yet.")
        return {"job": self._queue.add("evaluate", [str(self._runs.path / name)], run=name).number}

    async def _notes(self, request: Request) -> Any:
        name, body = self._named(request), await _body(request)
        await asyncio.to_thread(self._runs.annotate, name, body.get("tags"), body.get("note"))
        return {}

    async def _stop(self, request: Request) -> Any:
        if not self._queue.stop(request.path_params["number"]):
            raise ConfigError("It is over already.")
        return {}

    async def _chat_state(self, _: Request) -> Any:
        return self._chat.state

    async def _chat_open(self, request: Request) -> Any:
        names = (await _body(request)).get("runs")
        if not isinstance(names, list) or not all(isinstance(name, str) and self._runs.run(name) for name in names):
            raise ConfigError("runs: expected the names of one or two runs.")
        await asyncio.to_thread(self._chat.open, names)
        return self._chat.state

    async def _chat_close(self, _: Request) -> Any:
        await asyncio.to_thread(self._chat.close)
        return self._chat.state

    async def _chat_answer(self, request: Request) -> Response:
        lines = await asyncio.to_thread(self._chat.lines, await _body(request, most=_CHAT))

        async def until_the_end() -> AsyncIterator[bytes]:
            async for line in iterate_in_threadpool(lines):
                if request.app.state.closing():
                    return
                yield line

        return StreamingResponse(until_the_end(), media_type="text/event-stream")


def _answered(handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """`handler`, with what it returns, and a user's mistakes, as JSON."""

    async def answer(request: Request) -> Response:
        try:
            reply = await handler(request)
        except WorkbenchError as error:
            asks = {"code": error.code} if isinstance(error, _Asks) else {}
            return _Json({"error": str(error), **asks}, 422)
        except (OSError, ValueError) as error:
            if (text := unnameable(error)) is None:
                raise
            return _Json({"error": text}, 422)
        return reply if isinstance(reply, Response) else _Json(reply)

    return answer


class _Json(JSONResponse):
    """JSON in ASCII: files of others may hold halves of characters, and numbers that JSON has not."""

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, allow_nan=False).encode()
        except ValueError:
            nothing = json.loads(json.dumps(content), parse_constant=lambda _: None)
            return json.dumps(nothing).encode()


async def _body(request: Request, *, most: int = _BODY) -> dict[str, Any]:
    """The JSON object that was sent."""
    try:
        payload = json.loads(await asyncio.wait_for(body_of(request, most=most), _BODY_S))
    except TimeoutError:
        raise HTTPException(408, f"The request has not come in {_BODY_S:g} seconds.") from None
    except TooLarge:
        raise HTTPException(413, f"The request has more than {most:,} bytes.") from None
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict) or not is_unicode(payload):
        raise HTTPException(400, "Expected a JSON object.")
    return payload


class _Asks(WorkbenchError):
    """Python code would be executed, and nobody has permitted exactly that."""

    def __init__(self, code: Mapping[str, str]) -> None:
        super().__init__(f"This executes Python code: {', '.join(f'{key}={value}' for key, value in code.items())}.")
        self.code = code


async def _permitted(request: Request) -> tuple[str, Mapping[str, str], str]:
    """As `_answers`, where the request permits the code that would be executed; raises `_Asks` otherwise."""
    body = await _body(request)
    name, answers, run = _answers(body)
    code = await asyncio.to_thread(form.code, name, answers)
    if code and body.get("code") != code:
        raise _Asks(code)
    return name, answers, run


def _answers(body: Mapping[str, Any]) -> tuple[str, Mapping[str, str], str]:
    """The recipe, what was answered, and the name of the run."""
    recipe, answers, run = body.get("recipe"), body.get("answers", {}), body.get("run", "")
    plain = isinstance(answers, dict) and all(isinstance(value, str) for value in answers.values())
    if not isinstance(recipe, str) or not isinstance(run, str) or not plain:
        raise HTTPException(400, "Expected {recipe: NAME, answers: {KEY: TEXT}, run: NAME}.")
    if recipe.startswith("-") or any(key.startswith("-") for key in answers):
        raise ConfigError("Neither a recipe nor a setting begins with -.")
    return recipe, answers, run


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_address(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code)


@dataclass(frozen=True)
class Access:
    """Where a server listens, and the token that its users need."""

    token: str
    host: str = "127.0.0.1"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can send requests. Then reading needs no token."""
        return self.host in (*LOOPBACK, "::1")

    def ticket(self, path: str) -> str:
        """A secret that permits reading one address, for links that cannot carry the token."""
        return hmac.new(self.token.encode(), path.encode(), hashlib.sha256).hexdigest()

    def refusal(self, method: str, path: str, headers: Headers, query: QueryParams) -> tuple[int, str] | None:
        """Status and reason where a request is not answered."""
        asked = headers.get("host", "")
        name = without_port(asked)
        if not (name in LOOPBACK or self.host in ANY or name.strip("[]") == self.host):
            return 403, f"{asked} is not a name of this server. Open the address that `workbench ui` printed."
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != asked:
            return 403, f"Pages of {origin} may not ask this server."
        scheme, _, given = headers.get("authorization", "").partition(" ")
        permitted = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())
        if path == "/" or path.startswith("/static/") or permitted:
            return None
        if method not in ("GET", "HEAD"):
            return 401, "Changing something needs the token. Open the address that `workbench ui` printed."
        if self.is_local or hmac.compare_digest(query.get("ticket", "").encode(), self.ticket(path).encode()):
            return None
        return 401, "Reading needs the token. Open the address that `workbench ui` printed."


class Guards:
    """ASGI layer that refuses what `access` refuses, and sets security headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        query = QueryParams(scope["query_string"])
        refused = self._access.refusal(scope["method"], scope["path"], Headers(scope=scope), query)
        answer = self._app if refused is None else JSONResponse({"error": refused[1]}, refused[0])
        await answer(scope, receive, guarded)


@dataclass(frozen=True)
class Watched:
    """Everything that a page shows."""

    curves: Sequence[tuple[str, str]] = ()
    """Runs and their members, "" for the run itself."""
    log: int | None = None
    """A job whose log is shown."""
    run: str | None = None
    """A run whose log is shown."""


@dataclass
class EventSource:
    """Server-sent events of one page: runs, jobs, rows of metrics and lines of logs as they come.

    The id of an event says how much of each curve and log was sent. A client that was cut off sends it back as
    `Last-Event-ID`, and goes on from there.
    """

    runs: RunFolder
    queue: JobQueue
    watched: Watched
    closing: Callable[[], bool]
    """Whether the server ends."""
    positions: dict[str, str] = field(default_factory=dict)
    """How much of each curve was sent, and of the log."""
    _sent: dict[str, str] = field(default_factory=dict)

    async def stream(self) -> AsyncIterator[str]:
        """Yield events until the server ends."""
        quiet = 0.0
        while not self.closing():
            new_events = await asyncio.to_thread(self.news)
            for event in new_events:
                yield event
            quiet = 0.0 if new_events else quiet + LOOK_S
            if quiet >= _ALIVE_S:
                quiet = 0.0
                yield ": here\n\n"
            await asyncio.sleep(LOOK_S)

    def news(self) -> list[str]:
        """Events for everything that is new since the last look."""
        events = [self._changed("runs", self.runs.summaries())]
        events.append(self._changed("jobs", [asdict(job) for job in self.queue.jobs]))
        events.append(self._changed("trouble", self.queue.trouble))
        events += [self._rows(run, curve) for run, curve in self.watched.curves]
        events += [self._files(run) for run in dict.fromkeys(run for run, _ in self.watched.curves)]
        if self.watched.log is not None:
            events.append(self._log(self.queue.log(self.watched.log)))
        elif self.watched.run is not None and (run := self.runs.run(self.watched.run)) is not None:
            events.append(self._log(run / run_log.NAME))
        return [event for event in events if event]

    def _changed(self, name: str, value: Any) -> str:
        text = json.dumps(value)
        if self._sent.get(name) == text:
            return ""
        self._sent[name] = text
        return self._event(name, text)

    def _rows(self, run: str, curve: str) -> str:
        path = self.runs.metric_path(run, curve)
        if path is None:
            return ""
        key = f"{run}/{curve}"
        try:
            file = self.runs.metrics(path)
        except (WorkbenchError, OSError) as error:
            return self._changed(f"fault {key}", {"run": run, "curve": curve, "error": str(error)})
        goes_on, columns = file.after(self.positions.get(key))
        if self.positions.get(key) == file.position:
            return ""
        self.positions[key] = file.position
        rows = {"run": run, "curve": curve, "goes_on": goes_on, "columns": columns}
        return self._event("rows", json.dumps(rows))

    def _files(self, run: str) -> str:
        """A run's files besides metrics, where they have changed."""
        if self.runs.run(run) is None:
            return ""
        marks = self.runs.marks(run)
        return self._changed(f"files {run}", {"run": run, **marks}) if marks or f"files {run}" in self._sent else ""

    def _log(self, path: Path) -> str:
        inode, _, offset = self.positions.get("log", "").partition(".")
        try:
            with bounds.opened(path) as file:
                now = os.fstat(file.fileno())
                goes_on = inode == f"{now.st_ino:x}" and int(offset) <= now.st_size
                first = int(offset) if goes_on else max(0, now.st_size - _LOG_BYTES)
                file.seek(first)
                text = file.read(now.st_size - first)
        except (OSError, ValueError):
            return ""
        if goes_on and not text:
            return ""
        self.positions["log"] = f"{now.st_ino:x}.{first + len(text)}"
        value = {"text": text.decode(errors="replace"), "goes_on": goes_on}
        return self._event("log", json.dumps(value))

    def _event(self, name: str, text: str) -> str:
        return f"id: {json.dumps(self.positions)}\nevent: {name.partition(' ')[0]}\ndata: {text}\n\n"


def positions(header: str | None) -> dict[str, str]:
    """The positions that a client sends back as its last event; empty where they are malformed."""
    try:
        parsed = json.loads(header or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in parsed.items()} if isinstance(parsed, dict) else {}
