"""The section `image`: how rows that are pictures are read, prepared and augmented.

It is used where `data.format` is `image`; workbench/data/images/ carries it out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from workbench.schema import ConsistentSection, Section, Unit


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


Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "light": {"crop_scale": (0.8, 1.0), "rotation": 10.0, "translate": 0.05, "brightness": 0.2, "contrast": 0.2},
    "strong": {
        "crop_scale": (0.35, 1.0),
        "horizontal_flip": 0.5,
        "trivialaugment": True,
        "erasing": 0.1,
        "mixup": 0.2,
        "cutmix": 1.0,
    },
}
"""Settings that a preset has where the configuration leaves them out."""
_PROBABILITIES = ("horizontal_flip", "vertical_flip", "erasing")
_GEOMETRIC = ("rotation", "translate", "shear")
_COLOUR = ("brightness", "contrast", "gamma", "saturation", "hue", "blur")
_WITH_STRENGTH = ("crop_scale", *_GEOMETRIC, "randaugment", "trivialaugment", *_COLOUR, "erasing")
_SWITCHED = ("horizontal_flip", "vertical_flip", *_WITH_STRENGTH)
"""Settings that change a picture where they differ from their default."""
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "crop_ratio": ("crop_scale",),
    "border": (*_GEOMETRIC, "randaugment", "trivialaugment"),
    "randaugment_magnitude": ("randaugment",),
    "erasing_area": ("erasing",),
    "erasing_ratio": ("erasing",),
    "erasing_fill": ("erasing",),
    "mix_probability": ("mixup", "cutmix"),
}
"""Settings that mean nothing unless one of others is on."""
_EXAMPLES: Mapping[str, str] = {
    "crop_scale": "[0.5,1]",
    "rotation": "10",
    "translate": "0.1",
    "shear": "10",
    "randaugment": "2",
    "trivialaugment": "true",
    "erasing": "0.25",
    "mixup": "0.2",
    "cutmix": "1",
}


class Growth(Section):
    """A value that grows from a share of itself to all of it over the first part of the run."""

    start: Share = 1.0
    """Share of the full value at the start of the run; 1: no growth."""
    until: Share = 0.8
    """Share of the run after which the value is the full one."""
    steps: Annotated[PositiveInt | None, Unit("stages")] = None
    """Equal steps by which it grows; null: at every optimizer step."""

    def at(self, progress: float) -> float:
        """Share of the full value after `progress`, a share of the run: from `start` to 1, and exactly 1 at the end."""
        grown = min(progress / self.until, 1.0)
        if self.steps is not None:
            # Rounding must not hold back a step that is due: 0.3 / 0.1 is a little less than 3.
            grown = int(grown * self.steps + 1e-9) / self.steps
        return self.start + (1.0 - self.start) * grown if grown < 1 else 1.0


class ResolutionGrowth(Growth):
    steps: Annotated[PositiveInt | None, Unit("stages")] = 4
    """Equal steps by which the side grows; each is another shape, which costs a compilation where models are compiled.
    null: at every optimizer step that changes the rounded side."""


class AugmentGrowthConfig(Section):
    """Augmentation that grows over the run, with its optimizer steps: easy pictures first."""

    strength: Growth = Growth()
    """Strength of every change: its ranges, magnitudes and probabilities, except the flips', which have none."""
    resolution: ResolutionGrowth = ResolutionGrowth()
    """Side of the pictures (progressive resizing), rounded to a multiple of the backbone's patches."""


