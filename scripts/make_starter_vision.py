"""Make the shipped vision backbone: a ViT of 1.9 M parameters, pretrained on Fashion-MNIST.

    python scripts/make_starter_vision.py fashion_mnist_subset.zip OUT [--epochs 24]

The encoder reads half of the patches of a picture; from these it names the class, and a decoder of two blocks that is
thrown away afterwards reconstructs the other half (masked autoencoder, He et al. 2022, with a label beside it). The
last epochs read whole pictures. Colours, places and turns are drawn at random, in ranges that grow at the start: the
grey pictures teach shapes in any colour. The archive has train/CLASS/PICTURE.png and test/CLASS/PICTURE.png.
Fashion-MNIST: Xiao et al. 2017, MIT.

Legend: B pictures of a batch, N all pictures, P patches, K seen patches, D hidden size.
"""

from __future__ import annotations

import argparse
import io
import math
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

SIZE, PATCH, KEPT = 64, 8, 0.5
BATCH, PEAK_RATE, WARMUP = 128, 1e-3, 0.05
WHOLE, GROWTH = 0.1, 0.2
"""Shares of the run: whole pictures at its end, and growing ranges of the augmentations at its start."""


class Decoder(nn.Module):
    """Reconstructs hidden patches, normalised each by itself, from the encoder's outputs."""

    def __init__(self, hidden: int, patches: int, width: int = 96) -> None:
        super().__init__()
        self.enter = nn.Linear(hidden, width)
        self.mask = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(0.02 * torch.randn(patches, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(width, 3 * PATCH**2)

    def forward(self, seen_BKD: Tensor, order_BP: Tensor) -> Tensor:
        """Patches (B, P - K, pixels) that `seen` lacks; `order` has the seen ones first."""
        count, kept = order_BP.shape[1], seen_BKD.shape[1]
        tokens = torch.cat([self.enter(seen_BKD), self.mask.expand(len(seen_BKD), count - kept, -1)], 1)
        patches_BPD: Tensor = self.leave(self.blocks(tokens + self.positions[order_BP])[:, kept:])
        return patches_BPD


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    train, test = (_read(arguments.zip, part) for part in ("train", "test"))
    names = train[2]
    config = ViTConfig(
        hidden_size=160,
        num_hidden_layers=6,
        num_attention_heads=5,
        intermediate_size=640,
        image_size=SIZE,
        patch_size=PATCH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    model = ViTForImageClassification(config)
    decoder = Decoder(config.hidden_size, (SIZE // PATCH) ** 2)
    parameters = [*model.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_RATE, weight_decay=0.05, betas=(0.9, 0.95))
    steps = arguments.epochs * (len(train[0]) // BATCH)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step / steps))
    generator = torch.Generator().manual_seed(0)
    for epoch in range(arguments.epochs):
        share = epoch / arguments.epochs
        began, kept, strength = time.monotonic(), KEPT if share < 1 - WHOLE else 1.0, min(1.0, 0.1 + share / GROWTH)
        order = torch.randperm(len(train[0]), generator=generator)[: steps // arguments.epochs * BATCH]
        losses = []
        for rows in order.split(BATCH):
            pixels = _augmented(train[0][rows], strength, generator)
            with torch.autocast("cpu", torch.bfloat16):
                named, rebuilt = _losses(model, decoder, pixels, train[1][rows], kept, generator)
            (named + rebuilt).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            losses.append((named.item(), rebuilt.item()))
        named, rebuilt = np.mean(losses, 0)
        took, right = time.monotonic() - began, _accuracy(model, test)
        print(
            f"epoch {epoch + 1}: label {named:.3f}, patches {rebuilt:.3f}, {took:.0f} s, test {right:.4f}", flush=True
        )
    model.bfloat16().save_pretrained(arguments.out)
    mean = [0.5] * 3
    ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}, image_mean=mean, image_std=mean).save_pretrained(
        arguments.out
    )


def _read(path: Path, part: str) -> tuple[Tensor, Tensor, list[str]]:
    """Pictures (N, 1, 28, 28) in [0, 1], their classes (N,), and the names of these."""
    with zipfile.ZipFile(path) as archive:
        files = sorted(name for name in archive.namelist() if f"{part}/" in name and name.endswith(".png"))
        pixels = [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("L")) for name in files]
    classes = [Path(name).parent.name for name in files]
    names = sorted(set(classes))
    return (
        torch.from_numpy(np.stack(pixels))[:, None] / 255,
        torch.tensor([names.index(each) for each in classes]),
        names,
    )


def _augmented(grey_B1HW: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Cut, turned, mirrored and coloured at random, before a random background, (B, 3, SIZE, SIZE) in [-1, 1]."""
    count = len(grey_B1HW)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    def warped(pictures: Tensor, turn: float, scales: tuple[float, float], shift: float) -> Tensor:
        angle, scale, mirror = uniform(-turn, turn), uniform(*scales), torch.sign(uniform(-1, 1))
        theta = torch.zeros(count, 2, 3)
        theta[:, 0, 0], theta[:, 0, 1] = scale * angle.cos() * mirror, -scale * angle.sin()
        theta[:, 1, 0], theta[:, 1, 1] = scale * angle.sin() * mirror, scale * angle.cos()
        theta[:, :, 2] = uniform(-shift, shift, 2)
        grid = F.affine_grid(theta, [count, 1, SIZE, SIZE], align_corners=False)
        return F.grid_sample(pictures, grid, align_corners=False)

    shape = warped(grey_B1HW, 0.6 * strength, (1 - 0.45 * strength, 1 + 0.3 * strength), 0.3 * strength)
    others = grey_B1HW[torch.randperm(count, generator=generator)]
    texture = warped(others, 3.0, (0.1, 0.5), 0.5) - 0.5  # a magnified piece of another picture
    light = 1 - 0.5 * strength
    front, back = uniform(light, 1, 3, 1, 1), uniform(0, 0.5 * strength, 3, 1, 1)
    back = back + strength * uniform(-0.4, 0.4, 3, 1, 1) * texture
    swapped = uniform(0, 1, 1, 1, 1) < 0.4 * strength
    pixels = torch.where(swapped, 1 - back - (front - back) * shape, back + (front - back) * shape)
    pixels = pixels + 0.04 * strength * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return pixels.clamp(0, 1) * 2 - 1


def _losses(
    model: ViTForImageClassification,
    decoder: Decoder,
    pixels: Tensor,
    classes: Tensor,
    kept: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the class, and the mean squared error of the patches that the encoder does not see."""
    tokens = model.vit.embeddings(pixels)
    patches = F.unfold(pixels, PATCH, stride=PATCH).transpose(1, 2).float()
    count, seen = patches.shape[1], round(kept * patches.shape[1])
    order = torch.rand(len(pixels), count, generator=generator).argsort(1)
    shown = tokens[:, 1:].gather(1, order[:, :seen, None].expand(-1, -1, tokens.shape[2]))
    hidden = torch.cat([tokens[:, :1], shown], 1)
    for layer in model.vit.layers:
        hidden = layer(hidden)
    hidden = model.vit.layernorm(hidden)
    named = F.cross_entropy(model.classifier(hidden[:, 0]).float(), classes, label_smoothing=0.1)
    if seen == count:
        return named, torch.zeros(())
    hidden_patches = patches.gather(1, order[:, seen:, None].expand(-1, -1, patches.shape[2]))
    spread = hidden_patches.std(-1, keepdim=True) + 0.05
    wanted = (hidden_patches - hidden_patches.mean(-1, keepdim=True)) / spread
    return named, F.mse_loss(decoder(hidden[:, 1:], order).float(), wanted)


@torch.no_grad()
def _accuracy(model: ViTForImageClassification, test: tuple[Tensor, Tensor, list[str]]) -> float:
    """Share of grey test pictures whose class is right."""
    right = 0
    for pixels, classes in zip(test[0].split(200), test[1].split(200), strict=True):
        whole = F.interpolate(pixels, SIZE, mode="bilinear").expand(-1, 3, -1, -1) * 2 - 1
        right += int((model(whole).logits.argmax(1) == classes).sum())
    return right / len(test[1])


def _factor(share: float) -> float:
    return share / WARMUP if share < WARMUP else 0.5 * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zip", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=24)
    main(parser.parse_args())
