"""Examples as token ids, and which of those tokens carry loss.

What is supervised is what the model has to generate: from the end of the generation prompt through reasoning, content
and tool calls, to and including the token that ends the turn.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from workbench.data.formats import Example
from workbench.data.segments import Instrumented, Message, Rendering, Segment
from workbench.errors import BackboneError, DataError

LossOn = Literal["assistant", "last", "all"]

# Plain words and no special token but the end of a turn: what a base model has seen, whatever its vocabulary.
# Contents are trimmed, because a token of two line breaks would span the end of "Assistant:\n" and an answer.
DEFAULT_TEMPLATE = """\
{%- if tools %}
    {{- 'Tools, called as {"name": ..., "arguments": ...} in <tool_call></tool_call>:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content | trim + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant:\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content | trim + '\\n</think>\\n' }}
        {%- endif %}
        {{- message.content | default('') | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>' + (call.function or call) | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
        {{- '\\n\\n' }}
    {%- else %}
        {{- message.role | capitalize + ':\\n' + message.content | trim + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example as the model sees it."""

    input_ids: list[int]
    supervised: list[bool]
    """Which tokens carry loss: the token itself is the target."""
    end_positions: tuple[int, ...] = ()
    """Where the supervised end-of-turn tokens stand."""
    bos: bool = False
    """The first token is the tokenizer's beginning of a sequence, which truncation keeps."""

    @property
    def ends(self) -> int:
        """How many supervised end-of-turn tokens there are."""
        return len(self.end_positions)


def truncate(encoded: Encoded, *, max_tokens: int, side: Literal["left", "right"]) -> Encoded:
    """At most `max_tokens` tokens: `left` cuts the beginning (but a BOS token), `right` the end."""
    cut = len(encoded.input_ids) - max_tokens
    if cut <= 0:
        return encoded
    head = max_tokens if side == "right" else int(encoded.bos)
    tail = head + cut
    return Encoded(
        input_ids=encoded.input_ids[:head] + encoded.input_ids[tail:],
        supervised=encoded.supervised[:head] + encoded.supervised[tail:],
        end_positions=tuple(end - cut * (end >= tail) for end in encoded.end_positions if not head <= end < tail),
        bos=encoded.bos and head > 0,
    )


class Template:
    """How a tokenizer writes conversations.

    Args:
        tokenizer: A fast tokenizer, because masks are found by character offsets.
        template: Jinja source that replaces the tokenizer's own; where neither is there, DEFAULT_TEMPLATE.

    Attributes:
        source: The Jinja source in use, to be saved with what is trained with it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._name = f"the chat template of {os.path.basename(tokenizer.name_or_path) or 'the tokenizer'}"
        if not tokenizer.is_fast:
            raise BackboneError(
                f"{type(tokenizer).__name__} gives no character offsets, by which the loss mask is found.\n"
                "  Give a model.id whose tokenizer has a tokenizer.json."
            )
        self._tokenizer = tokenizer
        self._adds_bos = _adds_bos(tokenizer)
        self._named = template is None and isinstance(tokenizer.chat_template, dict)
        self.source: str = template or _own_template(tokenizer) or self._default()
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        special.update(tokenizer.all_special_ids)
        # A beginning of a sequence ends no turn, except in vocabularies that use one token for both.
        self._special = (special - {tokenizer.bos_token_id}) | ({tokenizer.eos_token_id} - {None})
        self._header: str | None = None
        self._generated_ends: dict[int, bool] = {}

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The example's ids with the mask that `loss_on` asks for.

        Raises:
            DataError: The template refuses this conversation; says the place and the template's own words.
            BackboneError: The template does not let assistant turns be told apart.
        """
        if example.text:
            return self._encode_text(example, loss_on)
        conversation = Conversation(self, example.place, example.messages, example.tools)
        whole = conversation.render()
        tokens = self._tokenise(whole.text)
        supervised = [False] * len(tokens.ids)
        ends: list[int] = []
        for number in _answers(example.messages, loss_on):
            for first, last, end in self._turn(conversation, whole, tokens, number):
                if end == len(tokens.ids):
                    tokens.ids.append(self._tokenizer.eos_token_id)
                    supervised.append(True)
                supervised[first:last] = [True] * (last - first)
                ends += [] if end is None else [end]
        if loss_on == "all":
            supervised = [True] * len(tokens.ids)
        return Encoded(tokens.ids, supervised, tuple(ends), tokens.ids[:1] == [self._tokenizer.bos_token_id])

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Ids of the conversation with the generation prompt: what generation starts from."""
        conversation = Conversation(self, "the conversation", messages, tools)
        return self._tokenise(conversation.text(prompt=True)).ids

    def stops(self) -> list[int]:
        """Ids that end an answer: the tokenizer's eos, and what the template writes after one."""
        probe = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        encoded = self.encode(Example("a first conversation", messages=probe * 2), loss_on="assistant")
        eos = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        return sorted({*eos, *(encoded.input_ids[end] for end in encoded.end_positions)})

    @cached_property
    def instrumented(self) -> Instrumented:
        """The template, compiled so that it tells its turns."""
        try:
            return Instrumented(self.source)
        except TemplateSyntaxError as error:
            raise BackboneError(
                f"{self._name}, line {error.lineno}: {error.message}\n"
                "  Mend it, or give another one with model.chat_template=FILE."
            ) from None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def refusal(self, why: str) -> BackboneError:
        """The error for a template whose turns cannot be told apart."""
        return BackboneError(
            f"{self._name} {why}, so the answers cannot be told from the rest.\n"
            "  Give another one with model.chat_template=FILE, such as one that writes what the model generates\n"
            "  between {% generation %} and {% endgeneration %}."
        )

    def check_tools(self, place: str, tools: Sequence[Message]) -> None:
        """Refuse tools where the tokenizer has a template for each purpose: only its default one is used here."""
        if tools and self._named:
            raise DataError(
                f"{place}: has tools, but {self._name} is one of several by name.\n"
                "  Write the one for tools to a file and give it as model.chat_template=FILE."
            )

    def _default(self) -> str:
        return ("{{ bos_token }}" if self._adds_bos else "") + DEFAULT_TEMPLATE

    def _tokenise(self, text: str) -> Tokens:
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return Tokens(text, encoding["input_ids"], encoding["offset_mapping"])

    def _encode_text(self, example: Example, loss_on: LossOn) -> Encoded:
        """Raw pieces as one string, between the tokenizer's own BOS and an EOS that belongs to the last piece."""
        tokens = self._tokenise("".join(text for text, _ in example.text))
        wanted = [loss or loss_on == "all" for _, loss in example.text]
        if loss_on == "last":
            last = max((number for number, loss in enumerate(wanted) if loss), default=None)
            wanted = [number == last for number in range(len(wanted))]
        supervised: list[bool] = []
        position = 0
        for (text, _), loss in zip(example.text, wanted, strict=True):
            position += len(text)
            supervised += [loss] * (bisect_left(tokens.starts, position) - len(supervised))
        supervised += [wanted[-1]] * (len(tokens.ids) - len(supervised))
        eos, bos = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        ids = tokens.ids
        if eos is not None and ids[-1:] != [eos]:
            ids, supervised = [*ids, eos], [*supervised, wanted[-1]]
        if self._adds_bos and ids[0] != bos:
            ids, supervised = [bos, *ids], [loss_on == "all", *supervised]
        ends = (len(ids) - 1,) if supervised[-1] and ids[-1] == eos else ()
        return Encoded(ids, supervised, ends, ids[0] == bos)

    def _turn(
        self, conversation: Conversation, whole: Rendering, tokens: Tokens, number: int
    ) -> Iterable[tuple[int, int, int | None]]:
        """Token ranges (first, last exclusive) of an assistant's turn, each with its end-of-turn token."""
        if self.instrumented.tagged:
            for start, stop in _tagged_spans(whole, conversation.messages, number):
                first, last = tokens.between(start, stop)
                # Generation stops at the end of the turn; blank text that the template writes after it is no answer.
                end = tokens.visible(range(last - 1, first - 1, -1))
                if end is not None and tokens.ids[end] in self._special:
                    yield first, end + 1, end
                else:
                    yield first, last, None
            return
        segment = self._segment(conversation, whole, number)
        first, last = tokens.between(self._start(conversation, whole, tokens, segment), segment.end)
        end = tokens.visible(range(last - 1, first - 1, -1))
        if end is not None and tokens.ids[end] in self._special:
            generated = self._is_generated(conversation, tokens, number, end)
            yield first, end + generated, end if generated else None
            return
        # Some families (GLM) write no end: the next turn's role token, or eos after the last turn, stops generation.
        following = tokens.visible(range(last, len(tokens.ids)))
        if following is None and self._tokenizer.eos_token_id is not None:
            yield first, len(tokens.ids) + 1, len(tokens.ids)
        elif following is not None and tokens.ids[following] in self._special:
            yield first, following + 1, following
        else:
            yield first, last if end is None else end + 1, None

    def _segment(self, conversation: Conversation, whole: Rendering, number: int) -> Segment:
        """The one place where the template writes an assistant's message."""
        segments = whole.of(number)
        if len(segments) != 1:
            raise self.refusal(f"writes an assistant's message {len(segments)} times in a loop over the messages")
        segment = segments[0]
        if any(segment.start <= other.start < segment.end and other is not segment for other in whole.segments):
            raise self.refusal("writes other messages inside an assistant's")
        if number + 1 < len(conversation.messages) and not whole.of(number + 1):
            # Gemma 4 writes tool results into the pass of the assistant that called: keep what stands there before.
            alone = conversation.render(stop=number + 1)
            answer = alone.text[alone.of(number)[0].start : alone.of(number)[0].end]
            shared = len(os.path.commonprefix([answer, whole.text[segment.start : segment.end]]))
            return replace(segment, end=segment.start + shared)
        return segment

    def _start(self, conversation: Conversation, whole: Rendering, tokens: Tokens, segment: Segment) -> int:
        """The character at which generation takes over from the generation prompt."""
        header = self._generation_prompt(conversation, whole, segment)
        if whole.text.startswith(header, segment.start):
            return segment.start + len(header)
        # A prompt may lead further than this turn goes (`<think>` before a turn without reasoning). Whole tokens are
        # compared: by characters, the `<` of an answer in HTML would pass for the prompt's.
        first, last = tokens.between(segment.start, segment.end)
        pairs = zip(self._tokenise(header).ids, tokens.ids[first:last], strict=False)
        shared = next((count for count, (left, right) in enumerate(pairs) if left != right), last - first)
        if not shared:
            raise self.refusal(
                f"asks for an answer with {header!r}, but starts one with "
                f"{whole.text[segment.start : segment.end][: max(20, len(header))]!r} ({conversation.place})"
            )
        return tokens.starts[first + shared]

    def _generation_prompt(self, conversation: Conversation, whole: Rendering, segment: Segment) -> str:
        """What the template writes to ask for the answer that `segment` holds."""
        if self.instrumented.constant_header:
            if self._header is None:
                asked = conversation.render(prompt=True)
                self._header = asked.text[asked.loop_end :]
            return self._header
        before = whole.text[: segment.start]
        asked = conversation.render(stop=segment.message, prompt=True)
        # Earlier turns may be written differently before the answer is there (reasoning is dropped from history).
        return asked.text[len(before) if asked.text.startswith(before) else asked.loop_end :]

    def _is_generated(self, conversation: Conversation, tokens: Tokens, number: int, end: int) -> bool:
        """Whether the token that ends a turn also ends it while it is the last one.

        gpt-oss generates `<|return|>` and writes `<|end|>` in its place once the conversation goes on: loss on that
        would teach the model not to stop. A template's answer for a token is asked once and remembered.
        """
        token = tokens.ids[end]
        if number + 1 == len(conversation.messages):
            return True
        if token not in self._generated_ends:
            alone = conversation.render(stop=number + 1)
            answers = [alone.text[part.start : part.end].rstrip() for part in alone.of(number)]
            written = tokens.text[tokens.starts[end] : tokens.ends[end]].strip()
            self._generated_ends[token] = any(answer.endswith(written) for answer in answers)
        return self._generated_ends[token]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one example, and the template that writes them."""

    template: Template
    place: str
    messages: Sequence[Message]
    tools: Sequence[Message]

    def text(self, *, stop: int | None = None, prompt: bool = False) -> str:
        """The first `stop` messages as Transformers writes them; `prompt` asks for the next answer."""
        self.template.check_tools(self.place, self.tools)
        try:
            return str(
                self.template.tokenizer.apply_chat_template(
                    self._bare(stop),
                    tools=list(self.tools) or None,
                    chat_template=self.template.source,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except Exception as error:  # A template is foreign code and may raise anything.
            raise self._refused(error) from None

    def render(self, *, stop: int | None = None, prompt: bool = False) -> Rendering:
        """The same with the segments of its messages."""
        text = self.text(stop=stop, prompt=prompt)
        instrumented = self.template.instrumented
        special_tokens = self.template.tokenizer.special_tokens_map
        try:
            found = instrumented.render(self._bare(stop), self.tools, prompt=prompt, special_tokens=special_tokens)
        except Exception:
            found = None
        if found is None or found.text != text:
            raise self.template.refusal("computes with the text of whole messages")
        return found

    def _bare(self, stop: int | None) -> list[Message]:
        """The messages without our own key."""
        return [{key: value for key, value in each.items() if key != "loss"} for each in self.messages[:stop]]

    def _refused(self, error: Exception) -> DataError:
        return DataError(
            f"{self.place}: the chat template refuses this conversation: {error}\n"
            "  Change the row, write data.on_bad_row=skip, or give another template with model.chat_template=FILE."
        )


class Tokens:
    """Token ids of a text with the characters that each stands for.

    A token belongs to where it starts. One that starts before an answer and reaches into it is part of the prompt,
    after which generation cannot produce it; one that starts in an answer and reaches beyond is generated whole.
    """

    def __init__(self, text: str, ids: list[int], offsets: Iterable[tuple[int, int]]) -> None:
        self.text = text
        self.ids = ids
        self.starts: list[int] = []
        self.ends: list[int] = []
        end = 0
        for start, stop in offsets:
            # Tokenizers may trim a leading space off the offsets, which leaves a gap. The bytes of one character
            # have the same offsets each, which overlap.
            self.starts.append(min(start, end))
            end = max(end, stop)
            self.ends.append(end)

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """First and last (exclusive) token that starts in these characters."""
        return bisect_left(self.starts, start), bisect_left(self.starts, stop)

    def visible(self, numbers: Iterable[int]) -> int | None:
        """The first of these tokens that is more than blank text."""
        return next((n for n in numbers if self.text[self.starts[n] : self.ends[n]].strip()), None)


def _answers(messages: Sequence[Message], loss_on: LossOn) -> list[int]:
    """Numbers of the assistant messages that carry loss."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if loss_on == "all":
        return answers
    if loss_on == "last":
        answers = answers[-1:]
    return [number for number in answers if messages[number].get("loss", True)]


def _tagged_spans(whole: Rendering, messages: Sequence[Message], number: int) -> list[tuple[int, int]]:
    """The `{% generation %}` blocks of one message.

    A block outside all loop passes belongs to the message before it. A template without a loop over the messages
    has to write one block for each of the assistant's.
    """
    if not whole.segments:
        return whole.generated[_answers(messages, "all").index(number) :][:1]
    starts = [segment.start for segment in whole.segments]
    owners = [whole.segments[max(0, bisect_left(starts, start + 1) - 1)].message for start, _ in whole.generated]
    return [span for span, owner in zip(whole.generated, owners, strict=True) if owner == number]


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bos is not None and tokenizer("a")["input_ids"] != plain and tokenizer("a")["input_ids"][0] == bos


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    return tokenizer.get_chat_template() if tokenizer.chat_template else None
