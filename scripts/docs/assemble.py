"""Gather the pages of the documentation from the files beside the code, and write those that come from the code.

python scripts/docs/assemble.py DOCS SOURCE

Pages keep their places in the checkout, so that links between them stay as they are. SOURCE gets a copy of the package
as it installs, with adapters and recipes inside, for mkdocstrings to read.
"""

from __future__ import annotations

import html
import importlib
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from workbench.config import reference

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "workbench/config/glossary.md"),
    *("adapters/*.md", "recipes/*.md", "recipes/*/*.md", "scripts/*.md", "scripts/*/*.md"),
)
_TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]+`")
_TO_TESTS = re.compile(r"\[([^\]]+)\]\((?:\.\./)*tests/[^)]+\)")
"""A link to tests, which the site does not have."""


def pages() -> list[Path]:
    """Markdown files of the site, relative to the checkout."""
    return sorted(path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern))


def settings_page(settings: Iterable[reference.SettingReference]) -> str:
    """Every setting in tables, one for each section of a recipe."""
    parts = [
        "# Settings",
        "Every key of a recipe, as `workbench explain KEY` shows it: values, unit, default, meaning, why and papers.",
    ]
    for section, keys in groupby(settings, key=lambda each: each.key.partition(".")[0].removesuffix("[]")):
        parts += [f"## {section}", "| key | values | default | meaning |\n|---|---|---|---|\n" + "\n".join(_rows(keys))]
    return "\n\n".join(parts) + "\n"


def _rows(settings: Iterable[reference.SettingReference]) -> Iterator[str]:
    for each in settings:
        of = f"*{', '.join(each.of)}:* " if each.of else ""
        default = _code(each.default) if each.default and not each.is_section else ""
        unit = f"; unit: {_cell(each.unit)}" if each.unit else ""
        more = [paper for paper in each.papers if paper not in reference.papers(each.meaning)]
        papers = f" ({_cell('; '.join(more))})" if more else ""
        meaning = f"{each.meaning} Why: {each.why}" if each.why else each.meaning
        yield f"| {_code(each.key)} | {_cell(each.values)}{unit} | {default} | {of}{_cell(meaning)}{papers} |"


def _cell(text: str) -> str:
    """Text as a table's cell shows it; nothing outside of its code is HTML or Markdown."""
    words, code = _CODE.sub("\0", text), _CODE.findall(text)
    escaped = re.sub(r"([*_\[|])", r"\\\1", html.escape(words, quote=False))
    return re.sub("\0", lambda _: code.pop(0), escaped)


def _code(text: str) -> str:
    return f"`{text}`"


def _plain_bars(row: re.Match[str]) -> str:
    """A row of a table whose code has plain bars: GitHub wants them escaped, Python-Markdown shows the backslash."""
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


PYTHON = {
    "Commands": (
        "What a command does and prints, as a function that returns it.",
        *("run", "run_each", "check", "plan", "data_report", "features", "find_learning_rate", "load_recipe"),
        *("distill_cache", "distill_student"),
        *("evaluate", "judge", "win_rate", "drafts", "benchmark", "predict", "generate", "sample", "load_run"),
        *("merge", "export", "combine", "blend", "compare", "adopt", "doctor", "family"),
    ),
    "Trainings": (
        "The training of a run, with a loss, rows or a backbone of a script.",
        *("fit", "fit_bank"),
    ),
    "Parts": (
        "For a loop of your own, such as `scripts/own_loop.py`.",
        *("load_tokenizer", "load_backbone", "load_rows", "encode_rows", "global_batch", "micro_batches"),
        *("attach", "attach_bank", "output_head", "token_loss", "likelihood", "save_adapter", "load_adapter"),
        *("TrainingBank", "Datum"),
    ),
    "Your own": ("For files that `plugins` names.", "register_method", "register_task"),
}
"""Headings of the page on Python, what stands below each, and names of `workbench`."""


MODULES = {
    "workbench.config": "Sections of a configuration; `workbench explain KEY` says what each setting does.",
    "workbench.adapters": "Methods, which are sections as well, and what is done with adapters.",
}
"""Modules on that page, all of whose public names it has."""


def python_page() -> str:
    """The public names, whose docstrings mkdocstrings fills in."""
    parts = ["# Python", "Examples run in this order in one folder; `runs/short` is the run of the first."]
    for title, (text, *names) in PYTHON.items():
        parts += [f"## {title}", text, *(f"::: workbench.{name}" for name in names)]
    for module, text in MODULES.items():
        names = importlib.import_module(module).__all__
        parts += [f"## {module}", text, *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def assemble(docs: Path, source: Path) -> None:
    """Write all pages below `docs`, and the package below `source`."""
    made = {"settings.md": settings_page(reference.settings()), "python.md": python_page()}
    for page in pages():
        target = docs / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_TO_TESTS.sub(r"\1", _TABLE_ROW.sub(_plain_bars, (ROOT / page).read_text())))
    for notebook in ROOT.glob("scripts/*/*.ipynb"):  # a file to fetch from the site
        shutil.copyfile(notebook, docs / notebook.relative_to(ROOT))
    shutil.copytree(ROOT / "scripts" / "docs" / "pictures", docs / "scripts" / "docs" / "pictures")
    (docs / "reference").mkdir()
    for name, text in made.items():
        (docs / "reference" / name).write_text(text)
    for own in (Path(__file__).with_name("wide.css"), Path(__file__).parent / "vendor" / "iframe-worker.js"):
        shutil.copyfile(own, docs / own.name)
    shutil.copytree(ROOT / "workbench", source / "workbench", ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    assemble(Path(sys.argv[1]), Path(sys.argv[2]))
