"""A teacher that a server answers for: the likeliest tokens after each token of a row, by OpenAI's completions.

A row is sent as tokens and echoed with log-probabilities; that of its last token is the answer's first. vLLM and
`workbench serve` write tokens as token_id:NUMBER, so that none of two with one text is taken for the other.

Legend: N positions, k tokens kept of each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx2
import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.distill_config import DistillConfig, TeacherConfig
from workbench.data.batching import Indices, micro_batches
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import cache_packing
from workbench.distillation.cache_packing import Packed
from workbench.distillation.cache_shards import Keys
from workbench.errors import BackboneError, ConfigError, DataError

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before a request that failed for a passing reason is sent again."""
SECONDS = 600.0
"""Longest wait for an answer."""
AT_ONCE = 4
"""Requests on their way."""
TOKENS, ROWS = 4096, 32
"""Tokens of a request, padding included, and its rows."""
PROBES = 8
"""Training rows whose text the server's tokenizer reads, and whose conversation its template writes."""
_PREFIX = "token_id:"
_PASSING = {408, 429, 500, 502, 503, 504}

Top = Mapping[int, float]
"""Log-probabilities of the likeliest tokens of a position."""


@dataclass(frozen=True)
class ServedTeacher:
    """A model by its name at an address. A context: leaving it closes its connections."""

    url: str
    model: str
    _client: httpx2.Client

    @staticmethod
    def of(teacher: TeacherConfig) -> ServedTeacher:
        """The teacher that a configuration names."""
        assert teacher.url is not None and isinstance(teacher.id, str), "the configuration requires both"
        key = os.environ.get("OPENAI_API_KEY")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return ServedTeacher(teacher.url.rstrip("/"), teacher.id, httpx2.Client(headers=headers, timeout=SECONDS))

    def __enter__(self) -> ServedTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def likeliest(self, rows: Sequence[Sequence[int]], k: int) -> list[list[Top]]:
        """The likeliest tokens in place of each token but the first, of each row; at least `k` a position.

        Raises:
            BackboneError: the server does not answer.
            ConfigError: it does not tell that much.
        """
        scored = self._completed([list(ids[:-1]) for ids in rows], k)
        if len(scored) != len(rows):
            raise self._unusable(f"it gave {len(scored)} answers to {len(rows)} rows")
        return [self._read(each, ids, k) for each, ids in zip(scored, rows, strict=True)]

    def require_comparable(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatEncoder | MlmEncoder,
        train: TokenizedSet,
    ) -> None:
        """Refuse a teacher that reads other tokens than the student, or conversations written otherwise.

        Raises:
            BackboneError: the server does not answer.
            ConfigError: it has no such model, tells no probabilities of tokens, or reads rows otherwise.
        """
        names = [str(each.get("id")) for each in self._get("models").get("data", [])]
        if self.model not in names:
            known = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"distill.teacher.id={self.model} is no model of {self.url}. It has: {known}.")
        rows = [train[index].input_ids for index in range(min(PROBES, len(train)))]
        self.likeliest([[int(token) for token in ids] for ids in rows if len(ids) > 1][:1], 1)
        texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]
        self._require_same_tokens([text for text in texts if text.strip()], tokenizer)
        if train.chat and isinstance(template, ChatEncoder):
            self._require_same_rendering(data, template)

    def _require_same_tokens(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        for text, scored in zip(texts, self._completed(list(texts), 1), strict=True):
            served_ids = [_number(token) for token in scored["tokens"]][:-1]
            expected = [tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False)]
            if served_ids not in expected:
                raise ConfigError(
                    f"distill.teacher.url={self.url}: {self.model} cuts a text of {len(text)} characters into "
                    f"{len(served_ids)} tokens, {served_ids[:8]} ..., and the student's tokenizer into "
                    f"{len(expected[1])}, {expected[1][:8]} ... Name a teacher with the student's tokenizer, or load "
                    "one here with distill.loss=universal."
                )

    def _require_same_rendering(self, data: DataConfig, template: ChatEncoder) -> None:
        """Compare how many tokens a conversation has: a server tells no more of what its template writes."""
        for example in tokenized.first_examples(data, PROBES):
            asked = list(example.messages)
            while asked and asked[-1]["role"] == "assistant":
                asked.pop()
            if not asked or example.tools:
                continue
            try:
                wanted = len(template.prompt(asked))
            except DataError:
                continue  # the row was left out when the data were read
            messages = [{key: each[key] for key in ("role", "content") if key in each} for each in asked]
            body = {"model": self.model, "messages": messages, "max_tokens": 1, "temperature": 0}
            response = self._sent("POST", "chat/completions", body)
            if response.status_code in (400, 404, 405):
                return  # no chat is served, as of a model without a template
            served = int(self._json(response).get("usage", {}).get("prompt_tokens", wanted))
            if served != wanted:
                raise ConfigError(
                    f"distill.teacher.url={self.url}: the chat template of {self.model} writes {example.place} in "
                    f"{served} tokens, and the student's in {wanted}, so that it would be asked about texts that "
                    "it has not learnt to go on from. Write the teacher's template into a file, and name it to the "
                    "student: model.chat_template=FILE"
                )

    def _completed(self, prompts: Sequence[Any], k: int) -> list[dict[str, Any]]:
        """Log-probabilities of each prompt's tokens and one more."""
        body = {
            "model": self.model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": k,
            "return_tokens_as_token_ids": True,
        }
        response = self._sent("POST", "completions", body)
        if response.status_code == 400:
            raise self._unusable(_reason(response))
        choices = sorted(self._json(response).get("choices", []), key=lambda choice: int(choice.get("index", 0)))
        scored = [choice.get("logprobs") for choice in choices]
        if not all(isinstance(each, dict) and each.get("tokens") and each.get("top_logprobs") for each in scored):
            raise self._unusable("its answer has no log-probabilities of the prompt's tokens")
        return scored

    def _read(self, scored: Mapping[str, Any], ids: Sequence[int], k: int) -> list[Top]:
        """The likeliest tokens of each position of a row."""
        try:
            echoed_ids = [_number(token) for token in scored["tokens"]]
            tops: list[Top] = [
                {_number(token): float(logp) for token, logp in each.items()} for each in scored["top_logprobs"][1:]
            ]
        except (ValueError, AttributeError, TypeError):
            raise self._unusable("its tokens are written as text, not as token_id:NUMBER") from None
        if echoed_ids[: len(ids) - 1] != list(ids[:-1]) or len(tops) < len(ids) - 1:
            raise self._unusable("it echoes other tokens than it was sent")
        if (fewest := min(map(len, tops), default=k)) < k:
            raise ConfigError(
                f"distill.cache.k={k}: {self.url} tells {fewest} of the likeliest tokens. Write "
                f"distill.cache.k={fewest}."
            )
        return tops[: len(ids) - 1]

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"distill.teacher.url={self.url} cannot teach: {reason}.\n  It must answer POST /completions with echo, "
            "logprobs=distill.cache.k and return_tokens_as_token_ids, as `workbench serve` (k up to 20) and vLLM "
            "(--max-logprobs) do."
        )

    def _get(self, path: str) -> dict[str, Any]:
        return self._json(self._sent("GET", path, None, patient=False))

    def _json(self, response: httpx2.Response) -> dict[str, Any]:
        if response.status_code in (401, 403):
            raise ConfigError(f"distill.teacher.url={self.url}: {_reason(response)} Set OPENAI_API_KEY to its key.")
        try:
            response.raise_for_status()
            payload = response.json()
        except (httpx2.HTTPError, ValueError):
            payload = None
        if not isinstance(payload, dict):
            raise BackboneError(
                f"distill.teacher.url={self.url}: {response.request.method} {response.request.url.path} was answered "
                f"with status {response.status_code}: {_reason(response)} Write the address up to /v1."
            )
        return payload

    def _sent(self, method: str, path: str, body: Mapping[str, Any] | None, *, patient: bool = True) -> httpx2.Response:
        """The answer to a request, which is sent again where it fails for a passing reason."""
        for wait in (*(WAITS if patient else ()), None):
            try:
                response = self._client.request(method, f"{self.url}/{path}", json=body)
            except httpx2.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            except httpx2.InvalidURL as error:
                raise ConfigError(f"distill.teacher.url={self.url} is no address: {error}.") from None
            else:
                if response.status_code not in _PASSING:
                    return response
                reason = f"status {response.status_code}: {_reason(response)}"
            if wait is not None:
                time.sleep(wait)
        raise BackboneError(
            f"distill.teacher.url={self.url} does not answer ({reason}). Start the server, or correct the address; the "
            "finished shards of the cache are kept."
        )


