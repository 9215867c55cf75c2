"""The text of an answer while its tokens come, up to a stop word."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BEFORE = 6
"""Tokens of the prompt that are decoded in front of an answer, so that its first space is not taken for the text's."""
_HALF = "\ufffd"
"""Decoded from the first bytes of a character."""


class AnswerText:
    """Decodes tokens as they come. Text that may be the beginning of a stop word, or half a character, is held back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._ids = list(prompt[-_BEFORE:])
        self._before, self._written = 0, len(self._ids)
        self._stops = stops
        self._held = ""
        self.stopped = False
        """Whether a stop word came; the text ends before it."""

    def push(self, token: int) -> str:
        """Text that is certain now that this token came."""
        self._ids.append(token)
        more = self._new()
        if not more or more.endswith(_HALF):
            return ""
        self._before, self._written = self._written, len(self._ids)
        return self._certain(more)

    def finish(self) -> str:
        """The rest of the text, with half a character as the tokenizer writes it."""
        rest = self._certain(self._new())
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _new(self) -> str:
        """Text of the tokens that are not written yet, behind that of some that are: a token may depend on them."""
        known, whole = (self._decoded(end) for end in (self._written, len(self._ids)))
        return whole[len(known) :]

    def _decoded(self, end: int) -> str:
        return str(self._backend.decode(self._ids[self._before : end], skip_special_tokens=True))

    def _certain(self, more: str) -> str:
        if self.stopped:
            return ""
        text = self._held + more
        stop_spans = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if stop_spans:  # the one that is complete first
            self.stopped, self._held = True, ""
            return text[: min(stop_spans)[1]]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Number of the last characters of a text that may be the beginning of a stop word."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
