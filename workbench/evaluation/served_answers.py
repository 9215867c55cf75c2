"""Answers that a server draws: vLLM, or `workbench serve`, by OpenAI's completions with log-probabilities.

Legend: G answers to a prompt, T most tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from workbench.data.batching import Indices
from workbench.data.text.generated_answers import Floats, SampledAnswer
from workbench.errors import BackboneError, ConfigError
from workbench.evaluation.served_policy import ServedPolicy
from workbench.runs.openai_client import OpenAIClient, reason, token_numbers

AT_ONCE = 256
"""Answers on their way, or those to one prompt."""
_WHOLE: Mapping[str, float] = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""Settings with which a server draws from all of the probabilities, whatever generation_config.json says."""


class ServedSampler:
    """Draws answers of a model behind an address, as `AnswerSampler` does of one that is here.

    A request asks for all answers to a prompt, with a seed that is a function of the prompt's random numbers; which
    answer a seed gives is up to the server.

    Args:
        policy: What answers there.
        known: Size of the tokenizer's vocabulary.
        stop: Tokens that end an answer.
    """

    def __init__(self, policy: ServedPolicy, *, known: int, stop: Sequence[int], temperature: float) -> None:
        self._policy, self._known, self._stop, self._temperature = policy, known, list(stop), temperature

    def begin(self) -> None:
        """Have the server answer with the weights of now, where their turn has come."""
        self._policy.refresh()

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        """All prompts together: the server batches them."""
        return [np.arange(len(prompts))]

    def answer(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[Indices]]:
        """Answers to each prompt, up to and with a token that ends it; G, of T tokens at most, as its draws (G, T)."""
        return [[one.ids for one in group] for group in self.scored(prompts, draws)]

    def scored(self, prompts: Sequence[Indices], draws: Sequence[Floats]) -> list[list[SampledAnswer]]:
        """The same answers, with the log-probabilities that the server drew them by.

        Raises:
            BackboneError: The server does not answer.
            ConfigError: It tells no tokens or no log-probabilities, or tokens that the tokenizer does not know.
        """
        many = max(1, AT_ONCE // len(draws[0]))
        threads = ThreadPoolExecutor(min(many, len(prompts)))
        try:
            return list(threads.map(self._asked, prompts, draws))
        finally:
            threads.shutdown(cancel_futures=True)

    def _asked(self, prompt: Indices, draws_GT: Floats) -> list[SampledAnswer]:
        answers, most = draws_GT.shape
        seed = int(draws_GT[0, 0] * 2**31)
        return asked(
            self._policy.server,
            {
                "model": self._policy.name,
                "prompt": prompt.tolist(),
                "n": answers,
                "max_tokens": most,
                "temperature": self._temperature,
                "seed": seed,
                "stop_token_ids": self._stop,
            },
            known=self._known,
        )


def asked(server: OpenAIClient, body: Mapping[str, Any], *, known: int) -> list[SampledAnswer]:
    """Answers to the prompt of a request, which is drawn from all of the probabilities.

    Raises:
        BackboneError: The server does not answer.
        ConfigError: It tells no tokens or no log-probabilities, or tokens from `known` on.
    """
    wanted = {**body, **_WHOLE, "logprobs": 1, "return_tokens_as_token_ids": True}
    response = server.sent("POST", "completions", wanted)
    if response.status_code in (400, 422):
        raise unusable(server, reason(response))
    if response.status_code == 404:
        raise BackboneError(
            f"{server.named}: {body['model']} is not there any more ({reason(response)}). Go on with --resume, which "
            "has the adapter loaded again."
        )
    choices = server.choices(response)
    if len(choices) != body["n"]:
        raise unusable(server, f"it gave {len(choices)} answers where {body['n']} were asked for")
    return [_read(server, choice, most=int(body["max_tokens"]), known=known) for choice in choices]


def _read(server: OpenAIClient, choice: Mapping[str, Any], *, most: int, known: int) -> SampledAnswer:
    scored = choice.get("logprobs")
    if not isinstance(scored, dict) or not scored.get("tokens") or not scored.get("token_logprobs"):
        raise unusable(server, "its answer has no log-probabilities")
    try:
        ids = np.asarray(token_numbers(scored), dtype=np.int64)
        log_probs = np.asarray(scored["token_logprobs"], dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise unusable(server, str(error)) from None
    if len(ids) != len(log_probs) or len(ids) > most or not np.isfinite(log_probs).all():
        raise unusable(server, f"it told {len(log_probs)} log-probabilities of {len(ids)} tokens, {most} at most")
    if ids.max() >= known:
        raise ConfigError(
            f"{server.named}: it wrote token {ids.max()}, and the tokenizer of model.id knows {known:,}. Serve the "
            "model that model.id names."
        )
    return SampledAnswer(ids, log_probs)


def unusable(server: OpenAIClient, why: str) -> ConfigError:
    """The error of a server that answers otherwise than it must."""
    return ConfigError(
        f"{server.named} cannot write rollouts: {why}.\n  It must answer POST /completions with n, seed, logprobs, "
        "stop_token_ids and return_tokens_as_token_ids, as vLLM and `workbench serve` do."
    )
