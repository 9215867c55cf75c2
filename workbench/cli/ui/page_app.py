"""The addresses of the page's server, as an ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from workbench.cli.ui import form, inspections
from workbench.cli.ui.events import EventSource, Watched, positions
from workbench.cli.ui.guards import Access, Guards
from workbench.cli.ui.job_queue import JobQueue
from workbench.cli.ui.run_chat import Chat
from workbench.cli.ui.run_folder import RunFolder
from workbench.errors import ConfigError, WorkbenchError
from workbench.runs import evaluation_request

STATIC = Path(__file__).parent / "static"
_REPORT = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; frame-ancestors 'self'"
)
"""Policy of a report, which may come from anybody: it is shown, and nothing in it is executed."""
_BODY = 2**20
_ROWS = 200
Answer = Callable[[Request], Awaitable[Response]]


class Page:
    """A folder of runs, its queue and its chat, over HTTP."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._runs, self._access = RunFolder(folder), access
        self._queue, self._chat = JobQueue(folder), Chat(folder)
        self._comparing = asyncio.Lock()

    @property
    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/", self._index),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/runs/{name}/report.html", self._report),
            Route("/api/about", self._about),
            Route("/api/events", self._events),
            Route("/api/runs/{name}", self._run),
            Route("/api/runs/{name}/tables/{table}", self._table),
            Route("/api/runs/{name}/samples", self._samples),
            Route("/api/runs/{name}/layers", self._layers),
            Route("/api/differences", self._differences),
            Route("/api/paired", self._paired),
            Route("/api/settings", self._settings),
            Route("/api/recipes", self._recipes),
            Route("/api/recipes/{name:path}", self._recipe),
            Route("/api/chat", self._chat_state),
            *(
                Route(path, _mended(answer), methods=["POST"])
                for path, answer in {
                    "/api/form/mistakes": self._mistakes,
                    "/api/form/check": self._check,
                    "/api/form/plan": self._plan,
                    "/api/form/start": self._start,
                    "/api/runs/{name}/resume": self._resume,
                    "/api/runs/{name}/evaluate": self._evaluate,
                    "/api/jobs/{number:int}/stop": self._stop,
                    "/api/chat/open": self._chat_open,
                    "/api/chat/close": self._chat_close,
                    "/api/chat/completions": self._chat_answer,
                }.items()
            ),
        ]
        app = Starlette(
            routes=routes,
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
        """End the chat and give the folder back."""
        self._chat.close()
        self._queue.close()

    async def _work(self) -> None:
        while True:
            self._queue.go_on()
            await asyncio.sleep(0.5)

    async def _index(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _about(self, _: Request) -> Response:
        return JSONResponse({"folder": str(self._runs.path)})

    async def _events(self, request: Request) -> Response:
        curves = [
            (run, curve) for run, _, curve in (word.partition("//") for word in request.query_params.getlist("curve"))
        ]
        log = request.query_params.get("log", "")
        watched = Watched(curves, int(log) if log.isdecimal() else None, request.query_params.get("run"))
        source = EventSource(
            self._runs,
            self._queue,
            watched,
            request.app.state.closing,
            positions(request.headers.get("last-event-id")),
        )
        return StreamingResponse(source.stream(), media_type="text/event-stream")

    def _named(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if self._runs.run(name) is None:
            raise HTTPException(404, f"No run is called {name}.")
        return name

    async def _run(self, request: Request) -> Response:
        name = self._named(request)
        try:
            run_page = await asyncio.to_thread(self._runs.page, name)
        except WorkbenchError as error:
            raise HTTPException(422, str(error)) from None
        report = f"/runs/{name}/report.html"
        return JSONResponse({**run_page, "ticket": self._access.ticket(report)})

    async def _report(self, request: Request) -> Response:
        path = self._runs.path / self._named(request) / "report.html"
        if not path.is_file():
            raise HTTPException(404, "The report comes when the run has ended.")
        return FileResponse(path, headers={"Content-Security-Policy": _REPORT})

    async def _table(self, request: Request) -> Response:
        name, first = self._named(request), request.query_params.get("first", "0")
        if not first.isdecimal():
            raise HTTPException(400, "first: expected the number of a row.")
        table = request.path_params["table"]
        try:
            table_page = await asyncio.to_thread(self._runs.table, name, table, first=int(first), count=_ROWS)
        except (OSError, ValueError) as error:
            raise HTTPException(422, f"{table}.parquet: damaged ({error}).") from None
        if table_page is None:
            raise HTTPException(404, f"{name} has no {table}.parquet.")
        return JSONResponse(table_page)

    async def _samples(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._runs.samples, self._named(request)))

    async def _layers(self, request: Request) -> Response:
        try:
            return JSONResponse(await asyncio.to_thread(self._runs.layers, self._named(request)))
        except WorkbenchError as error:
            raise HTTPException(422, str(error)) from None

    def _several(self, request: Request) -> list[str]:
        names = request.query_params.getlist("run")
        if missing := [name for name in names if self._runs.run(name) is None]:
            raise HTTPException(404, f"No run is called {missing[0]}.")
        return names

    async def _differences(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(self._runs.differences, self._several(request)))

    async def _paired(self, request: Request) -> Response:
        names = self._several(request)
        if len(names) < 2:
            raise HTTPException(400, "run: expected two names or more.")
        async with self._comparing:  # one process at a time, however many ask
            return await self._looked(request, inspections.paired, str(self._runs.path), names)

    async def _settings(self, _: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(form.settings))

    async def _recipes(self, _: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(form.names))

    async def _recipe(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            recipe_form = await asyncio.to_thread(form.recipe, name)
        except WorkbenchError as error:
            raise HTTPException(422, str(error)) from None
        if recipe_form is None:
            raise HTTPException(404, f"No recipe is called {name}.")
        return JSONResponse({**recipe_form, "run": form.free_name(name, self._taken())})

    def _taken(self) -> list[str]:
        there = [path.name for path in self._runs.path.iterdir()]
        return [*there, *(job.run for job in self._queue.jobs if self._queue.busy(job.run))]

    async def _mistakes(self, request: Request) -> Response:
        name, answers, _ = await _form(request)
        errors = await asyncio.to_thread(form.mistakes, name, answers)
        return JSONResponse({"mistakes": errors, "code": [] if errors else form.code(name, answers)})

    async def _check(self, request: Request) -> Response:
        name, answers, _ = await _form(request)
        return await self._looked(request, inspections.inspect, name, form.words(answers))

    async def _plan(self, request: Request) -> Response:
        name, answers, _ = await _form(request)
        return await self._looked(request, inspections.plan, name, form.words(answers))

    async def _looked(self, request: Request, ask: inspections.Ask, name: str, words: Sequence[str]) -> Response:
        answer = asyncio.ensure_future(inspections.answered(ask, name, words))
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            while not (answer.done() or gone.done() or request.app.state.closing()):
                await asyncio.wait({answer, gone}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(answer.result()) if answer.done() else Response(status_code=503)
        finally:
            answer.cancel()
            gone.cancel()

    async def _start(self, request: Request) -> Response:
        name, answers, run = await _form(request)
        if errors := await asyncio.to_thread(form.mistakes, name, answers):
            return JSONResponse({"mistakes": errors}, 422)
        form.require_name(run, self._taken())
        words = [name, *form.words(answers), "--out", str(self._runs.path / run)]
        return JSONResponse({"job": self._queue.add("run", words, run=run).number, "run": run})

    async def _resume(self, request: Request) -> Response:
        name = self._named(request)
        page = await asyncio.to_thread(self._runs.page, name)
        if not page["resumable"] or self._queue.busy(name):
            raise ConfigError(f"{name} is {page['status']}: there is nothing to resume.")
        if page["code"]:
            raise ConfigError(f"{name} names Python code ({', '.join(page['code'])}). Resume it in a terminal.")
        path = self._runs.path / name
        job = self._queue.add("run", [str(path / "config.yaml"), "--out", str(path), "--resume"], run=name)
        return JSONResponse({"job": job.number, "run": name})

    async def _evaluate(self, request: Request) -> Response:
        name = self._named(request)
        if (await asyncio.to_thread(self._runs.summary, name))["status"] == "running":
            evaluation_request.ask(self._runs.path / name, self._runs.config(name))
            return JSONResponse({"asked": True})
        if not (self._runs.path / name / "adapter").is_dir():
            raise ConfigError(f"{name} has no adapter yet.")
        return JSONResponse({"job": self._queue.add("evaluate", [str(self._runs.path / name)], run=name).number})

    async def _stop(self, request: Request) -> Response:
        if not self._queue.stop(request.path_params["number"]):
            raise ConfigError("It is over already.")
        return JSONResponse({})

    async def _chat_state(self, _: Request) -> Response:
        return JSONResponse(self._chat.state)

    async def _chat_open(self, request: Request) -> Response:
        names = (await _body(request)).get("runs")
        if not isinstance(names, list) or not all(isinstance(name, str) and self._runs.run(name) for name in names):
            raise ConfigError("runs: expected the names of one or two runs.")
        await asyncio.to_thread(self._chat.open, names)
        return JSONResponse(self._chat.state)

    async def _chat_close(self, _: Request) -> Response:
        await asyncio.to_thread(self._chat.close)
        return JSONResponse(self._chat.state)

    async def _chat_answer(self, request: Request) -> Response:
        lines = await asyncio.to_thread(self._chat.lines, await _body(request))

        async def until_the_end() -> AsyncIterator[bytes]:
            async for line in iterate_in_threadpool(lines):
                if request.app.state.closing():
                    return
                yield line

        return StreamingResponse(until_the_end(), media_type="text/event-stream")


def _mended(answer: Answer) -> Answer:
    """`answer`, with a person's mistakes as JSON."""

    async def mended(request: Request) -> Response:
        try:
            return await answer(request)
        except WorkbenchError as error:
            return JSONResponse({"error": str(error)}, 422)

    return mended


async def _body(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY:
            raise HTTPException(413, f"The request has more than {_BODY:,} bytes.")
    try:
        payload = json.loads(bytes(body))
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise HTTPException(400, "Expected a JSON object.")
    return payload


async def _form(request: Request) -> tuple[str, Mapping[str, str], str]:
    """The recipe, what was answered, and the name of the run."""
    body = await _body(request)
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
