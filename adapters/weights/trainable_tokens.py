"""Rows of the embedding that train while everything else stays, on HF PEFT's trainable tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import NonNegativeInt

from workbench.adapters import anatomy
from workbench.adapters.method import ExtraParameters, Method, MethodInfo, register
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel


@register
class TrainableTokens(Method):
    """The embeddings of `model.new_tokens` and of some others; the head's rows, too, where it shares the weights."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "trainable-tokens": MethodInfo(
            "embeddings of some tokens",
            "no paper; PEFT's own",
            no_freezing="what it trains stands before the first layer",
            token_rows=True,
        ),
    }
    method: Literal["trainable-tokens"] = "trainable-tokens"
    tokens: Annotated[tuple[NonNegativeInt, ...], Unit("token ids")] = ()
    """Ids of tokens of the vocabulary whose embeddings train, beside those of model.new_tokens."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse backbones without an embedding of tokens, heads whose bias would be lost, and unknown ids."""
        if not anatomy.reads_tokens(model):
            return "pictures and sound have no tokens of a vocabulary. Take adapter.method=lora."
        head: Any = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings()
        if head is not None and head.weight is embedding.weight and head.bias is not None:
            return (
                f"the output head of {type(model).__name__} shares the embedding and has a bias, with which PEFT "
                "cannot train single rows. Take adapter.method=lora."
            )
        rows = embedding.weight.shape[0]
        if beyond := [token for token in self.tokens if token >= rows]:
            return f"the vocabulary has {rows:,} tokens, and no id {beyond[0]}. Write adapter.tokens with ids below."
        return None

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Name of the embedding."""
        embedding = model.get_input_embeddings()
        return [next(name for name, module in model.named_modules() if module is embedding).rsplit(".", 1)[-1]]

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's TrainableTokensConfig for this backbone."""
        from peft import TrainableTokensConfig

        new = beside.token_rows or {}
        rows = sorted({*self.tokens, *(row for each in new.values() for row in each)})
        if not rows:
            raise ConfigError(
                "adapter.method=trainable-tokens: no tokens are named. Write model.new_tokens=[<a>, <b>], or "
                "adapter.tokens as a list of ids."
            )
        compute_as_stored(model.get_input_embeddings())
        config = TrainableTokensConfig(
            task_type=anatomy.task(model),
            target_modules=sorted({*self.modules(model), *new}),
            token_indices=rows,
        )
        config.modules_to_save = beside.heads or None  # type: ignore[attr-defined]
        return config

    def decays(self, parameter: str) -> bool:
        """No weight decay: it would pull the embeddings themselves to 0."""
        return False


def compute_as_stored(embedding: nn.Module) -> None:
    """Store an embedding in the precision that it gives, as PEFT reads its weights."""
    import torch

    weight: Any = embedding.weight
    given = embedding(torch.zeros(1, 1, dtype=torch.int64, device=weight.device)).dtype
    weight.data = weight.data.to(given)
