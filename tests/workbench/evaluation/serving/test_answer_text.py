"""Text of an answer comes in pieces that add up to what its tokens decode to, and ends before a stop word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from workbench.config import ModelConfig
from workbench.evaluation.serving.answer_text import AnswerText
from workbench.models import backbones


@pytest.fixture(scope="module", params=["starter", "stories"])
def tokenizer(request: pytest.FixtureRequest, stories: str) -> PreTrainedTokenizerBase:
    return backbones.tokenizer(ModelConfig(id="starter" if request.param == "starter" else stories))


TEXTS = st.text(st.sampled_from("ab .\n<é漢🙂"), min_size=1, max_size=24)


@given(st.data())
def test_pieces_add_up(tokenizer: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    prompt, ids = (tokenizer.encode(data.draw(TEXTS), add_special_tokens=False) for _ in range(2))
    prompt = prompt[-6:]
    cut = data.draw(st.integers(0, len(ids)))
    text = AnswerText(tokenizer, prompt, ())
    pieces = [text.push(token) for token in ids]
    whole, before = (tokenizer.decode(each, skip_special_tokens=True) for each in (prompt + ids, prompt))
    assert "".join(pieces) + text.finish() == whole[len(before) :]
    assert not text.stopped
    half = AnswerText(tokenizer, prompt, ())
    begun = "".join(map(half.push, ids[:cut])) + half.finish()  # it may end within a character
    assert whole[len(before) :].startswith(begun.rstrip("\ufffd"))


@given(st.data())
def test_it_ends_before_the_first_stop_word(tokenizer: PreTrainedTokenizerBase, data: st.DataObject) -> None:
    ids = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    stops = data.draw(st.lists(st.text("ab .", min_size=1, max_size=3), min_size=1, max_size=3))
    plain, text, written = AnswerText(tokenizer, [], ()), AnswerText(tokenizer, [], stops), ""
    for token in ids:
        written += text.push(token)
        assert not any(stop in written for stop in stops)
    written += text.finish()
    whole = "".join(map(plain.push, ids)) + plain.finish()
    found = [(place + len(stop), place) for stop in stops if (place := whole.find(stop)) >= 0]
    assert text.stopped == bool(found)
    assert written == (whole[: min(found)[1]] if found else whole)  # the one that is complete first
