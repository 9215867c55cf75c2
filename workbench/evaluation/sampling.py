"""Answers drawn from a model's own probabilities, several to a prompt, which is read once for all of them.

An answer is a function of the weights, its prompt and its random numbers: of no other row.

Legend: B answers, G answers to a prompt, T most tokens of an answer, V vocabulary, L tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, LogitsProcessor
from transformers.cache_utils import DynamicLayer

from workbench.adapters import anatomy
from workbench.data.batching import Indices, micro_batches
from workbench.data.text.generated_answers import Floats, SampledAnswer
from workbench.evaluation import generation
from workbench.evaluation.scores import generation_config
from workbench.training import capacity


class AnswerSampler:
    """Draws answers of a causal model from softmax(logits / temperature), over ids that the tokenizer knows.

    Args:
        model: With its adapter, if it has any.
        known: Size of the tokenizer's vocabulary.
        stop: Tokens that end an answer.
    """

    def __init__(self, model: nn.Module, *, known: int, stop: Sequence[int], temperature: float) -> None:
        self._model, self._known, self._stop, self._temperature = model, known, list(stop), temperature
        self._backbone: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        # Whether what comes after a prompt's first tokens decides what they compute.
        self._invoked = isinstance(model, PeftModel) and bool(
            getattr(model.active_peft_config, "alora_invocation_tokens", None)
        )
        self._virtual = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning

    def begin(self) -> None:
        """Nothing: the model that writes is the one that trains."""

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        """Numbers of the prompts that are answered together, which depend on nothing but the prompts.

        Args:
            answers: G.
            tokens: T.
        """
        lengths = np.asarray([(len(prompt) + tokens) * answers for prompt in prompts], dtype=np.int64)
        # Beside a prefix, `generate` may take padded rows one after the other.
        width = anatomy.hidden_size(self._backbone.config)
        most = 1 if self._virtual else capacity.forward_tokens(self._backbone.device, width=width)
        return list(micro_batches(np.arange(len(prompts)), lengths, tokens=most))

    def answer(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[Indices]]:
        """Answers to each prompt, up to and with a token that ends it, or as long as there are random numbers.

        Args:
            draws: Random numbers (G, T) of the answers to each prompt.
        """
        return self._answered(prompts, draws, self._drawing(draws))

    def scored(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[SampledAnswer]]:
        """The same answers, with the log-probabilities that their tokens were drawn by."""
        drawing = self._drawing(draws)
        drawing.log_probs = []
        answers = self._answered(prompts, draws, drawing)
        each_T = iter(torch.stack(drawing.log_probs, dim=1).cpu().numpy())
        return [[SampledAnswer(ids, next(each_T)[: len(ids)]) for ids in group] for group in answers]

    def _drawing(self, draws: Sequence[Floats]) -> _Drawn:
        return _Drawn(np.concatenate(draws), self._temperature, known=self._known)

    @torch.no_grad()
    def _answered(self, prompts: Sequence[Indices], draws: Sequence[Floats], drawing: _Drawn) -> list[list[Indices]]:
        each, most = draws[0].shape
        settings = generation_config(self._stop, max_new_tokens=most)
        settings.use_cache = True
        with generation.plain(self._model, self._backbone):
            inputs = generation.padded_on_the_left(prompts, device=self._backbone.device)
            read = (
                self._read(inputs, each)
                if min(map(len, prompts)) > 1 and not (self._virtual or self._invoked)
                else None
            )
            output = generation.generate(
                self._model,
                {name: tensor.repeat_interleave(each, dim=0) for name, tensor in inputs.items()},
                settings,
                processor=drawing,
                read=read,
            )
        written = output[:, inputs["input_ids"].shape[1] :].cpu().numpy()
        answers = [generation.answer_of(ids, self._stop) for ids in written]
        return [answers[start : start + each] for start in range(0, len(answers), each)]

    def _read(self, inputs: dict[str, Tensor], each: int) -> Cache | None:
        """Keys and values of all tokens but the last, `each` times; None where a layer keeps something else."""
        shorter = {name: tensor[:, :-1] for name, tensor in inputs.items()}
        once = GenerationConfig(
            max_new_tokens=1, do_sample=False, use_cache=True, return_dict_in_generate=True, pad_token_id=0
        )
        cache = self._backbone.generate(**shorter, generation_config=once).past_key_values
        if not (isinstance(cache, Cache) and all(isinstance(layer, DynamicLayer) for layer in cache.layers)):
            return None
        cache.batch_repeat_interleave(each)
        return cache


class _Drawn(LogitsProcessor):
    """Makes the most likely token of each row the one that its next random number picks."""

    def __init__(self, draws_BT: Floats, temperature: float, *, known: int) -> None:
        self._draws_TB = torch.from_numpy(draws_BT.T.copy())
        self._temperature, self._known = temperature, known
        self._at = 0
        self.log_probs: list[Tensor] | None = None
        """Log-probabilities (B,) of the picked tokens, one tensor for each place; None: nobody asks."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        known_BV = scores[:, : self._known]
        tokens_B = picked(known_BV, self._draws_TB[self._at].to(scores.device), self._temperature)
        self._at += 1
        if self.log_probs is not None:
            log_p_BV = (known_BV.double() / self._temperature).log_softmax(-1)
            self.log_probs.append(log_p_BV.gather(1, tokens_B[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


def picked(logits_BV: Tensor, draws_B: Tensor, temperature: float) -> Tensor:
    """The token (B,) at which the cumulative probability rises above the random number of its row.

    Args:
        draws_B: In [0, 1), float64.
        temperature: Logits are divided by it, > 0.
    """
    sums_BV = (logits_BV.double() / temperature).softmax(-1).cumsum(-1)
    wanted_B1 = draws_B[:, None] * sums_BV[:, -1:]
    return torch.searchsorted(sums_BV, wanted_B1, right=True)[:, 0].clamp_max(logits_BV.shape[1] - 1)
