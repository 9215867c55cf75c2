"""Pictures of a report and of each page of `workbench ui` in a real browser: light and dark, 1280 and 400 pixels wide.

python scripts/screenshots.py [--runs FOLDER] [--out scripts/docs/pictures]

Without --runs it first makes a folder of four runs by shipped recipes, some ten minutes of one core. Needs Chromium on
the path, and `pip install -c constraints.txt -e '.[browser,serve]'`. README and the site show what it writes. It ends
where a page asks anything of another host.
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
from typing import Any

from PIL import Image

RUNS = {
    "sft-quickstart": ["sft/quickstart"],
    "sft-dora": ["sft/quickstart", "adapter.method=dora"],
    "classify-quickstart": ["classify/quickstart"],
    "reinforce-tools": ["reinforce/tools"],
}
"""Names, and what trains them: the first has a page, a report and a chat, is compared with the second, and the last one
has episodes."""
WIDTHS = {1280: 800, 400: 800}
"""Height in pixels of the part of a page that is shown, by its width."""
QUESTION = "Who is in the story?"
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
    if missing := [name for name in RUNS if name not in ready]:
        raise SystemExit(f"{runs}: no run has ended in {', '.join(missing)}. Leave --runs out to make them.")
    first, second, *_, played = RUNS
    with served(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        root, asked = address.partition("#")[0], set[str]()
        pages = {
            "report": (ready[first].resolve().as_uri(), "h1", None),
            "runs": (f"{root}#/", "table", None),
            "run": (f"{root}#/run/{first}", ".u-over", None),
            "compare": (f"{root}#/compare?run={first}&run={second}", ".u-over", None),
            "form": (f"{root}#/new?recipe={RUNS[first][0]}", "mark", None),
            "chat": (f"{root}#/chat?run={first}", "select", _ask),
            "episodes": (f"{root}#/run/{played}", "h2:text-is('Episodes')", _to_episodes),
        }
        for width, height in WIDTHS.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.on("request", lambda request: asked.add(request.url))
                page.set_default_timeout(120_000)
                page.goto(address)
                for name, (place, there, then) in pages.items():
                    page.goto(place)
                    page.wait_for_selector(there)
                    if then is not None:
                        then(page)
                    page.wait_for_timeout(500)
                    write(page.screenshot(), out / f"{name}-{width}-{scheme}.png")
                page.close()
        browser.close()
    if outside := [url for url in sorted(asked) if not url.startswith((root, "file:", "data:", "blob:"))]:
        raise SystemExit(f"A page asks another host: {', '.join(outside)}.")


def _ask(page: Any) -> None:
    """Have the chosen run and its backbone answer a question."""
    page.get_by_label("beside the backbone").check()
    page.get_by_role("button", name="Load", exact=False).first.click()
    page.wait_for_selector("text= ready.")
    page.locator("textarea").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    page.locator(".talk .card > .soft").nth(1).wait_for()  # both have said how long they took


def _to_episodes(page: Any) -> None:
    page.locator("h2", has_text="Episodes").evaluate("heading => heading.scrollIntoView()")


def main() -> None:
    """Make the runs where none are named, and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder of runs that have ended")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "docs" / "pictures")
    words = parser.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if words.runs is None:
            for name, run in RUNS.items():
                to = str(Path(folder) / "runs" / name)
                subprocess.run([sys.executable, "-m", "workbench.cli", "run", *run, "--out", to], check=True)
        shoot(words.runs or Path(folder) / "runs", words.out)


if __name__ == "__main__":
    main()
