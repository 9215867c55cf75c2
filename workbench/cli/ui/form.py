"""The form that starts a run: recipes, settings, mistakes in an answer, and what `check` and `plan` say of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workbench import recipes
from workbench.cli.ui.run_folder import flat
from workbench.config import reference
from workbench.config.yaml_text import override, read_yaml
from workbench.errors import ConfigError, WorkbenchError
from workbench.recipes.load import load
from workbench.runs import files, trust
from workbench.schema import ROOT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TOP = ("model.id", "data.train", "adapter.method", "train.learning_rate", "train.epochs", "train.steps", "batch.size")
"""Settings that most runs change, shown first."""

Answers = Mapping[str, str]
"""Settings by their key, as they would stand behind `key=` on the command line."""


def names() -> list[str]:
    """Shipped recipes, and YAML files of the folder that the server was started in."""
    return [*recipes.shipped(), *sorted(str(path) for path in Path().glob("*.y*ml") if _is_recipe(path))]


def recipe(name: str) -> dict[str, Any] | None:
    """A recipe's text and values; None where `names` has none of that name."""
    if name not in names():
        return None
    path = recipes.find(name)
    return {"name": name, "text": path.read_text(encoding="utf-8"), "written": flat(read_yaml(path))}


@lru_cache(maxsize=1)
def settings() -> list[dict[str, Any]]:
    """Every setting that has a place of its own, sections before their keys."""
    facts = ("key", "values", "words", "default", "meaning", "why", "unit", "papers", "of")
    return [
        {name: getattr(each, name) for name in facts}
        | {"closed": each.is_closed, "section": each.is_section, "top": each.key in _TOP}
        | {"choices": reference.choices(each.key)}
        for each in reference.settings()
        if "NAME" not in each.key and "[]" not in each.key
    ]


def words(answers: Answers) -> list[str]:
    """Answers as words of the command line."""
    return [f"{key}={value}" for key, value in answers.items()]


def mistakes(name: str, answers: Answers) -> list[tuple[str, str]]:
    """Place and cure of each mistake; empty where looking for them would execute Python code."""
    try:
        if not code(name, answers):
            load(name, words(answers))
        return []
    except ConfigError as error:
        return list(error.mistakes) or [(ROOT, str(error))]


def code(name: str, answers: Answers) -> dict[str, str]:
    """Settings of a recipe with answers that execute Python code, with their values; read as the run reads them.

    Raises:
        ConfigError: There is no such recipe, or an answer is no setting.
    """
    named = trust.code(override(read_yaml(recipes.find(name)), words(answers)))
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in named.items()}


def keep(folder: Path, name: Any, text: Any) -> dict[str, str]:
    """Write a file that was dropped on the page, in base64, into a folder of the user's.

    Returns:
        Its `path`.

    Raises:
        ConfigError: The name is none of a file, or the text is no base64.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: a file's name has letters, digits, dots, - and _, and no more than 100.")
    try:
        written = base64.b64decode(str(text), validate=True)
    except ValueError:
        raise ConfigError(f"{name}: expected its bytes in base64.") from None
    folder /= hashlib.sha256(written).hexdigest()[:12]  # two files may have one name
    folder.mkdir(parents=True, exist_ok=True)
    files.write_bytes(folder / name, written)
    return {"path": str(folder / name)}


def require_name(name: str, taken: Sequence[str]) -> None:
    """Raise ConfigError where a name is invalid or taken."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: a run's name has letters, digits, dots, - and _, and no more than 100.")
    if name in taken:
        raise ConfigError(f"A run is called {name} already. Write another name.")


def free_name(name: str, taken: Sequence[str]) -> str:
    """A free name for a run of a recipe."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name.removesuffix(".yaml").removesuffix(".yml")).strip("-.") or "run"
    candidates = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    return next(name for name in candidates if name not in taken)


def _is_recipe(path: Path) -> bool:
    try:
        return bool(re.search(r"^recipe:", path.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return False


Part = dict[str, Any]
"""A table (title, head, rows, right), a text, or an example (place, pieces)."""

Ask = Callable[[str, Sequence[str]], list[Part]]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["workbench.cli.check_output", "workbench.recipes.verbs.plans.plan"])


def inspect(recipe: str, words: Sequence[str]) -> list[Part]:
    """Show what `workbench check` does."""
    from workbench.cli import check_output
    from workbench.recipes.inspection import Inspection
    from workbench.recipes.load import load
    from workbench.recipes.verbs.check import check

    found, parts = check(load(recipe, words)), []
    with redirect_stdout(io.StringIO()) as printed:
        if isinstance(found, Inspection):
            parts = [{"example": place, "pieces": pieces} for place, pieces in found.examples]
            check_output.numbers(found)
        else:
            check_output.inspection(found)
    return [*parts, {"text": printed.getvalue()}]


def hold(recipe: str, words: Sequence[str]) -> list[Part]:
    """Show what `workbench check` and `workbench data` do, without what the backbone says of the rows."""
    from workbench.cli import render
    from workbench.recipes.load import load
    from workbench.recipes.verbs import data_report

    parts = inspect(recipe, words)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
        report = data_report.data_report(load(recipe, words), out=Path(folder), name=recipe, perplexity="off")
        render.data(report)
    return [*parts, {"text": printed.getvalue().partition("\nPage: ")[0].strip()}]


def plan(recipe: str, words: Sequence[str]) -> list[Part]:
    """Show what `workbench plan` does."""
    from workbench.cli import render
    from workbench.recipes.load import load
    from workbench.recipes.verbs.plans.plan import solve

    return list(_parts(render.plan_parts(solve(load(recipe, words)).plan)))


def paired(folder: str, names: Sequence[str]) -> list[Part]:
    """Show scores of runs of a folder against the first of them on the same rows, as `workbench compare` does."""
    from workbench.report import pages, run_record

    pairs, notes = pages.paired([run_record.read(Path(folder, name)) for name in names], names)
    parts: list[Part] = [{"text": text} for text in notes]
    if not pairs:
        return parts
    head, right = list(pages.PAIRED_COLUMNS), [place > 1 for place in range(len(pages.PAIRED_COLUMNS))]
    table = {"table": "On the same rows", "head": head, "rows": list(map(list, pairs)), "right": right}
    return [table, {"text": pages.paired_note(pairs)}, *parts]


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


def _answer(ask: Ask, recipe: str, words: Sequence[str], end: Connection) -> None:
    os.environ["COLUMNS"] = "100"
    try:
        end.send({"parts": ask(recipe, words)})
    except WorkbenchError as error:
        end.send({"error": str(error), "mistakes": list(getattr(error, "mistakes", ()))})
    except Exception:
        end.send({"error": traceback.format_exc()})


async def answered(ask: Ask, recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """What `ask` finds, in a new process, or why it finds nothing. The process ends when the caller stops waiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[dict[str, Any]] = loop.create_future()
    given_up = threading.Event()

    def work() -> None:
        answer = _asked(ask, recipe, words, given_up)
        if answer is not None:
            loop.call_soon_threadsafe(future.set_result, answer)

    # In a daemon thread: the first process waits for slow imports, for which an ending server does not wait.
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
