"""Examples as token ids, and which of those tokens carry loss.

What is supervised is what the model has to generate: from the end of the generation prompt through reasoning, content
and tool calls, to and including the token that ends the turn.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.text import media
from workbench.data.text.chat_template import ChatTokenizer, Rendering, Segment, TokenSpans
from workbench.data.text.formats import Conversion, Example, Reader
from workbench.data.text.messages import Message, last_answer_only, split_thoughts, thoughts
from workbench.data.time_limit import SECONDS, time_limit
from workbench.errors import BackboneError, DataError, WorkbenchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSING = "</think>"
HIDDEN = "\uf8ff" * len(CLOSING)
"""Stands in for `</think>` while a template writes it, as long as that, so that spans stay where they are."""


class AnswerSpan(NamedTuple):
    """Tokens `first` to `last` (exclusive), which carry loss, and the one of them that ends the turn.

    `last` is one more than there are tokens where an eos has to be added.
    """

    first: int
    last: int
    end: int | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one example, and the template that writes them."""

    tokenizer: ChatTokenizer
    place: str
    messages: Sequence[Message]
    tools: Sequence[Message]
    restored: bool = False
    """Write the reasoning of the last message too, which the template cuts off at `</think>` (DeepSeek's do)."""
    pictures: media.KeptPictures | None = None
    """All that its messages have, in their order."""
    mark: str = ""
    """What the template writes for a picture; empty where no picture is read."""
    in_parts: bool | None = None
    """Whether the template reads contents as lists of parts; None: as it comes."""

    @contextmanager
    def _rendering(self) -> Iterator[None]:
        """Limit the time of a template, which is foreign code, and say that it refuses the row where it raises."""
        try:
            with time_limit(self.endless):
                yield
        except BackboneError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.place}: {self.tokenizer.name} refuses this conversation: {error}\n"
                "  Change the row, write data.on_bad_row=skip, or give another template with model.chat_template=FILE."
            ) from None

    def text(self, *, prompt: bool) -> str:
        """The conversation as Transformers writes it when it serves; `prompt` asks for the next answer."""
        with self._rendering():
            text = self.tokenizer.tokenizer.apply_chat_template(
                self.bare(None),
                tools=list(self.tools) or None,
                chat_template=self.tokenizer.source,
                add_generation_prompt=prompt,
                tokenize=False,
            )
            return self._with_pictures(Rendering(str(text).replace(HIDDEN, CLOSING), [], [], 0), None).text

    def whole(self) -> Rendering:
        """The same with the segments of its messages; its text is checked against `text`."""
        text = self.text(prompt=False)
        try:
            with self._rendering():
                rendering = self.marked()
        except DataError:  # the same template wrote `text`, so it is the marks that it cannot live with
            rendering = None
        if rendering is None or rendering.text != text:
            raise self.tokenizer.refusal("computes with the text of whole messages")
        return rendering

    def part(self, *, stop: int | None = None, prompt: bool = False) -> Rendering:
        """The first `stop` messages with their segments."""
        with self._rendering():
            rendering = self.marked(stop, prompt=prompt)
        if rendering is None:
            raise self.tokenizer.refusal("computes with the text of whole messages")
        return rendering

    def answer(self, number: int) -> str:
        """Text of message `number` while it is the last one."""
        alone = self.part(stop=number + 1)
        return "".join(alone.text[segment.start : segment.end] for segment in alone.of(number))

    def marked(self, stop: int | None = None, *, prompt: bool = False, text: str | None = None) -> Rendering | None:
        """The first `stop` messages with their segments; None where the template cut a mark in two. `text`: what the
        template writes without marks, where that is known."""
        rendering = self.tokenizer.instrumented.render(
            self.bare(stop), self.tools, prompt=prompt, special_tokens=self.tokenizer.special_tokens, text=text
        )
        if rendering is None:
            return None
        return self._with_pictures(replace(rendering, text=rendering.text.replace(HIDDEN, CLOSING)), stop)

    def _with_pictures(self, rendering: Rendering, stop: int | None) -> Rendering:
        """The same with the tokens of pictures in place of their marks."""
        if not self.mark:
            return rendering
        places = [match.start() for match in re.finditer(re.escape(self.mark), rendering.text)]
        count = len(media.of_messages(self.messages[:stop]))
        if len(places) != count:
            raise DataError(
                f"{self.place}: has {count} picture{'s' * (count != 1)}, and {self.tokenizer.name} writes "
                f"{len(places)} times {self.mark}, which stands for one. Take the word out of the texts, or give "
                "another template with model.chat_template=FILE."
            )
        return rendering.expanded(places, len(self.mark), self.pictures.texts[:count] if self.pictures else [])

    def picture_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the characters that each picture has in the text of the whole conversation."""
        end = 0
        for each in self.pictures.texts if self.pictures else ():
            start = text.index(each, end)
            end = start + len(each)
            yield start, end

    def endless(self) -> BackboneError:
        """The error for a template that is not done in time."""
        return BackboneError(
            f"{self.place}: {self.tokenizer.name} was not done with it after {SECONDS:g} seconds of computing. Does it "
            "loop without an end?\n  Correct it, or give another one with model.chat_template=FILE."
        )

    def bare(self, stop: int | None) -> list[Message]:
        """The messages without our own key, and with restored reasoning hidden from the template."""
        bare = [self._content(each) for each in self.messages[:stop]]
        if self.restored and len(bare) == len(self.messages):
            bare[-1] |= {"content": f"<think>\n{thoughts(bare[-1])}\n{HIDDEN}\n\n{split_thoughts(bare[-1])['content']}"}
        return bare

    def _content(self, message: Message) -> Message:
        """A message as its template reads it, without our own keys."""
        bare = {key: value for key, value in message.items() if key not in ("loss", media.KEY)}
        if self.in_parts is None:
            return bare
        if not self.in_parts:
            return {**bare, "content": bare["content"].replace(media.MARK, self.mark)} if self.pictures else bare
        pieces, kinds = bare["content"].split(media.MARK), [each.kind for each in message.get(media.KEY, ())]
        parts: list[dict[str, str]] = []
        for text, kind in zip_longest(pieces if kinds else [bare["content"]], kinds):
            parts += [{"type": "text", "text": text}] * bool(text) + [{"type": kind}] * (kind is not None)
        return {**bare, "content": parts}


def wholes(conversations: Sequence[Conversation]) -> list[Rendering]:
    """`whole` of conversations without tools, in a third of the time; none where that fails for one of them.

    A template that never reads what it has written writes the same between marks as without them: it is enough to see
    that in the first conversation.
    """
    if not conversations:
        return []
    tokenizer = conversations[0].tokenizer
    checked = conversations if tokenizer.instrumented.captures else conversations[:1]
    renderings: list[Rendering] = []
    try:
        with time_limit(conversations[0].endless):
            bare = [conversation.bare(None) for conversation in checked]
            written: Any = tokenizer.tokenizer.apply_chat_template(bare, chat_template=tokenizer.source, tokenize=False)
            for conversation, text in zip_longest(conversations, written):
                whole = conversation.marked(text=text)
                if whole is None or (text is not None and whole.text != str(text).replace(HIDDEN, CLOSING)):
                    return []
                renderings.append(whole)
    except Exception:  # A template is foreign code; `whole` tells what is wrong, of the conversation that it is about.
        return []
    return renderings


class AnswerMasker:
    """Finds the answers in conversations; remembers what is the same in all conversations of a template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._header: str | None = None
        self._header_ids: dict[str, list[int]] = {}
        self._generated_ends: dict[int, bool] = {}

    def find(
        self, conversation: Conversation, whole: Rendering, numbers: Sequence[int]
    ) -> tuple[TokenSpans, list[AnswerSpan]]:
        """The tokens of a conversation, rendered, and what the model generates for the assistant's messages."""
        tokens = self._tokenizer.tokenise(whole.text)
        spans: list[tuple[int, int, int]] = []
        for number in numbers:
            message_spans = list(self._spans(conversation, whole, tokens, number))
            written = "".join(whole.text[start:stop] for start, stop in message_spans)
            message = conversation.messages[number]
            # A row whose answer the template leaves out would silently teach something else. Templates may take
            # reasoning away from the front of an answer, and rewrite an answer that comes with tool calls.
            if number + 1 == len(conversation.messages) and not written_out(thoughts(message), written):
                raise DataError(
                    f"{conversation.place}: {self._tokenizer.name} leaves out the reasoning of message {number + 1}, "
                    "and the model would learn to answer without.\n  Give another template with model.chat_template="
                    "FILE, take the reasoning out of the row, or write data.on_bad_row=skip."
                )
            calls = [call.get("function", call)["name"] for call in message.get("tool_calls") or []]
            missing = [f"the call of `{name}`" for name in calls if name not in written]
            content = str(message.get("content") or "").strip()
            said = content.split(media.MARK) if media.KEY in message else [content]
            if not calls and not all(written_out(each, written) for each in said):
                missing.append("the answer")
            if missing:
                raise DataError(
                    f"{conversation.place}: {self._tokenizer.name} leaves out {missing[0]} in message {number + 1}.\n"
                    "  Change the row, write data.on_bad_row=skip, or give another template with "
                    "model.chat_template=FILE."
                )
            spans += [(number, start, stop) for start, stop in message_spans]
        if any(tokens.straddles(start) for _, start, _ in spans):
            tokens = self._tokenizer.tokenise(whole.text, [start for _, start, _ in spans])
        return tokens, [self._answer(conversation, tokens, *span) for span in spans]

    def _spans(
        self, conversation: Conversation, whole: Rendering, tokens: TokenSpans, number: int
    ) -> Iterable[tuple[int, int]]:
        """Characters of an answer: from where generation takes over to the end of what belongs to the message."""
        if self._tokenizer.instrumented.tagged:
            if not whole.segments:  # without a loop over the messages, each block is one of the assistant's
                return whole.generated[assistants(conversation.messages).index(number) :][:1]
            starts = [segment.start for segment in whole.segments]
            # A block outside all loop passes belongs to the message before it.
            owners = [
                whole.segments[max(0, bisect_left(starts, start + 1) - 1)].message for start, _ in whole.generated
            ]
            return [span for span, owner in zip(whole.generated, owners, strict=True) if owner == number]
        segment = self._segment(conversation, whole, number)
        return [(self._start(conversation, whole, tokens, segment), segment.end)]

    def _answer(self, conversation: Conversation, tokens: TokenSpans, number: int, start: int, stop: int) -> AnswerSpan:
        first, last = tokens.between(start, stop)
        end = tokens.visible(range(last - 1, first - 1, -1))
        tagged = self._tokenizer.instrumented.tagged
        if end is not None and tokens.ids[end] in self._tokenizer.special:
            # Generation stops at the end of the turn; blank text that the template writes after it is no answer.
            generated = tagged or self._is_generated(conversation, tokens, number, end)
            return AnswerSpan(first, end + generated, end if generated else None)
        if tagged:
            return AnswerSpan(first, last, None)
        # Some families (GLM) write no end: the next turn's role token, or eos after the last turn, stops generation.
        following = tokens.visible(range(last, len(tokens.ids)))
        if following is None and self._tokenizer.eos is not None:
            return AnswerSpan(first, len(tokens.ids) + 1, len(tokens.ids))
        if following is not None and tokens.ids[following] in self._tokenizer.special:
            return AnswerSpan(first, following + 1, following)
        return AnswerSpan(first, first if end is None else end + 1, None)

    def _segment(self, conversation: Conversation, whole: Rendering, number: int) -> Segment:
        """The one place where the template writes an assistant's message."""
        segments = whole.of(number)
        if len(segments) != 1:
            raise self._tokenizer.refusal(f"writes an assistant's message {len(segments)} times in loops over messages")
        segment = segments[0]
        if any(segment.start <= other.start < segment.end for other in whole.segments if other is not segment):
            raise self._tokenizer.refusal("writes other messages inside an assistant's")
        if number + 1 < len(conversation.messages) and not whole.of(number + 1):
            # Gemma 4 writes tool results into the pass of the assistant that called: keep what stands there before.
            written = whole.text[segment.start : segment.end]
            return replace(segment, end=segment.start + len(_shared(conversation.answer(number), written)))
        return segment

    def _start(self, conversation: Conversation, whole: Rendering, tokens: TokenSpans, segment: Segment) -> int:
        """The character at which generation takes over from the generation prompt."""
        if self._tokenizer.instrumented.constant_header:
            if self._header is None:
                asked = conversation.part(prompt=True)
                self._header = asked.text[asked.loop_end :]
            header = self._header
        else:
            before = whole.text[: segment.start]
            asked = conversation.part(stop=segment.message, prompt=True)
            # Earlier turns may be written differently before the answer is there (reasoning is dropped from history).
            header = asked.text[len(before) if asked.text.startswith(before) else asked.loop_end :]
        if whole.text.startswith(header, segment.start):
            return segment.start + len(header)
        message = conversation.messages[segment.message]
        written = whole.text[segment.start : segment.end]
        ends = segment.message + 1 == len(conversation.messages)
        if ends and thoughts(message) and written_out(thoughts(message), written):
            raise DataError(
                f"{conversation.place}: message {segment.message + 1} has reasoning, but {self._tokenizer.name} asks "
                f"for answers with {header!r}, after which it is not generated.\n  Give another template with "
                "model.chat_template=FILE, take the reasoning out of the row, or write data.on_bad_row=skip."
            )
        # A prompt may lead further than this turn goes (`<think>` before a turn without reasoning). Whole tokens are
        # compared: by characters, the `<` of an answer in HTML would pass for the prompt's.
        if header not in self._header_ids:
            self._header_ids[header] = self._tokenizer.tokenise(header).ids
        first, last = tokens.between(segment.start, segment.end)
        shared = len(_shared(self._header_ids[header], tokens.ids[first:last]))
        if not shared:
            raise self._tokenizer.refusal(
                f"asks for an answer with {header!r}, but starts one with {written[:40]!r} ({conversation.place})"
            )
        return tokens.ends[first + shared - 1]

    def _is_generated(self, conversation: Conversation, tokens: TokenSpans, number: int, end: int) -> bool:
        """Whether the token that ends a turn also ends it while it is the last one.

        gpt-oss generates `<|return|>` and writes `<|end|>` in its place once the conversation goes on: loss on that
        would teach the model not to stop. A template's answer for a token is asked once and remembered.
        """
        token = tokens.ids[end]
        if number + 1 == len(conversation.messages):
            return True
        if token not in self._generated_ends:
            written = tokens.text[tokens.starts[end] : tokens.ends[end]].strip()
            self._generated_ends[token] = conversation.answer(number).rstrip().endswith(written)
        return self._generated_ends[token]


