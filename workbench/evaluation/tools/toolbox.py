"""The tools and environments of a user's file: what they are called and take, and the program that runs them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

from jsonschema import Draft202012Validator
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from workbench.config import plugins
from workbench.config.sections.tools_config import ToolsConfig
from workbench.data import starter
from workbench.data.rows import excerpt
from workbench.data.text.messages import Message, message_of
from workbench.data.text.tool_calls import ToolCall
from workbench.errors import ConfigError, DataError
from workbench.evaluation.tools import openenv, tool_host
from workbench.runs import trust
from workbench.runs.trust import Trust
from workbench.schema import did_you_mean

KEY = "reinforce.tools"
START = 120.0
"""Seconds in which the user's file must be imported."""
_SIGNATURE = '''def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """'''
_OWN = ("reset", "step", "reward")


def toolbox(section: ToolsConfig | None, *, read_from: tuple[Path, Trust] | None = None) -> Toolbox | None:
    """The tools of a run, if it has any. Raises ConfigError: they cannot be used, or `read_from`, the run directory
    that the configuration was read from, is not trusted."""
    if section is None:
        return None
    if section.file is not None and read_from is not None and not read_from[1].given:
        raise trust.refused(read_from[0], f"its tools need {section.file}", read_from[1])
    return Toolbox(section)


