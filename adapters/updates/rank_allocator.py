"""AdaLoRA's allocation of ranks during training, and the plain LoRA that it ships.

Legend: R ranks of a layer, I inputs, O outputs.
A triplet is one rank: a row of A_RI, a value of E_R1 and a column of B_OR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import AdaLoraModel, LoraConfig, PeftConfig
from torch import Tensor, nn

from workbench.adapters.peft_tuners import OwnForm


@dataclass(frozen=True)
class RankBudget:
    """Number of ranks at each step: all until `begin`, few from `end` on, falling as a cube in between."""

    begin: int
    end: int

    def at(self, step: int, *, first: int, last: int) -> int:
        """Ranks after optimizer step `step` (from 1), of `first` at the start and `last` at the end; paper, eq. 12."""
        left = (self.end - step) / (self.end - self.begin)
        return last + int((first - last) * min(max(left, 0.0), 1.0) ** 3)


class _Layer(NamedTuple):
    A_RI: nn.Parameter
    E_R1: nn.Parameter
    B_OR: nn.Parameter


class RankSchedule:
    """The companion of AdaLoRA: keeps A and B near orthonormal, and sets the least important values of E to zero.

    Between two allocations a value that was set to zero may grow again; after the last one it may not.

    Args:
        trainable: The float32 values that train, by name.
        rank: Ranks per layer at the end, on average.
        interval: Optimizer steps from one allocation to the next.
        orthogonality: Weight of the penalty.
        memory: beta of the moving averages of sensitivity and of its uncertainty.
    """

    def __init__(
        self,
        trainable: Mapping[str, nn.Parameter],
        budget: RankBudget,
        *,
        rank: int,
        interval: int,
        orthogonality: float,
        memory: float,
    ) -> None:
        self.layers = {
            name: _Layer(*(trainable[name.replace(".lora_E.", f".lora_{part}.")] for part in "AEB"))
            for name in sorted(trainable)
            if ".lora_E." in name
        }
        self.budget = budget
        self.first = sum(len(layer.E_R1) for layer in self.layers.values())
        self.last = rank * len(self.layers)
        self.interval = interval
        self.orthogonality = orthogonality
        self.memory = memory
        parts = {f"{name}|{part}": each for name, layer in self.layers.items() for part, each in _named(layer)}
        self.sensitivity = {key: torch.zeros_like(each) for key, each in parts.items()}
        self.uncertainty = {key: torch.zeros_like(each) for key, each in parts.items()}
        self.kept = {name: torch.ones_like(layer.E_R1, dtype=torch.bool) for name, layer in self.layers.items()}

    def on_gradients(self) -> None:
        """Add the gradient of `penalty`."""
        self.penalty().backward()

    def penalty(self) -> Tensor:
        """Mean over the A and B of their distance from orthonormal rows or columns (paper, eq. 4)."""
        grams = [gram for A_RI, _, B_OR in self.layers.values() for gram in (A_RI @ A_RI.T, B_OR.T @ B_OR)]
        distances = [(gram - torch.eye(len(gram), device=gram.device)).norm() for gram in grams]
        return self.orthogonality * torch.stack(distances).mean()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update the importances and remove the least important ranks; after the last allocation, keep them removed."""
        if step <= self.budget.end:
            beta = self.memory  # moving averages of |value * gradient|, and of how much it varies (paper, eq. 9 and 10)
            for name, layer in self.layers.items():
                for part, each in _named(layer):
                    assert each.grad is not None
                    average, variation = self.sensitivity[f"{name}|{part}"], self.uncertainty[f"{name}|{part}"]
                    now = (each * each.grad).abs()
                    average.lerp_(now, 1 - beta)
                    variation.lerp_((now - average).abs(), 1 - beta)
            if step == self.budget.end or (step > self.budget.begin and step % self.interval == 0):
                importance = torch.cat([self._importance_R(name) for name in self.layers])
                chosen = torch.zeros_like(importance, dtype=torch.bool)
                budget = self.budget.at(step, first=self.first, last=self.last)
                chosen[importance.argsort(descending=True, stable=True)[:budget]] = True
                sizes = [len(layer.E_R1) for layer in self.layers.values()]
                for kept_R1, chosen_R in zip(self.kept.values(), chosen.split(sizes), strict=True):
                    kept_R1.copy_(chosen_R[:, None])
                self._mask()
        else:
            self._mask()

    def state(self) -> dict[str, Tensor]:
        """The moving averages, and the ranks that are left."""
        return {
            **{f"sensitivity|{key}": value for key, value in self.sensitivity.items()},
            **{f"uncertainty|{key}": value for key, value in self.uncertainty.items()},
            **{f"kept|{key}": value for key, value in self.kept.items()},
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for key, value in self.state().items():
            value.copy_(state[key])

    def _importance_R(self, name: str) -> Tensor:
        """Importance of each triplet: that of its value, plus the means over its row and its column (paper, eq. 7)."""
        A_RI, E_R1, B_OR = (self.sensitivity[f"{name}|{part}"] * self.uncertainty[f"{name}|{part}"] for part in "AEB")
        return E_R1.flatten() + A_RI.mean(dim=1) + B_OR.mean(dim=0)

    def _mask(self) -> None:
        for name, layer in self.layers.items():
            layer.E_R1.mul_(self.kept[name])


def _named(layer: _Layer) -> zip[tuple[str, nn.Parameter]]:
    return zip("AEB", layer, strict=True)


class ReachedRanks(OwnForm, AdaLoraModel):
    """PEFT's AdaLoRA, shipped as plain LoRA with the ranks that each layer has kept: E is multiplied into A."""

    def shipped(self, name: str, tensors: dict[str, Tensor]) -> tuple[PeftConfig, dict[str, Tensor]]:
        """Triplets whose value is zero, and layers that have no other, are left out.

        An adapter that has not learnt yet, where all values are zero or on the meta device, is shipped whole.
        """
        live: Any = self.peft_config[name]
        prefix, ending = "base_model.model.", f".lora_E.{name}"
        layers = [key.removesuffix(ending) for key in tensors if key.endswith(ending)]
        blank = all(tensors[layer + ending].is_meta or not tensors[layer + ending].any() for layer in layers)
        ranks: dict[str, int] = {}
        for layer in layers:
            A_RI, E_R1, B_OR = (tensors.pop(f"{layer}.lora_{part}.{name}") for part in "AEB")
            kept: list[int] = list(range(len(E_R1))) if blank else E_R1.flatten().nonzero().flatten().tolist()
            if kept:
                ranks[layer.removeprefix(prefix)] = len(kept)
                tensors[f"{layer}.lora_A.{name}.weight"] = (A_RI * E_R1)[kept]
                tensors[f"{layer}.lora_B.{name}.weight"] = B_OR[:, kept]
        scale = live.lora_alpha / (live.init_r + 1e-5)  # as PEFT's AdaLoRA layers divide
        config = LoraConfig(
            task_type=live.task_type,
            base_model_name_or_path=live.base_model_name_or_path,
            r=live.init_r,
            lora_alpha=scale * live.init_r,
            lora_dropout=live.lora_dropout,
            fan_in_fan_out=live.fan_in_fan_out,
            target_modules=list(ranks),
            modules_to_save=live.modules_to_save,
            trainable_token_indices=live.trainable_token_indices,
            rank_pattern=ranks,
            alpha_pattern={layer: scale * rank for layer, rank in ranks.items()},
        )
        return config, tensors
