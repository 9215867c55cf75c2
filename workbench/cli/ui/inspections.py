"""`check` and `plan` of a form and pairs of runs, each in a process of its own that ends with the question."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError

Part = dict[str, Any]
"""A table (title, head, rows, right), a text, or an example (place, pieces)."""

Ask = Callable[[str, Sequence[str]], list[Part]]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["workbench.cli.render", "workbench.recipes.check", "workbench.recipes.plans.plan"])


def inspect(recipe: str, words: Sequence[str]) -> list[Part]:
    """Show what `workbench check` does."""
    from workbench.cli import render
    from workbench.recipes.check import check
    from workbench.recipes.inspection import Inspection
    from workbench.recipes.load import load

    check_result = check(load(recipe, words))
    if isinstance(check_result, Inspection):
        examples = [{"example": place, "pieces": pieces} for place, pieces in check_result.examples]
        return [*examples, {"text": _printed(lambda: render.numbers(check_result))}]
    return [{"text": _printed(lambda: render.inspection(check_result))}]


def plan(recipe: str, words: Sequence[str]) -> list[Part]:
    """Show what `workbench plan` does."""
    from workbench.cli import plan_table
    from workbench.recipes.load import load
    from workbench.recipes.plans.plan import solve

    return list(_parts(plan_table.parts(solve(load(recipe, words)).plan)))


def paired(folder: str, names: Sequence[str]) -> list[Part]:
    """Show scores of runs of a folder against the first of them on the same rows, as `workbench compare` does."""
    from workbench.report import paired_section, run_record

    pairs = paired_section.paired([run_record.read(Path(folder, name)) for name in names], names)
    columns = {
        "head": list(paired_section.COLUMNS),
        "right": [place > 1 for place in range(len(paired_section.COLUMNS))],
    }
    tables: list[Part] = [{"table": "On the same rows", "rows": list(map(list, pairs.rows)), **columns}]
    note = [paired_section.note(pairs.rows)] if pairs.rows else []
    return [*(tables if pairs.rows else []), *({"text": text} for text in (*note, *pairs.notes))]


def _parts(parts: Iterable[Any]) -> Iterable[Part]:
    from rich.table import Table

    for each in parts:
        if isinstance(each, Table):
            columns = [list(map(str, column.cells)) for column in each.columns]
            yield {
                "table": str(each.title or ""),
                "head": [str(column.header) for column in each.columns],
                "right": [column.justify == "right" for column in each.columns],
                "rows": list(map(list, zip(*columns, strict=True))),
            }
        elif text := str(each):
            yield {"text": text}


def _printed(write: Callable[[], None]) -> str:
    import io
    from contextlib import redirect_stdout

    with redirect_stdout(io.StringIO()) as text:
        write()
    return text.getvalue()


def _answer(ask: Ask, recipe: str, words: Sequence[str], end: Connection) -> None:
    os.environ["COLUMNS"] = "100"
    try:
        end.send({"parts": ask(recipe, words)})
    except WorkbenchError as error:
        end.send({"error": str(error), "mistakes": list(getattr(error, "mistakes", ()))})
    except Exception:
        end.send({"error": traceback.format_exc()})


async def answered(ask: Ask, recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """Ask in a new process; returns what is found, or why nothing is. Whoever stops waiting ends it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[dict[str, Any]] = loop.create_future()
    given_up = threading.Event()

    def work() -> None:
        answer = _asked(ask, recipe, words, given_up)
        if answer is not None:
            loop.call_soon_threadsafe(future.set_result, answer)

    # The first process waits for imports that take long: a server that ends does not wait for them.
    threading.Thread(target=work, daemon=True).start()
    try:
        return await future
    finally:
        given_up.set()


def _asked(ask: Ask, recipe: str, words: Sequence[str], given_up: threading.Event) -> dict[str, Any] | None:
    """The answer of a process; None where nobody waits for it any more."""
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_answer, args=(ask, recipe, words, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while not ours.poll(0.05):
            if given_up.is_set():
                return None
        reply: dict[str, Any] = ours.recv()
        return reply
    except EOFError:
        process.join()
        return {"error": f"The process that looked ended with status {process.exitcode}: memory may have run out."}
    finally:
        process.kill()
        process.join()
        ours.close()