def assistants(messages: Sequence[Message]) -> list[int]:
    """Numbers of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def written_out(part: str, text: str) -> bool:
    """Whether `text` holds a part of a message, by its last line, as templates may trim its start."""
    return not part.strip() or part.strip().splitlines()[-1].strip() in text


def _shared(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
    """The longest common prefix."""
    count = min(len(left), len(right))
    return left[: next((n for n in range(count) if left[n] != right[n]), count)]


LossOn = Literal["assistant", "last", "all"]
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Plain words and no special token but the end of a turn: what a base model has seen, whatever its vocabulary.
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
        {{- message.content + '\\n\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'Assistant:\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
        {%- endif %}
        {{- message.content | default('') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>' + (call.function or call) | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
        {{- '\\n\\n' }}
    {%- else %}
        {{- message.role | capitalize + ':\\n' + message.content + '\\n\\n' }}
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
    kept: int = 0
    """How many of the last tokens truncation keeps: what closes an encoder's text, and the answer after it."""
    source: int = 0
    """How many of the first tokens an encoder reads; 0 where there is no decoder beside it."""
    pictures: media.KeptPictures | None = None
    """Its pictures, as their processor keeps them."""
    last_picture: int = 0
    """How many of the first tokens hold all of its pictures; none of the tokens of a picture may be cut."""

    @property
    def ends(self) -> int:
        """How many supervised end-of-turn tokens there are."""
        return len(self.end_positions)


