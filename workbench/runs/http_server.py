"""Serving an ASGI application over HTTP until SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from workbench.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names by which only this machine reaches itself."""


def without_port(host: str) -> str:
    """The name in a Host header."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


class TooLarge(Exception):
    """A request has more bytes than it may have."""


async def body_of(request: Request, *, most: int) -> bytes:
    """The bytes that were sent; raises TooLarge."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise TooLarge
    return bytes(body)


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""

    def bound(self) -> socket.socket:
        """A socket at this address; raises ConfigError where there can be none."""
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((self.host, self.port), family=family)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{self.host}:{self.port}: {why}. Write another --port (0 takes a free one) or --host."
            ) from None


def serve(app: Starlette, listening: socket.socket, *, grace: int, ready: Callable[[str], None]) -> None:
    """Answer requests until SIGTERM or Ctrl-C.

    Args:
        grace: Seconds that requests in progress may still take.
        ready: Called with the address once the server answers.
    """
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace)
    # uvicorn raises the signal again after it has stopped: being asked to stop is no failure.
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGTERM, signal.SIGINT)}
    host, port = listening.getsockname()[:2]
    try:
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        server = uvicorn.Server(config)
        app.state.closing = lambda: server.should_exit  # for streams that have no end of their own
        server.run(sockets=[listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
