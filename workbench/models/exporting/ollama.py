"""An Ollama Modelfile: weights, a chat template in Go's language, stop words and settings of decoding.

A Jinja template is taken apart by what it writes, not by how: text before and after each role's messages, what begins a
prompt, and what begins an answer. Where these parts do not write the same again, Go's template could not either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from workbench.errors import BackboneError

Messages = Sequence[tuple[str, str]]  # roles and contents
Render = Callable[[Messages, bool], str]
"""Writes messages, and where the second argument says so the begin of an answer."""
_SYSTEM, _ASKED, _ANSWER, _AGAIN = "<<system>>", "<<question>>", "<<answer>>", "<<again>>"
CONVERSATIONS: tuple[Messages, ...] = (
    (("user", "One"),),
    (("user", "  Two\n\nlines  "), ("assistant", " Yes.\n"), ("user", "{{ Three }}")),
    (("system", " Be brief. "), ("user", "Four")),
    (("system", "Be\nbrief"), ("user", "5"), ("assistant", "6"), ("user", "7"), ("assistant", "8"), ("user", "9")),
)  # conversations that the parts of a template have to write as the template does, spaces at the ends included


@dataclass(frozen=True)
class TemplateParts:
    """Text around messages."""

    before_system: str
    after_system: str
    no_system: str  # begin of a prompt without a system message
    before_user: str
    after_user: str
    before_assistant: str
    after_assistant: str
    answer: str  # begin of an answer

    def write(self, messages: Messages) -> str:
        """A prompt, as Go's template writes it."""
        system = [content for role, content in messages if role == "system"]
        parts = [self.before_system, system[0], self.after_system] if system else [self.no_system]
        for role, content in messages:
            if role == "user":
                parts += [self.before_user, content, self.after_user]
            elif role == "assistant":
                parts += [self.before_assistant, content, self.after_assistant]
        return "".join([*parts, self.answer])

    def in_go(self) -> str:
        """The template in Go's language."""
        quoted = {name: text.replace("{{", '{{ "{{" }}') for name, text in vars(self).items()}
        return (
            "{{{{ if .System }}}}{before_system}{{{{ .System }}}}{after_system}{{{{ else }}}}{no_system}{{{{ end }}}}"
            '{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{before_user}{{{{ .Content }}}}{after_user}'
            '{{{{ else if eq .Role "assistant" }}}}{before_assistant}{{{{ .Content }}}}{after_assistant}'
            "{{{{ end }}}}{{{{ end }}}}{answer}"
        ).format(**quoted)


def renderer(tokenizer: PreTrainedTokenizerBase, template: str) -> Render:
    """Writes messages by a Jinja template."""

    def render(messages: Messages, answer: bool) -> str:
        rows = [{"role": role, "content": content} for role, content in messages]
        settings: dict[str, Any] = {"chat_template": template, "tokenize": False, "add_generation_prompt": answer}
        return str(tokenizer.apply_chat_template(rows, **settings))

    return render


def take_apart(render: Render, *, begin: str) -> TemplateParts:
    """The parts of a chat template. Raises BackboneError: the template does more than to put text around messages.
    `begin`: token that Ollama itself puts before a prompt, and which is left out."""
    try:
        head, after_user = render([("user", _ASKED)], False).split(_ASKED)
        talk = [("user", _ASKED), ("assistant", _ANSWER)]
        _, rest = render(talk, False).split(_ASKED)
        between, after_assistant = rest.split(_ANSWER)
        _, rest = render([*talk, ("user", _AGAIN)], False).split(_ANSWER)
        before_user = _without_start(rest.split(_AGAIN)[0], after_assistant)
        before_system, rest = render([("system", _SYSTEM), ("user", _ASKED)], False).split(_SYSTEM)
        template_parts = TemplateParts(
            before_system=before_system,
            after_system=_without_end(rest.split(_ASKED)[0], before_user),
            no_system=_without_end(head, before_user),
            before_user=before_user,
            after_user=after_user,
            before_assistant=_without_start(between, after_user),
            after_assistant=after_assistant,
            answer=_without_start(render([("user", _ASKED)], True), head + _ASKED + after_user),
        )
        for messages in CONVERSATIONS:
            if template_parts.write(messages) != render(messages, True):
                raise _refused(f"it does more than put text around messages (such as {messages[0][1]!r})")
    except (jinja2.TemplateError, ValueError, IndexError) as error:
        raise _refused(f"it does not write a system message, a question and an answer as parts ({error})") from None
    first = {name: getattr(template_parts, name).removeprefix(begin) for name in ("before_system", "no_system")}
    return replace(template_parts, **first)


def modelfile(parts: TemplateParts, stop: Sequence[str], *, weights: str, adapter: str | None, tokens: int) -> str:
    """The text of a Modelfile that decodes greedily, as the run was scored.

    Args:
        stop: Words at which an answer ends.
        weights: The file of the model.
        adapter: The file of an adapter over it.
        tokens: Of prompt and answer together.
    """
    template = parts.in_go()
    if '"""' in template:
        raise _refused('it holds """, which ends a text in a Modelfile')
    for word in stop:
        if not word.strip() or '"' in word or "\n" in word:
            raise BackboneError(
                f"The stop word {word!r} cannot be written into Ollama's Modelfile. Export --to gguf, which ends at "
                "the token itself."
            )
    lines = [f"FROM ./{weights}", *([f"ADAPTER ./{adapter}"] if adapter else [])]
    lines += [f'TEMPLATE """{template}"""', *(f'PARAMETER stop "{word}"' for word in stop)]
    lines += ["PARAMETER temperature 0", f"PARAMETER num_ctx {tokens}"]
    return "\n".join(lines) + "\n"


def _without_start(text: str, start: str) -> str:
    if not text.startswith(start):
        raise ValueError(f"{start!r} does not begin {text!r}")
    return text[len(start) :]


def _without_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError(f"{end!r} does not end {text!r}")
    return text[: len(text) - len(end)]


def _refused(why: str) -> BackboneError:
    return BackboneError(
        f"The run's chat template cannot be written in Go's language for Ollama: {why}. Export --to gguf, which holds "
        "the Jinja template itself, or train with a plainer model.chat_template."
    )
