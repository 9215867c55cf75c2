"""A client of servers with OpenAI's interface, which retries requests after passing failures."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from workbench.errors import BackboneError, ConfigError

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each retry, where the server names no longer wait."""
LONGEST_WAIT = 600.0
"""Seconds that a server may ask to be left alone before the request is given up."""
SECONDS = 600.0
"""Longest wait for an answer."""
_PREFIX = "token_id:"
_PASSING = {408, 429, *range(500, 600)} - {501, 505}
"""Status codes that are worth a retry."""


@dataclass(frozen=True)
class OpenAIClient:
    """A server at an address. A context: leaving it closes its connections."""

    url: str
    key: str
    """Key of the configuration that names it."""
    client: httpx2.Client
    kept: str
    """Says in errors what is kept, such as answers on disk."""
    retries: int | None = None
    """Retries after a passing failure; None: one after each of WAITS."""

    @staticmethod
    def of(url: str, *, key: str, kept: str, seconds: float = SECONDS, retries: int | None = None) -> OpenAIClient:
        """The server at an address up to /v1; OPENAI_API_KEY in the environment holds its secret, if any. `seconds`:
        the longest wait for an answer."""
        secret = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (secret.isascii() and secret.isprintable()):
            raise ConfigError("OPENAI_API_KEY holds characters that no request can carry. Set it to the key alone.")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        return OpenAIClient(url.rstrip("/"), key, httpx2.Client(headers=headers, timeout=seconds), kept, retries)

    def __enter__(self) -> OpenAIClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def named(self) -> str:
        """The address as the configuration has it, for messages."""
        return f"{self.key}={self.url}"

    def require_model(self, model: str, *, key: str) -> None:
        """Raise ConfigError where the server has no model of this name, the value of `key`."""
        payload = self.json(self.sent("GET", "models", None, patient=False))
        listed = payload.get("data")
        names = [str(each.get("id")) for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        if model not in names:
            known = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"{key}={model} is no model of {self.url}. It has: {known}.")

    def tokens(self, model: str, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts by the server's tokenizer; raises ValueError where the server does not return them."""
        return [token_numbers(each)[:-1] for each in self.echoed(model, texts, 1)]

    def echoed(self, model: str, prompts: Sequence[Any], k: int) -> list[dict[str, Any]]:
        """Log-probabilities of each prompt's tokens and of one more, with the `k` likeliest tokens at each position.

        Raises:
            ValueError: The server returns none, or refuses; says why.
        """
        body = {"model": model, "prompt": list(prompts), "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": k}
        response = self.sent("POST", "completions", {**body, "return_tokens_as_token_ids": True})
        if response.status_code == 400:
            raise ValueError(reason(response))
        given = [choice.get("logprobs") for choice in self.choices(response)]
        scored = [each for each in given if isinstance(each, dict) and each.get("tokens") and each.get("top_logprobs")]
        if len(scored) < len(given):
            raise ValueError("its answer has no log-probabilities of the prompt's tokens")
        return scored

    def choices(self, response: httpx2.Response) -> list[dict[str, Any]]:
        """The choices in a response, by index."""
        return sorted(self.json(response).get("choices", []), key=lambda choice: int(choice.get("index", 0)))

    def said(self, response: httpx2.Response) -> str:
        """The text that a chat is answered with; raises BackboneError: the response holds none."""
        payload = self.json(response)
        match payload:
            case {"choices": [{"message": {"content": str() | None as text}}, *_]}:
                return text or ""
        raise BackboneError(
            f"{self.named}: {response.request.url.path} was answered without a message: {str(payload)[:200]} "
            f"{self.kept[:1].upper()}{self.kept[1:]}."
        )

    def json(self, response: httpx2.Response) -> dict[str, Any]:
        """The JSON object in a response.

        Raises:
            ConfigError: The server wants another API key.
            BackboneError: It is no JSON object.
        """
        self.require_permitted(response)
        try:
            response.raise_for_status()
            payload = response.json()
        except (httpx2.HTTPError, ValueError, RecursionError):
            payload = None
        if not isinstance(payload, dict):
            raise BackboneError(
                f"{self.named}: {response.request.method} {response.request.url.path} was answered "
                f"with status {response.status_code}: {reason(response)} Write the address up to /v1."
            )
        return payload

    def require_permitted(self, response: httpx2.Response) -> None:
        """Raise ConfigError where the server refused the API key."""
        if response.status_code in (401, 403):
            raise ConfigError(f"{self.named}: {reason(response)} Set OPENAI_API_KEY to its key.")

    def sent(self, method: str, path: str, body: Mapping[str, Any] | None, *, patient: bool = True) -> httpx2.Response:
        """The response to a request, which is retried after passing failures if `patient`.

        Raises:
            BackboneError: The server does not answer.
            ConfigError: The address is invalid.
        """
        count = (len(WAITS) if self.retries is None else self.retries) if patient else 0
        for retry in range(count + 1):
            asked = 0.0
            try:
                response = self._whole(method, path, body)
            except (httpx2.TransportError, httpx2.DecodingError) as error:
                why = f"{type(error).__name__}: {error}"
            except (httpx2.InvalidURL, UnicodeError) as error:
                raise ConfigError(f"{self.named} is no address: {error}.") from None
            else:
                if response.status_code not in _PASSING:
                    return response
                why, asked = f"status {response.status_code}: {reason(response)}", seconds_asked(response)
            if asked > LONGEST_WAIT:
                why += f" It asks to be left alone for {asked:,.0f} s."
                break
            if retry < count:
                time.sleep(max(asked, WAITS[min(retry, len(WAITS) - 1)]))
        raise BackboneError(
            f"{self.named} does not answer ({why}). Start the server, or correct the address; {self.kept}."
        )

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        """The response once all of it is there. The client's limit is one of each piece, and a server may send pieces
        for ever."""
        limit = self.client.timeout.read
        with self.client.stream(method, f"{self.url}/{path}", json=body) as response:
            content, begun = bytearray(), time.monotonic()
            for piece in response.iter_bytes():
                content += piece
                if limit is not None and time.monotonic() - begun > limit:
                    raise httpx2.ReadTimeout(f"no whole answer in {limit:g} s")
            headers = {name: each for name, each in response.headers.items() if name in ("content-type", "retry-after")}
            status, request = response.status_code, response.request
        return httpx2.Response(status, headers=headers, content=bytes(content), request=request)


def seconds_asked(response: httpx2.Response) -> float:
    """Seconds after which the server wants to be asked again (Retry-After, a number or a date); 0 where it does not
    say."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
        return max(0.0, (when - datetime.now(when.tzinfo and UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def mismatch(
    texts: Sequence[str], served: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[int], list[int]] | None:
    """The first text that a server tokenises differently, with the server's ids and those of `tokenizer`; else None."""
    for text, ids in zip(texts, served, strict=True):
        expected = [tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False)]
        if list(ids) not in expected:
            return text, list(ids), expected[1]
    return None


def token_numbers(scored: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens of log-probabilities; raises ValueError where the server writes them as text."""
    try:
        return [token_number(token) for token in scored["tokens"]]
    except (ValueError, AttributeError, TypeError):
        raise ValueError("its tokens are written as text, not as token_id:NUMBER") from None


def token_number(token: str) -> int:
    """Id of a token written as token_id:NUMBER; raises ValueError where it is written as text."""
    if not token.startswith(_PREFIX):
        raise ValueError(token)
    return int(token.removeprefix(_PREFIX))


def reason(response: httpx2.Response) -> str:
    """Message of an error in OpenAI's form, or the beginning of the response, without the key that was sent."""
    try:
        error = response.json()["error"]
        said = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        said = repr(response.text)
    _, _, secret = response.request.headers.get("Authorization", "").partition(" ")
    said = said.replace(secret, "***") if secret else said
    return said if len(said) <= 300 else f"{said[:300]} ..."
