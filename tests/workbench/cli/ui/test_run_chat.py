"""A finished run answers with and without its adapter, in a process that ends with the chat."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.cli.ui.run_chat import Chat
from workbench.errors import ConfigError


def _answer(chat: Chat, model: str) -> str:
    asked = {"model": model, "messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 12}
    lines = [line.decode().removeprefix("data: ").strip() for line in chat.lines(asked)]
    pieces: list[Any] = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(pieces) > 3 and lines[-2:] == ["[DONE]", ""]
    return "".join(choice["delta"].get("content", "") for piece in pieces for choice in piece["choices"])


@pytest.mark.parametrize("runs", [[], ["a", "a"], ["a", "b", "c"]])
def test_a_chat_has_one_run_or_two(tmp_path: Path, runs: list[str]) -> None:
    chat = Chat(tmp_path)
    with pytest.raises(ConfigError, match="one run, or two"):
        chat.open(runs)
    with pytest.raises(ConfigError, match="Load one first"):
        chat.lines({})
    assert chat.state["state"] == "closed"


@pytest.mark.slow
def test_a_run_answers_with_and_without_its_adapter(trained: Path) -> None:
    chat = Chat(trained.parent)
    chat.open([trained.name])
    try:
        deadline = time.monotonic() + 120
        while chat.state["state"] == "loading":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        state = chat.state
        assert state["state"] == "ready" and len(state["models"]) == 2, state
        first, second = (_answer(chat, model) for model in state["models"])
        assert first and second and first != second
        with pytest.raises(ConfigError, match="No model is called"):
            _answer(chat, "nobody")
    finally:
        chat.close()
    assert chat.state["state"] == "closed"
