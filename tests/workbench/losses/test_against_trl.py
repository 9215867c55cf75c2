"""Loss and gradient of preference and policy losses against those of the installed TRL, over one model and batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench.config.sections.prefer_config import PreferConfig
from workbench.config.sections.reinforce_config import ReinforceConfig
from workbench.losses import policy_losses, preference_losses

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
BETA, GAMMA, WORTH = 0.3, 0.4, 1.3
PAIRS = [
    {"prompt": "Once upon a time", "chosen": " there was a girl.", "rejected": " no."},
    {"prompt": "The dog", "chosen": " ran.", "rejected": " was very, very big and it barked at everyone."},
    {"prompt": "She saw a", "chosen": " red bird in the tree", "rejected": " red car on the road"},
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS
    for name in ("chosen", "rejected")
][1:]


@pytest.fixture
def models(stories: str) -> tuple[nn.Module, nn.Module]:
    """A model and its reference, from which it has moved."""
    model, reference = (AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32) for _ in range(2))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    return model, reference


def log_probs(model: nn.Module, ids_BL: Tensor, mask_BL: Tensor, attended_BL: Tensor | None = None) -> Tensor:
    """Log-probabilities of tokens by those before them; 0 where the mask is."""
    logits = model(input_ids=ids_BL, attention_mask=attended_BL).logits[:, :-1].double()
    log_p_BL = logits.log_softmax(-1).gather(2, ids_BL[:, 1:, None])[..., 0]
    return log_p_BL.masked_fill(~mask_BL[:, 1:].bool(), 0)


def judged(model_BL: Tensor, reference_BL: Tensor, mask_BL: Tensor, config: PreferConfig, **words: Any) -> Tensor:
    """Our loss, of answers whose pairs follow one another."""
    tokens_B = mask_BL[:, 1:].sum(1)
    shared_B = tokens_B.view(-1, 2).min(1).values.repeat_interleave(2) if config.pairs else tokens_B
    own, other = (preference_losses.answers(each, tokens_B, shared_B, config) for each in (model_BL, reference_BL))
    words = {"desired_B": torch.ones(len(tokens_B), dtype=torch.bool), "margin_P": torch.zeros(()), **words}
    counted_B = other.counted_B if config.compares else None
    return preference_losses.judge(own, counted_B, config, beta=config.beta, **words).loss_P.mean()


def assert_same(model: nn.Module, own: Tensor, theirs: Tensor) -> None:
    assert own.item() == pytest.approx(theirs.item(), rel=2e-5, abs=1e-6)
    weights = list(model.parameters())
    gradients = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in (own, theirs)]
    scale = max(each.abs().max() for each in gradients[1])
    assert scale > 1e-3
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5 * float(scale))


def plain(config: Any, folder: Path, **words: Any) -> Any:
    rows = {"per_device_train_batch_size": 3, **words}
    return config(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, **rows
    )


def first_batch(trainer: Any) -> dict[str, Tensor]:
    return dict(trainer._prepare_inputs(next(iter(trainer.get_train_dataloader()))))


@pytest.mark.parametrize(
    ("loss", "theirs"),
    {
        "dpo": {"loss_type": "sigmoid"},
        "ipo": {"loss_type": "ipo"},
        "hinge": {"loss_type": "hinge"},
        "robust": {"loss_type": "robust", "label_smoothing": 0.1},
    }.items(),
)
def test_dpo_and_its_relatives(
    loss: str, theirs: dict[str, Any], models: tuple[nn.Module, nn.Module], stories: str, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    model, reference = models
    trainer = trl.DPOTrainer(
        model,
        ref_model=reference,
        args=plain(trl.DPOConfig, tmp_path, beta=BETA, **theirs),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=AutoTokenizer.from_pretrained(stories),
    )
    batch = first_batch(trainer)
    pairs = torch.arange(6).view(2, 3).T.flatten()  # theirs has all chosen answers first
    ids_BL, mask_BL, attended_BL = (batch[name][pairs] for name in ("input_ids", "completion_mask", "attention_mask"))
    own_BL = log_probs(trainer.model, ids_BL, mask_BL, attended_BL)
    with torch.no_grad():
        reference_BL = log_probs(reference, ids_BL, mask_BL, attended_BL)
    own = judged(own_BL, reference_BL, mask_BL, PreferConfig.model_validate({"loss": loss, "beta": BETA}))
    assert_same(model, own, trainer.compute_loss(trainer.model, batch))


def test_kto(models: tuple[nn.Module, nn.Module], stories: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    model, reference = models
    words = {"beta": BETA, "desirable_weight": WORTH, "per_device_train_batch_size": len(JUDGED)}
    trainer = trl.KTOTrainer(
        model,
        ref_model=reference,
        args=plain(trl.KTOConfig, tmp_path, **words),
        train_dataset=Dataset.from_list(JUDGED),
        processing_class=AutoTokenizer.from_pretrained(stories),
    )
    batch = first_batch(trainer)
    names = ("input_ids", "completion_mask", "attention_mask")
    ids_BL, mask_BL, attended_BL = (batch[name] for name in names)
    own_BL = log_probs(trainer.model, ids_BL, mask_BL, attended_BL)
    with torch.no_grad():
        reference_BL = log_probs(reference, ids_BL, mask_BL, attended_BL)
        mismatched = [batch[f"KL_{name}"] for name in names]  # each prompt with another one's answer
        ratio_B = log_probs(trainer.model, *mismatched).sum(1) - log_probs(reference, *mismatched).sum(1)
    own = judged(
        own_BL,
        reference_BL,
        mask_BL,
        PreferConfig.model_validate({"loss": "kto", "beta": BETA, "desirable": WORTH}),
        desired_B=torch.tensor([bool(each) for each in batch["label"]]),
        baseline=preference_losses.kto_baseline(ratio_B.mean()),
    )
    assert_same(model, own, trainer.compute_loss(trainer.model, batch))


@pytest.mark.parametrize("loss", ["orpo", "cpo", "simpo"])
def test_losses_without_a_reference(
    loss: str, models: tuple[nn.Module, nn.Module], stories: str, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    from trl.experimental import cpo, orpo

    words: dict[str, Any] = {"beta": BETA, "max_length": 64}
    config, trainer_class = (orpo.ORPOConfig, orpo.ORPOTrainer) if loss == "orpo" else (cpo.CPOConfig, cpo.CPOTrainer)
    if loss == "simpo":
        words |= {"loss_type": "simpo", "simpo_gamma": GAMMA, "cpo_alpha": 0.0}
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.pad_token = tokenizer.eos_token
    one = {"per_device_train_batch_size": 1}  # of several, theirs averages -log p over the tokens of all
    trainer = trainer_class(
        models[0],
        args=plain(config, tmp_path, **one, **words),
        train_dataset=Dataset.from_list(PAIRS[1:2]),
        processing_class=tokenizer,
    )
    batch = first_batch(trainer)
    if loss == "orpo":  # without -log p, which theirs takes of the prompt, too, and the paper of the answer alone
        theirs = -trainer.odds_ratio_loss(*trainer.concatenated_forward(trainer.model, batch)[:2])[0].mean()
    else:
        theirs = trainer.compute_loss(trainer.model, batch)
    log_p, masks = [], []
    for name in ("chosen", "rejected"):
        masks.append(batch[f"{name}_labels"] != -100)
        log_p.append(log_probs(trainer.model, batch[f"{name}_input_ids"], masks[-1]))
    width = max(each.shape[1] for each in masks)
    own_BL = torch.cat([nn.functional.pad(each, (0, width - 1 - each.shape[1])) for each in log_p])
    mask_BL = torch.cat([nn.functional.pad(each, (0, width - each.shape[1])) for each in masks])
    settings = {"loss": loss, "beta": BETA, **({"gamma": GAMMA} if loss == "simpo" else {})}
    config = PreferConfig.model_validate({**settings, **({"alpha": 0} if loss == "orpo" else {})})
    assert_same(models[0], judged(own_BL, own_BL, mask_BL, config), theirs)


def length_reward(completions: list[str], **_: Any) -> list[float]:
    return [len(each) / 10 + each.count("e") for each in completions]


POLICIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "grpo": ("GRPO", {"loss_type": "grpo"}, "answer"),
    "dr_grpo": ("GRPO", {"loss_type": "dr_grpo", "scale_rewards": "none"}, "constant"),
    "dapo": ("GRPO", {"loss_type": "dapo", "epsilon_high": 0.28}, "token"),
    "rloo": ("RLOO", {"beta": 0.0}, "whole"),
    "gspo": (
        "GRPO",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "mean_ratio",
    ),
    "cispo": ("GRPO", {"loss_type": "cispo", "epsilon_high": 5.0}, "token"),
}


@pytest.mark.parametrize("method", POLICIES)
@pytest.mark.parametrize("moved", [False, True])
def test_policy_losses(
    method: str, moved: bool, models: tuple[nn.Module, nn.Module], stories: str, tmp_path: Path
) -> None:
    """`moved`: the weights have changed since the answers were written, so that ratios differ from 1, and are cut."""
    trl = pytest.importorskip("trl")
    name, words, normalise = POLICIES[method]
    model, _ = models
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.pad_token = tokenizer.eos_token
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12}
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        reward_funcs=length_reward,
        args=plain(getattr(trl, f"{name}Config"), tmp_path, temperature=1.0, **sizes, **words),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in PAIRS[:2]]),
        processing_class=tokenizer,
    )
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    order = sorted(range(8), key=lambda row: inputs["prompt_ids"][row].tolist())  # answers to one prompt together
    inputs = {key: each[order] if torch.is_tensor(each) and each.ndim else each for key, each in inputs.items()}
    ids_BL = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attended_BL = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    mask_BL = inputs["completion_mask"].bool()
    width = mask_BL.shape[1]

    def written() -> Tensor:
        return log_probs(model, ids_BL, attended_BL, attended_BL)[:, -width:].masked_fill(~mask_BL, 0)

    with torch.no_grad():
        old_BL = written()
        if moved:
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * (0.004 if normalise == "whole" else 0.02))
    inputs |= {"old_per_token_logps": old_BL, "old_logps": old_BL.sum(1)}
    completions = tokenizer.batch_decode(inputs["completion_ids"], skip_special_tokens=True)
    config = ReinforceConfig.model_validate({"method": method, "answers": 4})
    reward_PG = torch.tensor(length_reward(completions), dtype=torch.float64).view(2, 4)
    advantage: dict[str, Callable[[], Tensor]] = {
        "leave_one_out": lambda: policy_losses.leave_one_out(reward_PG),
        "group": lambda: policy_losses.group_advantages(reward_PG, scaled=False),
        "group_scaled": lambda: policy_losses.group_advantages(reward_PG, scaled=True),
    }
    assert config.settings.baseline is not None and config.settings.normalise == normalise
    loss_B, clipped_BL = policy_losses.policy_loss(
        written(),
        old_BL,
        advantage[config.settings.baseline]().reshape(-1, 1).expand_as(mask_BL),
        mask_BL,
        low=config.settings.clip,
        high=config.settings.clip_high,
        normalise=config.settings.normalise,
        longest=12,
        beyond=config.settings.beyond,
    )
    assert bool(clipped_BL.any()) == moved
    items = int(mask_BL.sum()) if normalise == "token" else 8
    assert_same(model, loss_B.sum() / items, trainer.compute_loss(model, inputs))
