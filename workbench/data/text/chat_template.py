"""A chat template that tells which characters belong to which message, and the tokenizer that it is used with.

Searching the text for an answer fails as soon as an answer is trimmed, repeated or quoted. Instead the syntax tree
of the template is instrumented: every pass of a loop over the messages, and every `{% generation %}` block, writes
a private-use character and a number before and after its text. Taken out again, they leave the text and the spans.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context

from workbench import bounds
from workbench.data.text.messages import Message
from workbench.errors import BackboneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NodeT = TypeVar("NodeT", bound=nodes.Node)

# The name of the Marks among a template's variables, and of the filters that ask them; the number of a tagged block.
_NAME = "workbench_marks"
_GENERATION = -1
_CAPTURING = (
    nodes.AssignBlock,
    nodes.Block,
    nodes.CallBlock,
    nodes.Extends,
    nodes.FilterBlock,
    nodes.FromImport,
    nodes.Import,
    nodes.Include,
    nodes.Macro,
)  # everything in Jinja that gives a template its own text to read, beside a recursive loop


@dataclass(frozen=True, slots=True)
class Segment:
    """Characters `start` to `end` (exclusive), written in the loop pass of one message."""

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text."""

    text: str
    segments: list[Segment]  # one for every visible loop pass over a message, by where they start
    generated: list[tuple[int, int]]  # characters inside `{% generation %}` blocks
    loop_end: int  # where the last loop pass over a message ended; what follows is not the text of any message

    def of(self, message: int) -> list[Segment]:
        """The visible segments of message number `message`."""
        return [segment for segment in self.segments if segment.message == message]

    def expanded(self, places: Sequence[int], width: int, texts: Sequence[str]) -> Rendering:
        """The conversation with other texts in place of `width` characters at each of some places."""
        stops = [place + width for place in places]
        added = list(accumulate((len(text) - width for text in texts), initial=0))

        def moved(character: int) -> int:
            return character + added[bisect_right(stops, character)]

        pieces = [self.text[start:stop] for start, stop in zip([0, *stops], [*places, len(self.text)], strict=True)]
        text = "".join(piece for pair in zip_longest(pieces, texts, fillvalue="") for piece in pair)
        segments = [Segment(each.message, moved(each.start), moved(each.end)) for each in self.segments]
        generated = [(moved(start), moved(end)) for start, end in self.generated]
        return Rendering(text, segments, generated, moved(self.loop_end))


@cache
def _as_served() -> Callable[[list[Message]], list[Message]]:
    """Makes messages what transformers hands to a template: older releases than 5.23 know one name of reasoning."""
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "_alias_reasoning_fields", list)