def truncate(encoded: Encoded, *, max_tokens: int, side: Literal["left", "right"]) -> Encoded:
    """At most `max_tokens` tokens: `left` cuts the beginning (but a BOS token), `right` the end.

    An example of which nothing but what is kept would be left stays as long as it is, and so does one that would lose a
    part of a picture.
    """
    cut = len(encoded.input_ids) - max_tokens
    stop = len(encoded.input_ids) - encoded.kept
    if cut <= 0 or (encoded.kept and cut >= stop - int(encoded.bos)):
        return encoded
    head = stop - cut if side == "right" else int(encoded.bos)
    tail = head + cut
    if encoded.pictures and (side == "left" or head < encoded.last_picture):
        return encoded
    return Encoded(
        input_ids=encoded.input_ids[:head] + encoded.input_ids[tail:],
        supervised=encoded.supervised[:head] + encoded.supervised[tail:],
        end_positions=tuple(end - cut * (end >= tail) for end in encoded.end_positions if not head <= end < tail),
        bos=encoded.bos and head > 0,
        kept=encoded.kept,
        source=max(0, encoded.source - cut),
        pictures=encoded.pictures,
        last_picture=encoded.last_picture,
    )


class Block(NamedTuple):
    """A part of a long document."""

    encoded: Encoded
    tokens: int  # of the document, that no block before it has


