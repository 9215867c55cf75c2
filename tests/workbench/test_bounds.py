"""What comes from others ends: in time, memory and depth, and as a file."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench import adapters, bounds
from workbench.data.text.chat import ChatEncoder
from workbench.errors import BackboneError, FileError

TOO_MUCH: dict[str, tuple[Callable[[], object], str]] = {
    "a loop": (lambda: sum(iter(int, 1)), "1 seconds"),
    "a pattern": (lambda: re.fullmatch("(a+)+b", "a" * 40), "1 seconds"),
    "a power": (lambda: 9**9**8 * 7, "1 seconds"),
    "memory": (lambda: "x" * 10**11, "bytes of memory"),
    "memory bit by bit": (lambda: [bytes(2**20) for _ in range(10**6)], "bytes of memory"),
    "recursion": (lambda: json.loads("[" * 10**5), "nests too deeply"),
}


SLOW = [
    pytest.param(*each, id=name, marks=pytest.mark.slow if "1 s" in each[1] else ()) for name, each in TOO_MUCH.items()
]


@pytest.mark.parametrize(("act", "why"), SLOW)
def test_what_takes_too_much_is_told(act: Callable[[], object], why: str) -> None:
    seconds = 1 if why == "1 seconds" else 60  # a busy machine takes its time over memory
    assert why in (bounds.fault(act, seconds=seconds) or "")


@pytest.mark.parametrize("act", [lambda: 1, lambda: 1 / 0, lambda: exit(3), lambda: os._exit(9)])
def test_what_ends_is_no_fault(act: Callable[[], object]) -> None:
    assert bounds.fault(act, seconds=1) is None


def test_pipes_devices_and_sockets_have_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    listening = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)
    listening.bind("socket")
    (tmp_path / "file").write_text("x")
    for name in ("pipe", "link", "socket", "/dev/zero"):
        assert bounds.is_endless(tmp_path / name)
        with pytest.raises(OSError):
            bounds.opened(tmp_path / name)
    for plain in ("file", ".", "none", "x" * 5000, "a\0b", "\ud800"):
        assert not bounds.is_endless(plain)
    with bounds.opened(tmp_path / "file") as file:
        assert file.read() == b"x"
    listening.close()


TEMPLATES = {
    "a long text": "{{ 'x' * 10**10 }}",
    "a wide text": "{{ messages[0].content|center(10**10) }}",
    "a doubled text": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a deep indent": "{{ messages|tojson(indent=10**9) }}",
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "many brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "many conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{% for m in messages %}{{ ((9 + loop.index0) ** (9 ** 8)) is odd }}{% endfor %}",
    "a nested list": "{% set n=namespace(l=[1]) %}{% for i in range(60) %}{% set n.l=[n.l,n.l] %}{% endfor %}{{ n.l }}",
    "only where it generates": "{% if add_generation_prompt %}{{ (7 ** (9 ** 9)) is odd }}{% endif %}",
    "only after a system message": "{% if messages[0].role == 'system' %}{{ (7 ** (9 ** 9)) is odd }}{% endif %}",
}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name, marks=pytest.mark.slow if name in ("a doubled text", "a deep indent") else ())
        for name, source in TEMPLATES.items()
    ],
)
def test_a_template_beyond_its_limits_is_refused(stories: str, source: str) -> None:
    with pytest.raises(BackboneError, match=r"(bytes of memory|nests too deeply).*\n  Correct it, or give another one"):
        ChatEncoder(AutoTokenizer.from_pretrained(stories), source)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_never_ends_is_refused(stories: str, source: str) -> None:
    with pytest.raises(BackboneError, match=r"takes more than (5 seconds|1,073,741,824 bytes).*\n  Correct it"):
        ChatEncoder(AutoTokenizer.from_pretrained(stories), source)


@pytest.fixture
def adapter(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "adapter", tmp_path / "adapter"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "([a-z._0-9]+)*!"},
        {"target_modules": r"(.*\.?)*_proj!"},
        {"exclude_modules": "(m|mo|o|d|de|e|l|el)*[a-z.0-9_]*(.+)+!"},
        {"rank_pattern": {"(.+)+!": 4}},
        {"alpha_pattern": {"([a-z._0-9]+)*!": 4}},
    ],
)
def test_an_adapter_whose_patterns_never_end_is_refused(adapter: Path, stories: str, change: dict[str, object]) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FileError, match=r"a pattern that names modules takes more than 5 seconds.*as a list"):
        adapters.load(AutoModelForCausalLM.from_pretrained(stories), adapter)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "[]", "\x00"])
def test_a_damaged_adapter_configuration_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(FileError, match="damaged"):
        adapters.saved_config(tmp_path)
