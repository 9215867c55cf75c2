"""Untrusted code writes nothing outside of its folder, reaches nobody, and does not outlive its limits."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from workbench.config.sections.rewards_config import UnitTestReward
from workbench.data.text.generated_answers import Answer
from workbench.errors import ConfigError
from workbench.evaluation.rewards import confinement, sandbox, verifiers
from workbench.evaluation.rewards.sandbox import SandboxLimits

LIMITS, SHORT = SandboxLimits(seconds=10), SandboxLimits(seconds=1)
HELPERS = """
import ctypes, fcntl, os, resource, signal, socket, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)

def refused(act, kind=PermissionError):
    try:
        act()
    except kind:
        return True
    return False

def filtered(act):
    # By the filter, not by Landlock, whose first versions do not look at it.
    try:
        act()
    except OSError as error:
        return error.errno == 1
    return False

def call(*numbers):
    return libc.syscall(*numbers) < 0 and ctypes.get_errno() in (1, 38)
"""
ESCAPES = {
    "write a file": "assert refused(lambda: open({outside!r}, 'w'))",
    "append to a file": "assert refused(lambda: open({theirs!r}, 'a'))",
    "empty a file while opening it to read": "assert refused(lambda: os.open({theirs!r}, os.O_RDONLY | os.O_TRUNC))",
    "empty a file while opening it for nothing": "assert filtered(lambda: os.open({theirs!r}, 3 | os.O_TRUNC))",
    "empty a file": "assert refused(lambda: os.truncate({theirs!r}, 0))",
    "delete a file": "assert refused(lambda: os.unlink({theirs!r}))",
    "rename a file": "assert refused(lambda: os.rename({theirs!r}, 'mine'), OSError)",
    "make a folder": "assert refused(lambda: os.mkdir({outside!r}))",
    "make a folder of its own": "assert refused(lambda: os.mkdir('folder'))",
    "change rights": "assert refused(lambda: os.chmod({theirs!r}, 0o777))",
    "change times": "assert refused(lambda: os.utime({theirs!r}))",
    "write through a symbolic link": "os.symlink({theirs!r}, 's'); assert refused(lambda: open('s', 'a'))",
    "write through a hard link": "assert refused(lambda: os.link({theirs!r}, 'h'))",
    "make a device": "assert refused(lambda: os.mknod('device', 0o60600, 0))",
    "read a file": "assert refused(lambda: open({theirs!r}))",
    "read the password file": "assert refused(lambda: open('/etc/passwd'))",
    "look into a process": "assert refused(lambda: open('/proc/self/mem', 'rb'))",
    "a socket": "assert refused(lambda: socket.create_connection(('127.0.0.1', 80)))",
    "a socket of this machine": "assert refused(lambda: socket.socket(socket.AF_UNIX))",
    "fork": "assert refused(os.fork)",
    "vfork by number": "assert os.uname().machine != 'x86_64' or call(58)",
    "clone3 by number": "assert call(435, 0, 0)",
    "io_uring by number": "assert call(425, 8, 0)",
    "a program": "assert refused(lambda: subprocess.run(['/bin/true']))",
    "become another program": "assert refused(lambda: os.execv('/bin/true', ['true']))",
    "a signal to who started it": "assert refused(lambda: os.kill(os.getppid(), signal.SIGTERM))",
    "a signal to all": "assert refused(lambda: os.kill(-1, signal.SIGTERM))",
    "a group of its own": "assert refused(os.setsid)",
    "higher limits": "assert refused(lambda: resource.setrlimit(resource.RLIMIT_CPU, (99, 99)), ValueError)",
    "lift a limit": "assert refused(lambda: resource.prlimit(0, resource.RLIMIT_AS, (2**40, 2**40)))",
    "signals by a descriptor": "r, w = os.pipe(); assert refused(lambda: fcntl.fcntl(r, 8, os.getppid()))",
    "memory": "assert refused(lambda: bytearray(2**31), MemoryError)",
}
ALLOWED = {
    "files of its own": "open('a', 'w').write('hi'); os.rename('a', 'b'); assert open('b').read() == 'hi'",
    "threads": "t = threading.Thread(target=int); t.start(); t.join(9); assert not t.is_alive()",
    "the library": "import collections, datetime, decimal, hashlib, itertools, json, math, random, re, string",
    "a signal to itself": "signal.signal(signal.SIGUSR1, lambda *_: None); signal.raise_signal(signal.SIGUSR1)",
}


def test_no_escape_succeeds(tmp_path: Path) -> None:
    outside, theirs = tmp_path / "outside", tmp_path / "theirs"
    theirs.write_text("kept")
    theirs.chmod(0o666)
    before = theirs.stat()
    tests = [test.format(outside=str(outside), theirs=str(theirs)) for test in (*ESCAPES.values(), *ALLOWED.values())]
    passed = sandbox.passed(HELPERS, tests, LIMITS)
    assert not [name for name, each in zip((*ESCAPES, *ALLOWED), passed, strict=True) if not each]
    assert not outside.exists() and theirs.read_text() == "kept"
    assert (theirs.stat().st_mode, theirs.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_a_file_grows_to_the_limit_of_output() -> None:
    large = "assert refused(lambda: open('a', 'wb').write(bytes(2**21)), OSError)"
    assert sandbox.passed(HELPERS, [large, f"assert os.path.getsize('a') == {LIMITS.output}"], LIMITS) == [True, True]


def test_code_that_ends_early_passes_no_test() -> None:
    assert sandbox.passed("import os; os._exit(0)", ["pass"], LIMITS) == [False]
    tests = ["pass", "raise SystemExit", "import os; os._exit(0)", "pass"]
    assert sandbox.passed("raise SystemExit", tests, LIMITS) == [True, False, False, False]


def test_a_verdict_without_the_word_does_not_count() -> None:
    line = "confined\\nword 0 passed\\n 0 passed\\n"
    forged = f"import os\nfor n in range(3, 9):\n  try: os.write(n, b'{line}')\n  except OSError: pass"
    assert sandbox.passed(forged, ["assert False"], LIMITS) == [False]


SPEAK = """
import os
def speak(*said):
    for n in range(3, 9):
        try: os.write(n, b"".join(said))
        except OSError: pass
