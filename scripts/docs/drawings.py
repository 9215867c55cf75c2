"""The five drawings of how_it_works.md, as SVG that follows a reader's light or dark scheme.

python scripts/docs/drawings.py [--out scripts/docs/pictures]
"""

from __future__ import annotations

import argparse
from html import escape
from itertools import pairwise
from pathlib import Path

OUT = Path(__file__).parent / "pictures"
STYLE = """
  text { font: 14px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; fill: #22252b; text-anchor: middle }
  .soft { font-size: 12.5px; fill: #5c616a } .left { text-anchor: start }
  rect { rx: 6px; stroke: #c4c6cc; fill: #ffffff }
  .paper { fill: #f6f5f2; stroke: none; rx: 0 } .frozen { fill: #e3e5ea } .trains { fill: #cfe0fb; stroke: #2459b8 }
  .kept { fill: #cdeedd; stroke: #17764a } .out { fill: #f6f5f2; stroke-dasharray: 4 3 }
  path { stroke: #5c616a; stroke-width: 1.5; fill: none } .head { fill: #5c616a; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e6ea } .soft { fill: #a3a9b3 } rect { stroke: #4a505a; fill: #1e2126 }
    .paper, .out { fill: #15171b } .frozen { fill: #353a42 } .trains { fill: #1d355f; stroke: #86b1ff }
    .kept { fill: #1f4d38; stroke: #5fcf98 } path { stroke: #a3a9b3 } .head { fill: #a3a9b3 }
  }
"""
_LINE = 19
_HEAD = 8


