"""Rules for conversations: answers that repeat their prompt, refusals, turns that say nothing."""

from __future__ import annotations

from workbench.data.folds.similarity import normalised
from workbench.data.text.quality.row_texts import Exchange, RowText

PROMPT_WORDS = 5
"""A shorter prompt, such as a name, may rightly stand in its answer; it is repeated where it is the whole answer."""
OPENING = 300
"""Characters of an answer in which it would refuse."""
REFUSALS = (
    "as an ai language model",
    "as a language model",
    "as an ai assistant",
    "as an artificial intelligence",
    "i am just an ai",
    "im just an ai",
    "im sorry but i cant",
    "im sorry but i cannot",
    "i am sorry but i cannot",
    "i am sorry but i cant",
    "sorry i cant assist",
    "i cannot assist with",
    "i cant assist with",
    "i cannot help with that",
    "i cant help with that",
    "i am not able to assist",
    "im not able to assist",
    "i am unable to assist",
    "im unable to assist",
    "i cannot fulfill",
    "i cant fulfill",
    "i must decline",
    "i cannot provide information on",
    "it would not be appropriate for me",
)
"""Phrases with which chat models refuse or excuse themselves, in English, without case and punctuation."""


def repeats_prompt(row: RowText) -> float | None:
    """Largest share of an answer that is its prompt, or its prompt's last line, word by word; None without answers."""
    return max(map(_repeated, row.exchanges), default=None)


def refuses(row: RowText) -> float | None:
    """Answers that open with a refusal; None without answers."""
    if not row.exchanges:
        return None
    openings = [normalised(each.answer[:OPENING]) for each in row.exchanges]
    return float(sum(any(phrase in opening for phrase in REFUSALS) for opening in openings))


def empty_turns(row: RowText) -> float | None:
    """Turns without a letter or a digit; None without turns."""
    turns = row.turns or [part for exchange in row.exchanges for part in exchange]
    return float(sum(not any(map(str.isalnum, turn)) for turn in turns)) if turns else None


def _repeated(exchange: Exchange) -> float:
    answer = normalised(exchange.answer)
    asked = {normalised(exchange.prompt), normalised((exchange.prompt.strip().splitlines() or [""])[-1])}
    ratios = [
        len(prompt) / len(answer)
        for prompt in asked
        if prompt and (prompt == answer or (len(prompt.split()) >= PROMPT_WORDS and f" {prompt} " in f" {answer} "))
    ]
    return max(ratios, default=0.0)
