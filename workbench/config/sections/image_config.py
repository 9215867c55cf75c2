"""The section `image`: how rows that are pictures are read, prepared and augmented.

It is used where `data.format` is `image`; workbench/data/images/ carries it out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from workbench.config.sections.picture_augment_config import AugmentConfig
from workbench.config.sections.picture_prepare_config import PrepareConfig
from workbench.schema import Section, Unit

Depth = Literal["auto", 8, 10, 12, 14, 16]


class ImageConfig(Section):
    """Pictures: where they stand in a row, their size, what is done to them."""

    column: str = Field(default="image", min_length=1)
    """Column of a table that holds the picture: a path (from the table's folder), bytes, or both as `datasets` do."""
    size: Annotated[Annotated[int, Field(ge=8)] | None, Unit("pixels")] = None
    """Side of the square that the model reads, in pixels; null: as the backbone was trained."""
    prepare: PrepareConfig = PrepareConfig()
    augment: AugmentConfig = AugmentConfig()
    depth: Depth = "auto"
    """Bits that hold the values of pictures of more than 8 bits, grey or colour: 0 to 2 ** depth - 1 become 0 to 255 in
    all of them. `auto`: the fewest that hold every picture of data.train; where values are negative or above 65,535,
    their least and greatest. Floats always become 0 to 255 from the least to the greatest of these pictures, from 0
    to 1 where all lie there."""
    workers: Annotated[NonNegativeInt | Literal["auto"], Unit("processes")] = "auto"
    """Processes that decode and prepare pictures beside this one; `auto`: one for each further core where that saves
    time, none for a few pictures. Never changes the result."""
    max_pixels: Annotated[PositiveInt, Unit("pixels")] = 100_000_000
    """Most pixels of a picture file; larger ones are refused before they are decoded (decompression bombs)."""