class Drawing:
    """Boxes, arrows and words at places in pixels, from the upper left corner."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._size, self._title = (width, height), title
        self._parts = [f'<rect class="paper" width="{width}" height="{height}"/>']

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "") -> None:
        """A box with lines of text in its middle; `kind` is a class of STYLE."""
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>')
        for place, line in enumerate(lines):
            self.words(x + width / 2, y + height / 2 + _LINE * (place - len(lines) / 2) + 14, line)

    def words(self, x: float, y: float, text: str, kind: str = "") -> None:
        """A line of text around x, or from x on with the kind `left`."""
        self._parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def arrow(self, *places: tuple[float, float]) -> None:
        """A line along places, each beside or above the next, with a head at the last."""
        (x, y), (end_x, end_y) = places[-2:]
        over, down = (end_x > x) - (end_x < x), (end_y > y) - (end_y < y)
        back_x, back_y = end_x - _HEAD * over, end_y - _HEAD * down
        half_x, half_y = _HEAD / 2 * abs(down), _HEAD / 2 * abs(over)
        bends = [*places[:-1], (back_x, back_y)]
        self._parts.append(f'<path d="M{" L".join(f"{a} {b}" for a, b in bends)}"/>')
        corners = (end_x, end_y), (back_x - half_x, back_y - half_y), (back_x + half_x, back_y + half_y)
        self._parts.append(f'<path class="head" d="M{" L".join(f"{a} {b}" for a, b in corners)} Z"/>')

    def chain(self, y: float, height: float, boxes: list[tuple[float, float, tuple[str, ...], str]]) -> None:
        """Boxes (x, width, lines, kind) beside each other, each with an arrow to the next."""
        for x, width, lines, kind in boxes:
            self.box(x, y, width, height, *lines, kind=kind)
        for (x, width, *_), (next_x, *_) in pairwise(boxes):
            self.arrow((x + width, y + height / 2), (next_x, y + height / 2))

    def svg(self) -> str:
        """The drawing as the text of a file."""
        width, height = self._size
        start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        return "\n".join(
            [start, f"<title>{escape(self._title)}</title><style>{STYLE}</style>", *self._parts, "</svg>\n"]
        )


def bank() -> Drawing:
    """Members share one product with the frozen weight."""
    drawing = Drawing("A bank: the rows of all members pass the frozen weights together", 860, 270)
    for place, name in enumerate(("fold 1", "fold 2", "fold 5")):
        y = 24 + 80 * place
        drawing.box(20, y, 120, 54, "rows of", name)
        drawing.arrow((140, y + 27), (200, y + 27))
        drawing.arrow((340, y + 27), (400, y + 27))
        drawing.box(400, y, 160, 54, "+ own update B A x", kind="trains")
        drawing.arrow((560, y + 27), (595, y + 27))
        drawing.box(595, y, 90, 54, "own loss")
        drawing.arrow((685, y + 27), (720, y + 27))
        drawing.box(720, y, 120, 54, "own optimizer,", "own file", kind="trains")
    drawing.box(200, 24, 140, 214, "W x", "one product", "for all rows;", "W frozen, once", "in memory", kind="frozen")
    drawing.words(430, 262, "each layer of the backbone; members may differ in method, rank, rate and seed", "soft")
    return drawing


def global_batch() -> Drawing:
    """One batch, cut in any way, is one gradient."""
    drawing = Drawing("A global batch: the same rows and the same divisor, however they are cut", 860, 270)
    drawing.box(20, 96, 150, 78, "data, seed, step", "decide the rows")
    drawing.arrow((170, 135), (210, 135))
    drawing.box(210, 96, 140, 78, "global batch", "32 rows with T", "supervised tokens")
    cuts = (("one device, one pass", (32,)), ("one device, four passes", (8,) * 4), ("two devices, two each", (8,) * 4))
    for place, (name, sizes) in enumerate(cuts):
        y = 22 + 82 * place
        drawing.arrow((350, 135), (375, 135), (375, y + 27), (400, y + 27))
        drawing.words(400, y - 5, name, "soft left")
        for at, size in enumerate(sizes):
            width = 200 / len(sizes)
            drawing.box(400 + at * width, y, width - 4, 54, str(size), kind="trains")
        drawing.arrow((600, y + 27), (625, y + 27), (625, 135), (660, 135))
    drawing.box(660, 96, 180, 78, "sum of losses / T", "one gradient,", "one step", kind="kept")
    return drawing


def prefix_cache() -> Drawing:
    """What frozen first blocks give is computed once."""
    drawing = Drawing("The prefix cache: outputs of frozen first blocks are computed once for each row", 860, 220)
    first = [(20, 90, ("a row",), ""), (150, 190, ("blocks 1 to 6", "frozen"), "frozen")]
    drawing.chain(40, 60, [*first, (380, 150, ("their output", "memory or disk"), "kept")])
    drawing.arrow((530, 70), (570, 70))
    drawing.box(570, 40, 170, 60, "blocks 7 to 12", "train", kind="trains")
    drawing.arrow((740, 70), (780, 70))
    drawing.box(780, 40, 60, 60, "loss")
    drawing.words(245, 26, "once: epoch 1", "soft")
    drawing.box(345, 146, 220, 56, "every later epoch, fold", "and evaluation begins here", kind="out")
    drawing.arrow((455, 146), (455, 100))
    return drawing


def plan() -> Drawing:
    """A plan is the run's own step without values."""
    drawing = Drawing("A plan: the real step on tensors that have shapes and no values", 860, 250)
    drawing.chain(
        30,
        84,
        [
            (20, 150, ("config.json,", "rows, recipe;", "no weight"), ""),
            (210, 190, ("the run's own step", "on tensors that have", "shapes and no values"), "trains"),
            (440, 190, ("bytes alive at the peak,", "operations, bytes", "between devices"), ""),
            (670, 170, ("memory and time", "of this layout"), "kept"),
        ],
    )
    drawing.box(210, 172, 190, 60, "each layout, saving", "and weight format", kind="out")
    drawing.arrow((305, 172), (305, 114))
    drawing.box(440, 172, 190, 60, "rates: timed here, or", "of a card by name", kind="out")
    drawing.arrow((630, 202), (755, 202), (755, 114))
    drawing.words(650, 228, "the fastest that fits is what runs", "soft left")
    return drawing


def folds() -> Drawing:
    """Rows that belong together stay in one fold; decisions are made out of fold."""
    drawing = Drawing("Folds without leaks: what belongs together stays together", 860, 245)
    drawing.chain(
        24,
        84,
        [
            (20, 150, ("near-duplicates,", "groups, users", "stay together"), ""),
            (210, 150, ("five folds, each", "with its share of", "every class"), ""),
            (400, 190, ("five adapters in a bank,", "each without one fold"), "trains"),
            (630, 210, ("each row is judged by what", "did not train on it"), "kept"),
        ],
    )
    stages = ("pseudo-labels", "ensemble", "test-time views")
    for place, stage in enumerate(stages):
        drawing.box(250 + 150 * place, 160, 140, 44, stage, kind="out")
    drawing.arrow((735, 108), (735, 182), (690, 182))
    drawing.words(470, 228, "each stays only where rows out of fold show a gain", "soft")
    drawing.arrow((250, 182), (195, 182))
    drawing.box(20, 150, 175, 64, "one run that predicts,", "or one adapter", kind="kept")
    return drawing


DRAWINGS = {
    "bank": bank,
    "global-batch": global_batch,
    "prefix-cache": prefix_cache,
    "plan": plan,
    "folds": folds,
}
"""Names of files, and what draws them."""


def main() -> None:
    """Write all drawings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (out / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