class InstrumentedTemplate:
    """A chat template that tells what it writes for each message.

    Attributes:
        tagged: The template itself marks what the model generates with `{% generation %}`.
        constant_header: The generation prompt is provably the same text for every conversation.
        captures: The template may read what it has written, so that a mark could change what it writes.
    """

    def __init__(self, source: str) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self._source = source
        # Transformers' environment, so that filters, globals, sandbox and whitespace rules are those of serving.
        environment = _compile_jinja_template(source).environment.overlay()
        environment.filters = environment.filters | _FILTERS
        tree = environment.parse(source)
        self.constant_header = _constant_header(tree)
        self.captures = bool(list(tree.find_all(_CAPTURING))) or any(
            loop.recursive for loop in tree.find_all(nodes.For)
        )
        for loop in list(tree.find_all(nodes.For)):
            if isinstance(loop.target, nodes.Name):
                item = nodes.Name(loop.target.name, "load")
                loop.body = [_mark("enter", item), *_leave_before_jumps(loop.body), _mark("leave")]
        # `{% generation %}` blocks.
        blocks = [
            block
            for block in tree.find_all(nodes.CallBlock)
            if isinstance(called := block.call.node, nodes.ExtensionAttribute) and called.name == "_generation_support"
        ]
        for block in blocks:
            before, after = (_mark("block", nodes.Const(sign)) for sign in "+-")
            block.body = [before, *block.body, after]
        self.tagged = bool(blocks)
        self._template = environment.from_string(tree)
        # Copied for every conversation, which takes several times as long from the chain of them that Jinja makes.
        self._template.globals = dict(self._template.globals)
        self._private = [mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in source]

    def __reduce__(self) -> tuple[type[InstrumentedTemplate], tuple[str]]:
        """Pickled as its source; compiled templates cannot be pickled."""
        return InstrumentedTemplate, (self._source,)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        *,
        prompt: bool,
        special_tokens: dict[str, Any],
        text: str | None = None,
    ) -> Rendering | None:
        """The conversation with its spans; None where the template cut a mark in two.

        A template is foreign code: this may raise anything. `text`: what the template writes without marks, where that
        is known.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        chat: list[Message] = _as_served()(plain)
        marks = TemplateMarks(chat, self._unused([chat, tools] if text is None else text))
        variables = {**special_tokens, "messages": chat, "tools": list(tools) or None, "documents": None}
        marked = self._template.render({**variables, "add_generation_prompt": prompt, _NAME: marks})
        pieces = marked.split(marks.character)  # text, mark, text, mark, ..., text
        text = "".join(pieces[::2])
        position, loop_end = 0, 0
        entered: list[tuple[str, int]] = []
        segments: list[Segment] = []
        generated: list[tuple[int, int]] = []
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                position += len(piece)
            elif piece.endswith("+"):
                entered.append((piece[:-1], position))
            elif not entered or entered[-1][0] != piece[:-1]:
                return None
            else:
                message, start = int(piece[:-1]), entered.pop()[1]
                if message == _GENERATION:
                    generated.append((start, position))
                    continue
                loop_end = position
                if text[start:position].strip():
                    segments.append(Segment(message, start, position))
        if entered or len(pieces) % 2 == 0:
            return None
        return Rendering(text, sorted(segments, key=lambda segment: segment.start), sorted(generated), loop_end)

    def _unused(self, shown: Any) -> str:
        """A private-use character that is in none of these strings."""
        first = self._private[0]
        # Python writes private-use characters as escapes. What looks like one and is none only costs time.
        if repr(first)[1:-1] not in repr(shown):
            return first
        strings = _strings(shown)
        return next(mark for mark in self._private if not any(mark in each for each in strings))


@lru_cache(maxsize=8)  # compiling takes longer than encoding a few rows
def instrumented(source: str) -> InstrumentedTemplate:
    """The template of this source."""
    return InstrumentedTemplate(source)


MOST = 2**24
"""Characters that a template may write of a short conversation."""
_TRIED: tuple[Sequence[Message], ...] = tuple(
    [{"role": role, "content": f"{role} says this"} for role in roles]
    for roles in (["user"], ["user", "assistant"] * 2, ["system", "user", "assistant", "user"])
)


@lru_cache(maxsize=8)
def _fault(source: str, special_tokens: tuple[tuple[str, Any], ...]) -> str | None:
    """What a template takes too much of, or writes too much of, where it writes short conversations."""

    def write() -> None:
        template = instrumented(source)
        for messages in _TRIED:
            for prompt in (False, True):
                with suppress(TemplateError, TypeError, ValueError):  # it refuses the conversation
                    written = template.render(messages, (), prompt=prompt, special_tokens=dict(special_tokens))
                    if written is not None and len(written.text) > MOST:
                        raise MemoryError

    return bounds.fault(write)


class TemplateMarks:
    """The marks that an instrumented template asks for; `character` delimits each and occurs nowhere else."""

    def __init__(self, messages: Sequence[Message], character: str) -> None:
        self.character = character
        self._numbers = {id(message): number for number, message in enumerate(messages)}
        self._passes: list[int | None] = []

    def enter(self, item: object) -> str:
        """The mark before a loop pass over `item`; nothing where `item` is not one of the messages."""
        self._passes.append(self._numbers.get(id(item)))
        return self._mark(self._passes[-1], "+")

    def leave(self) -> str:
        """The mark after the loop pass that was entered last."""
        return self._mark(self._passes.pop(), "-")

    def generation(self, sign: str) -> str:
        """The mark before (`+`) or after (`-`) a `{% generation %}` block."""
        return self._mark(_GENERATION, sign)

    def _mark(self, number: int | None, sign: str) -> str:
        return "" if number is None else f"{self.character}{number}{sign}{self.character}"


def _filter(ask: Callable[[TemplateMarks, Any], str]) -> Any:
    return pass_context(lambda context, value: ask(context[_NAME], value))


_FILTERS = {
    f"{_NAME}_enter": _filter(TemplateMarks.enter),
    f"{_NAME}_leave": _filter(lambda marks, _: marks.leave()),
    f"{_NAME}_block": _filter(TemplateMarks.generation),
}  # how a template asks for its marks: a filter takes a third of the time that the sandbox takes for a call


def _leave_before_jumps(body: list[NodeT]) -> list[NodeT | nodes.Output]:
    """A loop's body in which `{% continue %}` and `{% break %}` also write the mark of leaving."""
    result: list[NodeT | nodes.Output] = []
    for node in body:
        if isinstance(node, nodes.Continue | nodes.Break):
            result.append(_mark("leave"))
        elif isinstance(node, nodes.If):
            node.body, node.else_ = _leave_before_jumps(node.body), _leave_before_jumps(node.else_)
            _leave_before_jumps(node.elif_)
        result.append(node)
    return result


