"""A tokenizer with every family's special tokens, and TRL's templates on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workbench.data.starter import FOLDER
from workbench.data.text.chat import ChatEncoder, Encoded

# DeepSeek's tokens hold a fullwidth bar and a low block.
DEEPSEEK = [f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant", "end\u2581of\u2581sentence")]
SPECIAL = """
    <|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|end_header_id|> <start_of_turn> <end_of_turn> <|end|>
    <|start|> <|message|> <|channel|> <|return|> <|call|> <|observation|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|>
    <|CHATBOT_TOKEN|> <|USER_TOKEN|> <|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> </s> <end_of_utterance>
    <|eot|> <|eom|> <turn|> <|turn> <|tool_response> <tool_response|>
"""
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>"]


@pytest.fixture(scope="session")
def templates() -> Path:
    """The folder of TRL's wheel that holds chat templates; TRL itself, which is slow to import, is not needed."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The starter's byte-level BPE with more special tokens; its eos is <|endoftext|>."""
    result = AutoTokenizer.from_pretrained(FOLDER)
    result.add_special_tokens({"additional_special_tokens": SPECIAL.split() + DEEPSEEK})
    result.add_tokens(PLAIN)
    return result


@pytest.fixture(scope="session")
def template(tokenizer: PreTrainedTokenizerBase, templates: Path) -> Callable[[str], ChatEncoder]:
    """One of TRL's templates by name, on the tokenizer above."""
    return lru_cache(lambda name: ChatEncoder(tokenizer, (templates / f"{name}.jinja").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def runs(tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[str]]:
    """The decoded stretches of tokens that do, or do not, carry loss."""

    def found(encoded: Encoded, supervised: bool = True) -> list[str]:
        stretches: list[list[int]] = []
        before = not supervised
        for token, carries in zip(encoded.input_ids, encoded.supervised, strict=True):
            if carries == supervised and before != supervised:
                stretches.append([])
            if carries == supervised:
                stretches[-1].append(token)
            before = carries
        return [str(tokenizer.decode(stretch)) for stretch in stretches]

    return found


@pytest.fixture
def importable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other processes import the functions and classes of tests."""
    monkeypatch.syspath_prepend(request.config.rootpath)
