"""One or two runs that answer, in a process of `workbench serve` whose memory is free when the chat is closed."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from workbench.errors import ConfigError

_ADDRESS = re.compile(r"http://([\d.]+):(\d+) answers")
_WAIT_S = 3600.0


@dataclass
class _Server:
    """A process of `workbench serve`."""

    runs: tuple[str, ...]
    process: subprocess.Popen[bytes]
    key: str
    log: IO[bytes]

    @property
    def printed(self) -> str:
        """Everything that it has printed."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


class Chat:
    """The runs that answer now, if any do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: _Server | None = None

    @property
    def state(self) -> dict[str, Any]:
        """Runs that are asked, and whether they are loaded, answer, or could not be loaded."""
        server = self._server
        if server is None:
            return {"state": "closed", "runs": [], "models": []}
        printed, state = server.printed, {"runs": server.runs, "models": []}
        if server.process.poll() is not None:
            return {**state, "state": "failed", "error": printed.strip().removeprefix("Error: ")}
        if not _ADDRESS.search(printed):
            return {**state, "state": "loading"}
        models = [line.rpartition(": ")[0] for line in printed.splitlines() if ": /v1/chat/completions" in line]
        return {**state, "state": "ready", "models": models}

    def open(self, runs: Sequence[str]) -> None:
        """Have these runs answer, and no others."""
        if not 1 <= len(runs) <= 2 or len(set(runs)) != len(runs):
            raise ConfigError("A chat has one run, or two that are not the same.")
        if self._server is not None and self._server.runs == tuple(runs) and self._server.process.poll() is None:
            return
        self.close()
        key = secrets.token_urlsafe(24)
        log = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process that writes it
        sources = [f"{run}={self._folder / run}" for run in runs]
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.cli", "serve", *sources, "--port", "0", "--grace", "1"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "WORKBENCH_API_KEY": key, "PYTHONUNBUFFERED": "1"},
        )
        self._server = _Server(tuple(runs), process, key, log)

    def close(self) -> None:
        """End the server, by force where it does not end in ten seconds."""
        if self._server is None:
            return
        process = self._server.process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._server.log.close()
        self._server = None

    def lines(self, request: Mapping[str, Any]) -> Iterator[bytes]:
        """The stream of an answer to a request as OpenAI's interface has it; raises ConfigError where none answers."""
        server = self._server
        address = None if server is None else _ADDRESS.search(server.printed)
        if server is None or address is None:
            raise ConfigError("No run is loaded. Load one first.")
        connection = http.client.HTTPConnection(address[1], int(address[2]), timeout=_WAIT_S)
        headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({**request, "stream": True}), headers)
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise ConfigError(f"The runs do not answer: {error}. Load them again.") from None
        if response.status != 200:
            reply = response.read()
            connection.close()
            try:
                raise ConfigError(str(json.loads(reply)["error"]["message"]))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(reply.decode(errors="replace")) from None
        return _read(connection, response)


def _read(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while line := response.readline():
            yield line
    finally:
        connection.close()
