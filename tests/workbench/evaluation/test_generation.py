"""A prompt is continued the same alone and in a batch that pads it, whatever stands before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import DeepPrompt, Method, Prefix, Prompt, PTuning
from workbench.evaluation import generate
from workbench.models import output_heads
from workbench.models.output_heads import Head

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
METHODS: list[Method] = [
    Prompt(virtual_tokens=3),
    PTuning(virtual_tokens=3),
    DeepPrompt(virtual_tokens=3),
    Prefix(virtual_tokens=3, encoder_width=8),
]
NEW = 5


@torch.no_grad()
def greedy(model: nn.Module, head: Head, prompt: list[int]) -> list[int]:
    """The most likely token after another, as training computes them: no cache, no mask, no padding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW:
        hidden = head.hidden(model, {"input_ids": torch.tensor([ids])})
        ids.append(int(head.project(hidden)[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.few
@pytest.mark.parametrize("config", METHODS, ids=lambda config: config.method)
def test_a_padded_batch_writes_what_training_would(family: PreTrainedModel, config: Method) -> None:
    model: Any = adapters.attach(family, config, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    head = output_heads.find(model, family)
    wanted = [greedy(model, head, prompt) for prompt in PROMPTS]
    ids = torch.tensor([PROMPTS[0], [0] * 4 + PROMPTS[1]])
    family.generation_config.eos_token_id = None
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    output = generate(model, {"input_ids": ids, "attention_mask": (ids != 0).long()}, settings)
    assert torch.equal(output[:, : ids.shape[1]], ids)
    assert output[:, ids.shape[1] :].tolist() == wanted


def test_rows_that_stop_early_are_padded_where_a_window_forbids_padding() -> None:
    base = tiny("Mistral")
    model: Any = adapters.attach(base, DeepPrompt(virtual_tokens=3), seed=0).eval()
    head = output_heads.find(model, base)
    first, second = (greedy(model, head, prompt) for prompt in PROMPTS)
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=second[1], pad_token_id=0)
    assert second[1] not in first and second[0] != second[1]
    ids = torch.tensor([PROMPTS[0], [0] * 4 + PROMPTS[1]])
    output = generate(model, {"input_ids": ids, "attention_mask": (ids != 0).long()}, settings)
    assert output[:, 7:].tolist() == [first, [*second[:2], 0, 0, 0]]
