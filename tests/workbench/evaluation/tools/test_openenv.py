"""Environments of a server that answers as openenv 0.10 does: what it is asked, and what a model reads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from workbench.config.sections.tools_config import ToolsConfig
from workbench.data.text.tool_calls import ToolCall
from workbench.errors import ConfigError
from workbench.evaluation.tools import openenv
from workbench.evaluation.tools.toolbox import Toolbox, opening, rewarded

TEXT = {"message": {"type": "string"}, "metadata": {"type": "object"}}
CALLS = {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}
MOVES = {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {"type": "object"}}
ACTIONS: dict[str, dict[str, Any]] = {
    "text": {"type": "object", "properties": TEXT, "required": ["message"]},
    "calls": {"type": "object", "properties": CALLS, "required": ["tool_name"]},
    "moves": {"type": "object", "properties": MOVES, "required": ["x", "y"], "description": "A move."},
}
ADD = {
    "name": "add",
    "description": "Adds.",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


class Environments:
    """A server whose sessions are games of guessing the seed, by one kind of action."""

    def __init__(self) -> None:
        self.kind, self.seeds, self.silent = "text", list[int](), False
        self.server: Server = serve(self.session, "127.0.0.1", 0, process_request=self.schema)
        self.url = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def schema(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        there = request.path == "/schema" and self.kind in ACTIONS
        body = json.dumps({"action": ACTIONS[self.kind]} if there else {}).encode()
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body)), "Connection": "close"}), body)

    def session(self, connection: ServerConnection) -> None:
        wanted = 0
        for text in connection:
            message = json.loads(text)
            if self.silent:
                continue
            if message["type"] == "reset":
                wanted = message["data"]["seed"]
                self.seeds.append(wanted)
                answer = observed({"text": "Guess."} if self.kind == "text" else {})
            elif message["type"] == "mcp":
                answer = {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": [ADD]}}}
            elif message["data"].get("message") == "break":
                break
            else:
                answer = self.acted(wanted, message["data"])
            connection.send(json.dumps(answer))

    def acted(self, wanted: int, action: dict[str, Any]) -> dict[str, Any]:
        if self.kind == "text":
            right = action["message"] == str(wanted)
            return observed({"text": "Right." if right else "Wrong."}, 1.0 if right else 0.25, done=right)
        if self.kind == "moves":
            return observed({"x": action["x"] + 1, "y": action["y"]}, None)
        assert action["type"] == "call_tool"
        if action["arguments"]["a"] < 0:
            return observed({"tool_name": "add", "result": None, "error": {"message": "too small"}}, None)
        content = [{"type": "text", "text": str(action["arguments"]["a"] + 1)}]
        return observed({"tool_name": "add", "result": {"content": content, "data": 1}, "error": None}, 2.0)


def observed(fields: dict[str, Any], reward: float | None = 0.0, *, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}}


@pytest.fixture
def server() -> Iterator[Environments]:
    server = Environments()
    yield server
    server.server.shutdown()


def toolbox(server: Environments, kind: str) -> Toolbox:
    server.kind = kind
    return Toolbox(ToolsConfig(environment=server.url))


def test_a_game_of_texts_is_played_in_sessions_of_their_own(server: Environments) -> None:
    box = toolbox(server, "text")
    assert not box.schemas and box.steps and box.rewards
    rows = [{"question": "A?", "seed": 3}, {"question": "B?"}, {"question": "B?"}]
    begun = box.carried_out([box.begun(row, n) for n, row in enumerate(rows)])
    asked = [{"role": "system", "content": "Play."}, {"role": "user", "content": "A digit."}]
    assert opening(begun[0], asked) == [asked[0], {"role": "user", "content": "A digit.\n\nGuess."}]
    first, *others = sorted(server.seeds, key=lambda seed: seed != 3)
    assert first == 3 and others[0] == others[1] != 3, "the episodes of a prompt begin alike"
    said = box.carried_out([box.said("4", 0), box.said(str(others[0]), 1), box.said("no", 2)])
    assert [(each["text"], each["done"]) for each in said] == [("Wrong.", False), ("Right.", True), ("Wrong.", False)]
    assert box.carried_out([box.said("3", 0)])[0]["done"]
    ends = box.carried_out([{"kind": "reward", "episode": n} for n in range(3)])
    assert [rewarded(each)["environment"] for each in ends] == [1.25, 1.0, 0.25]
    box.carried_out([{"kind": "end", "episode": n} for n in range(3)])
    box.close()


def test_tools_of_a_server_are_those_of_the_model(server: Environments) -> None:
    box = toolbox(server, "calls")
    (schema,) = box.schemas
    assert schema["function"] == {"name": "add", "description": "Adds.", "parameters": ADD["inputSchema"]}
    begun = box.carried_out([box.begun({"question": "A?"}, 0)])
    assert opening(begun[0], []) is None, "nothing is shown, so that the row's messages stay"
    right, small = (box.request(ToolCall("add", {"a": a}), 0) for a in (1, -1))
    assert not isinstance(right, str) and not isinstance(small, str)
    assert box.carried_out([right])[0]["text"] == "2"
    assert box.carried_out([small])[0]["text"] == "error: too small"
    assert "is not of type 'integer'" in str(box.request(ToolCall("add", {"a": "x"}), 0)), "it is not even asked"
    assert "given calls of its tools" in box.carried_out([box.said("Hm.", 0)])[0]["failed"]
    assert box.carried_out([{"kind": "reward", "episode": 0}])[0]["reward"] == 2.0
    box.close()


def test_an_action_of_several_fields_is_a_tool(server: Environments) -> None:
    box = toolbox(server, "moves")
    (schema,) = box.schemas
    assert schema["function"]["name"] == "act" and schema["function"]["description"] == "A move."
    assert set(schema["function"]["parameters"]["properties"]) == {"x", "y"}
    box.carried_out([box.begun({}, 0)])
    call = box.request(ToolCall("act", {"x": 1, "y": 2}), 0)
    assert not isinstance(call, str)
    assert json.loads(box.carried_out([call])[0]["text"]) == {"x": 2, "y": 2}
    box.close()


def test_a_server_that_keeps_silent_is_told(server: Environments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "_WAIT", 0.2)
    monkeypatch.setattr(server, "silent", True)
    with pytest.raises(ConfigError, match=r"TimeoutError.*Start the server, or correct the address\."):
        toolbox(server, "calls")


def test_what_is_no_such_server_is_told(server: Environments) -> None:
    with pytest.raises(ConfigError, match=r"is no server of OpenEnv's protocol: .*/schema tells no action. Correct"):
        toolbox(server, "nothing")
    with pytest.raises(ConfigError, match=r"refused.*Start the server, or correct the address\."):
        Toolbox(ToolsConfig(environment="http://127.0.0.1:1"))


def test_a_session_that_breaks_off_fails_its_episode_alone(server: Environments) -> None:
    box = toolbox(server, "text")
    box.carried_out([box.begun({}, 0), box.begun({}, 1)])
    broken, other = box.carried_out([box.said("break", 0), box.said("4", 1)])
    assert broken["failed"].startswith("ConnectionClosed") and other["text"] == "Wrong."
    box.close()
