"""Rows for an encoder-decoder are what transformers makes of a prompt and a target, and truncation keeps the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, BartConfig, PreTrainedTokenizerBase, T5Config, T5Tokenizer

from workbench.config import DataConfig, RunConfig
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder, Encoded, truncate
from workbench.data.text.encoder_decoder import Seq2SeqEncoder
from workbench.data.text.formats import Example
from workbench.data.text.row_encoder import row_encoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import BackboneError, ConfigError, DataError

PIECES = ["▁", "▁What", "▁is", "▁it", "▁the", *"abcdefgh123:.?", "▁User", "▁Assistant"]
PAD, EOS = 0, 1
TEXT = Example("row 1", text=(("What is a1?", False), ("the b", True)))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def t5() -> PreTrainedTokenizerBase:
    """A tokenizer of T5's class, with T5's special tokens."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer: PreTrainedTokenizerBase = T5Tokenizer(vocab=special + [(piece, -2.0) for piece in PIECES], extra_ids=0)
    return tokenizer


@pytest.fixture(scope="module")
def pairs(t5: PreTrainedTokenizerBase) -> Seq2SeqEncoder:
    return Seq2SeqEncoder(t5, start=PAD)


@pytest.mark.parametrize("family", ["t5", "stories"])
def test_a_row_is_prompt_start_and_target(family: str, t5: PreTrainedTokenizerBase, stories: str) -> None:
    """T5's tokenizer closes a text with eos; that of the stories opens one, as BART's does."""
    tokenizer = t5 if family == "t5" else AutoTokenizer.from_pretrained(stories)
    encoded = Seq2SeqEncoder(tokenizer, start=PAD).encode(TEXT, loss_on="assistant")
    asked, target = tokenizer("What is a1?")["input_ids"], tokenizer(text_target="the b")["input_ids"]
    target += [] if family == "t5" else [tokenizer.eos_token_id]
    assert encoded.input_ids == [*asked, PAD, *target]
    assert encoded.supervised == [False] * (len(asked) + 1) + [True] * len(target)
    assert encoded.source == len(asked) and encoded.end_positions == (len(encoded.input_ids) - 1,)
    assert encoded.bos == (family == "stories")


def test_a_single_question_is_read_as_it_stands(pairs: Seq2SeqEncoder) -> None:
    chat = Example("row 1", messages=(user("What is a1?"), assistant("the b")))
    assert pairs.encode(chat, loss_on="assistant") == pairs.encode(TEXT, loss_on="assistant")
    assert pairs.question(Example("row 1", messages=chat.messages[:1])) == pairs.question(
        Example("row 1", text=TEXT.text[:1])
    )


def test_turns_are_told_apart_and_the_last_answer_is_learnt(pairs: Seq2SeqEncoder, t5: PreTrainedTokenizerBase) -> None:
    turns = ({"role": "system", "content": "is it"}, user("a"), assistant("b"), user("c"), assistant("d"))
    encoded = pairs.encode(Example("row 1", messages=turns), loss_on="last")
    read, written = encoded.input_ids[: encoded.source], encoded.input_ids[encoded.source :]
    assert t5.decode(read) == "is it User: a Assistant: b User: c</s>"
    assert t5.decode(written) == "<pad> d</s>"
    ignored = (*turns[:2], assistant("b", loss=False), *turns[3:])
    assert pairs.encode(Example("row 1", messages=ignored), loss_on="assistant") == encoded
    trailing = (*turns, user("e"))
    assert pairs.encode(Example("row 1", messages=trailing), loss_on="last") == encoded


def test_a_chat_template_writes_all_that_the_encoder_reads(t5: PreTrainedTokenizerBase) -> None:
    source = "{% for m in messages %}{{ m.content }}.{% endfor %}{{ ' the' if add_generation_prompt }}"
    own = Seq2SeqEncoder(t5, source, start=PAD)
    encoded = own.encode(Example("row 1", messages=(user("a"), assistant("b"))), loss_on="assistant")
    assert t5.decode(encoded.input_ids[: encoded.source]) == "a. the"
    assert encoded.kept == len(encoded.input_ids) - encoded.source, "nothing closes this text"


