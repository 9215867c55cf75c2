"""A judge on 127.0.0.1 with OpenAI's interface, which prefers the longer answer unless a test says otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_teacher import FakeServer
from workbench.runs import openai_client


class JudgeServer(FakeServer):
    """Prefers the longer answer, unless `verdict` decides by the two texts."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict: Any = lambda a, b: "[[A]]" if len(a) > len(b) else "[[B]]" if len(b) > len(a) else "[[C]]"


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """Such a server, with no verdict on disk and no wait before a retry."""
    monkeypatch.setattr(openai_client, "WAITS", (0.0,) * 7)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    server = JudgeServer()
    server.answer = lambda body: answer(server, body)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def answer(server: JudgeServer, body: dict[str, Any]) -> dict[str, Any]:
    shown = body["messages"][-1]["content"]
    first = shown.split("[Answer A]\n")[1].split("\n[End of answer A]")[0]
    second = shown.split("[Answer B]\n")[1].split("\n[End of answer B]")[0]
    said = f"I look at both, [[C]] at first. {server.verdict(first, second)}"
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
