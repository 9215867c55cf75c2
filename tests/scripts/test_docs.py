"""The site is built from the checkout, has every page and setting, and its pages fetch nothing."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from tests.scripts.shown_commands import ROOT, TUTORIALS
from workbench import adapters, config
from workbench.config import plugins, reference

DOCS = ["bash", str(ROOT / "scripts" / "docs.sh")]
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//|@import[^;]*//")
IN_STYLES = re.compile(r"(?:@import|url\()[\s\"']*(?:https?:)?//")


def _built(out: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONSAFEPATH": "1"}
    return subprocess.run([*DOCS, str(out)], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_site_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="extra docs")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitemap.xml").touch()  # of a site made before, over which it is built
    done = _built(site)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert all((site / "scripts" / "tutorials" / f"{page.stem}.html").is_file() for page in TUTORIALS)
    assert (site / "scripts" / "tutorials" / "first_run.ipynb").is_file()
    page = (site / "recipes" / "run_files.html").read_text()  # what the search of pages on a disk needs
    assert '<script src="../iframe-worker.js">' in page and (site / "search" / "search_index.js").is_file()
    settings, python = ((site / "reference" / name).read_text() for name in ("settings.html", "python.html"))
    assert [each.key for each in reference.settings() if f"<code>{each.key}</code>" not in settings] == []
    told = dict(re.findall(r"<tr>\s*<td><code>([^<]+)</code></td>(.*?)</tr>", settings, re.S))
    for key, unit, paper in (("data.max_tokens", "tokens", ""), ("regularise.neftune", "", "Jain et al. 2024")):
        assert (f"unit: {unit}" in told[key]) is bool(unit) and paper in told[key]
    shown = [each for each in reference.settings() if each.unit]
    assert settings.count("unit: ") >= len(shown) > 100
    cited = {html.escape(one, quote=False) for each in reference.settings() for one in each.papers}
    assert [paper for paper in cited if paper not in re.sub("[()]", "", settings)] == []
    public = [f"workbench.{name}" for name in workbench.__all__ if not name.startswith("__")]
    public += [f"{each.__name__}.{name}" for each in (adapters, config) for name in each.__all__]
    assert [name for name in public if f'id="{name}"' not in python] == []
    assert [path for path in site.rglob("*.html") if FETCHED.search(path.read_text())] == []
    assert [path for path in site.rglob("*.css") if IN_STYLES.search(path.read_text())] == []


def test_the_page_on_python_has_every_name_once() -> None:
    page = plugins.module(ROOT / "scripts" / "docs" / "assemble.py", key="docs").python_page()
    shown = re.findall(r"^::: workbench\.(\w+)$", page, re.M)
    assert sorted(shown) == [name for name in workbench.__all__ if not name.startswith("__")]
    assert f"{config.__name__}.RunConfig" in page and f"{adapters.__name__}.Lora" in page


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = _built(tmp_path)
    assert done.returncode == 2 and "holds other files" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