class Toolbox:
    """The tools of a file, and a program that runs them, which ends with this object.

    Raises:
        ConfigError: The file, a function or the class cannot be used; the message says what to write.
    """

    def __init__(self, config: ToolsConfig) -> None:
        self.config = config
        self.environment: type | None = None
        functions, own, served = (
            dict[str, Callable[..., Any]](),
            dict[str, Callable[..., Any]](),
            list[dict[str, Any]](),
        )
        if config.at_address:
            self._file, self.environment = Path(openenv.__file__), openenv.OpenEnv
            served = self._served(str(config.environment))
        else:
            self._file = Path(starter.resolve(str(config.file)))
            module = plugins.module(self._file, key=f"{KEY}.file")
            functions = self._functions(vars(module))
            if config.environment is not None:
                self.environment = self._class(vars(module), config.environment)
                own = self._methods(self.environment)
        if twice := sorted(set(functions) & set(own)):
            raise ConfigError(
                f"{KEY}: {twice[0]} is a function of {self._file} and a method of {config.environment}: two tools of "
                "one name. Rename one of them, or name the functions that are tools in reinforce.tools.functions."
            )
        if config.credit == "turn" and not self.rewards:
            raise ConfigError(
                f"{KEY}.credit=turn asks the environment for the reward after each turn, and there is no "
                f"{'environment' if config.environment is None else f'{config.environment}.reward()'}. Write a class "
                "with `def reward(self):` in it and name it in reinforce.tools.environment, or leave credit out."
            )
        self._of_environment, self._of_step = frozenset(own), frozenset(each["function"]["name"] for each in served)
        self.schemas = (*(self._schema(*each) for each in {**functions, **own}.items()), *served)
        """The tools, each as {type: function, function: {name, description, parameters}}."""
        if not self.schemas and not self.steps:
            raise ConfigError(
                f"{KEY}.file: {self._file} defines no function, and so no tool. Write one, such as\n{_SIGNATURE}"
            )
        self._parameters = {
            each["function"]["name"]: Draft202012Validator(each["function"]["parameters"]) for each in self.schemas
        }
        self._host: subprocess.Popen[bytes] | None = None
        self._asks = self._tells = -1

    @property
    def identity(self) -> dict[str, Any]:
        """All of it that episodes depend on."""
        return {**self.config.model_dump(mode="json"), **plugins.fingerprints([self._file])}

    @property
    def steps(self) -> bool:
        """Whether the environment answers what is no call of a tool."""
        return self.environment is not None and callable(getattr(self.environment, "step", None))

    @property
    def rewards(self) -> bool:
        """Whether the environment gives a reward."""
        return self.environment is not None and callable(getattr(self.environment, "reward", None))

    def _functions(self, names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
        wanted = self.config.functions
        defined: dict[str, Callable[..., Any]] = {
            name: each
            for name, each in names.items()
            if inspect.isfunction(each) and each.__module__ == names["__name__"] and not name.startswith("_")
        }
        if wanted is None:
            return defined
        for number, name in enumerate(wanted):
            if name in wanted[:number]:
                raise ConfigError(f"{KEY}.functions: {name} is named twice: two tools of one name. Leave one out.")
            if not callable(names.get(name)):
                raise ConfigError(
                    f"{KEY}.functions: {self._file} defines no function {name}.{did_you_mean(name, sorted(defined))} "
                    "Write it, or leave the name out."
                )
        return {name: names[name] for name in wanted}

    def _class(self, names: Mapping[str, Any], name: str) -> type:
        found = names.get(name)
        if not inspect.isclass(found):
            classes = sorted(each for each, value in names.items() if inspect.isclass(value))
            raise ConfigError(
                f"{KEY}.environment: {self._file} defines no class {name}.{did_you_mean(name, classes)} Write "
                f"`class {name}:` with reset(self, row) and reward(self) in it."
            )
        if not callable(getattr(found, "reset", None)):
            raise ConfigError(
                f"{KEY}.environment: {name} of {self._file} has no reset. Write `def reset(self, row):` in it."
            )
        required = [
            each.name
            for each in list(inspect.signature(found).parameters.values())
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if required:
            raise ConfigError(
                f"{KEY}.environment: {name}() of {self._file} needs {', '.join(required)}, and each episode makes one "
                "without arguments. Give them defaults, or read them from the row in reset."
            )
        return found

    def _served(self, address: str) -> list[dict[str, Any]]:
        """The tools of a server."""
        where = f"{KEY}.environment={address}"
        if importlib.util.find_spec("websockets") is None:
            raise ConfigError(
                f"{where} is reached by websockets, which is not there. Run: pip install peft-workbench[openenv]"
            )
        try:
            return openenv.schemas(address)
        except ValueError as error:
            raise ConfigError(f"{where} is no server of OpenEnv's protocol: {error}. Correct the address.") from None
        except Exception as error:  # whatever a socket and a stranger's server raise
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{where}: {said}. Start the server, or correct the address.") from None

    def begun(self, row: Mapping[str, Any], episode: int) -> Mapping[str, Any]:
        """The request that begins an episode in an environment."""
        assert self.environment is not None
        given = [self.config.environment] if self.config.at_address else []
        name = self.environment.__name__
        return {"kind": "reset", "class": name, "given": given, "row": dict(row), "episode": episode}

    def _methods(self, environment: type) -> dict[str, Callable[..., Any]]:
        methods = inspect.getmembers(environment, inspect.isfunction)
        return {
            name: MethodType(each, environment)
            for name, each in methods
            if not name.startswith("_") and name not in _OWN
        }

    def _schema(self, name: str, function: Callable[..., Any]) -> dict[str, Any]:
        where = f"{KEY}: {name} of {self._file}"
        if not inspect.getdoc(function):
            raise ConfigError(
                f"{where} has no docstring, which tells the model what it does. Write one, such as\n{_SIGNATURE}"
            )
        loose = [each for each in inspect.signature(function).parameters.values() if each.kind in (2, 4)]
        if loose:
            raise ConfigError(f"{where} takes *{loose[0].name}, which no schema can tell. Name each parameter.")
        try:
            schema: dict[str, Any] = get_json_schema(function)
            Draft202012Validator.check_schema(schema["function"]["parameters"])
        except (DocstringParsingException, TypeHintParsingException) as error:
            cure = "Write a type for each parameter, and a line for each under `Args:`, such as"
            raise ConfigError(f"{where}: {error}. {cure}\n{_SIGNATURE}") from None
        except Exception as error:  # the library raises whatever the types of a user's function lead it to
            raise ConfigError(f"{where}: no schema can be made of it ({error}). Write plain types.") from None
        schema["function"].pop("return", None)
        return schema

    def start(self) -> None:
        """Start the program that runs the tools, where it does not run. Raises ConfigError: the file fails there."""
        if self._host is not None:
            return
        asks, self._asks = os.pipe()
        self._tells, tells = os.pipe()
        limits = {
            "seconds": self.config.seconds,
            "memory": int(self.config.memory),
            "output": self.config.output,
            "at_once": self.config.at_once,
        }
        path = str(self._file.expanduser().resolve())
        words = [str(Path(tool_host.__file__)), str(asks), str(tells), path, json.dumps(limits)]
        null = subprocess.DEVNULL
        self._host = subprocess.Popen(
            [sys.executable, "-B", *words], pass_fds=(asks, tells), stdin=null, stdout=null, stderr=null
        )
        os.close(asks)
        os.close(tells)
        self._text = b""
        self._end = weakref.finalize(self, _ended, self._host, self._asks, self._tells)
        first = self._answer(START)
        if "failed" in first:
            self.close()
            raise ConfigError(f"{KEY}.file: {self._file}: {first['failed']}. Correct the file.")

    def close(self) -> None:
        """End that program."""
        if self._host is not None:
            self._end()
            self._host = None

    def _answer(self, seconds: float) -> Any:
        until = time.monotonic() + seconds
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._tells], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._tells, 1 << 20) if ready else b""
            if not piece:
                what = f"was not done in {seconds:g} s" if not ready else "ended the program that runs its tools"
                self.close()
                raise ConfigError(f"{KEY}.file: {self._file} {what}. Correct the file.")
            self._text += piece
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def carried_out(self, jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answers to requests of `tool_host`, at most one of each episode."""
        if not jobs:
            return []
        self.start()
        data = json.dumps(list(jobs), default=str).encode() + b"\n"
        while data:
            data = data[os.write(self._asks, data) :]
        found: list[dict[str, Any]] = self._answer(START + len(jobs) * self.config.seconds)
        return found

    def request(self, call: ToolCall, episode: int) -> Mapping[str, Any] | str:
        """The request for a call; where it is a mistake of the model, what the model is told."""
        if call.fault:
            return f"error: {call.fault}"
        if call.name not in self._parameters:
            if self.steps:
                return self.said({"name": call.name, "arguments": dict(call.arguments)}, episode)
            known = ", ".join(self._parameters)
            return f"error: there is no tool {excerpt(call.name)}; there are {known}"
        mistake = next(iter(self._parameters[call.name].iter_errors(dict(call.arguments))), None)
        unknown = set(call.arguments) - set(self._parameters[call.name].schema.get("properties", {}))
        if mistake is not None or unknown:
            problem = mistake.message if mistake is not None else f"there is no parameter {min(unknown)}"
            return f"error: {call.name}: {problem[:300]}"
        if call.name in self._of_step:
            return self.said({"name": call.name, "arguments": dict(call.arguments)}, episode)
        own = call.name in self._of_environment
        return {"kind": "call", "name": call.name, "arguments": dict(call.arguments), "own": own, "episode": episode}

    @staticmethod
    def said(what: Mapping[str, Any] | str, episode: int) -> Mapping[str, Any]:
        """The request that tells the environment a call, or what was said without one."""
        return {"kind": "step", "said": what, "episode": episode}


def _ended(host: subprocess.Popen[bytes], *descriptors: int) -> None:
    for each in descriptors:
        os.close(each)
    host.kill()
    host.wait()


def opening(answer: Mapping[str, Any], asked: Sequence[Message]) -> list[Message] | None:
    """The messages of an answer to `reset`; None where those of the row, `asked`, are kept. Raises ValueError: they are
    none."""
    value = answer["messages"]
    if value is None:
        return None
    if isinstance(value, str):
        *before, last = asked
        return [*before, {**last, "content": f"{last['content']}\n\n{value}"}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"reset() returned {excerpt(value)}. Return a list of messages, a text, or None")
    try:
        return [message_of(each, f"message {number} of reset()") for number, each in enumerate(value, start=1)]
    except DataError as error:
        raise ValueError(str(error)) from None


def rewarded(answer: Mapping[str, Any]) -> dict[str, float]:
    """The rewards of an answer to `reward`, by their names. Raises ValueError: one is no finite number."""
    value = answer["reward"]
    named: dict[str, float] = value if isinstance(value, dict) else {"environment": value}
    if wrong := next((name for name, each in named.items() if not math.isfinite(each)), None):
        raise ValueError(f"reward() returned {named[wrong]} for {wrong}. Return finite numbers")
    return named
