"""Padding of reward models: a row ends where stock code finds its end."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from workbench.models.reward_model import settle_padding

END = "<|endoftext|>"


def of_bytes(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, as GPT-2's without its merges, and with one special token for all purposes."""
    words = [*sorted(ByteLevel.alphabet()), END]
    backend = Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, **special)


@pytest.mark.parametrize(
    ("special", "more"),
    [
        ({"unk_token": END, "bos_token": END, "pad_token": END}, []),
        ({"unk_token": END, "bos_token": END}, ["<|turn|>"]),
        ({"bos_token": "<s>"}, []),
        ({}, []),
    ],
)
def test_padding_is_neither_the_end_nor_text(special: dict[str, str], more: list[str]) -> None:
    tokenizer = of_bytes(**special)
    tokenizer.add_tokens(more, special_tokens=True)
    before = tokenizer("Hello! So?")["input_ids"]
    settle_padding(tokenizer)
    assert tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.pad_token in more or not tokenizer.pad_token.isascii() or tokenizer.pad_token == "<s>"
    assert tokenizer.pad_token_id not in before and tokenizer("Hello! So?")["input_ids"] == before


def test_padding_of_its_own_stays() -> None:
    tokenizer = of_bytes(pad_token="<|pad|>")
    settle_padding(tokenizer)
    assert tokenizer.pad_token == "<|pad|>"
