"""A teacher on 127.0.0.1 with OpenAI's interface, which answers what a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class FakeServer(ThreadingHTTPServer):
    """Answers `N!` to `What comes after N?`, with the seed behind it, unless `behave` answers a request itself."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.behave: Callable[[int, int, Any], Any] = lambda number, time, handler: None
        self.answer: Callable[[dict[str, Any]], Any] | None = None
        """Answers every request in place of the above."""
        self.models: Any = {"data": [{"id": "teacher"}]}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


def answered(number: int, seed: int, **message: Any) -> dict[str, Any]:
    """A whole response."""
    said = {"role": "assistant", "content": f"{number + 1}! ({seed % 97})", **message}
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    return {"choices": [{"index": 0, "message": said, "finish_reason": "stop"}], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path.startswith("/v1/locked"):
            self.say({"error": {"message": "the key is missing"}}, 401)
        elif self.path != "/v1/models":
            self.say({}, 418)
        else:
            self.say(self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.answer is not None:
            with self.server.lock:
                self.server.asked.append(body)
            self.say(self.server.answer(body))
            return
        said = body["messages"][-1]["content"]
        number = int((said if isinstance(said, str) else said[-1]["text"]).split()[-1].rstrip("?"))
        with self.server.lock:
            time = sum(each["number"] == number for each in self.server.asked)
            self.server.asked.append({"number": number, **body})
        said = self.server.behave(number, time, self)
        if said is not self:
            self.say(answered(number, body["seed"]) if said is None else said)

    def say(self, body: Any, status: int = 200, **headers: str) -> _Handler:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)
        return self

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
