"""Normal noise of PVeRA's layers that depends on the seed, the step, the row and the layer alone."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from peft.tuners.pvera.layer import PveraLayer
from torch import Tensor, nn

from workbench.adapters.row_dropout import row_hash, row_keys


class NoiseByRow:
    """Mixed into PEFT's layer: draws for each row by itself; as PEFT does where nobody says which rows compute."""

    noise_key: int

    def _reparametrize(self, mean: Tensor, log_variance: Tensor, name: str) -> Tensor:
        layer: Any = self
        keys_B = row_keys()
        if not layer.training or keys_B is None or mean[..., 0].numel() % len(keys_B):
            drawn: Tensor = super()._reparametrize(mean, log_variance, name)  # type: ignore[misc]
            return drawn
        tokens = keys_B.shape[1] if keys_B.ndim == 2 else mean[..., 0].numel() // len(keys_B)
        hash_BTR = row_hash(keys_B, self.noise_key, tokens=tokens, units=mean.shape[-1])
        # Evenly spread numbers between -1 and 1 become normal ones; the largest are 5.4 standard deviations away.
        even_BTR = (hash_BTR.float() + 0.5) * 2**-31
        normal = torch.erfinv(even_BTR.clamp(-1 + 2**-24, 1 - 2**-24)) * 2**0.5
        return mean + (normal.view(mean.shape) * (0.5 * log_variance).exp()).to(mean.dtype)


def draw_by_row(model: nn.Module) -> None:
    """Make the noise of all layers in `model` a function of seed, step, row and layer."""
    made: dict[type[Any], type[Any]] = {}
    layers: list[tuple[str, Any]] = [pair for pair in model.named_modules() if isinstance(pair[1], PveraLayer)]
    for path, layer in layers:
        kind = type(layer)
        made.setdefault(kind, type(f"RowNoise{kind.__name__}", (NoiseByRow, kind), {}))
        key = hashlib.blake2b(path.encode(), digest_size=8).digest()
        layer.noise_key = int.from_bytes(key, "big", signed=True)
        layer.__class__ = made[kind]
