"""The bank is exact: K adapters trained together equal K adapters trained alone with plain PEFT and plain AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.conftest import tiny
from tests.workbench.training.together import LabelledSet, Texts, Together, Trained, bert, class_outputs, section
from workbench import adapters, losses
from workbench.adapters import anatomy
from workbench.adapters.banks import bank as banks
from workbench.config import ModelConfig, RunConfig
from workbench.data.batching import MicroBatch, global_batch
from workbench.errors import TrainingError
from workbench.models import backbones, classifier, output_heads
from workbench.training.bank_trainer import BankTrainer, Objective, Predict
from workbench.training.optim import schedules

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


DIFFERENT = (
    section(seed=0, size=6, learning_rate=5e-3, weight_decay=0.1),
    section(seed=1, size=4, learning_rate=2e-3, steps=13, max_grad_norm=0.05, adapter={"rank": 5, "alpha": 3}),
    section(seed=2, size=5, learning_rate=8e-3, schedule="cosine", patience=3, adapter={"method": "lora+"}),
)
"""Members with their own learning rate, length, clipping, rank; the last is stopped early, after step 8."""


def head_outputs(model: PreTrainedModel, member: str, bank: banks.Bank) -> tuple[Predict, Objective]:
    """Next-token loss as the recipe computes it."""
    with bank.only(member):
        head = output_heads.find(bank.model, model)

    def objective(hidden_ND: Tensor, labels_N: Tensor, scale: float) -> Tensor:
        return losses.next_token(hidden_ND, labels_N, head.project, vocabulary=head.vocabulary, weights=[], scale=scale)

    return lambda batch: head.hidden(bank.model, batch.inputs).flatten(0, 1)[batch.positions_N], objective


def alone(
    model: PreTrainedModel, data: Sequence[Texts], configs: Sequence[RunConfig], ends: Sequence[int], dtype: torch.dtype
) -> Trained:
    """Each adapter by itself: plain PEFT, plain AdamW, the batch in one piece, the loss written out."""
    found = Trained([], [])
    for examples, config, end in zip(data, configs, ends, strict=True):
        peft = adapters.attach(copy.deepcopy(model), config.adapter, seed=config.seed).train()
        named = {name: each for name, each in peft.named_parameters() if each.requires_grad}
        assert {each.dtype for each in named.values()} == {dtype}
        groups = [
            {
                "params": [each],
                "weight_decay": config.train.weight_decay if each.ndim > 1 else 0.0,
                "factor": 16 if config.adapter.method == "lora+" and "lora_B" in name else 1,
            }
            for name, each in named.items()
        ]
        optimizer = torch.optim.AdamW(groups, foreach=False)
        found.losses.append([])
        for step in range(end):
            rows = global_batch(step, rows=len(examples), size=config.batch.size, seed=config.seed)
            loss = _plain_loss(peft, examples.batch(rows))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(list(named.values()), config.train.max_grad_norm)
            peak = config.train.learning_rate * schedules.factor((step + 0.5) / config.train.steps, config.schedule)
            for group in optimizer.param_groups:
                group["lr"] = peak * group["factor"]
            optimizer.step()
            found.losses[-1].append(loss.item())
        found.tensors.append({name: each.detach() for name, each in named.items()})
    return found


def _plain_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    logits = model(**batch.inputs).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1)[batch.positions_N] if logits.ndim == 3 else logits, batch.labels_N)


def assert_same(trained: Trained, wanted: Trained, *, losses: float, adapters: float) -> None:
    for curve, wanted_curve in zip(trained.losses, wanted.losses, strict=True):
        assert curve == pytest.approx(wanted_curve, rel=losses)
    for tensors, wanted_tensors in zip(trained.tensors, wanted.tensors, strict=True):
        assert tensors.keys() == wanted_tensors.keys()
        flat, wanted_flat = (
            torch.cat([each[name].flatten() for name in tensors]) for each in (tensors, wanted_tensors)
        )
        assert (flat - wanted_flat).norm() <= adapters * wanted_flat.norm()


STEPS = (20, 13, 8)
"""Steps that the members of DIFFERENT do."""


def test_bank_of_llama_equals_three_trainings_with_plain_peft(tmp_path: Path) -> None:
    """Different data, lengths, batch sizes, seeds, ranks, rates, decays, clipping, schedules and early stops."""
    model = tiny("Llama").double().requires_grad_(False)
    data = [Texts(50, 1), Texts(23, 2, shortest=9), Texts(31, 3)]
    wanted = alone(model, data, DIFFERENT, STEPS, torch.float64)
    # Several micro-batches, in which not every member has rows, and one of packed rows.
    for tokens, packed in ((40, False), (10_000, True)):
        folder = tmp_path / f"{tokens}-{packed}"
        found = Together(model, data, DIFFERENT, folder, head_outputs, tokens=tokens, packed=packed).fit()
        assert_same(found, wanted, losses=1e-5, adapters=1e-4)
    assert all(curve[-1] < 0.95 * curve[0] for curve in (wanted.losses[0], wanted.losses[2]))


def test_bank_of_bert_classifiers_equals_three_trainings_with_plain_peft(tmp_path: Path) -> None:
    """The heads are stacked too. No float32 in the loss here, so nothing but the order of sums differs."""
    model = bert()
    data = [LabelledSet(50, 1), LabelledSet(23, 2, shortest=9), LabelledSet(31, 3)]
    wanted = alone(model, data, DIFFERENT, STEPS, torch.float64)
    found = Together(model, data, DIFFERENT, tmp_path, class_outputs).fit()
    assert_same(found, wanted, losses=1e-10, adapters=1e-10)
    assert any("classifier" in name for name in found.tensors[0])


@pytest.mark.parametrize(
    ("weights", "compute", "losses", "adapters"),
    [
        ("nf4", "float32", 1e-5, 1e-4),
        pytest.param("int8", "float32", 1e-5, 1e-4, marks=pytest.mark.slow),
        pytest.param("nf4", "bfloat16", 1e-2, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_bank_over_quantised_weights(
    weights: str, compute: str, losses: float, adapters: float, short_stories: str, tmp_path: Path
) -> None:
    """In the precision that computes; the rates are such that a step does not amplify its rounding."""
    config = ModelConfig.model_validate({"id": short_stories, "weights": weights, "compute": compute})
    model = backbones.load(config, backbones.tokenizer(config)).model
    gentle = [
        each.model_copy(
            update={"train": each.train.model_copy(update={"learning_rate": 0.1 * each.train.learning_rate})}
        )
        for each in DIFFERENT
    ]
    data = [Texts(50, 1, vocabulary=500), Texts(23, 2, vocabulary=500), Texts(31, 3, vocabulary=500)]
    wanted = alone(model, data, gentle, STEPS, torch.float32)
    found = Together(model, data, gentle, tmp_path, head_outputs, compute=getattr(torch, compute), tokens=200).fit()
    assert_same(found, wanted, losses=losses, adapters=adapters)


@pytest.mark.nightly(but=["bert"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_packed_rows_of_members_drop_what_padded_ones_do(kind: str, tmp_path: Path) -> None:
    dropped = [
        section(steps=8, seed=seed, size=6 - seed, adapter={"dropout": 0.4, "rank": 3 + seed}) for seed in range(3)
    ]
    if kind == "llama":
        model, rows, outputs = tiny("Llama").double().requires_grad_(False), Texts, head_outputs
    else:
        model, rows, outputs = bert(), LabelledSet, _narrowed_outputs
    data = [rows(20, seed) for seed in range(3)]
    padded, packed = (
        Together(model, data, dropped, tmp_path / str(way), outputs, packed=way).fit() for way in (False, True)
    )
    # Next-token losses have float32 parts.
    assert_same(packed, padded, **dict.fromkeys(("losses", "adapters"), 1e-5 if kind == "llama" else 1e-10))


def _narrowed_outputs(model: PreTrainedModel, member: str, bank: banks.Bank) -> tuple[Predict, Objective]:
    """The last block passes the first token of each row on, as a classifier's does."""
    with bank.only(member):
        rows = LabelledSet(2, 0).batch(np.arange(2)).inputs
        classifier.narrow_last_block(bank.model, model, rows)
    assert classifier.first_tokens_read_packed(model)
    return class_outputs(model, member, bank)


