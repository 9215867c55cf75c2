"""A process that serves an application until it is asked to stop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from workbench.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine, for itself."""


def without_port(host: str) -> str:
    """The name in a Host header."""
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


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
    """Answer until SIGTERM or Ctrl-C; what has begun may end, for so many seconds.

    Args:
        ready: Is told the address once it answers.
    """
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace)
    # uvicorn raises the signal again when it has ended: to have been asked to stop is no failure.
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
