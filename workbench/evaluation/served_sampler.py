"""Rollouts by a server: the adapter that trains here is loaded into vLLM or `workbench serve`, which samples answers.

Legend: G answers to a prompt, T most tokens of an answer.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from workbench.data.batching import Indices
from workbench.data.text.generated_answers import Floats, SampledAnswer
from workbench.errors import BackboneError, ConfigError
from workbench.runs import files
from workbench.runs.openai_client import OpenAIClient, reason, token_numbers
from workbench.runs.resume_command import resume_command

LOAD, UNLOAD = "load_lora_adapter", "unload_lora_adapter"
_NOBODY = "workbench-nobody"  # a name that no adapter has, by which the server is tested
_STARTS = (
    "Start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora, or `workbench serve RUN --load-adapters`."
)
AT_ONCE = 256  # answers that are requested at a time; at least those to one prompt
_WHOLE: Mapping[str, float] = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""Settings that make a server sample from the whole distribution, whatever generation_config.json says."""


class ServedPolicy:
    """The adapter of a run on a server, under a name that is a hash of its values.

    A name never returns with other values, so no server answers from a stale cache, and a resumed run finds the adapter
    that it loaded before.

    Args:
        save: Writes the adapter as it is now into a folder, in PEFT's format.
        folder: Holds the adapters that the server has loaded; the server reads it at the same path.
        every: Rollouts between two updates of the server's weights.
        earlier: Weights before those of now that may still be asked.
    """

    def __init__(
        self, server: OpenAIClient, save: Callable[[Path], None], folder: Path, *, every: int = 1, earlier: int = 0
    ) -> None:
        self.server, self._save, self._folder, self._every, self._earlier = server, save, folder, every, earlier
        self._names: list[str] = []
        """The server's names for the weights that answer, those of now last."""
        self._rollouts = 0

    def refreshed(self) -> str:
        """The server's name for the current weights, which are loaded there at every `every`-th rollout since the run
        began or resumed. Raises BackboneError: the server does not answer; ConfigError: it does not load the adapter.
        """
        due = self._rollouts % self._every == 0
        self._rollouts += 1
        if not due:
            return self._names[-1]
        aside = self._folder / "next"
        with files.new_folder(aside, durable=False) as unfinished:
            self._save(unfinished)
        whole = hashlib.sha256(str(aside.resolve()).encode())  # two runs never share a name
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            whole.update((aside / file).read_bytes())
        name = f"{self._folder.resolve().parent.name}-{whole.hexdigest()[:12]}"
        if name not in self._names:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            aside.rename(self._folder / name)
            self._load(name)
        self._names = [*(each for each in self._names if each != name), name][-1 - self._earlier :]
        for each in _adapter_names(self._folder):
            if each not in self._names:
                _forget(self.server, self._folder / each)
        return name

    def _load(self, name: str) -> None:
        path = (self._folder / name).resolve()
        response = self.server.sent("POST", LOAD, {"lora_name": name, "lora_path": str(path)})
        if response.status_code == 400 and "already been loaded" in reason(response):
            return  # with the same values, before the run was stopped
        if response.status_code != 200:
            self.server.require_permitted(response)
            raise ConfigError(
                f"{self.server.named}: the server does not load {path}: {reason(response)} It must see that folder by "
                "the same path, and take its rank (vLLM: --max-lora-rank) and layers."
            )


def require_loading(server: OpenAIClient) -> None:
    """Raise ConfigError where a server cannot load adapters while it runs."""
    response = server.sent("POST", UNLOAD, {"lora_name": _NOBODY})
    if response.status_code == 404 and _NOBODY in response.text:
        return  # it knows the address but not the adapter
    if response.status_code == 401:
        server.require_permitted(response)
    raise ConfigError(
        f"{server.named} loads no adapters while it answers (POST /{UNLOAD}: status {response.status_code}, "
        f"{reason(response)}), so that new weights would never reach it. {_STARTS}"
    )


def clear_adapters(server: OpenAIClient, folder: Path) -> None:
    """Unload all adapters of a folder from a server, and delete the folder."""
    for name in _adapter_names(folder):
        _forget(server, folder / name)
    shutil.rmtree(folder, ignore_errors=True)


