"""A method of your own: each output of a linear layer is scaled by 1 + s, and s is what trains.

    workbench run sft/quickstart 'plugins=[scripts/my_method.py]' adapter.method=scales

A method is a section (`Scales`), a PEFT configuration (`ScalesConfig`) and, where PEFT has no tuner for it, a layer and
a tuner that puts it in place. tests/adapters/test_contract.py holds this file to what our own methods keep.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from workbench.adapters import ExtraParameters, Method, MethodInfo, anatomy, register
from workbench.adapters.peft_tuners import TunerConfig, register_tuner
from workbench.adapters.target_modules import Targets, resolve


@register
class Scales(Method):
    """(1 + s) * (W x + b), with s (outputs) zero: the identity at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {"scales": MethodInfo("a factor for each output of linear layers", "-")}
    method: Literal["scales"]
    targets: Targets = "all-linear"  # a role, or names of modules

    def refusal(self, model: Any) -> str | None:
        if anatomy.linear_modules(model):
            return None
        return "it scales linear layers, and the blocks have none. Take adapter.method=lora."

    def modules(self, model: Any) -> list[str]:
        return resolve(model, self.targets)

    def to_peft(self, model: Any, beside: ExtraParameters) -> PeftConfig:
        return ScalesConfig(
            task_type=anatomy.task(model), target_modules=self.modules(model), modules_to_save=beside.heads or None
        )


@dataclass
class ScalesConfig(TunerConfig):
    target_modules: list[str] | str | None = None


class ScalesLayer(nn.Module, BaseTunerLayer):
    adapter_layer_names = ("scales_s",)  # begins with the name that the tuner is registered under

    def __init__(self, base_layer: nn.Module, adapter: str, size: int, inference_mode: bool) -> None:
        super().__init__()
        self.base_layer, self.merged_adapters = base_layer, []
        self.scales_s = nn.ParameterDict({adapter: torch.zeros(size, device=next(base_layer.parameters()).device)})
        self.set_adapter([adapter], inference_mode=inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        outputs: Tensor = self.base_layer(x, *args, **kwargs)
        return outputs if self.disable_adapters else outputs * (1 + self.scales_s[self.active_adapters[0]]).to(outputs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base = self.get_base_layer()
        for values in filter(torch.is_tensor, (base.weight if isinstance(base, Conv1D) else base.weight.T, base.bias)):
            values.data *= 1 + self.scales_s[self.active_adapters[0]]


class ScalesModel(BaseTuner):
    prefix, tuner_layer_cls, target_module_mapping = "scales_", ScalesLayer, {}

    def _create_and_replace(  # type: ignore[no-untyped-def, override]
        self, peft_config, adapter_name, target, target_name, parent, current_key, **_
    ):
        size = target.nf if isinstance(target, Conv1D) else target.out_features
        setattr(parent, target_name, ScalesLayer(target, adapter_name, size, peft_config.inference_mode))


register_tuner("scales", ScalesConfig, ScalesModel)
