"""LoRA, rank-stabilised LoRA, DoRA, LoRA+ and activated LoRA, all on HF PEFT's LoRA tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.method import MethodInfo, register
from workbench.adapters.target_modules import OnLinear, taken_for_experts
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Decomposition = Literal["auto", "exact", "randomised"]


class LowRank(OnLinear):
    """W + scale * B A, with A (rank, in) and B (out, rank): what all LoRA methods have in common."""

    tuner: ClassVar[str] = "LoraConfig"
    rank: Annotated[PositiveInt, Unit("ranks")] = 16
    """Rank of the update B A."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / rank (alpha / sqrt(rank) for rslora and lora-ga)."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse layers that PEFT takes for experts, beside what other methods refuse."""
        if reason := super().refusal(model):
            return reason
        try:
            self.modules(model)
        except ConfigError as error:
            return str(error)
        return None

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the layers that are changed; a role leaves out those that PEFT takes for experts."""
        names = super().modules(model)
        lost = taken_for_experts(model, names)
        if lost and (len(lost) == len(names) or not isinstance(self.targets, str)):
            raise ConfigError(
                f"adapter.targets: PEFT takes {', '.join(lost)} of {type(model).__name__} for its experts, which once "
                "had these names, and cannot change the dense layers. Write adapter.targets=attention."
            )
        return [name for name in names if name not in lost]

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            use_rslora=self.method in ("rslora", "lora-ga"),
            use_dora=self.method == "dora",
        )


class OverExperts(LowRank):
    """LoRA that also changes the experts of a mixture, which are one parameter (PEFT's target_parameters).

    Each expert has an update of its own. The router stays frozen.
    """

    experts: bool = False
    """Change the experts of a mixture, too; with targets=mlp only these, where all MLPs are experts."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse experts that there are none of, beside what other methods refuse."""
        if self.experts and not anatomy.fused_experts(model):
            return f"{type(model).__name__} has no experts that stand in one parameter. Leave adapter.experts out."
        if self.experts and self.dropout:
            return "experts choose their inputs inside, where nothing can be dropped. Write adapter.dropout=0."
        if self.experts and self.method == "dora":
            return "experts have no magnitudes of outputs in PEFT. Write adapter.method=lora, or adapter.experts=false."
        return None if self._experts_alone(model) else super().refusal(model)

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Names of the layers that are changed; empty where only experts are."""
        return [] if self._experts_alone(model) else super().modules(model)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        settings = super().settings(model)
        if self.experts:
            ends = {".".join(path.split(".")[-2:]) for path in anatomy.fused_experts(model)}
            settings["target_parameters"] = sorted(ends)
        return settings

    def _experts_alone(self, model: PreTrainedModel) -> bool:
        """Whether targets=mlp leaves LoRA nothing but the experts."""
        mlp = [name for name in anatomy.linear_modules(model) if not anatomy.is_attention(name)]
        return self.experts and self.targets == "mlp" and len(taken_for_experts(model, mlp)) == len(mlp)


@register
class Lora(OverExperts):
    """A starts at random and B at zero: the identity at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "lora": MethodInfo("a low-rank update of linear layers", "Hu et al. 2021, arXiv:2106.09685",
                      token_rows=True, plain_lora=True),
        "rslora": MethodInfo("lora, scaled by alpha / sqrt(rank)", "Kalajdzievski 2023, arXiv:2312.03732",
                      token_rows=True, plain_lora=True),
        "dora": MethodInfo("lora of the direction, and each output's magnitude", "Liu et al. 2024, arXiv:2402.09353",
                      token_rows=True),
    }  # fmt: skip
    changes_convolutions: ClassVar[bool] = True
    method: Literal["lora", "rslora", "dora"] = "lora"
    """lora (scale alpha / rank), rslora (scale alpha / sqrt(rank)) or dora (adds a magnitude for each output)."""


@register
class LoraPlus(OverExperts):
    """LoRA whose B learns faster than its A."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "lora+": MethodInfo("lora, with a higher learning rate for B", "Hayou et al. 2024, arXiv:2402.12354",
                       token_rows=True, plain_lora=True),
    }  # fmt: skip
    changes_convolutions: ClassVar[bool] = True
    method: Literal["lora+"] = "lora+"
    rate_ratio: float = Field(default=16.0, ge=1)
    """Learning rate of B divided by that of A, which is train.learning_rate."""

    def rate_factor(self, parameter: str) -> float:
        """The ratio for B, 1 for A and for what trains beside."""
        return self.rate_ratio if ".lora_B." in parameter else 1.0


@register
class ALora(LowRank):
    """W + scale * B A for the tokens from a row's last invocation on, and W alone for those before it.

    Keys and values before the invocation are the backbone's, so one cache of them serves every such adapter.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "alora": MethodInfo(
            "lora from the invocation in a row on",
            "Greenewald et al. 2025, arXiv:2504.12397",
            no_merge="it leaves the tokens before the invocation as they are, and merged weights would change them",
            no_packing="PEFT looks for one invocation in a row, and packed rows are one",
            no_freezing="its layers have to know the tokens of the rows, which what is kept of frozen blocks has not",
        )
    }
    method: Literal["alora"] = "alora"
    invocation: Annotated[str | tuple[NonNegativeInt, ...], Unit("text or token ids")] = ""
    """The adapter acts from the last occurrence of these tokens on; a text is tokenised. Empty: what the chat template
    writes to ask for the next answer."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse all but causal language models, beside what LoRA refuses."""
        if anatomy.task(model) != "CAUSAL_LM":
            return "it begins where a causal language model is asked for an answer. Take adapter.method=lora."
        return super().refusal(model)

    @property
    def planned(self) -> Lora:
        """LoRA of the same size."""
        return Lora(rank=self.rank, alpha=self.alpha, targets=self.targets, dropout=self.dropout)

    def no_checkpointing(self, model: PreTrainedModel) -> str:
        """Say that PEFT loses the place of the invocation in a repeated forward pass."""
        return "a pass over a block that is repeated does not know where the invocation is"

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        ids = () if isinstance(self.invocation, str) else self.invocation
        if not ids and model.device.type != "meta":  # where only sizes are asked for, any id will do
            raise ConfigError(
                "adapter.invocation: the token ids of the invocation are not known here. "
                "Write them, as adapter.invocation=[5,7]."
            )
        return super().settings(model) | {"alora_invocation_tokens": list(ids or (0,))}