def _mark(name: str, value: nodes.Expr | None = None) -> nodes.Output:
    return nodes.Output([nodes.Filter(value or nodes.Const(None), f"{_NAME}_{name}", [], [], None, None)])


def _constant_header(tree: nodes.Template) -> bool:
    """Whether what follows the last top-level loop depends on nothing but `add_generation_prompt`."""
    loops = [number for number, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    tail = tree.body[loops[-1] + 1 :] if loops else []
    if not loops or any(list(node.find_all(nodes.For)) for node in tail):
        return False
    loaded = [name.name for node in tail for name in _names([node], "load")]
    assigned = {name.name for name in _names([tree], "store", "param")}
    assigned |= {reference.name for reference in tree.find_all(nodes.NSRef)}
    assigned |= {macro.name for macro in tree.find_all(nodes.Macro)}
    elsewhere = len(list(_names([tree], "load", name="add_generation_prompt"))) - loaded.count("add_generation_prompt")
    return not elsewhere and not (assigned | {"messages", "tools", "loop"}).intersection(loaded)


def _strings(value: Any) -> list[str]:
    """All strings in messages and tools."""
    if isinstance(value, str):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [text for each in inner for text in _strings(each)]


def _names(trees: Iterable[nodes.Node], *contexts: str, name: str | None = None) -> Iterable[nodes.Name]:
    # find_all looks below a node, so a tree is wrapped to be looked at itself.
    for tree in trees:
        for name_node in nodes.Scope([tree]).find_all(nodes.Name):
            if name_node.ctx in contexts and name in (None, name_node.name):
                yield name_node


class TokenSpans:
    """Token ids of a text with the characters that each stands for; a token belongs to where it starts."""

    def __init__(self, text: str, ids: list[int], offsets: Sequence[tuple[int, int]]) -> None:
        self.text = text
        self.ids = ids
        # Tokenizers may trim a leading space off the offsets, which leaves a gap: a token starts where the one before
        # it ended. The bytes of one character have the same offsets each: there a token starts earlier than that.
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        before = [0, *ends[:-1]]
        if starts != before:
            ends = list(accumulate(ends, max))
            before = [0, *ends[:-1]]
            starts = list(map(min, starts, before))
        self.starts, self.ends = starts, ends

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """First and last (exclusive) token that starts in these characters."""
        return bisect_left(self.starts, start), bisect_left(self.starts, stop)

    def straddles(self, character: int) -> bool:
        """Whether a token starts before `character` and reaches beyond it."""
        number = bisect_left(self.starts, character) - 1
        return number >= 0 and self.ends[number] > character

    def visible(self, numbers: Iterable[int]) -> int | None:
        """The first of these tokens that is more than blank text."""
        return next((n for n in numbers if self.text[self.starts[n] : self.ends[n]].strip()), None)


class ChatTokenizer:
    """A tokenizer with the chat template in use.

    Attributes:
        name: What error messages call the template.
        special: Ids that can end a turn.
        special_tokens: The tokenizer's special tokens by name, which templates may write.
        eos: The id that ends every text; None in vocabularies without one.
        instrumented: The template, compiled so that it tells its turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.name = f"the chat template of {os.path.basename(tokenizer.name_or_path) or 'the tokenizer'}"
        self.eos: int | None = tokenizer.eos_token_id
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        special.update(tokenizer.all_special_ids)
        # A beginning of a sequence ends no turn, except in vocabularies that use one token for both.
        self.special = (special - {tokenizer.bos_token_id}) | ({self.eos} - {None})
        self.special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        self._known: dict[str, tuple[list[int], Any]] = {}
        self._known_ids: dict[str, list[int]] = {}
        if (fault := _fault(source, tuple(self.special_tokens.items()))) is not None:
            raise BackboneError(
                f"{self.name} {fault}.\n  Correct it, or give another one with model.chat_template=FILE."
            )
        try:
            self.instrumented: InstrumentedTemplate = instrumented(source)
        except TemplateSyntaxError as error:
            raise BackboneError(
                f"{self.name}, line {error.lineno}: {error.message}\n"
                "  Correct it, or give another one with model.chat_template=FILE."
            ) from None

    def tokenise(self, text: str, answers: Iterable[int] = ()) -> TokenSpans:
        """`text` as it stands, without the special tokens that the tokenizer would add.

        Args:
            text: What is tokenised, as one string wherever that is what generation sees.
            answers: Characters at which generation takes over. A token that reaches across one is right for neither
                side: after the prompt's own tokens, generation cannot produce it. There the text is tokenised in two.
        """
        tokens = TokenSpans(text, *self._encode(text))
        edges = [answer for answer in answers if tokens.straddles(answer)]
        if not edges:
            return tokens
        ids, offsets = self._encode(text[: edges[0]])
        for start, stop in pairwise([*edges, len(text)]):
            # As it follows other text: after a line break, because some vocabularies open a text with a space.
            breaks, part = len(self._encode("\n")[0]), text[start:stop]
            more_ids, more_offsets = self._encode("\n" + part)
            if more_offsets[breaks - 1][1] != 1:  # the line break is one token with what follows
                more_ids, more_offsets = self._encode(part)
            else:
                more_ids = more_ids[breaks:]
                more_offsets = [(left - 1, right - 1) for left, right in more_offsets[breaks:]]
            ids += more_ids
            offsets += [(left + start, right + start) for left, right in more_offsets]
        return TokenSpans(text, ids, offsets)

    def ids(self, text: str) -> list[int]:
        """Ids of `text` as it stands, without the characters that they stand for."""
        return list(self._known_ids[text] if text in self._known_ids else self._encoding(text)[0])

    @contextmanager
    def tokenised(self, texts: Sequence[str], *, without_offsets: Sequence[str] = ()) -> Iterator[None]:
        """Inside the block these texts are known: one call of the tokenizer for many takes less time.
        `without_offsets`: texts of which only `ids` are asked for, which takes a fifth less."""
        try:
            self._known = dict(zip(texts, self._encodings(texts), strict=True))
            self._known_ids = dict(zip(without_offsets, self._ids(without_offsets), strict=True))
            yield
        finally:
            self._known, self._known_ids = {}, {}

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        self._encodings(texts[:1])  # sets what the library below is asked for: all of each text, special tokens read
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, encoding = self._encoding(text)
        return list(ids), encoding.offsets

    def _encoding(self, text: str) -> tuple[list[int], Any]:
        return self._known[text] if text in self._known else self._encodings([text])[0]

    def _encodings(self, texts: Sequence[str]) -> list[tuple[list[int], Any]]:
        """The ids of each text, and the encoding of the library behind the tokenizer: its `offsets` are made late."""
        if not texts:
            return []
        batch = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(zip(batch["input_ids"], batch.encodings or [], strict=True))

    def refusal(self, why: str) -> BackboneError:
        """The error for a template whose answers cannot be told from the rest."""
        return BackboneError(
            f"{self.name} {why}, so the answers cannot be told from the rest.\n"
            "  Give another one with model.chat_template=FILE, such as one that writes what the model generates\n"
            "  between {% generation %} and {% endgeneration %}."
        )