class AugmentConfig(ConsistentSection):
    """Random changes, carried out in the order of their fields; each is off by default."""

    preset: Literal["none", "light", "strong"] = "none"
    """Settings for those that are left out. `light`: crops of 80 % of the area or more, turns of 10 degrees, shifts of
    5 %, brightness and contrast by 20 %; safe for digits and letters. `strong`: crops of 35 % or more, horizontal
    flips, TrivialAugment, random erasing, mixup and CutMix; for photographs and long runs."""
    crop_scale: tuple[Share, Share] | None = None
    """Least and largest share of the area that a random crop keeps, before it is resized to the full side
    (RandomResizedCrop; ImageNet's recipe is [0.08, 1]); null: no crop."""
    crop_ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    """Least and largest ratio of a crop's width to its height; drawn evenly on a logarithmic scale."""
    horizontal_flip: Probability = 0.0
    """Probability that left and right are exchanged."""
    vertical_flip: Probability = 0.0
    """Probability that top and bottom are exchanged."""
    rotation: Annotated[float, Field(ge=0, le=180), Unit("degrees")] = 0.0
    """Largest rotation about the centre, in degrees to either side."""
    translate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest shift along each axis to either side, as a share of the picture's side."""
    shear: Annotated[float, Field(ge=0, lt=80), Unit("degrees")] = 0.0
    """Largest horizontal shear about the centre, in degrees to either side."""
    border: Literal["reflect", "edge", "black"] = "reflect"
    """Pixels from beyond the picture: its mirror image, the nearest pixel of its edge, or black."""
    randaugment: Annotated[NonNegativeInt, Unit("operations")] = 0
    """Operations that RandAugment (Cubuk et al. 2020) applies one after the other, drawn from its 14; 0: off."""
    randaugment_magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    """Magnitude of every operation of RandAugment, from 0 to 30."""
    trivialaugment: bool = False
    """One operation of the same 14, of a random magnitude from wide ranges: TrivialAugment (Müller & Hutter 2021)."""
    brightness: Probability = 0.0
    """Largest change of brightness: pixels are multiplied by a factor between 1 - brightness and 1 + brightness."""
    contrast: Probability = 0.0
    """Largest change of contrast: the distance from the picture's mean grey is multiplied by 1 ± contrast at most."""
    gamma: NonNegativeFloat = 0.0
    """Largest gamma correction: its exponent lies between 1 / (1 + gamma) and 1 + gamma, evenly on a log scale."""
    saturation: Probability = 0.0
    """Largest change of saturation: the distance from grey is multiplied by 1 ± saturation at most."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest turn of the colour circle to either side, as a share of a full turn; brightness stays (YIQ rotation)."""
    blur: Annotated[float, Field(ge=0, le=20), Unit("pixels")] = 0.0
    """Largest standard deviation of a Gaussian blur, in pixels of the full side; drawn evenly from 0."""
    erasing: Probability = 0.0
    """Probability that a rectangle is erased: random erasing (Zhong et al. 2020)."""
    erasing_area: tuple[Share, Share] = (0.02, 1 / 3)
    """Least and largest share of the picture's area that is erased."""
    erasing_ratio: tuple[PositiveFloat, PositiveFloat] = (0.3, 10 / 3)
    """Least and largest ratio of the rectangle's width to its height; drawn evenly on a logarithmic scale."""
    erasing_fill: Literal["random", "mean", "black"] = "random"
    """Pixels of an erased rectangle: random ones, the picture's mean colour, or black."""
    mixup: NonNegativeFloat = 0.0
    """Alpha of mixup (Zhang et al. 2018): picture and label are blended with another row's by a share from
    Beta(alpha, alpha); 0: off. With cutmix too, each row draws one of the two."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of CutMix (Yun et al. 2019): a rectangle comes from another row's picture, and as much of the label as its
    share of the area; 0: off."""
    mix_probability: Probability = 1.0
    """Probability that a row is mixed with another one at all."""
    curriculum: AugmentGrowthConfig = AugmentGrowthConfig()

    @property
    def mixes(self) -> bool:
        """Whether rows are mixed with other rows, so that labels are soft."""
        return bool(self.mixup or self.cutmix)

    @property
    def grows(self) -> bool:
        """Whether changes or pictures begin smaller than they end."""
        return self.curriculum.strength.start < 1 or self.curriculum.resolution.start < 1

    @property
    def is_on(self) -> bool:
        """Whether training pictures are anything else than the stored ones."""
        changed = any(self.differs(name) for name in _SWITCHED)
        return changed or self.mixes or self.curriculum.resolution.start < 1

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        name = values.get("preset", "none") if isinstance(values, dict) else None
        return {**PRESETS[name], **values} if isinstance(name, str) and name in PRESETS else values

    @field_validator(*_PROBABILITIES, mode="before")
    @classmethod
    def _number(cls, given: Any) -> Any:
        if given is True:
            raise ValueError("true would be a probability of 1, so always. Write a number, such as 0.5.")
        return given

    @field_validator("crop_scale", "crop_ratio", "erasing_area", "erasing_ratio")
    @classmethod
    def _rising(cls, given: tuple[float, float] | None) -> tuple[float, float] | None:
        if given is not None and given[0] > given[1]:
            raise ValueError(f"the least of the two stands first. Write [{given[1]:g}, {given[0]:g}].")
        return given

    def _contradictions(self) -> Iterator[str]:
        if self.randaugment and self.trivialaugment:
            yield (
                "randaugment and trivialaugment are two ways to draw the same operations. "
                "Write image.augment.randaugment=0 or image.augment.trivialaugment=false."
            )
        for name, needed in _NEEDS.items():
            if self.differs(name) and not any(self.differs(each) for each in needed):
                ways = " or ".join(f"{each}={_EXAMPLES[each]}" for each in needed)
                yield f"{name} does nothing without {' or '.join(needed)}. Add {ways}, or leave {name} out."
        for name in ("strength", "resolution"):
            growth = getattr(self.curriculum, name)
            if growth.start == 1 and growth != type(growth)():
                yield (
                    f"curriculum.{name} starts with all of it and cannot grow. "
                    f"Write curriculum.{name}.start=0.5, or leave curriculum.{name} out."
                )
        grows = self.curriculum.strength.start < 1
        if grows and not self.mixes and not any(self.differs(name) for name in _WITH_STRENGTH):
            yield "curriculum.strength has nothing to grow: no change with a strength is on. Add one, or leave it out."


Depth = Literal["auto", 8, 10, 12, 14, 16]


class MediaConfig(Section):
    """Files that the rows hold in place of texts: where they stand."""

    column: str
    folder: str | dict[str, str] | None = None
    """Folder, or zip or tar archive, of the files that a table names, with or without their suffix: from the table's
    folder, or from here. {table: folder} where tables have files of their own, such as {train.csv: train_images,
    test.csv: test_images}. null: `column` holds whole paths."""

    @property
    @abstractmethod
    def changes(self) -> bool:
        """Whether training rows are augmented."""

    def folder_of(self, source: str) -> str | None:
        """The folder of a table's files, which `folder` names by the table's path or name."""
        if not isinstance(self.folder, dict):
            return self.folder
        return next((own for table, own in self.folder.items() if table in (source, PurePath(source).name)), None)


class ImageConfig(MediaConfig):
    """Pictures: where they stand in a row, their size, what is done to them."""

    column: str = Field(default="image", min_length=1, coerce_numbers_to_str=True)
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

    @property
    def changes(self) -> bool:
        return self.augment.is_on