def blocks(document: Encoded, *, max_tokens: int, overlap: int) -> list[Block]:
    """A document as consecutive blocks of at most `max_tokens` tokens.

    Each has the beginning of a sequence and what closes one, where the document has them. Every token carries loss in
    one block: the last `overlap` tokens of the block before are read only.
    """
    ids, first, stop = document.input_ids, int(document.bos), len(document.input_ids) - document.kept
    room, found, begin, end = max_tokens - first - document.kept, list[Block](), first, first
    while end < stop:
        if end + 1 == stop and not first and begin == end:
            begin -= 1  # a last token that stood alone would have nothing to be predicted from
        known, end = end, min(begin + room, stop)
        ends = tuple(at - begin + first for at in document.end_positions if known <= at < end)
        loss = [*document.supervised[:first], *[False] * (known - begin), *document.supervised[known:end]]
        block = replace(
            document,
            input_ids=ids[:first] + ids[begin:end] + ids[stop:],
            supervised=loss + document.supervised[stop:],
            end_positions=ends,
        )
        found.append(Block(block, end - known + (first + document.kept) * (not found)))
        begin = end - overlap
    return found


class LastAnswer(NamedTuple):
    """The last answer of an example in the text that is tokenised."""

    tokens: TokenSpans  # all of the text
    start: int  # the character at which the answer begins
    added: int  # tokens that stand in front of the text's own: a beginning of a sequence


