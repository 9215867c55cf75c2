"""The text of an answer while its tokens come, up to a stop word."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

_BEFORE = 6
"""Tokens of the prompt that are decoded in front of an answer, so that its first space is not taken for the text's."""


class AnswerText:
    """Decodes tokens as they come. Text that may be the beginning of a stop word, or half a character, is held back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._ids = list(prompt[-_BEFORE:])
        self._stream = DecodeStream(list(self._ids), True)
        self._stops = stops
        self._begun = len(self._decoded())
        self._held = ""
        self.stopped = False
        """Whether a stop word came; the text ends before it."""

    def push(self, token: int) -> str:
        """Text that is certain now that this token came."""
        self._ids.append(token)
        return self._certain(self._stream.step(self._backend, token) or "")

    def finish(self) -> str:
        """The rest of the text, with half a character as the tokenizer writes it."""
        rest = self._certain(self._decoded()[self._begun :])
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _decoded(self) -> str:
        return str(self._backend.decode(self._ids, skip_special_tokens=True))

    def _certain(self, more: str) -> str:
        self._begun += len(more)
        text = self._held + more
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found and not self.stopped:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        if self.stopped:
            return ""
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text may be the beginning of a stop word."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