def test_a_member_that_ended_stays_as_it_is_and_costs_nothing(tmp_path: Path) -> None:
    short, long = section(steps=3, learning_rate=1e-2), section(steps=6, seed=1)
    data = [LabelledSet(24, 1), LabelledSet(24, 2)]
    wanted = Together(bert(), data[:1], [short], tmp_path / "alone", class_outputs).fit()
    together = Together(bert(), data, [short, long], tmp_path / "both", class_outputs)
    seen: list[int] = []
    together.outputs = lambda model, member, bank: _counting(seen, class_outputs(model, member, bank))
    found = together.fit()
    assert [len(losses) for losses in found.losses] == [3, 6]
    assert_same(Trained(found.losses[:1], found.tensors[:1]), wanted, losses=1e-10, adapters=1e-10)
    assert sum(seen) == 3 * (6 + 6) + 3 * 6  # rows, by steps


def test_running_out_of_memory_repeats_the_step_in_smaller_pieces(tmp_path: Path) -> None:
    configs, data = [section(steps=4), section(steps=4, seed=1)], [LabelledSet(24, 1), LabelledSet(24, 2)]
    wanted = Together(bert(), data, configs, tmp_path / "calm", class_outputs, tokens=60).fit()
    hurt = Together(bert(), data, configs, tmp_path / "hurt", class_outputs, tokens=60)
    calls: list[int] = []
    hurt.outputs = lambda model, member, bank: _scarce(calls, class_outputs(model, member, bank))
    found = hurt.fit()
    assert max(calls) > 30 and max(calls[-4:]) <= 30, "it went on in smaller pieces"
    assert found.callback.said and "Out of memory" in found.callback.said[0]
    assert_same(found, wanted, losses=1e-10, adapters=1e-10)


