"""Access to a page's server: an ASGI layer that refuses requests and sets the headers of every response."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workbench.runs.http_server import LOOPBACK, without_port

ANY = ("0.0.0.0", "::")
"""Addresses that stand for all of a machine's."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_READS = ("GET", "HEAD")


@dataclass(frozen=True)
class Access:
    """Where a server listens, and the token that opens what is not for everybody."""

    token: str
    host: str = "127.0.0.1"

    @property
    def is_local(self) -> bool:
        """Whether nobody but this machine can ask. Then reading needs no token."""
        return self.host in (*LOOPBACK, "::1")

    def ticket(self, path: str) -> str:
        """A word that opens one address for reading, for links that cannot carry the token."""
        return hmac.new(self.token.encode(), path.encode(), hashlib.sha256).hexdigest()

    def refusal(self, method: str, path: str, headers: Headers, query: QueryParams) -> tuple[int, str] | None:
        """Status and reason where a request is not answered."""
        asked = headers.get("host", "")
        if not self._knows(without_port(asked)):
            return 403, f"{asked} is not a name of this server. Open the address that `workbench ui` printed."
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != asked:
            return 403, f"Pages of {origin} may not ask this server."
        if path == "/" or path.startswith("/static/") or self._permitted(headers):
            return None
        if method not in _READS:
            return 401, "Changing something needs the token. Open the address that `workbench ui` printed."
        if self.is_local or hmac.compare_digest(query.get("ticket", "").encode(), self.ticket(path).encode()):
            return None
        return 401, "Reading needs the token. Open the address that `workbench ui` printed."

    def _knows(self, name: str) -> bool:
        return name in LOOPBACK or self.host in ANY or name.strip("[]") == self.host

    def _permitted(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token.encode())


class Guards:
    """Answers for the application where `access` refuses, and sets headers that keep browsers from asking others."""

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
