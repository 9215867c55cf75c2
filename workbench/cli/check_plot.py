"""The picture of `check --plot`: the schedule of a run and, where rows are pictures, these as the model sees them."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from workbench.config import RunConfig
from workbench.recipes.check import AnyInspection
from workbench.recipes.embeddings.embed_verbs import EmbedInspection
from workbench.recipes.inspection import Inspection
from workbench.report import schedule_plot
from workbench.runs import files

PICTURES = (".png", ".jpg", ".jpeg")
"""File formats of a sheet of pictures."""


def require_new(path: Path, config: RunConfig) -> None:
    """Refuse a file that `write` could not write, before the work that comes first; see `schedule_plot.require_new`."""
    schedule_plot.require_new(path, PICTURES if config.reads_pictures else schedule_plot.SUFFIXES)


def write(path: Path, inspection: AnyInspection) -> None:
    """Draw the learning rate and which layers train when, below the rows where they are pictures, to a new file."""
    pictures = None if isinstance(inspection, Inspection | EmbedInspection) else inspection.pictures
    if pictures is None:
        schedule_plot.write(path, inspection.config, steps=inspection.steps, blocks=inspection.blocks)
        return
    require_new(path, inspection.config)
    schedule = Image.open(
        io.BytesIO(schedule_plot.draw(inspection.config, steps=inspection.steps, blocks=inspection.blocks))
    )
    buffer = io.BytesIO()
    _stacked(pictures.sheet(), schedule).save(buffer, Image.registered_extensions()[path.suffix.lower()], quality=92)
    files.write_bytes(path, buffer.getvalue())


def _stacked(sheet: Image.Image, schedule: Image.Image) -> Image.Image:
    """One picture above the other; the lower one is made narrower where it is wider."""
    if schedule.width > sheet.width:
        schedule = schedule.resize(
            (sheet.width, schedule.height * sheet.width // schedule.width), Image.Resampling.LANCZOS
        )
    both = Image.new("RGB", (sheet.width, sheet.height + schedule.height), "white")
    both.paste(sheet)
    both.paste(schedule.convert("RGB"), (0, sheet.height))
    return both
