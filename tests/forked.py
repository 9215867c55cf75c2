"""Python that starts in milliseconds: a server that has imported what runs import forks itself for each command.

    forked.py serve DESCRIPTOR EXECUTABLE    # DESCRIPTOR: of a socket that listens
    forked.py ask SOCKET [-u] -m MODULE ARGUMENTS | [-u] FILE.py ARGUMENTS | ARGUMENTS that only Python itself takes

The server has computed no tensor and started no thread. A child has the words, the files, the folder and the
environment of who asks. Who asks ends as the child does, passes signals on to it, and takes it along when killed.
Libraries have read their environment variables before; only OMP_NUM_THREADS is looked at again. Children hash strings
alike, which processes that Python starts do not: `test_launcher.py` and `test_elastic.py` train with those.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from functools import cache
from select import select

PRELOADED = (
    "deepspeed",
    "setuptools",
    "sklearn.metrics",
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "workbench.cli.check_output",
    "workbench.cli.console",
    "workbench.cli.render",
    "workbench.recipes.over.sweep",
    "workbench.recipes.over.crossval",
    "workbench.recipes.verbs.run",
    "workbench.recipes.tasks.sft.text_run",
    "workbench.report.pages",
)
"""Modules with what they import. None of them is started by `python -m`, which would import it a second time."""
TORCHRUN = "-m torch.distributed.run"


@cache
def python() -> str:
    """Path of an executable that takes Python's arguments; `workbench` and `torchrun` are in the same folder."""
    import atexit
    import shutil
    import subprocess
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    executable = folder / "python"
    asking = f"exec '{sys.executable}' -IS '{__file__}' ask '{folder / 'socket'}'"
    for name, words in (("python", ""), ("workbench", "-m workbench.cli.verbs"), ("torchrun", TORCHRUN)):
        (folder / name).write_text(f'#!/bin/sh\n{asking} {words} "$@"\n')
        (folder / name).chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen(64)
        number = listening.fileno()
        command = [sys.executable, __file__, "serve", str(number), str(executable)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[number])

    def end() -> None:
        server.communicate(timeout=60)
        shutil.rmtree(folder)

    atexit.register(end)
    return str(executable)


def serve(descriptor: int) -> list[str]:
    """Fork for who asks, until the standard input ends; returns in children alone, with their words."""
    import gc
    from importlib import import_module

    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # the folders of tests are named like packages
    gc.disable()
    from workbench.runs.process_memory import importing

    with importing():
        for name in PRELOADED:
            import_module(name)
    _prepare()
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=descriptor) as listening:
        while sys.stdin not in select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                return _begin(connection)
            connection.close()
            while _ended():
                pass
    while True:  # wait for all, whose processor time is then this process's
        try:
            os.wait()
        except ChildProcessError:
            sys.exit()


def _prepare() -> None:
    """Make what every run makes once in its process: patterns of weights' names, templates, YAML of the defaults."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from workbench.config import RunConfig
    from workbench.config.yaml_text import dump_yaml
    from workbench.report import rendering

    get_checkpoint_conversion_mapping("llama")
    pages = rendering._environment()
    for name in pages.list_templates(extensions=["html"]):
        pages.get_template(name)
    config = RunConfig.model_validate({"recipe": "sft", "model": {"id": "starter"}, "data": {"train": "rows.jsonl"}})
    dump_yaml(config.model_dump(mode="json"))


def _ended() -> bool:
    """Whether a child has ended that nobody has waited for."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _begin(connection: socket.socket) -> list[str]:
    """Become two processes: one looks after the other, which is what was asked for and returns its words."""
    size, descriptors, *_ = socket.recv_fds(connection, 8, 3)
    words, folder, environment = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    if child := os.fork():
        for descriptor in (*descriptors, 0, 1, 2):
            os.close(descriptor)
        _look_after(child, connection)
    connection.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return list(words)


def _look_after(child: int, connection: socket.socket) -> None:
    """Pass on the signals that come, or kill a child whose asker is gone, and tell how it ended."""
    end = os.pidfd_open(child)
    while end not in select([connection, end], [], [])[0]:
        told = connection.recv(1)
        os.kill(child, told[0] if told else signal.SIGKILL)
        if not told:
            os.waitpid(child, 0)
            os._exit(0)
    connection.sendall(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]).to_bytes(2, "big", signed=True))
    os._exit(0)


def execute(words: list[str]) -> None:
    """Run a module or a file as Python does."""
    import runpy

    import torch

    _leave_plots_empty()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    named = words[0] == "-m"
    sys.argv = words[1:] if named else words
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path.insert(0, os.getcwd() if named else os.path.dirname(os.path.abspath(words[0])))
    if named:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _leave_plots_empty() -> None:
    """Have reports hold empty frames, as those of the tests' own process do: drawing takes a third of a short run."""
    from workbench.report import plots

    plots._drawn = lambda *_, **__: '<svg viewBox="0 0 1 1"></svg>'  # type: ignore[assignment]


def finish(words: list[str]) -> None:
    """Execute the words and end as Python does, without taking apart what was imported, which would copy all of it."""
    import atexit
    import threading
    import traceback

    status: object = None
    try:
        execute(words)
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(int(status is not None) if not isinstance(status, int) else status & 0xFF)


def ask(address: str, words: list[str]) -> None:
    """Have a child run the words, and end as it does; those that no child understands, Python runs itself."""
    first = next((word for word in words if word != "-u"), "")
    if first != "-m" and not first.endswith(".py"):
        os.execv(sys.executable, [sys.executable, *words])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(request)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    told = connection.recv(2)
    status = int.from_bytes(told, "big", signed=True) if told else "The server of forks has ended."
    if isinstance(status, int) and status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    else:
        sys.executable = sys.argv[3]  # what a child starts with it is a child, too
        finish(serve(int(sys.argv[2])))
