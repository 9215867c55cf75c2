"""(IA)^3: vectors that scale keys, values and the inside of the MLP, on HF PEFT's IA3 tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from workbench.adapters import anatomy
from workbench.adapters.anatomy import block_width, blocks, convolutions, features, is_attention, linear_modules
from workbench.adapters.method import ExtraParameters, Method, MethodInfo, register
from workbench.adapters.target_modules import Targets, linear_layers, short_names
from workbench.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "k", "v", "k_lin", "v_lin")
"""Names of key and value projections in the families."""
TOGETHER = ("query_key_value", "qkv_proj", "qkv", "c_attn", "Wqkv", "W_pack", "in_proj", "kv_proj", "key_value")
"""Names of one projection for both, often for queries too; it is scaled as a whole."""


@register
class Ia3(Method):
    """One factor for each key, each value and each unit inside an MLP; all are 1 at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "ia3": MethodInfo("a factor for each key, value and MLP unit", "Liu et al. 2022, arXiv:2205.05638"),
    }
    method: Literal["ia3"] = "ia3"
    targets: Targets = "all-linear"
    """attention: keys and values; mlp: what enters its last layer; all-linear: both, as in the paper. Or names of
    linear layers: those of attention have their outputs scaled, the others their inputs."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse blocks that hold convolutions alone."""
        if linear_modules(model) or not convolutions(model):
            return None
        return (
            f"it scales linear layers, and the blocks of {type(model).__name__} have none. "
            "Take adapter.method=lora, which changes convolutions."
        )

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the linear layers whose outputs or inputs are scaled."""
        outputs, inputs = self._scaled(model)
        return outputs + inputs

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's IA3Config for this backbone."""
        from peft import IA3Config

        outputs, inputs = self._scaled(model)
        return IA3Config(
            task_type=anatomy.task(model),
            target_modules=outputs + inputs,
            feedforward_modules=inputs,
            modules_to_save=beside.heads or None,
        )

    def decays(self, parameter: str) -> bool:
        """No weight decay: a scaling factor of 0 would remove the activation."""
        return False

    def _scaled(self, model: PreTrainedModel) -> tuple[list[str], list[str]]:
        """Names of the layers whose outputs are scaled, and of those whose inputs are."""
        if isinstance(self.targets, str):
            attention = [path for path in linear_modules(model) if is_attention(path)]
            apart = [path for path in attention if path.rsplit(".", 1)[-1] in KEYS_AND_VALUES]
            linear = [path for path in linear_modules(model) if not is_attention(path)]
            mlp_ends = []
            for block in (block for stack in blocks(model) for block in stack):
                here = [path for path in linear if path.startswith(f"{block}.")]
                sizes = {path: features(model.get_submodule(path)) for path in here}
                width = block_width(model, block)
                mlp_ends += [path for path in here if sizes[path][1] == width != sizes[path][0]] or here[-1:]
            chosen = [*(apart or [path for path in attention if path.rsplit(".", 1)[-1] in TOGETHER]), *mlp_ends]
            roles = {path: "attention" if is_attention(path) else "mlp" for path in chosen}
            chosen = [path for path in chosen if self.targets in ("all-linear", roles[path])]
        else:
            chosen = list(linear_layers(model, self.targets))
        if not chosen:
            raise ConfigError(
                f"adapter.method=ia3: found no layer to scale in {type(model).__name__} for adapter.targets="
                f"{self.targets}. Write adapter.targets as a list of names of linear layers inside the blocks, or take "
                "adapter.method=lora."
            )
        outputs = [path for path in chosen if is_attention(path)]
        return short_names(model, outputs), short_names(model, [path for path in chosen if path not in outputs])
