"""The output head of a language model, split from its body so that only supervised positions are projected.

Legend: B batch, L sequence, D hidden, N supervised positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from workbench.errors import BackboneError
from workbench.models import last_block


@dataclass(frozen=True)
class Head:
    """Runs a model up to its output head, and the head alone.

    The whole model is called, with the head's input caught on its way: so nothing is assumed about how a
    family's body is called, and a method that changes the inputs (prompts, prefixes) just works.
    """

    module: nn.Module
    vocabulary: int
    """V, the head's rows."""
    width: int
    """D, the hidden size."""
    softcap: float | None
    multiplier: float
    bias_1V: Tensor | None = None
    """Bias that the model adds to the logits outside of the head."""
    settings: Mapping[str, bool] = field(default_factory=dict)
    """Arguments of the model besides its inputs."""
    last_block: nn.Module | None = None
    """See `workbench.models.last_block`; None: it computes all positions."""

    def trainable(self) -> list[Tensor]:
        """The head's tensors that train: none, unless the backbone or added token rows do."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def hidden(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Hidden states (B, L, D) in front of the head; of the decoder where there is one.

        A causal model and a decoder need no attention mask: rows are padded on the right, and they never look right.
        """
        return self._caught(model, inputs)[:, -_predicting(inputs).shape[1] :]

    def supervised(self, model: nn.Module, inputs: Mapping[str, Tensor], positions_N: Tensor) -> Tensor:
        """Hidden states (N, D) in front of the head at flat indices into B * L; the last block may skip others."""
        ids_BL, packed = _predicting(inputs), "row_lengths" in inputs
        with last_block.narrowed(self.last_block, positions_N, ids_BL, packed=packed) as narrowing:
            hidden = self._caught(model, inputs)
        if narrowing is None or not narrowing.applied:
            return hidden[:, -ids_BL.shape[1] :].flatten(0, 1)[positions_N]
        return hidden.flatten(0, 1) if narrowing.slots_N is None else hidden.flatten(0, 1)[narrowing.slots_N]

    def _caught(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """The input of the head, as the model computes it."""
        caught: list[Tensor] = []

        def catch(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
            caught.append(arguments[0])
            return (arguments[0][:, :0],)

        handle = self.module.register_forward_pre_hook(catch)
        try:
            model(**inputs, **self.settings)
        finally:
            handle.remove()
        return caught[0]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), as the model itself would compute them."""
        logits: Tensor = self.module(hidden) * self.multiplier if self.multiplier != 1 else self.module(hidden)
        logits = logits if self.bias_1V is None else logits + self.bias_1V
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def known(backbone: PreTrainedModel) -> Head:
    """The head as the configuration of `backbone` describes it, not checked."""
    config = backbone.config.get_text_config(decoder=True)
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    module = backbone.get_output_embeddings()
    weight = module.weight
    assert isinstance(weight, Tensor)
    return Head(
        module=module,
        vocabulary=weight.shape[0],
        width=weight.shape[1],
        softcap=getattr(config, "final_logit_softcapping", None),  # Gemma 2 and later
        multiplier=(getattr(config, "logit_scale", None) or 1.0) / divisor,  # Cohere
        bias_1V=dict(backbone.named_buffers()).get("final_logits_bias"),  # Marian; zeros in BART
        settings={"use_cache": False} if backbone.can_generate() else {},
        last_block=last_block.of(backbone),
    )


def find(model: nn.Module, backbone: PreTrainedModel) -> Head:
    """The head of `model`, checked: body and head apart must give the logits that the model gives.

    Raises:
        BackboneError: they do not, so that the family does something to its logits that is not known here; or
            a model that generates looks at the tokens that it is to predict.
    """
    head, generates = known(backbone), backbone.can_generate()
    if isinstance(next(backbone.parameters()), FakeTensor):
        return head  # in a plan there are no values to check
    ids_BL = torch.arange(2, 6, device=backbone.device)[None] % head.vocabulary
    inputs = {"input_ids": ids_BL}
    if backbone.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids_BL
    training = model.training
    model.eval()
    with torch.no_grad():
        wanted = model(**inputs, **head.settings).logits[:, -ids_BL.shape[1] :]  # virtual tokens come before
        head_logits = head.project(head.hidden(model, inputs))
    looks_right = generates and _looks_right(head, model, backbone, inputs)
    model.train(training)
    if not torch.allclose(head_logits, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
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


def _predicting(inputs: Mapping[str, Tensor]) -> Tensor:
    """The tokens (B, L) at whose positions something is predicted."""
    return inputs.get("decoder_input_ids", inputs["input_ids"])


def _looks_right(head: Head, model: nn.Module, backbone: PreTrainedModel, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the first position depends on later ones, by gradients, which are exact zeros where it does not."""
    embedded: list[Tensor] = []

    def catch(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # bodies may scale it in place

    decoder = backbone.get_decoder() if backbone.config.is_encoder_decoder else backbone
    handle = decoder.get_input_embeddings().register_forward_hook(catch)
    try:
        with torch.enable_grad():
            first_D = head.hidden(model, inputs)[0, 0]
            weights_D = torch.arange(len(first_D), device=first_D.device, dtype=first_D.dtype)
            # An encoder may share the embedding; its part comes before the decoder's.
            (grad_BLD,) = torch.autograd.grad((first_D * weights_D).sum(), embedded[-1:])
    finally:
        handle.remove()
    return bool(grad_BLD[:, 1:].any())
