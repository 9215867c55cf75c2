"""The row encoder of a run: causal, encoder-decoder, or masked language modelling."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.data.text.chat import Template
from workbench.data.text.encoder_decoder import Pairs
from workbench.data.text.token_masking import Masking
from workbench.errors import BackboneError


def form(
    config: RunConfig, hub: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, template: str | None = None
) -> Template | Masking:
    """Choose the row encoder for the recipe of `config` and the architecture `hub`.

    Args:
        template: Jinja source that replaces the tokenizer's chat template.

    Raises:
        BackboneError: The tokenizer or the template does not allow it.
    """
    if config.recipe == "mlm":
        return Masking(tokenizer, share=config.masking.share, seed=config.seed)
    if not hub.is_encoder_decoder:
        return Template(tokenizer, template)
    start = getattr(hub, "decoder_start_token_id", None)
    if start is None:
        raise BackboneError(
            f"{type(hub).__name__}: its config.json has no decoder_start_token_id, from which the decoder starts. "
            "Write the id that it was pretrained with into config.json (for T5 its pad_token_id)."
        )
    return Pairs(tokenizer, template, start=int(start))
