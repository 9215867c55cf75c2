"""Examples as token ids, and which of those tokens carry loss.

What is supervised is what the model has to generate: from the end of the generation prompt through reasoning, content
and tool calls, to and including the token that ends the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.text.answer_masks import AnswerMasker, Conversation, assistants, wholes, written_out
from workbench.data.text.chat_tokenizer import ChatTokenizer, TokenSpans
from workbench.data.text.formats import Conversion, Example, Reader
from workbench.data.text.messages import Message, last_answer_only, split_thoughts, thoughts
from workbench.data.text.template_segments import Rendering
from workbench.errors import BackboneError, DataError, WorkbenchError

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

    @property
    def ends(self) -> int:
        """How many supervised end-of-turn tokens there are."""
        return len(self.end_positions)


def truncate(encoded: Encoded, *, max_tokens: int, side: Literal["left", "right"]) -> Encoded:
    """At most `max_tokens` tokens: `left` cuts the beginning (but a BOS token), `right` the end.

    An example of which nothing but what is kept would be left stays as long as it is.
    """
    cut = len(encoded.input_ids) - max_tokens
    stop = len(encoded.input_ids) - encoded.kept
    if cut <= 0 or (encoded.kept and cut >= stop - int(encoded.bos)):
        return encoded
    head = stop - cut if side == "right" else int(encoded.bos)
    tail = head + cut
    return Encoded(
        input_ids=encoded.input_ids[:head] + encoded.input_ids[tail:],
        supervised=encoded.supervised[:head] + encoded.supervised[tail:],
        end_positions=tuple(end - cut * (end >= tail) for end in encoded.end_positions if not head <= end < tail),
        bos=encoded.bos and head > 0,
        kept=encoded.kept,
        source=max(0, encoded.source - cut),
    )


class LastAnswer(NamedTuple):
    """The last answer of an example in the text that is tokenised."""

    tokens: TokenSpans
    """All of the text."""
    start: int
    """The character at which the answer begins."""
    added: int
    """Tokens that stand in front of the text's own: a beginning of a sequence."""


class ChatEncoder:
    """How a tokenizer writes conversations.

    Args:
        tokenizer: A fast tokenizer, because masks are found by character offsets.
        template: Jinja source that replaces the tokenizer's own; where neither is there, DEFAULT_TEMPLATE.

    Attributes:
        source: The Jinja source in use, to be saved with what is trained with it.

    Raises:
        BackboneError: The tokenizer gives no offsets, or the template is not valid Jinja.
    """

    conversion: Conversion | None = None
    """Rows are read as their format says."""
    reader: Reader | None = None
    """They are those of the file."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(
                f"{type(tokenizer).__name__} gives no character offsets, by which the loss mask is found.\n"
                "  Give a model.id whose folder has a tokenizer.json."
            )
        self._bos = _added_bos(tokenizer)
        default = DEFAULT_TEMPLATE if self._bos is None else "{{ bos_token }}" + DEFAULT_TEMPLATE
        own = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.source: str = template if template is not None else own or default
        self._one_of_several = template is None and isinstance(tokenizer.chat_template, dict)
        self._tokenizer = ChatTokenizer(tokenizer, self.source)
        self._masker = AnswerMasker(self._tokenizer)

    def encode(self, example: Example, *, loss_on: LossOn) -> Encoded:
        """The example's ids with the mask that `loss_on` asks for.

        Raises:
            DataError: The template refuses this conversation or leaves out an answer; names the place.
            BackboneError: The template does not let answers be told from the rest.
        """
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
            if example.messages and not example.tools
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

        known = [*pieces, *(whole.text for whole in rendered.values())]
        with self._tokenizer.tokenised(known, without_offsets=raw):
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
        """All that the written tokens depend on, besides the tokenizer."""
        return [self.source]

    def targets(self, encoded: Encoded) -> int:
        """How many tokens are predicted: the first one of a row has nothing to be predicted from."""
        return sum(encoded.supervised[1:])

    def seen(self, row: Row, *, epoch: int) -> Row:
        """The row as the model sees it."""
        return row

    def collate(self, rows: Sequence[Row], *, epoch: int) -> MicroBatch:
        """Rows as the model sees them."""
        return collate(rows, epoch=epoch)

    def expanded(self, example: Example, *, loss_on: LossOn) -> list[Example]:
        """The example, or one for each of its answers where the template drops the reasoning of earlier ones.

        Templates of models that reason write the reasoning of the last answer only. To be learnt as it is generated,
        each answer has to be the last of a conversation, with what came before as it is served.
        """
        if self._reads_field and any(split_thoughts(message) is not message for message in example.messages):
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

    @cached_property
    def _reads_field(self) -> bool:
        """Whether the template writes reasoning from a field of its own, and does not know it in front of an answer."""
        inline, field, _ = self._reasoning
        return "REASON" in field and inline.count("<think>") != field.count("<think>")

    @cached_property
    def _cuts_reasoning(self) -> bool:
        """Whether the template asks for reasoning, but never writes what it was given."""
        inline, field, prompt = self._reasoning
        return prompt.rstrip().endswith("<think>") and "REASON" not in inline + field

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

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Ids of the conversation with the generation prompt: what generation starts from."""
        conversation = self._conversation("the conversation", messages, tools)
        return self._tokenizer.tokenise(conversation.text(prompt=True)).ids

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
        return Conversation(self._tokenizer, place, messages, tools)

    def _rendered_conversation(self, example: Example) -> Conversation:
        conversation = self._conversation(example.place, example.messages, example.tools)
        restored = self._cuts_reasoning and bool(thoughts(example.messages[-1]))
        return replace(conversation, restored=True) if restored else conversation

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
        return Encoded(ids, supervised, tuple(ends), ids[:1] == [self._tokenizer.tokenizer.bos_token_id])

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
            ids, supervised = self._encode_pieces(example, wanted)
        eos = self._tokenizer.eos
        if eos is not None and ids[-1:] != [eos]:
            ids, supervised = [*ids, eos], [*supervised, wanted[-1]]
        if self._bos is not None and ids[:1] != [self._bos]:
            ids, supervised = [self._bos, *ids], [loss_on == "all", *supervised]
        ends = (len(ids) - 1,) if supervised[-1] and ids[-1] == eos else ()
        return Encoded(ids, supervised, ends, ids[0] == self._tokenizer.tokenizer.bos_token_id)

    def _encode_pieces(self, example: Example, wanted: Sequence[bool]) -> tuple[list[int], list[bool]]:
        """Ids of several pieces as one text, and whether each belongs to a wanted one."""
        stops = list(accumulate(len(text) for text, _ in example.text))
        starts = [start for start, (_, loss) in zip([0, *stops], example.text, strict=False) if loss]
        tokens = self._tokenizer.tokenise(example.whole_text, starts)
        supervised: list[bool] = []
        for stop, loss in zip(stops, wanted, strict=True):
            supervised += [loss] * (tokens.between(0, stop)[1] - len(supervised))
        return list(tokens.ids), supervised


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


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The beginning-of-sequence id, where the tokenizer puts one in front of a text."""
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    added = whole[0] == tokenizer.bos_token_id and whole != bare
    return int(whole[0]) if added else None
