"""The section `image.prepare`: steps that every picture goes through once, before it is stored for training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from workbench.schema import Section


class PrepareConfig(Section):
    """Steps in the order of their fields; each is off by default."""

    median: Literal[3, 5, 7, 9, 11] | None = None
    """Side of the median filter's window, in pixels of the file; removes salt-and-pepper noise."""
    standardise: Literal["none", "picture", "data"] = "none"
    """Brings brightness and contrast together: `picture` from the picture's own mean and standard deviation over all
    channels, so that colours stay; `data` from each channel's over the rows that train: no held-out ones, and of a
    cross-validation those of all folds together, within data.limit and without test rows. The mean becomes mid-grey,
    three standard deviations black and white."""
    edges: Literal["none", "canny", "sobel"] = "none"
    """Edge detection: `canny` draws thin lines, with thresholds by Otsu's method for each
    picture; `sobel` shows the strength of gradients."""
    edges_as: Literal["replace", "overlay"] = "replace"
    """Whether edges take the picture's place or are drawn over it in white."""
    crop_to_object: Annotated[float, Field(ge=0, le=1)] | None = None
    """Crops to the largest contour, with this margin on each side as a share of its longer side; null: whole pictures.
    A picture without a clear object stays whole."""
    fit: Literal["backbone", "stretch", "crop", "pad"] = "backbone"
    """How a picture becomes the square that the model reads, always antialiased: as the backbone was trained;
    stretched; its shorter side resized and the middle cut out; or its longer side resized and the rest filled with the
    mean colour of normalisation."""
    colour: Literal["colour", "grey"] = "colour"
    """Whether colours are kept; grey pictures have three equal channels."""

    @model_validator(mode="after")
    def _used(self) -> PrepareConfig:
        if self.edges == "none" and self.edges_as != "replace":
            raise ValueError("edges_as does nothing without edges. Add edges=canny, or leave edges_as out.")
        return self
