"""A server that writes the answers of recipe reinforce: asked before a weight is read, given each rollout's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from workbench import adapters
from workbench.config import RunConfig
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.evaluation import served_sampler
from workbench.evaluation.served_sampler import ServedPolicy, ServedSampler
from workbench.models.exported import ExportedModel
from workbench.runs import openai_client
from workbench.runs.openai_client import OpenAIClient
from workbench.runs.resume_command import resume_command
from workbench.runs.run_directory import Run

FOLDER = "rollouts"
"""Where in a run directory the adapter lies that the server has."""
PROBES = 8
"""Prompts that the server's tokenizer reads before the run."""


@contextmanager
def opened(config: RunConfig) -> Iterator[OpenAIClient | None]:
    """The server that `reinforce.rollouts` names; None where answers are written here."""
    url = config.reinforce.rollouts.url
    if url is None:
        yield None
        return
    with OpenAIClient.of(
        url, key="reinforce.rollouts.url", kept=f"a run keeps what it has learnt: {resume_command()}"
    ) as server:
        yield server


def require(server: OpenAIClient, config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: TokenizedSet) -> None:
    """Refuse a server that would fail in the first rollout.

    Raises:
        BackboneError: It does not answer.
        ConfigError: It lacks the model, tells no log-probabilities, cuts texts otherwise, or loads no adapters.
    """
    section = config.reinforce
    model = section.rollouts.id
    assert model is not None, "the configuration requires it"
    server.require_model(model, key="reinforce.rollouts.id")
    rows = [prompts[index].input_ids[:-1] for index in range(min(PROBES, len(prompts)))]
    first = {
        "model": model,
        "prompt": rows[0].tolist(),
        "n": 2,
        "max_tokens": min(4, section.max_new_tokens),
        "seed": 0,
    }
    served_sampler.asked(server, {**first, "temperature": section.temperature}, known=len(tokenizer))
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]
    texts = [text for text in texts if text.strip()]
    try:
        served = server.tokens(model, texts)
    except ValueError as error:
        raise served_sampler.unusable(server, str(error)) from None
    if difference := openai_client.mismatch(texts, served, tokenizer):
        text, served_ids, own_ids = difference
        raise ConfigError(
            f"{server.named}: {model} cuts a prompt of {len(text)} characters into {len(served_ids)} tokens, "
            f"{served_ids[:8]} ..., and the tokenizer of model.id into {len(own_ids)}, {own_ids[:8]} ... Serve the "
            "model that model.id names."
        )
    served_sampler.require_loading(server)


def sampler(
    server: OpenAIClient,
    config: RunConfig,
    run: Run,
    live: ExportedModel,
    *,
    known: int,
    stop: Sequence[int],
    longest: int,
) -> ServedSampler:
    """Draws answers there, of the adapter as it trains here.

    Args:
        known: Size of the tokenizer's vocabulary.
        stop: Tokens that end an answer, or a turn.
        longest: Most tokens of a prompt and its answer.
    """
    section = config.reinforce
    policy = ServedPolicy(
        server,
        lambda folder: adapters.save(live.model, folder),
        run.path / FOLDER,
        every=section.rollouts.sync_every,
        earlier=section.rollouts.staleness // section.updates,
    )
    return ServedSampler(policy, known=known, stop=stop, temperature=section.temperature, longest=longest)


def forget(server: OpenAIClient | None, run: Run) -> None:
    """Have the server forget the adapters of a run that has ended."""
    if server is not None:
        served_sampler.clear_adapters(server, run.path / FOLDER)
