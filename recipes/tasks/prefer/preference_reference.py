"""Log-probabilities of judged answers by the reference of recipe prefer.

It reads all rows once, before the first step, and is gone when the training begins: there is one model in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.sections.prefer_config import BACKBONE, PreferConfig
from workbench.data.batching import Indices
from workbench.data.text.preference_pairs import PreferenceSet, answer_rows
from workbench.errors import ConfigError
from workbench.losses import preference_losses
from workbench.recipes.single import token_reference
from workbench.recipes.single.token_reference import Reference, Wanted
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback
from workbench.training.distributed import layout_checks, zero_offload
from workbench.training.sampling.loss_based import ReferenceLosses

_AT_ONCE = 256
"""Answers whose tokens are added up at a time."""
Floats = npt.NDArray[np.float64]


class AnswerNumbers(NamedTuple):
    """Log-probabilities of all answers (S,) of a set, in nats."""

    counted_S: Floats
    """As the loss counts the tokens of an answer."""
    mean_S: Floats
    """Mean over tokens."""
    others_S: Floats | None = None
    """Counted so too, of answers to other prompts."""

    def subset(self, examples: Indices, each: int) -> AnswerNumbers:
        """Those of examples of so many answers each."""
        own = answer_rows(examples, each)
        others_S = None if self.others_S is None else self.others_S[own]
        return AnswerNumbers(self.counted_S[own], self.mean_S[own], others_S)


def wanted(config: RunConfig) -> Wanted:
    """The reference."""
    section = config.prefer
    key = "prefer.reference" if section.reference is not None else "prefer.start"
    return Wanted(key, section.reference_name, section.trust)


def started_from(config: RunConfig) -> Wanted:
    """The model that training starts from."""
    section = config.prefer
    return Wanted("prefer.start", section.start or BACKBONE, section.trust)


def find(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Reference]:
    """The model that training starts from, and where the loss has one the reference, which may be the same."""
    names = [started_from(config), *([wanted(config)] if config.prefer.compares else [])]
    references = [token_reference.find(each, config, tokenizer) for each in names]
    weights = references[-1].source.model.weights
    if zero_offload.cuts_weights(config.distributed) and (why := layout_checks.WHOLE_WEIGHTS.get(weights)):
        raise ConfigError(
            f"{names[-1].key}={names[-1].name} has model.weights={weights}, and distributed cuts a reference: {why}. "
            "Write distributed.zero=2."
        )
    return references


def files(config: RunConfig) -> dict[str, str]:
    """Digests of all files that the numbers depend on."""
    names = [started_from(config), *([wanted(config)] if config.prefer.compares else [])]
    return {file: digest for each in names for file, digest in token_reference.named(each, config).source.files.items()}


def in_words(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Sentences on the reference; raises what `token_reference.find` does."""
    references = find(config, tokenizer)
    if not config.prefer.compares:
        return [f"prefer.loss={config.prefer.loss} compares with no reference."]
    name = references[-1].source.name
    what = "the backbone without the adapter" if name == BACKBONE else name
    return [
        f"Reference: {what}. It reads all answers once, before the first step; there is no second model in training."
    ]


def is_start(config: RunConfig) -> bool:
    """Whether the loss compares with the model that training starts from."""
    if not config.prefer.compares:
        return False
    start, reference = (token_reference.named(each, config) for each in (started_from(config), wanted(config)))
    return start.source == reference.source


def ask(
    config: RunConfig,
    run: Run,
    callback: Callback,
    sets: Mapping[str, PreferenceSet],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, AnswerNumbers] | None:
    """The reference's numbers of some sets by name; None where the loss has no reference."""
    if not config.prefer.compares:
        return None
    reference = token_reference.find(wanted(config), config, tokenizer)
    others = {name: rows.others for name, rows in sets.items() if rows.others is not None}
    tables = [*(rows.answers for rows in sets.values()), *others.values()]
    losses = token_reference.ask(reference, tables, config, run, callback, tokenizer)
    answer_numbers = {
        name: AnswerNumbers(*_counted(each, rows.answer_tokens, rows.shared_tokens, config.prefer))
        for (name, rows), each in zip(sets.items(), losses, strict=False)
    }
    for (name, table), each in zip(others.items(), losses[len(sets) :], strict=True):
        others_S, _ = _counted(each, table.supervised, table.supervised, config.prefer)
        answer_numbers[name] = answer_numbers[name]._replace(others_S=others_S)
    return answer_numbers


def _counted(
    losses: ReferenceLosses, count_S: Indices, shared_S: Indices, config: PreferConfig
) -> tuple[Floats, Floats]:
    """Counted log-probabilities and means (S,) from the losses of tokens."""
    parts = []
    for start in range(0, len(count_S), _AT_ONCE):
        own = slice(start, start + _AT_ONCE)
        log_p_BL = torch.zeros(len(count_S[own]), int(count_S[own].max()), dtype=torch.float64)
        for row, number in enumerate(range(start, start + len(log_p_BL))):
            log_p_BL[row, : count_S[number]] = -torch.from_numpy(losses[number].astype(np.float64))
        tokens_B, shared_B = torch.from_numpy(count_S[own]), torch.from_numpy(shared_S[own])
        parts.append(preference_losses.answers(log_p_BL, tokens_B, shared_B, config))
    counted, means = zip(*parts, strict=True)
    return torch.cat(counted).numpy(), torch.cat(means).numpy()
