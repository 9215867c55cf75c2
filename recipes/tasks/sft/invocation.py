"""The invocation of activated LoRA in the rows of a run: its tokens, and how many rows have it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.adapters import ALora, Method
from workbench.data.batching import Indices, evenly_spaced
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError

MOST = 10_000
"""Rows that are looked through for it."""


def resolved(
    method: Method, template: ChatEncoder | MlmEncoder, tokenizer: PreTrainedTokenizerBase, *, chat: bool
) -> Method:
    """The method, with the token ids of its invocation where it has one.

    Args:
        chat: Whether the rows are conversations, which the template writes.

    Raises:
        ConfigError: There is nothing that asks for an answer.
    """
    if not isinstance(method, ALora) or (not isinstance(method.invocation, str) and method.invocation):
        return method
    if method.invocation:
        ids = tokenizer.encode(str(method.invocation), add_special_tokens=False)
    else:
        ids = template.generation_prompt() if chat and isinstance(template, ChatEncoder) else []
    if not ids:
        raise ConfigError(
            "adapter.invocation: nothing in these rows asks for an answer, as the generation prompt of a chat template "
            "does. Write the text before the answers, as adapter.invocation='Answer:', or its token ids."
        )
    return method.model_copy(update={"invocation": tuple(ids)})


def last(ids: Indices, invocation: Sequence[int]) -> int | None:
    """Place of the first token of the last occurrence of `invocation` in a row; None where there is none."""
    if len(ids) < len(invocation):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(invocation))
    places = np.flatnonzero((windows == np.asarray(invocation)).all(axis=1))
    return int(places[-1]) if len(places) else None


def in_words(rows: TokenizedSet, method: ALora, tokenizer: PreTrainedTokenizerBase) -> str:
    """Rows that have the invocation of a resolved method, and the share of their labels that stand before it.

    Raises:
        ConfigError: No row has it before a token that it could learn from.
    """
    invocation = [int(each) for each in method.invocation]
    text = str(tokenizer.decode(invocation))
    looked = evenly_spaced(len(rows), MOST)
    having = after = labels = 0
    for number in looked:
        row = rows[int(number)]
        start = last(row.input_ids, invocation)
        having += start is not None
        labels += int(row.supervised.sum())
        after += 0 if start is None else int(row.supervised[start + 1 :].sum())
    if not after:
        raise ConfigError(
            f"adapter.invocation: no row of {rows.source} has {text!r} (tokens {invocation}) before a token that "
            "carries loss, so nothing would be learnt. Write the text that stands before the answers."
        )
    share = "" if after == labels else f"; {1 - after / labels:.1%} of the tokens that carry loss teach it nothing"
    return f"The adapter acts from the last {text!r} on, which {having:,} of {len(looked):,} rows have{share}."
