"""A teacher that a server answers for: the likeliest tokens after each token of a row, by OpenAI's completions.

A row is sent as tokens and echoed with log-probabilities; that of its last token is the answer's first. vLLM and
`workbench serve` write tokens as token_id:NUMBER, so that none of two with one text is taken for the other.

Legend: N positions, k tokens kept of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx2
import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.config.sections.distill_config import DistillConfig, TeacherConfig
from workbench.data.batching import Indices, micro_batches
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation import teacher_cache
from workbench.distillation.teacher_cache import Keys, Packed
from workbench.errors import ConfigError, DataError
from workbench.runs import openai_client
from workbench.runs.openai_client import OpenAIClient, token_number

KEY, KEPT = "distill.teacher.url", "the finished shards of the cache are kept"
"""Key of the address, and what is not lost where nobody answers there."""
AT_ONCE = 4  # requests that run at the same time
TOKENS, ROWS = 4096, 32  # tokens of a request, padding included, and its rows
PROBES = 8  # training rows whose text the server's tokenizer reads, and whose conversation its template writes

Top = Mapping[int, float]  # log-probabilities of the likeliest tokens of a position


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
        server = OpenAIClient.of(teacher.url, key=KEY, kept=KEPT)
        return ServedTeacher(server.url, teacher.id, server.client)

    @property
    def _server(self) -> OpenAIClient:
        return OpenAIClient(self.url, KEY, self._client, KEPT)

    def __enter__(self) -> ServedTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def likeliest(self, rows: Sequence[Sequence[int]], k: int) -> list[list[Top]]:
        """The likeliest tokens at each position but the first of each row; at least `k` a position. Raises
        BackboneError: the server does not answer; ConfigError: it does not tell that much."""
        try:  # log-probabilities of each prompt's tokens and one more
            scored = self._server.echoed(self.model, [list(ids[:-1]) for ids in rows], k)
        except ValueError as error:
            raise self._unusable(str(error)) from None
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
        """Refuse a teacher that reads other tokens than the student, or conversations written otherwise. Raises
        BackboneError: the server does not answer; ConfigError: it has no such model, tells no probabilities of tokens,
        or reads rows otherwise."""
        self._server.require_model(self.model, key="distill.teacher.id")
        rows = [train[index].input_ids for index in range(min(PROBES, len(train)))]
        self.likeliest([[int(token) for token in ids] for ids in rows if len(ids) > 1][:1], 1)
        texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]
        texts = [text for text in texts if text.strip()]
        try:
            served = self._server.tokens(self.model, texts)
        except ValueError as error:
            raise self._unusable(str(error)) from None
        if difference := openai_client.mismatch(texts, served, tokenizer):
            text, served_ids, own_ids = difference
            raise ConfigError(
                f"distill.teacher.url={self.url}: {self.model} cuts a text of {len(text)} characters into "
                f"{len(served_ids)} tokens, {served_ids[:8]} ..., and the student's tokenizer into "
                f"{len(own_ids)}, {own_ids[:8]} ... Name a teacher with the student's tokenizer, or load "
                "one here with distill.loss=gold."
            )
        if train.chat and isinstance(template, ChatEncoder):
            self._require_same_rendering(data, template)

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
            response = self._server.sent("POST", "chat/completions", body)
            if response.status_code in (400, 404, 405):
                return  # no chat is served, as of a model without a template
            served = int(self._server.json(response).get("usage", {}).get("prompt_tokens", wanted))
            if served != wanted:
                raise ConfigError(
                    f"distill.teacher.url={self.url}: the chat template of {self.model} writes {example.place} in "
                    f"{served} tokens, and the student's in {wanted}, so that it would be asked about texts that "
                    "it has not learnt to go on from. Write the teacher's template into a file, and name it to the "
                    "student: model.chat_template=FILE"
                )

    def _read(self, scored: Mapping[str, Any], ids: Sequence[int], k: int) -> list[Top]:
        """The likeliest tokens of each position of a row."""
        try:
            echoed_ids = [token_number(token) for token in scored["tokens"]]
            tops: list[Top] = [
                {token_number(token): float(logp) for token, logp in each.items()}
                for each in scored["top_logprobs"][1:]
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


@dataclass(frozen=True)
class ServedQuestions:
    """Asks a server about training rows, several requests at a time."""

    train: TokenizedSet
    teacher: ServedTeacher
    config: DistillConfig
    vocabulary: int  # tokens that count

    def ask(self, rows: Indices, keys_R: Keys, counts_R: Indices) -> tuple[Indices, Packed, int]:
        longer = micro_batches(rows, self.train.lengths, tokens=TOKENS)
        groups = [some[start : start + ROWS] for some in longer for start in range(0, len(some), ROWS)]
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
        scored = self.teacher.likeliest(
            [[int(token) for token in row.input_ids] for row in each], min(self.config.cache.kept, self.vocabulary)
        )
        pairs = zip(each, scored, strict=True)
        return [tops[place] for row, tops in pairs for place in np.flatnonzero(np.asarray(row.supervised)[1:])]

    def _pack(self, tops: Sequence[Top]) -> Packed:
        """As `teacher_cache.pack_likeliest` packs whole distributions."""
        k, kept = min(self.config.cache.kept, self.vocabulary), []
        for top in tops:
            known = [token for token in top if token < self.vocabulary]
            if len(known) < k:
                raise ConfigError(
                    f"distill.cache.k={k}: at some position only {len(known)} of the teacher's likeliest tokens are "
                    "the student's; the others pad the teacher's head. Write a smaller distill.cache.k."
                )
            kept.append(sorted(sorted(known, key=lambda token: (-top[token], token))[:k]))
        ids_Nk = np.asarray(kept, dtype=np.int64)
        logp_Nk = np.asarray([[top[token] for token in ids] for top, ids in zip(tops, kept, strict=True)])
        # A server may round: together the k may have a little more than all of the probability.
        rest_N = np.log(np.maximum(1 - np.exp(logp_Nk).sum(1), np.finfo(np.float32).eps))
        return {
            **teacher_cache.pack_ids(ids_Nk, self.vocabulary),
            "log_probs": logp_Nk.astype(self.config.cache.dtype),
            "rest": rest_N.astype(np.float32),
        }
