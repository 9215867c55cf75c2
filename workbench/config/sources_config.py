"""The sections `data.sources` and `data.mix`; workbench/data/text/mixture.py carries them out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from workbench.schema import Section


class SourceConfig(Section):
    """One of several sources of training rows."""

    path: str = Field(min_length=1)
    """A file, a folder of files, or a hub data set id, as `data.train`."""
    weight: PositiveFloat = 1.0
    """How much more often its rows are drawn than those of a source of weight 1."""
    limit: PositiveInt | None = None
    """Use only its first `limit` rows."""
    passes: PositiveFloat | None = None
    """Most passes over its rows in the whole run; a run that would make more is refused."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Renames its columns, as `data.columns`, which holds where this is empty."""


class MixConfig(Section):
    """How often rows of each source are drawn."""

    by: Literal["size", "weight"] = "size"
    """`size`: a source's chance is its rows (to the power of 1 / temperature) times its weight; `weight`: its weight
    alone, so that weights are proportions."""
    temperature: Annotated[float, Field(ge=1)] = 1.0
    """With by=size: 1 draws each row equally often; higher values draw those of small sources more often (mT5: 3.3)."""
    unit: Literal["rows", "tokens"] = "rows"
    """Unit that chances divide up; with `tokens` a source of long rows is drawn less often."""
    rows: PositiveInt | None = None
    """Rows of an epoch; null: as many as all sources have together."""
