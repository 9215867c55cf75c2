"""Answers are drawn from the model's probabilities, whatever is beside them and however their prompt was read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import ALora, DeepPrompt, Lora, Method, Prompt
from workbench.data.batching import Indices
from workbench.data.text import generated_answers
from workbench.data.text.generated_answers import Floats
from workbench.evaluation.sampling import AnswerSampler, picked

PROMPTS = [np.asarray(ids) for ids in ([1, 403, 407, 261], [1, 268, 388, 342, 432, 398, 299, 280], [1, 410])]
TOKENS, STOPS, TEMPERATURE = 5, [2, *range(20, 30), *range(400, 420)], 1.5


def draws(answers: int = 3) -> list[Floats]:
    return [generated_answers.sampling_numbers([7, row], answers=answers, tokens=TOKENS) for row in range(len(PROMPTS))]


@torch.no_grad()
def written_out(model: nn.Module, prompt: Indices, draws_T: Floats, *, known: int) -> list[int]:
    """One answer, without a cache, padding or company."""
    ids, answer = prompt.tolist(), list[int]()
    for draw in draws_T:
        logits_V = model(input_ids=torch.tensor([ids + answer])).logits[0, -1, :known].double()
        sums_V = (logits_V / TEMPERATURE).softmax(-1).cumsum(-1)
        answer.append(int((sums_V <= draw * sums_V[-1]).sum()))
        if answer[-1] in STOPS:
            break
    return answer


def sampled(model: nn.Module, prompts: list[Indices], numbers: list[Floats], *, known: int) -> list[list[list[int]]]:
    sampler = AnswerSampler(model, known=known, stop=STOPS, temperature=TEMPERATURE)
    return [[each.tolist() for each in group] for group in sampler.answer(prompts, numbers)]


@pytest.mark.parametrize(
    "method",
    [
        None,
        Lora(rank=4, dropout=0.5),
        Prompt(virtual_tokens=3),
        DeepPrompt(virtual_tokens=3),
        ALora(rank=4, invocation=(407, 261)),  # with which a prompt ends
    ],
)
def test_equals_what_is_written_out_token_by_token(stories: str, method: Method | None) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(stories)
    if method is not None:
        model = adapters.attach(model, method, seed=0)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
    model.train()
    chosen = [0] if isinstance(method, DeepPrompt) else [0, 1, 2]
    found = sampled(model, [PROMPTS[row] for row in chosen], [draws()[row] for row in chosen], known=500)
    assert model.training
    model.eval()
    for row, answers in zip(chosen, found, strict=True):
        assert answers == [written_out(model, PROMPTS[row], each, known=500) for each in draws()[row]]
    lengths = {len(each) for group in found for each in group}
    assert min(lengths) < max(lengths) == TOKENS  # some were ended by a token, some by their length


def test_tells_the_probability_that_each_token_was_drawn_by(stories: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    sampler = AnswerSampler(model, known=500, stop=STOPS, temperature=TEMPERATURE)
    found = sampler.scored(PROMPTS, draws())
    plain = sampled(model, PROMPTS, draws(), known=500)
    for prompt, group, answers in zip(PROMPTS, found, plain, strict=True):
        assert [one.ids.tolist() for one in group] == answers
        for one in group:
            ids = torch.from_numpy(np.concatenate([prompt, one.ids]))
            with torch.no_grad():
                logits_TV = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1, :500].double()
            wanted_T = (logits_TV / TEMPERATURE).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
            assert one.log_probs == pytest.approx(wanted_T.numpy(), abs=1e-4)


@pytest.mark.parametrize("family", ["GPT2", "Gemma2", "Mistral", "OPT", "Falcon"])
def test_prompts_are_read_once_in_every_family(family: str) -> None:
    model = tiny(family).eval()
    prompts = [ids % 60 for ids in PROMPTS]
    found = sampled(model, prompts, draws(2), known=60)
    for row, prompt in enumerate(prompts):
        assert found[row] == [written_out(model, prompt, each, known=60) for each in draws(2)[row]]


def test_an_answer_depends_on_no_other(stories: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    together = sampled(model, PROMPTS, draws(), known=512)
    for row, answers in enumerate(together):
        assert sampled(model, [PROMPTS[row]], [draws()[row]], known=512) == [answers]
        assert sampled(model, [PROMPTS[row]], [draws()[row][1:2]], known=512) == [answers[1:2]]


def test_a_prompt_is_read_once_for_all_its_answers(stories: str) -> None:
    """No forward pass but the one that reads the prompts has more than a token of each answer."""
    model: Any = AutoModelForCausalLM.from_pretrained(stories)
    shapes: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    sampled(model, PROMPTS, draws(4), known=512)
    assert shapes[0] == (3, 7)
    assert set(shapes[1:]) == {(12, 1)}


def test_tokens_come_as_often_as_they_are_likely() -> None:
    """Of evenly spaced random numbers, the share of each token is its probability, exactly up to one of them."""
    logits = torch.randn(17, generator=torch.Generator().manual_seed(1))
    logits[5] = -torch.inf
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens = picked(logits.expand(len(grid), -1), grid, 0.7)
    share = torch.bincount(tokens, minlength=17).double() / len(grid)
    assert (share - (logits.double() / 0.7).softmax(-1)).abs().max() <= 1 / len(grid)
    ends = picked(logits.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), 1.0)
    assert ends.tolist() == [0, 16]


def test_random_numbers_of_an_answer_do_not_depend_on_how_many_there_are() -> None:
    few, many = (generated_answers.sampling_numbers([3, 1], answers=count, tokens=6) for count in (2, 5))
    assert np.array_equal(few, many[:2]) and len(np.unique(many)) == many.size
