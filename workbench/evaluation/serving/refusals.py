"""Answers that say no, in the form of OpenAI's errors."""

from __future__ import annotations

from starlette.responses import JSONResponse

from workbench.evaluation.serving.answer_progress import Interrupted, Overfull, ShuttingDown, TimedOut, Unloaded
from workbench.evaluation.serving.scheduler import QueueFull

RETRY_S = 1
"""Seconds after which a client that was turned away may ask again."""


class Refusal(Exception):
    """A request that is not answered.

    Args:
        message: What is wrong and what to write.
        param: The parameter that it is about.
        code: Its name for programs.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, object]:
        """The error as OpenAI writes it."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The answer to a client."""
        headers = {"Retry-After": str(RETRY_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def of(error: QueueFull | Interrupted) -> Refusal:
    """The refusal of a request that could not be answered now."""
    if isinstance(error, QueueFull):
        return Refusal("Too many requests wait already. Ask again later.", status=429, code="queue_full")
    if isinstance(error, TimedOut):
        return Refusal("The answer took longer than the server allows.", status=504, code="timeout")
    if isinstance(error, Overfull):
        return Refusal("The server ran out of memory. Ask again later, or for less.", status=503, code="memory")
    if isinstance(error, Unloaded):
        return Refusal("The adapter was unloaded. Load it again.", status=404, param="model", code="model_not_found")
    if isinstance(error, ShuttingDown):
        return Refusal("The server is shutting down. Ask again later.", status=503, code="shutting_down")
    return Refusal("The server failed; its log says why.", status=500, code="failed")
