"""Rewards as a person names them on the command line: a kind, a file, a run directory, or a section in YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from workbench.config.sections.rewards_config import KINDS, RewardSource
from workbench.config.yaml_text import load_yaml
from workbench.errors import ConfigError
from workbench.schema import did_you_mean, parse

_WITHOUT_SETTINGS = ("number", "unit_tests", "vote", "likelihood")
"""Kinds of which every setting has a default."""


def read(words: Sequence[str], *, option: str = "--score") -> tuple[RewardSource, ...]:
    """The sections that words mean.

    Args:
        words: Each a kind without settings (`number`), a Python file with or without a function (`my.py`, `my.py:f`),
            a run directory of recipe reward, or `{kind: ..., ...}`.
        option: Names the option in messages.

    Raises:
        ConfigError: A word means none of these, or its section is wrong.
    """
    return tuple(parse(RewardSource, _section(word, option), source=f"{option} {word}") for word in words)


def _section(word: str, option: str) -> Mapping[str, Any]:
    if word.startswith("{"):
        try:
            parsed = load_yaml(word)
        except YAMLError as error:
            raise ConfigError(f"{option} {word}: not valid YAML ({str(error).splitlines()[0]}). Correct it.") from None
        if not isinstance(parsed, dict):
            raise ConfigError(f"{option} {word}: expected a section such as '{{kind: number}}'.")
        return parsed
    file, _, function = word.rpartition(":") if ".py:" in word else (word, "", "")
    if file.endswith(".py"):
        return {"kind": "function", "file": file, **({"function": function} if function else {})}
    if (Path(word).expanduser() / "config.yaml").is_file():
        return {"kind": "model", "run": word}
    if word in _WITHOUT_SETTINGS:
        return {"kind": word}
    if word in KINDS:
        raise ConfigError(f"{option} {word}: has settings of its own. Write them, as in '{{kind: {word}, ...}}'.")
    raise ConfigError(
        f"{option} {word}: is no kind of reward, Python file or run directory.{did_you_mean(word, list(KINDS))}"
    )
