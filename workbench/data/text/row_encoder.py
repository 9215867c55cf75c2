"""The row encoder of a run: causal, encoder-decoder, or masked language modelling."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.encoder_decoder import Seq2SeqEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.errors import BackboneError


def row_encoder(
    config: RunConfig, hub: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, template: str | None = None
) -> ChatEncoder | MlmEncoder:
    """Choose the row encoder for the recipe of `config` and the architecture `hub`.

    Args:
        template: Jinja source that replaces the tokenizer's chat template.

    Raises:
        BackboneError: The tokenizer or the template does not allow it.
    """
    if config.recipe == "mlm":
        return MlmEncoder(tokenizer, share=config.masking.share, seed=config.seed)
    return conversation_encoder(hub, tokenizer, template=template)


def conversation_encoder(
    hub: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, template: str | None = None
) -> ChatEncoder:
    """How the architecture `hub` reads prompts and answers; see `row_encoder`."""
    if not hub.is_encoder_decoder:
        return ChatEncoder(tokenizer, template)
    start = getattr(hub, "decoder_start_token_id", None)
    if start is None:
        raise BackboneError(
            f"{type(hub).__name__}: its config.json has no decoder_start_token_id, from which the decoder starts. "
            "Write the id that it was pretrained with into config.json (for T5 its pad_token_id)."
        )
    return Seq2SeqEncoder(tokenizer, template, start=int(start))
