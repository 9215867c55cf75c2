"""An answer that a model gave, with all that a reward may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.data.text.formats import Example
from workbench.data.text.messages import Message


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt."""

    prompt: str
    """All that stood before the answer, as text: of a conversation the last message of the user."""
    text: str
    """The answer, without the tokens that end it."""
    messages: tuple[Message, ...] = ()
    """The turns before the answer; empty where the prompt is raw text."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the conversation may call."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The columns of its row, by their names in the file."""
    place: str = "an answer"
    """File and row, for messages."""

    @property
    def example(self) -> Example:
        """Prompt and answer as an example whose answer carries loss."""
        if not self.messages:
            return Example(self.place, text=((self.prompt, False), (self.text, True)))
        turns = (*self.messages, {"role": "assistant", "content": self.text})
        return Example(self.place, messages=turns, tools=self.tools)


def answer_to(question: Example, text: str, row: Mapping[str, Any]) -> Answer:
    """The answer `text` to the prompt `question`, which `prompts.read_prompts` gives."""
    asked = [message["content"] for message in question.messages if message["role"] == "user"]
    prompt = asked[-1] if asked else "".join(piece for piece, _ in question.text)
    return Answer(prompt, text, question.messages, question.tools, row, question.place)
