"""Which tokens of a rendered conversation are the assistant's to generate."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from workbench.data.text.chat_tokenizer import ChatTokenizer, TokenSpans
from workbench.data.text.messages import Message, split_thoughts, thoughts
from workbench.data.text.template_segments import Rendering, Segment
from workbench.data.time_limit import SECONDS, time_limit
from workbench.errors import BackboneError, DataError

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

    def text(self, *, prompt: bool) -> str:
        """The conversation as Transformers writes it when it serves; `prompt` asks for the next answer."""
        try:
            with time_limit(self.endless):
                text = self.tokenizer.tokenizer.apply_chat_template(
                    self.bare(None),
                    tools=list(self.tools) or None,
                    chat_template=self.tokenizer.source,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
                return str(text).replace(HIDDEN, CLOSING)
        except BackboneError:
            raise
        except Exception as error:  # A template is foreign code.
            raise self._refused(error) from None

    def whole(self) -> Rendering:
        """The same with the segments of its messages; its text is checked against `text`."""
        text = self.text(prompt=False)
        try:
            rendering = self._render(None, prompt=False)
        except BackboneError:
            raise
        except Exception:  # The same template wrote `text`, so it is the marks that it cannot live with.
            rendering = None
        if rendering is None or rendering.text != text:
            raise self.tokenizer.refusal("computes with the text of whole messages")
        return rendering

    def part(self, *, stop: int | None = None, prompt: bool = False) -> Rendering:
        """The first `stop` messages with their segments."""
        try:
            rendering = self._render(stop, prompt=prompt)
        except BackboneError:
            raise
        except Exception as error:
            raise self._refused(error) from None
        if rendering is None:
            raise self.tokenizer.refusal("computes with the text of whole messages")
        return rendering

    def answer(self, number: int) -> str:
        """Text of message `number` while it is the last one."""
        alone = self.part(stop=number + 1)
        return "".join(alone.text[segment.start : segment.end] for segment in alone.of(number))

    def _render(self, stop: int | None, *, prompt: bool) -> Rendering | None:
        with time_limit(self.endless):
            return self.marked(stop, prompt=prompt)

    def marked(self, stop: int | None = None, *, prompt: bool = False, text: str | None = None) -> Rendering | None:
        """The first `stop` messages with their segments; None where the template cut a mark in two.

        Args:
            text: What the template writes without marks, where that is known.
        """
        rendering = self.tokenizer.instrumented.render(
            self.bare(stop), self.tools, prompt=prompt, special_tokens=self.tokenizer.special_tokens, text=text
        )
        return rendering and replace(rendering, text=rendering.text.replace(HIDDEN, CLOSING))

    def endless(self) -> BackboneError:
        """The error for a template that is not done in time."""
        return BackboneError(
            f"{self.place}: {self.tokenizer.name} was not done with it after {SECONDS:g} seconds of computing. Does it "
            "loop without an end?\n  Correct it, or give another one with model.chat_template=FILE."
        )

    def bare(self, stop: int | None) -> list[Message]:
        """The messages without our own key, and with restored reasoning hidden from the template."""
        bare = [{key: value for key, value in each.items() if key != "loss"} for each in self.messages[:stop]]
        if self.restored and len(bare) == len(self.messages):
            bare[-1] |= {"content": f"<think>\n{thoughts(bare[-1])}\n{HIDDEN}\n\n{split_thoughts(bare[-1])['content']}"}
        return bare

    def _refused(self, error: Exception) -> DataError:
        return DataError(
            f"{self.place}: {self.tokenizer.name} refuses this conversation: {error}\n"
            "  Change the row, write data.on_bad_row=skip, or give another template with model.chat_template=FILE."
        )


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
            _check_written(conversation, number, "".join(whole.text[start:stop] for start, stop in message_spans))
            spans += [(number, start, stop) for start, stop in message_spans]
        if any(tokens.straddles(start) for _, start, _ in spans):
            tokens = self._tokenizer.tokenise(whole.text, [start for _, start, _ in spans])
        answer = self._tagged if self._tokenizer.instrumented.tagged else self._untagged
        return tokens, [answer(conversation, tokens, *span) for span in spans]

    def _spans(
        self, conversation: Conversation, whole: Rendering, tokens: TokenSpans, number: int
    ) -> Iterable[tuple[int, int]]:
        """Characters of an answer: from where generation takes over to the end of what belongs to the message."""
        if self._tokenizer.instrumented.tagged:
            return _tagged_spans(whole, conversation.messages, number)
        segment = self._segment(conversation, whole, number)
        return [(self._start(conversation, whole, tokens, segment), segment.end)]

    def _tagged(self, conversation: Conversation, tokens: TokenSpans, number: int, start: int, stop: int) -> AnswerSpan:
        first, last = tokens.between(start, stop)
        end = tokens.visible(range(last - 1, first - 1, -1))
        # Generation stops at the end of the turn; blank text that the template writes after it is no answer.
        if end is not None and tokens.ids[end] in self._tokenizer.special:
            return AnswerSpan(first, end + 1, end)
        return AnswerSpan(first, last, None)

    def _untagged(
        self, conversation: Conversation, tokens: TokenSpans, number: int, start: int, stop: int
    ) -> AnswerSpan:
        first, last = tokens.between(start, stop)
        end = tokens.visible(range(last - 1, first - 1, -1))
        if end is not None and tokens.ids[end] in self._tokenizer.special:
            generated = self._is_generated(conversation, tokens, number, end)
            return AnswerSpan(first, end + generated, end if generated else None)
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
        header = self._generation_prompt(conversation, whole, segment)
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

    def _generation_prompt(self, conversation: Conversation, whole: Rendering, segment: Segment) -> str:
        """Text by which the template asks for the answer that `segment` holds."""
        if self._tokenizer.instrumented.constant_header:
            if self._header is None:
                asked = conversation.part(prompt=True)
                self._header = asked.text[asked.loop_end :]
            return self._header
        before = whole.text[: segment.start]
        asked = conversation.part(stop=segment.message, prompt=True)
        # Earlier turns may be written differently before the answer is there (reasoning is dropped from history).
        return asked.text[len(before) if asked.text.startswith(before) else asked.loop_end :]

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


def _check_written(conversation: Conversation, number: int, written: str) -> None:
    """Refuse a row whose answer the template leaves out: it would silently teach something else.

    Templates may take reasoning away from the front of an answer, and rewrite an answer that comes with tool calls.
    """
    message = conversation.messages[number]
    if number + 1 == len(conversation.messages) and not written_out(thoughts(message), written):
        raise DataError(
            f"{conversation.place}: {conversation.tokenizer.name} leaves out the reasoning of message {number + 1}, "
            "and the model would learn to answer without.\n  Give another template with model.chat_template=FILE, take "
            "the reasoning out of the row, or write data.on_bad_row=skip."
        )
    calls = [call.get("function", call)["name"] for call in message.get("tool_calls") or []]
    missing = [f"the call of `{name}`" for name in calls if name not in written]
    content = str(message.get("content") or "").strip()
    if not calls and not written_out(content, written):
        missing.append("the answer")
    if missing:
        raise DataError(
            f"{conversation.place}: {conversation.tokenizer.name} leaves out {missing[0]} in message {number + 1}.\n"
            "  Change the row, write data.on_bad_row=skip, or give another template with model.chat_template=FILE."
        )


def written_out(part: str, text: str) -> bool:
    """Whether `text` holds a part of a message, of which templates may trim the start: its last line tells."""
    return not part.strip() or part.strip().splitlines()[-1].strip() in text


def _tagged_spans(whole: Rendering, messages: Sequence[Message], number: int) -> list[tuple[int, int]]:
    """The `{% generation %}` blocks of one message.

    A block outside all loop passes belongs to the message before it. A template without a loop over the messages
    has to write one block for each of the assistant's.
    """
    if not whole.segments:
        return whole.generated[assistants(messages).index(number) :][:1]
    starts = [segment.start for segment in whole.segments]
    owners = [whole.segments[max(0, bisect_left(starts, start + 1) - 1)].message for start, _ in whole.generated]
    return [span for span, owner in zip(whole.generated, owners, strict=True) if owner == number]


def _shared(left: Sequence[Any], right: Sequence[Any]) -> Sequence[Any]:
    """The longest common prefix."""
    count = min(len(left), len(right))
    return left[: next((n for n in range(count) if left[n] != right[n]), count)]