@dataclass(frozen=True)
class ServedQuestions:
    """Asks a server about training rows, several requests at a time."""

    train: TokenizedSet
    teacher: ServedTeacher
    config: DistillConfig
    vocabulary: int
    """Tokens that count."""

    def ask(self, share: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Indices, Packed, int]:
        """See `teacher_cache.Questions`."""
        longer = micro_batches(share, self.train.lengths, tokens=TOKENS)
        groups = [rows[start : start + ROWS] for rows in longer for start in range(0, len(rows), ROWS)]
        threads = ThreadPoolExecutor(AT_ONCE)
        try:
            top_tokens = list(chain.from_iterable(threads.map(self._tops, groups)))
        finally:
            threads.shutdown(cancel_futures=True)
        order = np.concatenate(groups)
        assert len(top_tokens) == counts_R[order].sum()
        return order, self._pack(top_tokens), self.vocabulary

    def _tops(self, rows: Indices) -> list[Top]:
        """The likeliest tokens at the supervised positions of some rows."""
        each = [self.train[int(index)] for index in rows]
        scored = self.teacher.likeliest([[int(token) for token in row.input_ids] for row in each], self._k)
        pairs = zip(each, scored, strict=True)
        return [tops[place] for row, tops in pairs for place in np.flatnonzero(np.asarray(row.supervised)[1:])]

    @property
    def _k(self) -> int:
        return min(self.config.cache.k, self.vocabulary)

    def _pack(self, tops: Sequence[Top]) -> Packed:
        """As `cache_packing.pack_likeliest` packs whole distributions."""
        kept = [sorted(self._likeliest(top)) for top in tops]
        ids_Nk = np.asarray(kept, dtype=np.int64)
        logp_Nk = np.asarray([[top[token] for token in ids] for top, ids in zip(tops, kept, strict=True)])
        # A server may round: together the k may have a little more than all of the probability.
        rest_N = np.log(np.maximum(1 - np.exp(logp_Nk).sum(1), np.finfo(np.float32).eps))
        return {
            **cache_packing.pack_ids(ids_Nk, self.vocabulary),
            "log_probs": logp_Nk.astype(self.config.cache.dtype),
            "rest": rest_N.astype(np.float32),
        }

    def _likeliest(self, top: Top) -> list[int]:
        known = [token for token in top if token < self.vocabulary]
        if len(known) < self._k:
            raise ConfigError(
                f"distill.cache.k={self._k}: at some position only {len(known)} of the teacher's likeliest tokens are "
                "the student's; the others pad the teacher's head. Write a smaller distill.cache.k."
            )
        return sorted(known, key=lambda token: (-top[token], token))[: self._k]


def _number(token: str) -> int:
    if not token.startswith(_PREFIX):
        raise ValueError(token)
    return int(token.removeprefix(_PREFIX))


def _reason(response: httpx2.Response) -> str:
    """Message of an error in OpenAI's form, or how an answer begins."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return repr(response.text[:200])
