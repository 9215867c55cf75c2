"""Pictures of a report and of `workbench ui` in a real browser: light and dark, 1280 and 400 pixels wide.

python scripts/screenshots.py [--runs FOLDER] [--out scripts/docs/pictures]

Without --runs it first makes a folder of two runs by shipped recipes, some minutes of one core. Needs Chromium on the
path, and `pip install -c constraints.txt -e '.[browser,serve]'`. README and the site show what it writes.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

RECIPES = ("sft/quickstart", "classify/quickstart")
"""The runs; the first is shown on a page of its own, and its report."""
WIDTHS = {1280: 800, 400: 800}
"""Height in pixels of the part of a page that is shown, by its width."""
COLOURS = 64
MOST_BYTES = 150_000
"""Of a file, which every clone of the repository fetches."""


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The address of `workbench ui` for a folder of runs, with its token."""
    command = [sys.executable, "-m", "workbench.cli", "ui", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+#token=\S+", line)))
        finally:
            process.terminate()


def write(png: bytes, path: Path) -> None:
    """A picture of a page as a file with a palette; raises SystemExit where it is larger than MOST_BYTES."""
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    if (size := path.stat().st_size) > MOST_BYTES:
        raise SystemExit(f"{path}: {size:,} bytes, more than {MOST_BYTES:,}. Show a smaller part of the page.")
    print(f"{path}: {size:,} bytes")


def shoot(runs: Path, out: Path) -> None:
    """Write NAME-WIDTH-SCHEME.png for each page."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    if (chromium := next(filter(None, map(shutil.which, names)), None)) is None:
        raise SystemExit(f"None of {', '.join(names)} is on the path. Install Chromium.")
    ready = {path.parent.name: path for path in runs.glob("*/report.html")}
    first = RECIPES[0].replace("/", "-")
    run = first if first in ready else next(iter(ready), None)
    if run is None:
        raise SystemExit(f"{runs}: no run has ended there. Leave --runs out to make some.")
    with served(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = {"report": ready[run].resolve().as_uri(), "runs": "#/", "run": f"#/run/{run}"}
        for width, height in WIDTHS.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.set_default_timeout(120_000)
                page.goto(address)
                for name, place in pages.items():
                    page.goto(place if name == "report" else address.partition("#")[0] + place)
                    page.wait_for_selector({"report": "h1", "runs": "table", "run": ".u-over"}[name])
                    page.wait_for_timeout(500)
                    write(page.screenshot(), out / f"{name}-{width}-{scheme}.png")
                page.close()
        browser.close()


def main() -> None:
    """Make the runs where none are named, and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder of runs that have ended")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "docs" / "pictures")
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if words.runs is None:
            for recipe in RECIPES:
                to = Path(folder) / "runs" / recipe.replace("/", "-")
                subprocess.run([sys.executable, "-m", "workbench.cli", "run", recipe, "--out", str(to)], check=True)
        shoot(words.runs or Path(folder) / "runs", words.out)


if __name__ == "__main__":
    main()
