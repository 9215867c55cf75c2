"""A client of servers with OpenAI's interface, which retries requests after passing failures."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from transformers import PreTrainedTokenizerBase

from workbench.errors import BackboneError, ConfigError

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each retry."""
SECONDS = 600.0
"""Longest wait for an answer."""
_PREFIX = "token_id:"
_PASSING = {408, 429, 500, 502, 503, 504}
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

    @staticmethod
    def of(url: str, *, key: str, kept: str) -> OpenAIClient:
        """The server at an address up to /v1; OPENAI_API_KEY in the environment holds its secret, if any."""
        secret = os.environ.get("OPENAI_API_KEY")
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        return OpenAIClient(url.rstrip("/"), key, httpx2.Client(headers=headers, timeout=SECONDS), kept)

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
        names = [str(each.get("id")) for each in payload.get("data", [])]
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
        except (httpx2.HTTPError, ValueError):
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
        for wait in (*(WAITS if patient else ()), None):
            try:
                response = self.client.request(method, f"{self.url}/{path}", json=body)
            except httpx2.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            except httpx2.InvalidURL as error:
                raise ConfigError(f"{self.named} is no address: {error}.") from None
            else:
                if response.status_code not in _PASSING:
                    return response
                why = f"status {response.status_code}: {reason(response)}"
            if wait is not None:
                time.sleep(wait)
        raise BackboneError(
            f"{self.named} does not answer ({why}). Start the server, or correct the address; {self.kept}."
        )


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
    """Message of an error in OpenAI's form, or the beginning of the response."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return repr(response.text[:200])
