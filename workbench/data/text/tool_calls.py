"""Calls of tools in what a model wrote: the forms in which chat templates write them, and how each is read back.

A template has the form in which a call that it writes is read back. A new form is one more record of FORMS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.data.rows import excerpt
from workbench.data.text.formats import Example
from workbench.data.text.messages import Message, split_thoughts
from workbench.errors import BackboneError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workbench.data.text.chat import ChatEncoder


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    fault: str = ""
    """Why it cannot be carried out, in words that the model is answered with; empty where it can."""

    def message(self, number: int) -> dict[str, Any]:
        """The call in a message's `tool_calls`, with an id of nine digits, as Mistral's templates ask for."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": f"{number:09d}", "type": "function", "function": function}


class WrittenTurn(NamedTuple):
    """A turn of the assistant as its tokens are read."""

    message: Message
    """Role, content and reasoning, without the calls."""
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls."""

    begin: str
    """Pattern of what begins a call: text that has it, and is no whole call, is a call that cannot be read."""
    call: str
    """Pattern of a call. Group `calls` is JSON: an object with name and arguments, or a list of them; or else `name`
    is a name, and `arguments` a JSON object, or all parameters as `parameter` finds them."""
    parameter: str = ""
    """Pattern of the name (1) and the value (2) of a parameter."""
    around: str = ""
    """Pattern of marks around calls, which are no content."""
    stops: tuple[str, ...] = ()
    """Tokens that end a turn with calls, beside those that end any."""

    def read(self, text: str, *, name: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The content of a turn, and its calls. `name`: takes the place of that of a call that cannot be read."""
        calls = [
            call for match in re.finditer(self.call, text, re.DOTALL) for call in self._of(match.groupdict(), name=name)
        ]
        rest = re.sub(self.call, "", text, flags=re.DOTALL)
        if match := re.search(self.begin, rest):
            calls.append(ToolCall(name, {}, f"the call is not finished: {excerpt(rest[match.start() :])}"))
            rest = rest[: match.start()]
        return (re.sub(self.around, "", rest) if self.around else rest).strip(), tuple(calls)

    def _of(self, found: Mapping[str, str | None], *, name: str) -> Iterator[ToolCall]:
        written, arguments = found.get("calls"), found.get("arguments") or ""
        if written is None and self.parameter:
            pairs = re.findall(self.parameter, arguments, re.DOTALL)
            yield ToolCall(str(found["name"]).strip(), {key.strip(): _value(value.strip()) for key, value in pairs})
            return
        try:
            value = json.loads(arguments if written is None else written)
        except (ValueError, RecursionError):
            yield ToolCall(name, {}, f"the call is not JSON: {excerpt(arguments if written is None else written)}")
            return
        if written is None:
            value = {"name": str(found["name"]).strip(), "arguments": value}
        for each in value if isinstance(value, list) else [value]:
            given = each.get("arguments", each.get("parameters")) if isinstance(each, dict) else None
            given = _value(given) if isinstance(given, str) else given
            if not isinstance(given, dict) or not isinstance(each.get("name"), str):
                yield ToolCall(name, {}, f"a call is an object with name and arguments, found {excerpt(each)}")
            else:
                yield ToolCall(each["name"], given)


def _value(text: str) -> Any:
    """A value that is written as JSON where it is no text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_BAR, _LOW = "\uff5c", "\u2581"
"""DeepSeek's tokens hold a fullwidth bar and a low block."""


def _deepseek(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _LOW)}{_BAR}>"


FORMS = (
    CallForm(  # DeepSeek V3, R1 (`function`, a fence) and V3.1
        begin=_deepseek("tool call begin"),
        call=(
            rf"{_deepseek('tool call begin')}(?:function{_deepseek('tool sep')})?(?P<name>[^\n<]+?)"
            rf"(?:\n```json\n|{_deepseek('tool sep')})(?P<arguments>.*?)(?:\n```)?{_deepseek('tool call end')}"
        ),
        around=f"{_deepseek('tool calls begin')}|{_deepseek('tool calls end')}",
    ),
    CallForm(  # gpt-oss; the channel stands before the name, or after it
        begin=r"to=functions\.",
        call=(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.(?P<name>[\w.-]+)"
            r"(?:<\|channel\|>commentary)? *(?:<\|constrain\|>)?(?:json)?<\|message\|>(?P<arguments>.*?)"
            r"(?:<\|call\|>|\Z)"
        ),
        around=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|analysis|commentary)<\|message\|>|<\|end\|>",
        stops=("<|call|>",),
    ),
    CallForm(  # Mistral: a list, and since 2025 a name and its arguments
        begin=r"\[TOOL_CALLS\]",
        call=(
            r"\[TOOL_CALLS\]\s*(?:(?P<calls>\[.*?\])|(?P<name>[^\[\{\s]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?"
            r"(?P<arguments>\{.*?\}))\s*(?=\[TOOL_CALLS\]|\Z)"
        ),
    ),
    CallForm(  # GLM
        begin="<tool_call>",
        call=r"<tool_call>(?P<name>[^\n<{]+)(?P<arguments>.*?)</tool_call>",
        parameter=r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
        stops=("<|observation|>",),
    ),
    CallForm(  # Qwen 3.5, Qwen3-Coder, Nemotron 3
        begin="<tool_call>|<function=",
        call=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?P<arguments>.*?)</function>(?:\s*</tool_call>)?",
        parameter=r"<parameter=([^>\n]+)>(.*?)</parameter>",
    ),
    CallForm(  # Hermes, Qwen 2.5 and 3, and the template here of backbones without one
        begin="<tool_call>",
        call=r"<tool_call>\s*(?P<calls>.*?)\s*</tool_call>",
    ),
    CallForm(  # Llama 3.1: the whole turn
        begin=r'\A\s*(?:<\|python_tag\|>)?\s*\{\s*"name"',
        call=r"\A\s*(?:<\|python_tag\|>)?\s*(?P<calls>\{\s*\"name\".*\})\s*\Z",
        stops=("<|eom_id|>",),
    ),
)
"""The forms, each before those that read its calls as something else."""


