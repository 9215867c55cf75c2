"""The output head of a causal model, split from its body so that only supervised positions are projected.

Legend: B batch, L sequence, D hidden, N supervised positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workbench.errors import BackboneError


@dataclass(frozen=True)
class Head:
    """Runs a model up to its output head, and the head alone.

    The whole model is called, with the head's input caught on its way: so nothing is assumed about how a
    family's body is called, and a method that changes the inputs (prompts, prefixes) just works.
    """

    module: nn.Module
    softcap: float | None
    multiplier: float

    @property
    def vocabulary(self) -> int:
        """V, the head's rows."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.shape[0]

    @property
    def width(self) -> int:
        """D, the hidden size."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.shape[1]

    def trainable(self) -> list[Tensor]:
        """The head's tensors that train: none, unless the backbone or added token rows do."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def hidden(self, model: nn.Module, input_ids_BL: Tensor) -> Tensor:
        """Hidden states (B, L, D) in front of the head.

        No attention mask is needed: rows are padded on the right, and a causal model never looks right.
        """
        caught: list[Tensor] = []

        def catch(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
            caught.append(arguments[0])
            return (arguments[0][:, :0],)

        handle = self.module.register_forward_pre_hook(catch)
        try:
            model(input_ids=input_ids_BL, use_cache=False)
        finally:
            handle.remove()
        return caught[0][:, -input_ids_BL.shape[1] :]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), as the model itself would compute them."""
        logits: Tensor = self.module(hidden) * self.multiplier if self.multiplier != 1 else self.module(hidden)
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def find(model: nn.Module, backbone: PreTrainedModel) -> Head:
    """The head of `model`, checked: body and head apart must give the logits that the model gives.

    Raises:
        BackboneError: they do not, so that the family does something to its logits that is not known here; or
            the model looks at the tokens that it is to predict.
    """
    config = backbone.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    head = Head(
        module=backbone.get_output_embeddings(),
        softcap=getattr(config, "final_logit_softcapping", None),  # Gemma 2 and later
        multiplier=(getattr(config, "logit_scale", None) or 1.0) / divisor,  # Cohere
    )
    ids = torch.arange(2, 6, device=backbone.device)[None] % head.vocabulary
    training = model.training
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits[:, -ids.shape[1] :]  # virtual tokens come before
        found = head.project(head.hidden(model, ids))
    looks_right = _looks_right(head, model, backbone, ids)
    model.train(training)
    if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
        raise BackboneError(
            f"{type(backbone).__name__}: its logits are not those of its output head alone, so its loss cannot be "
            "computed in chunks. Please report this family; another backbone works today."
        )
    if looks_right:
        raise BackboneError(
            f"{type(backbone).__name__} is no causal language model: each position sees the tokens after it, so that "
            "it would learn to copy them. Take a backbone that generates text."
        )
    return head


def _looks_right(head: Head, model: nn.Module, backbone: PreTrainedModel, ids_BL: Tensor) -> bool:
    """Whether the first position depends on later ones, by gradients, which are exact zeros where it does not."""
    embedded: list[Tensor] = []

    def catch(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # bodies may scale it in place

    handle = backbone.get_input_embeddings().register_forward_hook(catch)
    try:
        with torch.enable_grad():
            first_D = head.hidden(model, ids_BL)[0, 0]
            weights_D = torch.arange(len(first_D), device=first_D.device, dtype=first_D.dtype)
            (grad_BLD,) = torch.autograd.grad((first_D * weights_D).sum(), embedded)
    finally:
        handle.remove()
    return bool(grad_BLD[:, 1:].any())
