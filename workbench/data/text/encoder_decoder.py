"""Rows for an encoder-decoder: the encoder reads the prompt, and the decoder learns the answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from workbench.data.text import media
from workbench.data.text.chat import ChatEncoder, Conversation, Encoded, LossOn, learnt, outcomes
from workbench.data.text.formats import Example
from workbench.data.text.messages import Message
from workbench.errors import ConfigError, DataError, WorkbenchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A single question is written as it is, as in pretraining; several turns are marked with their roles.
PLAIN_TEMPLATE = """\
{%- set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- for message in messages %}
    {{- '\\n\\n' if not loop.first }}
    {{- message.role | capitalize + ': ' if turns | length > 1 and message.role != 'system' }}
    {{- message.content }}
{%- endfor %}
"""


class Seq2SeqEncoder(ChatEncoder):
    """Tokenises prompts for an encoder and answers for a decoder.

    The answer is tokenised separately, as a target: start token, text, eos. A prompt is raw text with the tokenizer's
    own special tokens, or a conversation written by the chat template; without one, by PLAIN_TEMPLATE between those
    tokens.

    Args:
        tokenizer: A fast tokenizer.
        template: Jinja source that replaces the tokenizer's own.
        start: The decoder's start token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, *, start: int) -> None:
        whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
        before = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        around = (whole[:before], whole[before + len(bare) :])
        opening, closing = ("".join(tokenizer.convert_ids_to_tokens(ids)) for ids in around)
        plain = f"{{{{- {opening!r} }}}}{PLAIN_TEMPLATE}{{{{- {closing!r} }}}}"
        super().__init__(tokenizer, template or (None if tokenizer.chat_template else plain))
        self._plain = self.source == plain
        self._start = start

    @property
    def identity(self) -> list[object]:
        return ["pairs", self._start, self.source]

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example alone: an encoder-decoder learns one answer a row."""
        return [example]

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """Encode prompt, start token and answer as one row; the answer and its eos carry loss. Raises ConfigError:
        `loss_on` is all, but the input of an encoder is not predicted; DataError: the row has no prompt, no answer, or
        several."""
        if loss_on == "all":
            raise ConfigError(
                "data.loss_on=all: an encoder-decoder predicts only the answer, not the prompt. Leave data.loss_on out."
            )
        if not example.text:
            source, answer = self._chat_pair(example, loss_on)
        elif [loss for _, loss in example.text] == [False, True]:
            source, answer = self._read(example.text[0][0]), example.text[1][0]
        else:
            raise DataError(
                f"{example.place}: is text without a prompt, but an encoder-decoder learns to answer one.\n"
                "  Give a prompt and a completion, use a causal backbone, or write data.on_bad_row=skip."
            )
        target = list(self._tokenizer.tokenizer(text_target=answer, verbose=False)["input_ids"])
        eos = self._tokenizer.eos
        if eos is not None and target[-1:] != [eos]:
            target.append(eos)
        return Encoded(
            input_ids=[*source, self._start, *target],
            supervised=[False] * (len(source) + 1) + [True] * len(target),
            end_positions=(len(source) + len(target),) if target[-1] == eos else (),
            bos=source[0] == self._tokenizer.tokenizer.bos_token_id,
            kept=int(source[-1] in self._tokenizer.special) + 1 + len(target),
            source=len(source),
        )

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        return outcomes(partial(self.encode, loss_on=loss_on), examples)

    def question(self, example: Example) -> list[int]:
        """Input ids of the encoder for generating an answer."""
        if example.messages:
            return self.prompt(example.messages, example.tools)
        return self._read(example.whole_text)

    def _chat_pair(self, example: Example, loss_on: LossOn) -> tuple[list[int], str]:
        numbers = learnt(example.messages, loss_on)
        if len(numbers) > 1:
            raise DataError(
                f"{example.place}: has {len(numbers)} answers to learn, but an encoder-decoder learns one per row and "
                "reads the turns before it. Write data.loss_on=last."
            )
        if not numbers or numbers[0] == 0:
            raise DataError(f"{example.place}: has no answer to a question. Correct it, or write data.on_bad_row=skip.")
        before, message = example.messages[: numbers[0]], example.messages[numbers[0]]
        if media.KEY in message:
            raise DataError(f"{example.place}: its answer has a picture, which no model writes. Take it out.")
        if message.get("tool_calls") or message.get("reasoning_content"):
            raise DataError(
                f"{example.place}: its answer has tool calls or reasoning, which only the chat template of a causal "
                "backbone can write. Use such a backbone, or write data.on_bad_row=skip."
            )
        conversation = self._conversation(example.place, before, example.tools)
        return self._tokenizer.tokenise(conversation.text(prompt=True)).ids, message["content"]

    def _read(self, text: str) -> list[int]:
        return list(self._tokenizer.tokenizer(text, verbose=False)["input_ids"])

    def _conversation(self, place: str, messages: Sequence[Message], tools: Sequence[Message]) -> Conversation:
        if tools and self._plain:
            raise DataError(
                f"{place}: has tools, which the default prompt of an encoder-decoder does not show.\n"
                "  Write a chat template that shows them to a file, and give it as model.chat_template=FILE."
            )
        return super()._conversation(place, messages, tools)
