"""Environments of a server that speaks OpenEnv's protocol (github.com/meta-pytorch/OpenEnv).

`tool_host` imports this file in place of a user's, so that it uses the standard library and websockets alone.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import cached_property
from typing import Any

ACT = "act"
"""The tool that acts, where an action is more than one text."""
_LARGEST = 2**24
"""Bytes of a message."""
_WAIT = 30.0
"""Seconds to connect, and for the schemas; an episode's calls are bounded by who runs them."""


class OpenEnv:
    """A session with the environment at `address`, such as http://localhost:8000.

    A server with tools (MCP) is given calls of them. One whose action needs a single text is given what the model says,
    any other one calls of a tool `act`, whose parameters are those of an action.

    Raises:
        OSError: Nobody answers there.
        RuntimeError: The server refuses; says why.
        ValueError: What answers is no such server.
    """

    def __init__(self, address: str, wait: float | None = None) -> None:
        self._address, self._wait = address.rstrip("/"), wait
        self._rewards, self._open = list[float](), ExitStack()

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin; returns what the server shows. Its seed is a column `seed` of the row, or a digest of all columns, so
        that all episodes of a prompt begin alike."""
        digest = hashlib.sha256(json.dumps(dict(row), sort_keys=True, default=str).encode()).digest()
        seed = row.get("seed", int.from_bytes(digest[:4], "big") >> 1)
        return _shown(self._asked("reset", {"seed": seed})["observation"]) or None

    def step(self, said: Mapping[str, Any] | str) -> tuple[str, bool]:
        """Act by a call or a text; returns the observation, and whether the episode is done."""
        told = self._asked("step", self._action_of(said))
        self._rewards.append(float(told.get("reward") or 0))
        return _shown(told["observation"]), bool(told.get("done"))

    def reward(self) -> float:
        """The sum of what the steps so far gave."""
        return sum(self._rewards)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools, each as {type: function, function: {name, description, parameters}}."""
        if self._text_field:
            return []
        if not self._has_tools:
            what = str(self._action.get("description") or "Acts in the environment.")
            properties = {name: each for name, each in self._action["properties"].items() if name != "metadata"}
            listed = [{"name": ACT, "description": what, "inputSchema": {**self._action, "properties": properties}}]
        else:
            request = {"jsonrpc": "2.0", "method": "tools/list", "id": 1}
            listed = self._asked("mcp", request).get("result", {}).get("tools", [])
        return [
            {
                "type": "function",
                "function": {
                    "name": each["name"],
                    "description": each.get("description") or each["name"],
                    "parameters": each.get("inputSchema") or {"type": "object", "properties": {}},
                },
            }
            for each in listed
        ]

    def close(self) -> None:
        """End the session."""
        self._open.close()

    def _action_of(self, said: Mapping[str, Any] | str) -> dict[str, Any]:
        if isinstance(said, str):
            if not self._text_field:
                raise RuntimeError("it is given calls of its tools, and this turn has none")
            return {self._text_field: said}
        if self._has_tools:
            return {"type": "call_tool", "tool_name": said["name"], "arguments": dict(said["arguments"])}
        return {self._text_field: json.dumps(dict(said))} if self._text_field else dict(said["arguments"])

    @cached_property
    def _action(self) -> dict[str, Any]:
        """The schema of an action."""
        try:
            with urllib.request.urlopen(f"{self._address}/schema", timeout=_WAIT) as answer:
                action = json.loads(answer.read(_LARGEST)).get("action")
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self._address}/schema is answered with status {error.code}") from None
        if not isinstance(action, dict) or not isinstance(action.get("properties"), dict):
            raise ValueError(f"{self._address}/schema tells no action")
        return action

    @property
    def _has_tools(self) -> bool:
        return {"tool_name", "arguments"} <= set(self._action["properties"])

    @property
    def _text_field(self) -> str:
        """The one field that an action needs, if it is a text."""
        needed = self._action.get("required", [])
        alone = len(needed) == 1 and not self._has_tools
        return needed[0] if alone and self._action["properties"][needed[0]].get("type") == "string" else ""

    @cached_property
    def _socket(self) -> Any:
        from websockets.sync.client import connect

        address = self._address.replace("http", "ws", 1) + "/ws"
        return self._open.enter_context(connect(address, max_size=_LARGEST, open_timeout=_WAIT, proxy=None))

    def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv(self._wait))
        told: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            raise RuntimeError(f"{told.get('code')}: {told.get('message')}")
        return told


def schemas(address: str) -> list[dict[str, Any]]:
    """The tools of an environment; raises what OpenEnv raises."""
    with closing(OpenEnv(address, _WAIT)) as session:
        return session.schemas()


def _shown(observation: Mapping[str, Any]) -> str:
    """An observation as the model reads it: its one text, the result of a call, or all fields as JSON."""
    told = {name: each for name, each in observation.items() if name not in ("metadata", "tool_name") and each != ""}
    if "result" in told and "error" in told:
        if told["error"]:
            return f"error: {told['error']['message']}"
        result = told["result"]
        parts = result.get("content") if isinstance(result, dict) else None
        texts = [part["text"] for part in parts or () if part.get("type") == "text"]
        return "\n".join(texts) if texts else json.dumps(result, ensure_ascii=False)
    if not told:
        return ""
    only = next(iter(told.values())) if len(told) == 1 else None
    return only if isinstance(only, str) else json.dumps(told, ensure_ascii=False)
