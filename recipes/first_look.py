"""What is refused before torch is imported: a layout, a run directory, and rows that cannot be read."""

from __future__ import annotations

from pathlib import Path

from workbench.config import RunConfig
from workbench.data import starter
from workbench.data.source_files import data_files
from workbench.errors import DataError
from workbench.runs import deadline, run_directory
from workbench.runs.ranks import Ranks

SMALL, FIRST = 2**20, 1000
"""Bytes of all files together up to which all rows are read, and how many rows of larger files are. A run reads them
once more: 1 MB takes a tenth of a second."""


def require(config: RunConfig, *, devices: int, out: Path | None = None, resume: bool = False) -> None:
    """Refuse a run that cannot begin, as the run itself would; raises WorkbenchError.

    Args:
        devices: Processes that train together.
        out: The run directory, where the command names one that it will begin or continue.
    """
    from workbench.training.distributed import layout_checks

    deadline.require_end(config.budget)
    layout_checks.require(config, Ranks(0, devices))
    if out is not None:
        run_directory.require_free(out.expanduser(), resume=resume)
    if not resume:  # which reads what it began with
        require_rows(config)


def require_rows(config: RunConfig) -> None:
    """Raise DataError where the rows of local files are malformed; of large files the first ones are read.

    Pictures and recordings are left to the run, as they may stand in folders of classes.
    """
    read, data = config.reader.readable, config.data
    if (
        read is None
        or config.media is not None
        or data.streaming.on
        or (config.over is not None and not config.over.ships)
    ):
        return
    total = 0
    for source in (*(own.train for own in data.training_files.values()), *_scored(config)):
        place = starter.resolve(source)
        try:
            paths = data_files(place, data) if "://" not in source else None
        except DataError:
            if not Path(place).is_dir():
                raise
            return  # of classes of pictures, as the backbone may say
        if paths is None:
            return
        total += sum(path.stat().st_size for path in paths)
    if total <= SMALL:
        read(config, None)
        return
    try:
        read(config, FIRST)
    except DataError:
        read(config, 2**62)  # in the words, and with the numbers, of a run


def _scored(config: RunConfig) -> tuple[str, ...]:
    return (*config.data.held_out_files.values(), *config.data.test_files.values())
