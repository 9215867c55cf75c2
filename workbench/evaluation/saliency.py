"""Gradient maps: which pixels of a picture a prediction hangs on, for every backbone alike.

Legend: H, W, 3 of a picture; S noisy copies of it.
"""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
import torch

from workbench.data.batching import MicroBatch
from workbench.data.images.decoding import Pixels
from workbench.data.labelled.labelled_data import LabelledSet
from workbench.models.classifier import Classifier

COPIES = 4
NOISE = 0.1
"""Standard deviation of the noise on a copy, as a share of the range of the picture's values."""
BLUR = 1 / 40
"""Standard deviation of the final smoothing, as a share of the picture's longer side."""
STRENGTH = 0.75
"""Opacity of the colour where the map is 1."""

Map = npt.NDArray[np.float32]


def gradient_map(model: Classifier, rows: LabelledSet, index: int, *, output: int) -> Map:
    """Size of the gradient of one output by each pixel (H, W), smoothed, from 0 to 1.

    It is the mean over noisy copies of the picture (SmoothGrad, Smilkov et al. 2017), the largest of the three
    channels. The model's parameters get no gradient.

    Args:
        output: Number of the class, or 0 for a number.
    """
    device = next(model.model.parameters()).device
    one = rows.batch(np.asarray([index]))
    clean = one.inputs["pixel_values"]
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn((COPIES, *clean.shape[1:]), generator=draw) * NOISE * (clean.max() - clean.min())
    pixels_S3HW = (clean + noise).to(device).requires_grad_()
    batch = MicroBatch(
        inputs={"pixel_values": pixels_S3HW},
        positions_N=(torch.arange(1, COPIES + 1) * one.tokens - 1).to(device),
        labels_N=one.labels_N.expand(COPIES, -1).to(device),
        tokens=COPIES * one.tokens,
    )
    with torch.enable_grad():
        (gradient_S3HW,) = torch.autograd.grad(model.outputs(batch)[:, output].sum(), pixels_S3HW)
    map_HW = gradient_S3HW.float().abs().mean(0).amax(0).cpu().numpy()
    return smoothed(map_HW)


def smoothed(map_HW: Map) -> Map:
    """The map blurred and scaled to its 99th percentile, from 0 to 1; zeros where it is flat at zero."""
    known_HW = np.nan_to_num(map_HW, posinf=0.0)  # half precision may overflow
    soft_HW = cv2.GaussianBlur(known_HW, (0, 0), sigmaX=max(0.5, BLUR * max(map_HW.shape)))
    top = float(np.percentile(soft_HW, 99))
    return np.clip(soft_HW / top, 0, 1).astype(np.float32) if top > 0 else np.zeros_like(map_HW)


def overlay(picture_HW3: Pixels, map_HW: Map) -> Pixels:
    """The picture in grey, under the map in colours: yellow where it is 1, none where it is 0."""
    grey_HW1 = picture_HW3.mean(2, keepdims=True)
    colour_HW3 = cv2.applyColorMap((255 * map_HW).astype(np.uint8), cv2.COLORMAP_INFERNO)[:, :, ::-1]
    share_HW1 = STRENGTH * map_HW[:, :, None]
    return np.asarray(np.rint((1 - share_HW1) * grey_HW1 + share_HW1 * colour_HW3), dtype=np.uint8)