_ASKED: tuple[Message, ...] = ({"role": "user", "content": "Which one?"},)
_TRIED = ToolCall("probe_tool", {"which": "this one"})
_SCHEMA = {"type": "object", "properties": {"which": {"type": "string", "description": "It."}}, "required": ["which"]}
_TOOL = {"type": "function", "function": {"name": _TRIED.name, "description": "Takes it.", "parameters": _SCHEMA}}


class CallReader:
    """Reads the turns of a model by the form of its chat template, or by the tokenizer's own `response_template`.

    Raises:
        BackboneError: The template writes no tools, or calls in none of FORMS.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: ChatEncoder) -> None:
        self._tokenizer = tokenizer
        self._parses = getattr(tokenizer, "response_template", None) is not None
        turn = {"role": "assistant", "content": "", "tool_calls": [_TRIED.message(0)]}
        try:
            asked = template.prompt(_ASKED, (_TOOL,))
            tried = template.encode(Example("a call", (*_ASKED, turn), (_TOOL,)), loss_on="last")
        except (BackboneError, DataError):
            asked, tried = [], None
        told = _TRIED.name in tokenizer.decode(asked)
        marked = [] if tried is None else [n for n, carries in enumerate(tried.supervised) if carries]
        ids = [] if tried is None else [tried.input_ids[n] for n in marked]
        ends = set() if tried is None else {tried.input_ids[end] for end in tried.end_positions}
        text = self._text([each for each in ids if each not in ends])
        found = (form for form in FORMS if form.read(text, name="")[1] == (_TRIED,))
        form = next(found, None)
        if not told or (form is None and not self._parses):
            lacks = "writes calls in no form that is known here" if told else "writes no tools"
            raise BackboneError(
                f"reinforce.tools: the chat template {lacks}, so that none can be read back. Give one with "
                "model.chat_template=FILE that writes `tools`, and calls such as <tool_call>{...}</tool_call>; or take "
                "a backbone that was taught to call, such as Qwen/Qwen3-0.6B."
            )
        self._form = form or FORMS[-1]
        known = tokenizer.get_vocab()
        self.stops = sorted(ends | {known[token] for token in self._form.stops if token in known})
        """Ids that end a turn with calls."""

    def read(self, ids: Any, *, stop: Any, prefix: Any, name: str) -> WrittenTurn:
        """A turn by its tokens, of which the last may be one of `stop`.

        Args:
            prefix: The tokens before it.
            name: Takes the place of that of a call that cannot be read, where the template writes it.
        """
        ids = [int(each) for each in ids]
        while ids and ids[-1] in stop:
            ids.pop()
        if self._parses:
            try:
                parsed = self._tokenizer.parse_response(ids, prefix=[int(each) for each in prefix])
            except Exception as error:  # what a model writes may be anything
                return WrittenTurn(_said(self._text(ids)), (ToolCall(name, {}, f"the turn cannot be read: {error}"),))
            functions = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
            calls = tuple(ToolCall(each["name"], each.get("arguments") or {}) for each in functions)
            thought = parsed.get("reasoning_content") or parsed.get("thinking")
            said: Message = {"role": "assistant", "content": parsed.get("content") or ""}
            return WrittenTurn(said | ({"reasoning_content": thought} if thought else {}), calls)
        content, calls = self._form.read(self._text(ids), name=name)
        return WrittenTurn(_said(content), calls)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _said(content: str) -> Message:
    return split_thoughts({"role": "assistant", "content": re.sub(r"\A\s*(<think>)?\s*</think>\s*", "", content)})
