"""Runs the tools and environments of a user's file: this is a program of its own, which forks a child for each.

    tool_host.py ASKS TELLS FILE LIMITS     # two descriptors, a Python file, JSON

The program has imported the file and nothing else; a child starts in a millisecond, and what one does to its memory no
other sees. A call has a child for itself, an episode one from `reset` to `end`. A child that takes too long, or too
much memory, is killed, and its answer says so. Uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any, ClassVar, NoReturn

LONGEST = 4096
"""Bytes of an answer beside the text, which the limit of output bounds."""


class Child:
    """A process that answers requests, one after another."""

    private: ClassVar[set[int]] = set()
    """Descriptors that no child may write to: those of this program, and of all children."""

    def __init__(self, module: Any, limits: dict[str, Any]) -> None:
        (own, self.asks), (self.tells, tells) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for each in (self.asks, self.tells, *self.private):
                os.close(each)
            serve(module, own, tells, limits)
        os.close(own)
        os.close(tells)
        self.private.update((self.asks, self.tells))
        self.most = 8 * limits["output"] + LONGEST
        self.text, self.ended = b"", ""

    def ask(self, job: dict[str, Any]) -> None:
        """Send a request."""
        self.text = b""
        with contextlib.suppress(OSError):  # it has ended, as its answer says
            os.write(self.asks, json.dumps(job).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """What has come of its answer: the whole of it, or None where more is to come."""
        piece = os.read(self.tells, 1 << 16)
        self.text += piece
        if not piece:
            return {"failed": f"the process ended by itself, {self.end()}", "over": True}
        if len(self.text) > self.most:
            return {"failed": "it answered too much", "over": True}
        if not self.text.endswith(b"\n"):
            return None
        try:
            answer: dict[str, Any] = json.loads(self.text)
        except ValueError:  # it found the descriptor, and wrote of its own
            return {"failed": "it answered nothing that can be read", "over": True}
        return answer

    def end(self) -> str:
        """Kill it with all that it started, once; returns how it had ended."""
        if self.pid:
            for stop in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    stop(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            for each in (self.asks, self.tells):
                os.close(each)
                self.private.discard(each)
            self.pid = 0
            signalled = os.WIFSIGNALED(status)
            self.ended = f"signal {os.WTERMSIG(status)}" if signalled else f"status {os.WEXITSTATUS(status)}"
        return self.ended


def serve(module: Any, asks: int, tells: int, limits: dict[str, Any]) -> NoReturn:
    """Answer requests until there are no more: the life of a child."""
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # it dies with who forked it
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + limits["memory"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    state: dict[str, Any] = {}
    with os.fdopen(asks, "rb") as pipe:
        for line in pipe:
            try:
                answer = carried_out(module, json.loads(line), state, limits)
                text = json.dumps(answer)
            except MemoryError:
                text = json.dumps({"failed": f"it took more than {limits['memory']:,} bytes of memory"})
            except BaseException as error:  # a user's code may raise anything
                text = json.dumps({"failed": f"{type(error).__name__}: {error}"[:500]})
            os.write(tells, text.encode() + b"\n")
    os._exit(0)


def carried_out(module: Any, job: dict[str, Any], state: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request, in a child."""
    kind = job["kind"]
    environment: Any = state.get("environment")
    if kind == "reset":
        environment = state["environment"] = getattr(module, job["class"])(*job.get("given", ()))
        return {"messages": environment.reset(job["row"])}
    if kind == "reward":
        value = environment.reward()
        return {"reward": {str(k): float(v) for k, v in value.items()} if isinstance(value, dict) else float(value)}
    if kind == "call":
        owner = environment if environment is not None and job["own"] else module
        return shown(getattr(owner, job["name"])(**job["arguments"]), limits)
    step = environment.step(job["said"])
    if not isinstance(step, tuple) or len(step) != 2 or not isinstance(step[1], bool):
        raise TypeError(f"step() returned {repr(step)[:80]}. Return an observation and whether the episode is done.")
    return {**shown(step[0], limits), "done": step[1]}


def shown(value: Any, limits: dict[str, Any]) -> dict[str, Any]:
    """A result as text, cut to the limit of output."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    most = limits["output"]
    return {"text": text, "cut": False} if len(text) <= most else {"text": text[:most] + " ...", "cut": True}


def main() -> None:
    """Import the file, then carry out lists of requests as they come."""
    asks, tells, path, limits = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    Child.private.update((asks, tells))
    for descriptor in Child.private:
        os.set_inheritable(descriptor, False)

    def tell(value: Any) -> None:
        data = json.dumps(value).encode() + b"\n"
        while data:
            data = data[os.write(tells, data) :]

    spec = importlib.util.spec_from_file_location("workbench_tools", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workbench_tools"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        tell({"failed": f"{type(error).__name__}: {error}"})
        return
    tell({"ready": True})
    episodes: dict[int, Child] = {}
    with os.fdopen(asks, "rb") as pipe:
        for line in pipe:
            tell(answers(module, json.loads(line), episodes, limits))


def answers(
    module: Any, jobs: list[dict[str, Any]], episodes: dict[int, Child], limits: dict[str, Any]
) -> list[dict[str, Any]]:
    """The answers to requests, some of which are carried out at the same time."""
    found: list[dict[str, Any]] = [{} for _ in jobs]
    waiting, running = list(range(len(jobs)))[::-1], dict[int, tuple[int, Child, float]]()
    while waiting or running:
        while waiting and len(running) < limits["at_once"]:
            number = waiting.pop()
            job = jobs[number]
            child = episodes.get(job["episode"])
            if job["kind"] == "end":
                if child is not None:
                    episodes.pop(job["episode"]).end()
                continue
            if job["kind"] == "reset" or (job["kind"] == "call" and child is None):
                child = Child(module, limits)
                if job["kind"] == "reset":
                    episodes[job["episode"]] = child
            if child is None:
                found[number] = {"failed": "its process has ended"}
                continue
            child.ask(job)
            running[child.tells] = (number, child, time.monotonic() + limits["seconds"])
        if not running:
            continue
        soonest = min(until for _, _, until in running.values())
        ready, _, _ = select.select(list(running), [], [], max(0.0, soonest - time.monotonic()))
        for descriptor in list(running):
            number, child, until = running[descriptor]
            answer = child.read() if descriptor in ready else None
            if answer is None and time.monotonic() < until:
                continue
            if answer is None:
                answer = {"failed": f"it took more than {limits['seconds']:g} s", "over": True}
            over = answer.get("over", False)
            found[number] = answer | {"step": jobs[number]["kind"] == "step"}
            del running[descriptor]
            kept = episodes.get(jobs[number]["episode"]) is child
            if not kept or over:
                child.end()
                if kept:
                    del episodes[jobs[number]["episode"]]
    return found


if __name__ == "__main__":
    main()
