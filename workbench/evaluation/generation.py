"""Generation of text that does not depend on padding, also for methods with virtual tokens.

Legend: B batch, V virtual tokens, L prompt with padding on its left, S = V + L, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft import PeftModel, PeftModelForCausalLM, PeftType
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from workbench.data.batching import Indices, encoder_inputs


def generate(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    config: GenerationConfig,
    *,
    streamer: TextStreamer | None = None,
    halt: Callable[[], bool] | None = None,
    processor: LogitsProcessor | None = None,
    read: Cache | None = None,
) -> Tensor:
    """Output of `model.generate`: a causal model's prompts and continuations, or a decoder's text.

    Args:
        halt: Called after each token; generation ends where it returns True.
        processor: Changes the logits of each next token.
        read: Keys and values of all tokens of the prompts but the last; not for methods with virtual tokens.
    """
    settings: dict[str, Any] = {"generation_config": config, "streamer": streamer}
    if processor is not None:
        settings["logits_processor"] = LogitsProcessorList([processor])
    if read is not None:
        settings["past_key_values"] = read
    if halt is not None:
        settings["stopping_criteria"] = StoppingCriteriaList([_Halt(halt)])
    if isinstance(model, PeftModelForCausalLM):
        kind = model.active_peft_config.peft_type
        if kind in (PeftType.PROMPT_TUNING, PeftType.P_TUNING):
            return _after_soft_prompt(model, **inputs, settings=settings)
        if kind == PeftType.PREFIX_TUNING and not inputs["attention_mask"].all() and _has_sliding_window(model):
            return _one_by_one(model, **inputs, settings=settings)
    return model.generate(**inputs, **settings)  # type: ignore[operator, no-any-return]


def padded_on_the_left(prompts: Sequence[Indices], *, device: torch.device | None = None) -> dict[str, Tensor]:
    """Inputs of which the last column is the end of every prompt, where a causal model goes on."""
    backwards = encoder_inputs([prompt[::-1] for prompt in prompts])
    return {name: tensor.flip(1).to(device) for name, tensor in backwards.items()}


def answer_of(ids: Indices, stop: Sequence[int]) -> Indices:
    """Tokens up to and with the first one of `stop`; padding comes after it."""
    ends = np.flatnonzero(np.isin(ids, stop))
    return ids[: ends[0] + 1] if len(ends) else ids


@contextmanager
def plain(model: nn.Module, backbone: Any) -> Iterator[None]:
    """Evaluation mode, and none of the penalties that a backbone's generation_config.json may ask for."""
    training, own = model.training, backbone.generation_config
    model.eval()
    backbone.generation_config = GenerationConfig()
    try:
        yield
    finally:
        backbone.generation_config = own
        model.train(training)


class _Halt(StoppingCriteria):
    def __init__(self, halt: Callable[[], bool]) -> None:
        self._halt = halt

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self._halt(), device=input_ids.device)


def _after_soft_prompt(model: PeftModel, input_ids: Tensor, attention_mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Continuations (B, L + new) of padding, virtual tokens and text in this order, the order of training.

    PEFT puts the virtual tokens before the padding, and counts the padding as positions of the text.
    """
    backbone: Any = model.get_base_model()
    text_BLD = backbone.get_input_embeddings()(input_ids)
    virtual_BVD = model.get_prompt(len(input_ids)).to(text_BLD.dtype)
    attended_BS = torch.cat([attention_mask.new_ones(virtual_BVD.shape[:2]), attention_mask], 1)
    order_BS = attended_BS.argsort(dim=1, stable=True)  # padding comes first
    embedded_BSD = torch.cat([virtual_BVD, text_BLD], 1)
    new = backbone.generate(
        inputs_embeds=embedded_BSD.gather(1, order_BS[..., None].expand_as(embedded_BSD)),
        attention_mask=attended_BS.gather(1, order_BS),
        **settings,
    )
    return torch.cat([input_ids, new], 1)


def _one_by_one(model: Any, input_ids: Tensor, attention_mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Continuations (B, L + new), generated row by row: padding would push the prefix out of a sliding window."""
    rows = []
    for ids_L, mask_L in zip(input_ids, attention_mask.bool(), strict=True):
        text_1L = ids_L[mask_L][None]
        output = model.generate(input_ids=text_1L, attention_mask=torch.ones_like(text_1L), **settings)
        rows.append(torch.cat([ids_L[~mask_L], output[0]]))
    return pad_sequence(rows, batch_first=True, padding_value=settings["generation_config"].pad_token_id)


def _has_sliding_window(model: PeftModel) -> bool:
    """Whether a layer attends to a limited number of tokens, padding among them."""
    return getattr(model.config.get_text_config(), "sliding_window", None) is not None