def _forget(server: OpenAIClient, path: Path) -> None:
    """Unload an adapter and delete it; it does not matter whether the server still has it."""
    with suppress(BackboneError):
        server.sent("POST", UNLOAD, {"lora_name": path.name}, patient=False)
    shutil.rmtree(path, ignore_errors=True)


def _adapter_names(folder: Path) -> list[str]:
    """Names of the adapters in a folder."""
    return sorted(each.parent.name for each in folder.glob("*/adapter_config.json") if each.parent.name != "next")


class ServedSampler:
    """Samples answers of a model on a server, as `AnswerSampler` does of a local one.

    A request asks for all answers to a prompt, with a seed made from the prompt's random numbers; which answer a seed
    gives is up to the server.

    Args:
        policy: The adapter that answers there.
        known: Size of the tokenizer's vocabulary.
        stop: Tokens that end an answer.
        longest: Most tokens of a prompt and its answer.
    """

    def __init__(
        self, policy: ServedPolicy, *, known: int, stop: Sequence[int], temperature: float, longest: int
    ) -> None:
        self._policy, self._known, self._stop, self._temperature = policy, known, list(stop), temperature
        self._longest, self._name = longest, ""

    def begin(self) -> Self:
        """A sampler of the weights that the server has now, which it is given where it is time."""
        begun = copy.copy(self)
        begun._name = self._policy.refreshed()
        return begun

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        """One batch of all prompts: the server batches them itself."""
        return [np.arange(len(prompts))]

    def answer(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[Indices]]:
        """G answers to each prompt, up to and including a stop token or T tokens long, as its draws (G, T) say."""
        return [[one.ids for one in group] for group in self.scored(prompts, draws)]

    def scored(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[SampledAnswer]]:
        """The same answers, with the log-probabilities that the server sampled them with; raises as `asked`."""
        many = max(1, AT_ONCE // len(draws[0]))
        threads = ThreadPoolExecutor(min(many, len(prompts)))
        try:
            return list(threads.map(self._asked, prompts, draws))
        finally:
            threads.shutdown(cancel_futures=True)

    def _asked(self, prompt: Indices, draws_GT: Floats) -> list[SampledAnswer]:
        answers, most = draws_GT.shape
        body = {
            "model": self._name,
            "prompt": prompt.tolist(),
            "n": answers,
            "max_tokens": min(most, self._longest - len(prompt)),
            "temperature": self._temperature,
            "seed": int(draws_GT[0, 0] * 2**31),
            "stop_token_ids": self._stop,
        }
        return asked(self._policy.server, body, known=self._known)


def asked(server: OpenAIClient, body: Mapping[str, Any], *, known: int) -> list[SampledAnswer]:
    """Answers to the prompt of a request, sampled from the whole distribution. Raises BackboneError: the server does
    not answer; ConfigError: its answer lacks tokens or log-probabilities, or has a token that is not below `known`."""
    response = server.sent("POST", "completions", {**body, **_WHOLE, "logprobs": 1, "return_tokens_as_token_ids": True})
    if response.status_code in (400, 422):
        raise unusable(server, reason(response))
    if response.status_code == 404:
        raise BackboneError(
            f"{server.named}: {body['model']} is not there any more ({reason(response)}). Load the adapter again, and "
            f"go on: {resume_command()}"
        )
    choices = server.choices(response)
    if len(choices) != body["n"]:
        raise unusable(server, f"it gave {len(choices)} answers where {body['n']} were asked for")
    return [_sampled_answer(server, choice, most=int(body["max_tokens"]), known=known) for choice in choices]


def _sampled_answer(server: OpenAIClient, choice: Mapping[str, Any], *, most: int, known: int) -> SampledAnswer:
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
    """The error of a server whose answers cannot be used."""
    return ConfigError(
        f"{server.named} cannot write rollouts: {why}.\n  It must answer POST /completions with n, seed, logprobs, "
        "stop_token_ids and return_tokens_as_token_ids, as vLLM and `workbench serve` do."
    )
