"""Answers in the form of OpenAI's interface, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from workbench.evaluation.serving.answer_progress import Reason, TokenScore


@dataclass
class Written:
    """One answer as far as it has come."""

    text: str = ""
    tokens: int = 0
    scores: list[TokenScore] = field(default_factory=list)
    reason: Reason | None = None


class AnswerForm(Protocol):
    """How one address writes its answers."""

    prefix: str
    """Beginning of an answer's id."""
    whole: str
    """Name of the object that is a whole answer."""
    part: str
    """Name of the object that is a chunk of it."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the first chunk; None: there is none without text."""

    def choice(self, index: int, written: Written, *, chunk: bool) -> dict[str, Any]:
        """A choice, whole or of a chunk."""


class ChatForm:
    """/v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, scored: bool) -> None:
        self._tokenizer, self._scored = tokenizer, scored

    def opening(self, index: int) -> dict[str, Any]:
        """See AnswerForm."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, written: Written, *, chunk: bool) -> dict[str, Any]:
        """See AnswerForm."""
        message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
        if chunk:
            message = {"content": written.text} if written.text else {}
        scores = {"content": [self._token(each) for each in written.scores], "refusal": None} if self._scored else None
        name = "delta" if chunk else "message"
        return {"index": index, name: message, "logprobs": scores, "finish_reason": written.reason}

    def _token(self, scored: TokenScore) -> dict[str, Any]:
        top = [_named(self._tokenizer, token, logprob) for token, logprob in scored.top]
        return {**_named(self._tokenizer, scored.token, scored.logprob), "top_logprobs": top}


class CompletionForm:
    """/v1/completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, scored: bool, numbered: bool = False) -> None:
        self._tokenizer, self._scored, self._numbered = tokenizer, scored, numbered

    def opening(self, index: int) -> None:
        """See AnswerForm."""
        return None

    def choice(self, index: int, written: Written, *, chunk: bool) -> dict[str, Any]:
        """See AnswerForm."""
        scores = self._scores(written.scores) if self._scored else None
        return {"index": index, "text": written.text, "logprobs": scores, "finish_reason": written.reason}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        tokens, offset = [self._text(each.token) for each in scores], [0]
        for token in tokens:
            offset.append(offset[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in scores],
            "top_logprobs": [
                None if each.logprob is None else {self._text(token): logprob for token, logprob in each.top}
                for each in scores
            ],
            "text_offset": offset[:-1],
        }

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._numbered else str(self._tokenizer.decode([token]))


def _named(tokenizer: PreTrainedTokenizerBase, token: int, logprob: float | None) -> dict[str, Any]:
    text = str(tokenizer.decode([token]))
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(prompts: int, answers: int) -> dict[str, int]:
    """Numbers of tokens."""
    return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}