def _scarce(calls: list[int], outputs: tuple[Predict, Objective]) -> tuple[Predict, Objective]:
    """From the second step on, no room for the second of its larger pieces: after gradients of the first."""
    predict, objective = outputs

    def cramped(batch: MicroBatch) -> Tensor:
        calls.append(batch.inputs["input_ids"].numel())
        if len(calls) > 4 and calls[-1] > 30 and calls[-2] > 30:
            raise torch.OutOfMemoryError("fake")
        return predict(batch)

    return cramped, objective


@pytest.mark.nightly(but=["llama-True", "bert-False"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_activations_that_are_computed_again_change_nothing(kind: str, packed: bool, tmp_path: Path) -> None:
    configs = [section(steps=4, seed=seed, adapter={"dropout": 0.3, "rank": 3 + seed}) for seed in range(2)]
    if kind == "llama":
        model, rows, outputs = tiny("Llama").double().requires_grad_(False), Texts, head_outputs
    else:
        model, rows, outputs = bert(), LabelledSet, _narrowed_outputs
    data = [rows(20, seed) for seed in range(2)]
    passes: dict[str, list[int]] = {"kept": [], "again": []}
    whole = Together(model, data, configs, tmp_path / "kept", outputs, packed=packed)
    whole.during = lambda fit: _passes(fit, passes["kept"])
    kept = whole.fit()
    again = [
        each.model_copy(update={"train": each.train.model_copy(update={"checkpointing": True})}) for each in configs
    ]
    recomputed = Together(model, data, again, tmp_path / "again", outputs, packed=packed)
    recomputed.during = lambda fit: _passes(fit, passes["again"])
    found = recomputed.fit()
    assert found.losses == kept.losses
    for one, other in zip(found.tensors, kept.tensors, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert len(passes["again"]) == 2 * len(passes["kept"]) > 0


@contextmanager
def _passes(fit: BankTrainer, passes: list[int]) -> Iterator[None]:
    """Count the passes of training through the first layer of each block."""
    for block in anatomy.blocks(fit.bank.model)[0]:
        next(fit.bank.model.get_submodule(block).children()).register_forward_pre_hook(lambda *_: passes.append(1))
    yield


@pytest.mark.parametrize("auto", [True, False])
def test_what_does_not_fit_at_all_is_computed_again_where_nobody_forbids_it(auto: bool, tmp_path: Path) -> None:
    configs, data = [section(steps=3), section(steps=3, seed=1)], [LabelledSet(24, 1), LabelledSet(24, 2)]
    if not auto:
        configs = [
            each.model_copy(update={"train": each.train.model_copy(update={"checkpointing": False})})
            for each in configs
        ]
    wanted = Together(bert(), data, configs, tmp_path / "calm", class_outputs, tokens=60).fit()
    hurt = Together(bert(), data, configs, tmp_path / "hurt", class_outputs, tokens=60)
    hurt.outputs = lambda model, member, bank: _only_recomputed(model, class_outputs(model, member, bank))
    if not auto:
        with pytest.raises(TrainingError, match="Not even one example fits"):
            hurt.fit()
        return
    found = hurt.fit()
    assert any("recomputing activations" in sentence for sentence in found.callback.said)
    assert_same(found, wanted, losses=1e-10, adapters=1e-10)


def _only_recomputed(model: PreTrainedModel, outputs: tuple[Predict, Objective]) -> tuple[Predict, Objective]:
    """No room for any activations that are kept."""
    predict, objective = outputs
    blocks = [model.get_submodule(name) for name in anatomy.blocks(model)[0]]

    def cramped(batch: MicroBatch) -> Tensor:
        if torch.is_grad_enabled() and not all(block.training for block in blocks):
            raise torch.OutOfMemoryError("fake")
        return predict(batch)

    return cramped, objective


def _counting(seen: list[int], outputs: tuple[Predict, Objective]) -> tuple[Predict, Objective]:
    predict, objective = outputs

    def counted(batch: MicroBatch) -> Tensor:
        seen.append(len(batch.inputs["input_ids"]))
        return predict(batch)

    return counted, objective


def _values(parameters: Sequence[nn.Parameter]) -> None:
    for each in parameters:
        each.data.fill_(torch.nan)


def _gradients(parameters: Sequence[nn.Parameter]) -> None:
    parameters[0].register_hook(lambda gradient: gradient * torch.inf)


@pytest.mark.parametrize(("harm", "what"), [(_values, "loss"), (_gradients, "norm of the gradient")])
def test_a_member_that_diverges_ends_alone(
    harm: Callable[[Sequence[nn.Parameter]], None], what: str, tmp_path: Path
) -> None:
    configs = [section(steps=4), section(steps=4, seed=1), section(steps=4, seed=2)]
    data = [LabelledSet(20, 1), LabelledSet(20, 2), LabelledSet(20, 3)]
    wanted = Together(bert(), data, configs, tmp_path / "sane", class_outputs).fit()
    mad = Together(bert(), data, configs, tmp_path / "mad", class_outputs)
    mad.prepare = lambda bank: harm([*bank.parameters_of(bank.members[1]).values()])
    found = mad.fit()
    assert [len(losses) for losses in found.losses] == [4, 0, 4]
    assert_same(
        Trained(found.losses[::2], found.tensors[::2]),
        Trained(wanted.losses[::2], wanted.tensors[::2]),
        losses=1e-10,
        adapters=1e-10,
    )
    (said,) = found.callback.said
    assert f"member0001 ends here; the others go on. The {what} is not finite at step 1" in said