@pytest.mark.parametrize(
    ("example", "loss_on", "error", "cure"),
    [
        (TEXT, "all", ConfigError, "Leave data.loss_on out"),
        (Example("row 7", text=(("a b", True),)), "assistant", DataError, "row 7: .* Give a prompt and a completion"),
        (
            Example("row 7", messages=(user("a"), assistant("b"), user("c"), assistant("d"))),
            "assistant",
            DataError,
            "row 7: has 2 answers to learn.*data.loss_on=last",
        ),
        (Example("row 7", messages=(assistant("b"),)), "assistant", DataError, "row 7: has no answer to a question"),
        (
            Example("row 7", messages=(user("a"), assistant("", tool_calls=[{"function": {"name": "b"}}]))),
            "assistant",
            DataError,
            "row 7: its answer has tool calls or reasoning.*Use such a backbone",
        ),
        (
            Example("row 7", messages=(user("a"), assistant("b")), tools=({"function": {"name": "b"}},)),
            "assistant",
            DataError,
            "row 7: has tools.*model.chat_template=FILE",
        ),
    ],
)
def test_what_an_encoder_decoder_cannot_learn(
    pairs: Seq2SeqEncoder, example: Example, loss_on: Any, error: type[Exception], cure: str
) -> None:
    with pytest.raises(error, match=f"(?s){cure}"):
        pairs.encode(example, loss_on=loss_on)


@given(st.data(), st.integers(1, 40), st.sampled_from(["left", "right"]), st.booleans(), st.booleans())
def test_truncation_cuts_what_is_read_and_never_the_answer(
    data: st.DataObject, max_tokens: int, side: Literal["left", "right"], bos: bool, closed: bool
) -> None:
    source, target = data.draw(st.integers(1 + bos + closed, 20)), data.draw(st.integers(1, 12))
    size = source + 1 + target
    whole = Encoded(
        list(range(size)), [place > source for place in range(size)], (size - 1,), bos, target + 1 + closed, source
    )
    cut = truncate(whole, max_tokens=max_tokens, side=side)
    room = max_tokens - (size - source) - bos - closed
    if size <= max_tokens or room < 1:
        assert cut == whole
        return
    text = list(range(bos, source - closed))
    read = [0] * bos + (text[-room:] if side == "left" else text[:room]) + [source - 1] * closed
    assert cut.input_ids == [*read, *range(source, size)] and len(cut.input_ids) == max_tokens
    assert (cut.source, cut.bos, cut.kept) == (len(read), bos, whole.kept)
    assert [cut.input_ids[place] for place, loss in enumerate(cut.supervised) if loss] == list(range(source + 1, size))
    assert cut.input_ids[cut.end_positions[0]] == size - 1


def test_tokenised_files(pairs: Seq2SeqEncoder, t5: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "What is a1?", "completion": "the b"}\n{"prompt": "a b c d", "completion": "a b c d e f g h"}\n'
    )

    def read(template: ChatEncoder, **settings: Any) -> TokenizedSet:
        config = DataConfig.model_validate({"train": str(path), **settings})
        return tokenized.read(str(path), config, t5, template)

    found = read(pairs)
    assert found.lengths.tolist() == [12, 27] and found.supervised.tolist() == [4, 17]
    assert found.longest_sequences.tolist() == [7, 18] and found.ends.tolist() == [1, 1]
    batch = found.batch(np.asarray([0, 1]))
    assert {name: tuple(tensor.shape) for name, tensor in batch.inputs.items()} == {
        "input_ids": (2, 9),
        "attention_mask": (2, 9),
        "decoder_input_ids": (2, 18),
    }
    assert batch.inputs["attention_mask"].sum(1).tolist() == [7, 9] and batch.tokens == 39
    assert batch.inputs["decoder_input_ids"][:, 0].tolist() == [PAD, PAD]
    assert batch.labels_N.tolist() == [*found[0].input_ids[8:], *found[1].input_ids[10:]]
    # The same file and tokenizer, written for another kind of model, is another data set.
    assert read(ChatEncoder(t5)).lengths.tolist() != found.lengths.tolist()
    with pytest.raises(DataError, match=r"row 2: 19 of its 27 tokens are its answer.*data.max_tokens=19.*Raise it"):
        read(pairs, max_tokens=19)
    assert len(read(pairs, max_tokens=19, on_bad_row="skip")) == 1
    assert read(pairs, max_tokens=20).truncated == 1


def test_the_architecture_decides_how_rows_are_written(t5: PreTrainedTokenizerBase) -> None:
    config = RunConfig.model_validate({"recipe": "sft", "data": {"train": "rows.jsonl"}})
    assert isinstance(row_encoder(config, BartConfig(), t5), Seq2SeqEncoder)
    assert type(row_encoder(config, BartConfig(is_encoder_decoder=False), t5)) is ChatEncoder
    with pytest.raises(BackboneError, match=r"T5Config: .* no decoder_start_token_id.*Write the id"):
        row_encoder(config, T5Config(decoder_start_token_id=None), t5)