def hear():
    for n in range(3, 9):
        try: return os.read(n, 2**16)
        except OSError: pass
"""
TELL = "speak(b'ran\\n'); speak(hear().strip(), b' passed\\n')"
LEAVE = "lambda *a: os._exit(0)"
FORGERIES = {
    "the runner's own function": "import sys; sys.modules['__main__']._passes = lambda *a, **k: True",
    "exec": "import builtins; builtins.exec = lambda *a: None",
    "compile": "import builtins; c = builtins.compile; builtins.compile = lambda *a, **k: c('pass', *a[1:], **k)",
    "os.write": "import os; w = os.write; os.write = lambda n, b: w(n, b.replace(b'failed', b'passed'))",
    "BaseException": "import builtins; builtins.BaseException = builtins.AssertionError = ZeroDivisionError",
    "each test is empty": "import json; json.loads = lambda *a: {'tests': ['pass'], 'word': ''}",
    "a trace that leaves": f"import os, sys; sys.settrace({LEAVE}); sys.setprofile({LEAVE})",
    "at the end": "import atexit, os; atexit.register(os._exit, 0)",
    "all that is said, at once": f"{SPEAK}\nspeak(b'ran\\n', b'ran\\n', b' passed\\n')",
    "the whole dialogue": f"{SPEAK}\nwhile True: speak(b'ran\\n'); hear(); {TELL}",
    "the dialogue of a test": f"{SPEAK}\ndef f(): {TELL}; os._exit(0)",
    "a thread": f"{SPEAK}\nimport _thread\n_thread.start_new_thread(lambda: speak(hear().strip(), b' passed\\n'), ())",
    "a local of the runner": "import sys\ndef f(): sys._getframe(2).f_locals.update(passed=True, execute=print)",
    "an exit": "def f(): raise SystemExit(0)",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_no_answer_tells_its_own_verdict(code: str) -> None:
    assert sandbox.passed(code, ["assert f() == 3", "assert 1 == 2"], SHORT) == [False, False]


def test_a_word_cannot_be_read_before_its_test_has_run() -> None:
    waits = f"{SPEAK}\nheard = hear()"
    assert sandbox.passed(waits, ["assert heard"], SHORT) == [False]


def test_code_that_does_not_compile_fails_its_tests_alone() -> None:
    assert sandbox.passed("def f(:", ["f()", "assert 1 + 1 == 2"], LIMITS) == [False, True]


@pytest.mark.nightly(but=["ignores signals", "forks for ever"])
@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import signal\nfor n in (signal.SIGXCPU, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "import time; time.sleep(100)",
        "import threading, time; threading.Thread(target=time.sleep, args=(100,)).start(); time.sleep(100)",
        "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(2**18)); n += 1",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    ],
    ids=["computes", "ignores signals", "sleeps", "leaves a thread", "fills the disk", "forks for ever"],
)
def test_nothing_outlives_a_limit(code: str) -> None:
    before = psutil.Process().children(recursive=True)  # such as the workers that another test's data keep
    assert sandbox.passed(code, ["pass"], SHORT) == [False]
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_a_machine_that_keeps_nothing_in_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where the kernel knows no Landlock: the number of its call is one that no kernel has."""
    source = Path(confinement.__file__).read_text().replace("libc.syscall(444", "libc.syscall(4444")
    (tmp_path / "confinement.py").write_text(source)
    monkeypatch.setattr(confinement, "__file__", str(tmp_path / "confinement.py"))
    with pytest.raises(ConfigError, match=r"does not keep it in: .*landlock_create_ruleset.*kind: function"):
        sandbox.require(SandboxLimits(seconds=1, memory=2**28))


def test_too_little_memory_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="1,048,576 bytes of memory may be too few"):
        verifiers.UnitTestVerifier(UnitTestReward(memory="1MiB"))  # type: ignore[arg-type]


def test_code_in_an_answer_is_scored_by_the_tests_of_its_row() -> None:
    code = "Here it is:\n```python\ndef f(x):\n    return x + 1\n```\nDone."
    row = {"tests": ["assert f(1) == 2", "assert f(1) == 3"]}
    answers = [Answer("p", code, row=row), Answer("p", "I do not know.", row=row)]
    assert verifiers.UnitTestVerifier(UnitTestReward(score="share"))(answers) == [0.5, 0.0]
    assert verifiers.UnitTestVerifier(UnitTestReward())([Answer("p", code, row={"tests": "assert f(1) == 2"})]) == [1]


def test_the_filter_is_short_enough_for_the_kernel() -> None:
    for number, architecture in ((0, 0xC000003E), (1, 0xC00000B7)):
        program = list(confinement.instructions(number, architecture, own=os.getpid()))
        assert len(program) < 4096 and all(max(each[1:3]) < 256 for each in program)
