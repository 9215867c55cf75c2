"""Settings as YAML 1.2 and `key=value` words: plain values, without anchors, tags or directives."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.scanner import Scanner, ScannerError

from workbench import bounds
from workbench.errors import ConfigError
from workbench.schema import shown


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; raises ConfigError with the line where it is not one."""
    try:
        if bounds.is_endless(path):
            raise ConfigError(f"{path}: is a pipe or a device, which has no end. Write it to a file.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `workbench ls recipes` lists the shipped recipes.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as UTF-8 text ({error}). Name a YAML file, saved as UTF-8."
        ) from None
    try:
        values = load_yaml(text)
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML.\n  {str(error).replace(chr(10), chr(10) + '  ')}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: expected a mapping such as `recipe: sft`, found {shown(values)}.")
    return values


def load_yaml(text: str) -> Any:
    """The value that YAML 1.2 holds; raises ruamel's YAMLError for whatever is none."""
    known = _written.get(text)
    return deepcopy(_read(text) if known is None else known)


@lru_cache(maxsize=64)  # a command reads its recipe and its config.yaml several times
def _read(text: str) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.Scanner, yaml.Constructor, yaml.max_depth = _Scanner, _Constructor, 50
    try:
        value = yaml.load(text)
        repr(value)  # a ValueError where a hexadecimal number has more digits than Python writes
    except MarkedYAMLError as error:
        error.note = None  # how a program could do without the check
        if isinstance(error, MaxDepthExceededError):
            error.problem = "values are nested too deeply"
        raise
    except ValueError as error:  # a number of more digits than Python reads
        raise YAMLError(str(error)) from None
    if not is_unicode(value):
        raise YAMLError("it holds half of a character, such as \\ud800, that UTF-8 cannot hold")
    return value


def dump_yaml(values: Mapping[str, Any]) -> str:
    """`values` as YAML that `load_yaml` reads back equal, which does not parse again what was written last.

    A run's report reads config.yaml soon after it was written, and parsing its 400 lines takes 27 ms. Writing them
    takes 33 ms: the sections that another configuration of this process had, too, are not written anew.
    """
    text = "".join(_section(key, value) for key, value in values.items()) or "{}\n"
    _written.clear()
    _written[text] = _plain(values)
    return text


def _section(key: str, value: Any) -> str:
    known = repr((key, value))
    if known not in _sections:
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        yaml.Representer = _Representer
        text = io.StringIO()
        yaml.dump({key: value}, text)
        _sections[known] = text.getvalue()
    return _sections[known]


_sections: dict[str, str] = {}
"""The YAML of each section that was written, by its `repr`, which tells 1 from 1.0 and from True."""
_written: dict[str, Any] = {}
"""The text that was written last, with its values."""


def _plain(value: Any) -> Any:
    """A copy that holds dictionaries and lists, as YAML gives them."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def override(values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """`values` with every `section.key=value` word applied; the value is read as YAML."""
    result = _copy(values)
    for word in words:
        key, equals, text = word.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            raise ConfigError(f"{word!r}: expected key=value, such as train.epochs=3.")
        try:
            value = load_yaml(text)
        except YAMLError:
            value = text
        if not is_unicode(value):
            raise ConfigError(f"{key}: {shown(value)} is no text that UTF-8 can hold. Write it anew.")
        section = result
        for at, part in enumerate(parts[:-1], start=1):
            child = {} if section.get(part) is None else section[part]  # null has no keys yet
            if not isinstance(child, dict):
                before, after = ".".join(parts[:at]), ".".join(parts[at:])
                raise ConfigError(
                    f"{word!r}: `{before}` is {shown(child)}, not a section with keys. Write {before}=null before it, "
                    f"to put `{after}` in its place."
                )
            section[part] = section = child
        section[parts[-1]] = value
    return result


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def is_unicode(value: Any) -> bool:
    """Whether all text in a value can be written as UTF-8."""
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, Mapping):
        return all(is_unicode(key) and is_unicode(each) for key, each in value.items())
    return not isinstance(value, (list, tuple)) or all(map(is_unicode, value))


class _Scanner(Scanner):
    """Refuses what no setting needs: an alias may hold itself, a tag asks for Python's objects."""

    def _refuse(self) -> None:
        mark = self.reader.get_mark()
        text = f"{self.reader.peek()} begins an anchor, an alias, a tag or a directive: write the value, or quote it"
        raise ScannerError(None, None, text, mark)

    fetch_anchor = fetch_alias = fetch_tag = fetch_directive = _refuse


class _Constructor(SafeConstructor):
    """Reads dates as text: no setting is one."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    """Writes no aliases, and escapes what ruamel.yaml does not read back where it is quoted, such as U+0085."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)
