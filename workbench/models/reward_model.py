"""A backbone whose head gives each answer to a prompt, or each of its steps, one number: how good it is.

Legend: S answers of a micro-batch, of a pair first the chosen and then the rejected one; N their steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.data.batching import Indices, MicroBatch
from workbench.data.labelled.labels import Labels
from workbench.data.labelled.text_reader import TextReader
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import PreferenceSet
from workbench.errors import BackboneError
from workbench.losses.ranking_losses import bradley_terry, step_cross_entropy
from workbench.models import classifier, exported
from workbench.models.classifier import Classifier

LABELS = Labels("number", ("reward",))  # the one output is the reward as it is: nothing is standardised
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RewardModel:
    """A classifier with one output, which reads prompt and answer as a chat template writes them."""

    classifier: Classifier
    tokenizer: PreTrainedTokenizerBase
    template: ChatEncoder

    @property
    def model(self) -> nn.Module:
        """Backbone, adapter and head."""
        return self.classifier.model

    def rewards(self, batch: MicroBatch) -> Tensor:
        """Reward (S,) of each row, float32: the head's output at its last token."""
        if "row_starts" in batch.inputs:  # packed
            end = batch.rows + 1 if batch.filler else None
            last_S = batch.inputs["row_starts"][1:end].long() - 1
        else:
            assert batch.lengths_B is not None, "padded rows say how long they are"
            length = batch.inputs["input_ids"].shape[1]
            last_S = torch.arange(len(batch.lengths_B), device=batch.lengths_B.device) * length + batch.lengths_B - 1
        return self.classifier.outputs(replace(batch, positions_N=last_S))[:, 0].float()

    def pair_loss(self, train: PreferenceSet, *, centre: float) -> Callable[[MicroBatch, float], Tensor]:
        """The summed loss of a micro-batch of pairs, as the trainer wants it, with the weights and margins of `train`.
        `centre`: see `bradley_terry`."""
        of_rewards = judged_loss(train, centre=centre)

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            reward_S = self.rewards(batch)
            numbers = batch.rows_B if batch.rows_B is not None else np.zeros(len(reward_S) // 2, dtype=np.int64)
            return of_rewards(reward_S, numbers, scale)

        return loss

    def step_logits(self, batch: MicroBatch) -> Tensor:
        """Logit (N,) that each step is right, float32: the head's output at its last token."""
        return self.classifier.outputs(batch)[:, 0].float()

    def step_loss(self, batch: MicroBatch, scale: float) -> Tensor:
        """The summed loss of a micro-batch of answers whose steps are rated, as the trainer wants it."""
        loss_N = step_cross_entropy(self.step_logits(batch), batch.labels_N)
        return (loss_N if batch.weights_N is None else loss_N * batch.weights_N).sum() * scale


def judged_loss(train: PreferenceSet, *, centre: float) -> Callable[[Tensor, Indices, float], Tensor]:
    """From the rewards (S,) of pairs, their numbers in `train` and a factor to their summed loss times the factor.
    `centre`: see `bradley_terry`."""
    margins_P, weights_P = train.margins, np.asarray(train.supervised, dtype=np.float64)
    ties_P = train.ties if train.ties.any() else None

    def loss(reward_S: Tensor, numbers: Indices, scale: float) -> Tensor:
        chosen_P, rejected_P = reward_S.unflatten(0, (-1, 2)).unbind(1)
        margin_P, weight_P = (torch.from_numpy(each[numbers]).to(chosen_P) for each in (margins_P, weights_P))
        tie_P = None if ties_P is None else torch.from_numpy(ties_P[numbers]).to(chosen_P.device)
        loss_P = bradley_terry(chosen_P, rejected_P, margin_P, centre=centre, tie_P=tie_P)
        return (loss_P * weight_P).sum() * scale

    return loss


def settle_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Pad with a token that ends no answer: a stock model takes the last token that is no padding for a row's end.

    The text of a special token is looked for in all that is read. So an ordinary one, where nothing else is there, is
    one from the end of the vocabulary, and not the first, which may be an exclamation mark.
    """
    if tokenizer.pad_token not in (None, tokenizer.eos_token):
        return
    size = tokenizer.vocab_size
    rare = tokenizer.convert_ids_to_tokens([size - 1, size - 2])
    some = [tokenizer.unk_token, tokenizer.bos_token, *tokenizer.added_tokens_encoder, *rare]
    tokenizer.pad_token = next(token for token in some if token not in (None, tokenizer.eos_token))


def make(
    model: nn.Module,
    backbone: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder,
    config: RunConfig,
) -> RewardModel:
    """How `model` comes to an answer's reward. Raises BackboneError: its head reads the first token, which has seen
    nothing in a causal model, or all of an encoder."""
    reader = TextReader(tokenizer, config.data, config.classes, config.duplicates)
    scorer = classifier.classification_model(model, backbone, reader, LABELS)
    if scorer.token_head is None:
        raise BackboneError(
            f"model.id={config.model.id}: {type(backbone).__name__} is an encoder, and recipe reward reads "
            "conversations with a causal backbone. Take one, or write recipe=classify with classes.kind=pair."
        )
    return RewardModel(scorer, tokenizer, template)


def save(live: RewardModel, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
    """Write adapter, head, tokenizer and chat template into `folder`, atomically: a stock model with one label.
    `adapter`: writes the adapter, where the model holds several and only one is meant."""
    live.tokenizer.chat_template = live.template.source
    classifier.save(live.classifier, folder, adapter=adapter)


def load(
    run: Path,
    config: RunConfig,
    template: Callable[[PreTrainedTokenizerBase], ChatEncoder],
    *,
    waiting: bool = False,
) -> RewardModel:
    """The reward model that the run at `run` shipped, in evaluation mode. `template`: how conversations are written,
    from the tokenizer that was saved."""
    tokenizer = exported.load_tokenizer(run, config)
    return RewardModel(classifier.load(run, config, waiting=waiting), tokenizer, template(tokenizer))
