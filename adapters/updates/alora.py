"""Activated LoRA: an update that begins where a row asks for the answer, on HF PEFT's LoRA tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import NonNegativeInt

from workbench.adapters import anatomy
from workbench.adapters.method import MethodInfo, register
from workbench.adapters.updates.lora import Lora, LowRank
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