class ChatEncoder:
    """How a tokenizer writes conversations. Raises BackboneError: the tokenizer gives no offsets, or the template is
    not valid Jinja.

    Args:
        tokenizer: A fast tokenizer, because masks are found by character offsets.
        template: Jinja source that replaces the tokenizer's own; where neither is there, DEFAULT_TEMPLATE.
        processor: Reads the pictures of rows; or why none are read, in words after "and".

    Attributes:
        source: The Jinja source in use, to be saved with what is trained with it.
    """

    conversion: Conversion | None = None  # rows are read as their format says
    reader: Reader | None = None  # they are those of the file

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        *,
        processor: media.MediaProcessor | str = "this recipe reads text alone. Take sft, prefer, reward or reinforce",
    ) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(
                f"{type(tokenizer).__name__} gives no character offsets, by which the loss mask is found.\n"
                "  Give a model.id whose folder has a tokenizer.json."
            )
        whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
        added = whole[0] == tokenizer.bos_token_id and whole != bare
        self._bos = int(whole[0]) if added else None
        default = DEFAULT_TEMPLATE if self._bos is None else "{{ bos_token }}" + DEFAULT_TEMPLATE
        own = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.source: str = template if template is not None else own or default
        self._one_of_several = template is None and isinstance(tokenizer.chat_template, dict)
        self._tokenizer = ChatTokenizer(tokenizer, self.source)
        self._masker = AnswerMasker(self._tokenizer)
        self.processor = None if isinstance(processor, str) else processor
        self._blind = processor if isinstance(processor, str) else ""

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The example's ids with the mask that `loss_on` asks for. Raises DataError: the template refuses this
        conversation or leaves out an answer; names the place; BackboneError: the template does not let answers be told
        from the rest."""
        if example.text:
            return self._encode_text(example, loss_on)
        conversation = self._rendered_conversation(example)
        return self._encode_chat(example, conversation, conversation.whole(), loss_on)

    def encode_many(self, examples: Sequence[Example], *, loss_on: LossOn) -> list[Encoded | WorkbenchError]:
        """`encode` of each example, as `outcomes`, tokenised in one call.

        What is remembered of the template is forgotten first: the result depends on nothing but these examples.
        """
        self._masker = AnswerMasker(self._tokenizer)
        chats = {
            number: self._rendered_conversation(example)
            for number, example in enumerate(examples)
            if example.messages and not example.tools and not media.of_messages(example.messages)
        }
        rendered = dict(zip(chats, wholes(list(chats.values())), strict=False))
        pieces = [example.whole_text for example in examples if len(example.text) > 1]
        raw = [example.text[0][0] for example in examples if len(example.text) == 1]

        def encoded(number: int) -> Encoded:
            example = examples[number]
            if example.text:
                return self._encode_text(example, loss_on)
            conversation = chats.get(number) or self._rendered_conversation(example)
            return self._encode_chat(example, conversation, rendered.get(number) or conversation.whole(), loss_on)

        with self._tokenizer.tokenised([*pieces, *(whole.text for whole in rendered.values())], without_offsets=raw):
            return outcomes(encoded, range(len(examples)))

    def answer_text(self, example: Example) -> LastAnswer:
        """Where the last answer of an example stands in its text, whose tokens are those of `encode`."""
        if example.text:
            start = sum(len(text) for text, _ in example.text[:-1])
            tokens = self._tokenizer.tokenise(example.whole_text, [start])
            return LastAnswer(tokens, start, int(self._bos is not None and tokens.ids[:1] != [self._bos]))
        conversation = self._rendered_conversation(example)
        tokens, answers = self._masker.find(conversation, conversation.whole(), learnt(example.messages, "last"))
        return LastAnswer(tokens, tokens.starts[answers[-1].first], 0)

    @property
    def identity(self) -> list[Any]:
        return [self.source]

    def targets(self, encoded: Encoded) -> int:
        """How many tokens are predicted: the first one of a row has nothing to be predicted from."""
        return sum(encoded.supervised[1:])

    def seen(self, row: Row, *, epoch: int) -> Row:
        return row

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        batch = collate(rows, epoch=epoch)
        if self.processor is None:
            return batch
        keys = [row.pictures for row in rows]
        seen = self.processor.inputs(batch.inputs["input_ids"], keys)
        if seen and self.processor.numbered:
            seen[media.NUMBERS] = media.numbers(keys)
        return replace(batch, inputs={**batch.inputs, **seen})

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example, or one for each of its answers where the template drops the reasoning of earlier ones.

        Templates of models that reason write the reasoning of the last answer only. To be learnt as it is generated,
        each answer has to be the last of a conversation, with what came before as it is served.
        """
        if self.reads_reasoning and any(split_thoughts(message) is not message for message in example.messages):
            example = replace(example, messages=tuple(map(split_thoughts, example.messages)))
        numbers = learnt(example.messages, loss_on) if loss_on == "assistant" else []
        reasoned = [number for number in numbers if thoughts(example.messages[number])]
        if not reasoned:
            return [example]
        whole = self._conversation(example.place, example.messages, example.tools).whole()
        written = {
            number: "".join(whole.text[each.start : each.end] for each in whole.of(number)) for number in reasoned
        }
        if all(written_out(thoughts(example.messages[number]), text) for number, text in written.items()):
            return [example]
        return [
            replace(
                example,
                place=f"{example.place}, answer {count} of {len(numbers)}",
                messages=tuple(last_answer_only(example.messages[: number + 1])),
            )
            for count, number in enumerate(numbers, start=1)
        ]

    @property
    def reads_reasoning(self) -> bool:
        """Whether the template writes reasoning from a field of its own, and may not know it in front of an answer."""
        inline, field, _ = self._reasoning
        return "REASON" in field and inline.count("<think>") != field.count("<think>")

    @cached_property
    def _reasoning(self) -> tuple[str, str, str]:
        """A first answer with reasoning in front of it, the same with a field for it, and the generation prompt."""
        asked = {"role": "user", "content": "Why?"}
        inline = {"role": "assistant", "content": "<think>\nREASON\n</think>\n\nSo."}
        answers = [
            self._conversation("a first conversation", (asked, each), ()) for each in (inline, split_thoughts(inline))
        ]
        try:
            texts = [answer.text(prompt=False) for answer in answers]
            return texts[0], texts[1], replace(answers[0], messages=(asked,)).text(prompt=True)
        except (BackboneError, DataError):
            return "", "", ""

    def question(self, example: Example) -> list[int]:
        """Ids that an answer to `example` starts from, as in training; raw text without the EOS that ends a row."""
        if example.messages:
            return self.prompt(example.messages, example.tools)
        ids = self._encode_text(example, "all").input_ids
        return ids[:-1] if ids[-1] == self._tokenizer.eos else ids

    def pictures_of(self, example: Example) -> str:
        """Names the pictures of an example, as `Row.pictures` does; empty where it has none."""
        found = media.of_messages(example.messages)
        return self.processor.kept(found, example.place).key if found and self.processor else ""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Ids of the conversation with the generation prompt: what generation starts from."""
        return self._tokenizer.tokenise(self._conversation("the conversation", messages, tools).text(prompt=True)).ids

    def continued(
        self, messages: Sequence[Message], count: int, tools: Sequence[Message], stop: Sequence[int], last: int
    ) -> tuple[list[int], bool]:
        """Ids that a conversation goes on with behind its answer `messages[count]`, up to where the next one begins;
        and whether they stand behind the answer as it was generated. Where they do not, the template writes earlier
        turns differently now, and the ids are those of all of the conversation.

        Args:
            stop: Ids that end an answer.
            last: The last id that was generated.
        """
        before, said, whole = (
            self._conversation("the conversation", messages[:each], tools).text(prompt=prompt)
            for each, prompt in ((count, True), (count + 1, False), (len(messages), True))
        )
        written = said if said.startswith(before) else ""
        ends = [str(self._tokenizer.tokenizer.decode([each])) for each in stop]
        places = [written.rfind(end) + len(end) for end in ends if written.rfind(end) >= len(before)]
        edge = max(places, default=len(said.rstrip()))
        if not places and whole.startswith(end := str(self._tokenizer.tokenizer.decode([last])), edge):
            edge += len(end)  # what ends the answer begins the next turn
        tokens = self._tokenizer.tokenise(whole, [edge])
        if not (whole.startswith(before) and whole.startswith(written[:edge] or "\0")):
            return self._tokenizer.tokenise(whole).ids, False
        return tokens.ids[tokens.between(0, edge)[1] :], True

    def generation_prompt(self) -> list[int]:
        """Ids that ask for the next answer, such as the header of its message; empty where the template has none."""
        conversation = self._conversation("a first conversation", ({"role": "user", "content": "a"},), ())
        asked, whole = (self._tokenizer.tokenise(conversation.text(prompt=each)).ids for each in (True, False))
        return asked[len(whole) :] if asked[: len(whole)] == whole else []

    def stops(self) -> list[int]:
        """Ids that end an answer: the tokenizer's eos, and what the template writes after one."""
        probe = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        first = Example("a first conversation", messages=probe * 2)
        conversation = self._rendered_conversation(first)
        encoded = self._encode_chat(first, conversation, conversation.whole(), "assistant")
        eos = set() if self._tokenizer.eos is None else {self._tokenizer.eos}
        return sorted(eos | {encoded.input_ids[end] for end in encoded.end_positions})

    def _conversation(self, place: str, messages: Sequence[Message], tools: Sequence[Message]) -> Conversation:
        if tools and self._one_of_several:
            raise DataError(
                f"{place}: has tools, but {self._tokenizer.name} is one of several by name.\n"
                "  Write the one for tools to a file and give it as model.chat_template=FILE."
            )
        if not (found := media.of_messages(messages)):
            if self._parts == (False, True):  # a template that knows lists of parts alone
                return Conversation(self._tokenizer, place, messages, tools, in_parts=True)
            return Conversation(self._tokenizer, place, messages, tools)
        wrong = next((each.kind for each in found if self.processor is None or each.kind != self.processor.kind), None)
        if wrong is not None or self.processor is None:
            why = self._blind
            if wrong != "image" and (self.processor is not None or "text alone. Take a" in why):
                why = "its backbone hears nothing beside text. Take one that does, such as Qwen2-Audio"
            elif self.processor is not None:
                why = "its backbone sees nothing. Take one that sees, such as Qwen3-VL, Gemma 3 or LLaVA"
            raise DataError(
                f"{place}: has a {media.KINDS[wrong or 'image'].noun}, and {why}. Or learn from the text of the rows "
                f"alone: data.ignore='[{', '.join(media.COLUMNS)}]' leaves columns of pictures and sound out."
            )
        pictures = self.processor.kept(found, place)
        mark, parts = self.processor.token, self._parts[1]
        return Conversation(self._tokenizer, place, messages, tools, pictures=pictures, mark=mark, in_parts=parts)

    @cached_property
    def _parts(self) -> tuple[bool, bool]:
        """Whether the template writes a content that is a text, and one that is a list of parts."""
        text = "a word to look for"

        def writes(content: Any) -> bool:
            asked = [{"role": "user", "content": content}]
            try:
                written = self._tokenizer.instrumented.render(
                    asked, (), prompt=False, special_tokens=self._tokenizer.special_tokens
                )
            except Exception:  # a template is foreign code
                return False
            return written is not None and text in written.text and "{" not in written.text

        return writes(text), writes([{"type": "text", "text": text}])

    def _rendered_conversation(self, example: Example) -> Conversation:
        conversation = self._conversation(example.place, example.messages, example.tools)
        inline, field, prompt = self._reasoning
        # The template asks for reasoning, but never writes what it was given.
        cuts_reasoning = prompt.rstrip().endswith("<think>") and "REASON" not in inline + field
        return replace(conversation, restored=cuts_reasoning and bool(thoughts(example.messages[-1])))

    def _encode_chat(self, example: Example, conversation: Conversation, whole: Rendering, loss_on: LossOn) -> Encoded:
        tokens, answers = self._masker.find(conversation, whole, learnt(example.messages, loss_on))
        ids = list(tokens.ids)
        supervised = [False] * len(ids)
        for answer in answers:
            if self._tokenizer.eos is not None and answer.last > len(ids):
                ids.append(self._tokenizer.eos)
                supervised.append(True)
            supervised[answer.first : answer.last] = [True] * (answer.last - answer.first)
        ends = [answer.end for answer in answers if answer.end is not None]
        if loss_on == "all":
            supervised = [True] * len(ids)
        last = 0
        for start, stop in conversation.picture_spans(whole.text):
            first, last = tokens.between(start, stop)
            supervised[first:last] = [False] * (last - first)
        bos = ids[:1] == [self._tokenizer.tokenizer.bos_token_id]
        return Encoded(ids, supervised, tuple(ends), bos, pictures=conversation.pictures, last_picture=last)

    def _encode_text(self, example: Example, loss_on: LossOn) -> Encoded:
        """Raw pieces as one string, between the tokenizer's own BOS and an EOS that belongs to the last piece."""
        wanted = [loss or loss_on == "all" for _, loss in example.text]
        if loss_on == "last":
            last = max((number for number, loss in enumerate(wanted) if loss), default=None)
            wanted = [number == last for number in range(len(wanted))]
        if len(wanted) == 1:
            ids = self._tokenizer.ids(example.text[0][0])
            supervised = wanted * len(ids)
        else:
            # Several pieces as one text, cut where those that are wanted begin.
            stops = list(accumulate(len(text) for text, _ in example.text))
            starts = [start for start, (_, loss) in zip([0, *stops], example.text, strict=False) if loss]
            tokens = self._tokenizer.tokenise(example.whole_text, starts)
            ids, supervised = list(tokens.ids), []
            for stop, loss in zip(stops, wanted, strict=True):
                supervised += [loss] * (tokens.between(0, stop)[1] - len(supervised))
        eos = self._tokenizer.eos
        if eos is not None and ids[-1:] != [eos]:
            ids, supervised = [*ids, eos], [*supervised, wanted[-1]]
        if self._bos is not None and ids[:1] != [self._bos]:
            ids, supervised = [self._bos, *ids], [loss_on == "all", *supervised]
        ends = (len(ids) - 1,) if supervised[-1] and ids[-1] == eos else ()
        return Encoded(ids, supervised, ends, ids[0] == self._tokenizer.tokenizer.bos_token_id)


def outcomes(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT | WorkbenchError]:
    """Results of `function`, with an item's DataError in the place of its result; any other error is the last one."""
    results: list[ResultT | WorkbenchError] = []
    for item in items:
        try:
            results.append(function(item))
        except WorkbenchError as error:
            results.append(error)
            if not isinstance(error, DataError):
                break
    return results


def learnt(messages: Sequence[Message], loss_on: LossOn) -> list[int]:
    """Numbers of the messages that carry loss."""
    answers = assistants(messages)
    if loss_on == "all":
        return answers
    return [number for number in answers[-1 * (loss_on == "last") :] if messages[number].get("loss", True)]
