"""The head that a backbone is loaded with: text, hidden tokens, or classes, whose fresh head ships with the adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BertConfig,
    LlamaConfig,
    LlavaConfig,
    MoonshineConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3_5Config,
    T5Config,
    ViTConfig,
    WhisperConfig,
)

from tests.conftest import MINILM, T5_SIZES, tiny
from workbench import adapters
from workbench.adapters import Lora
from workbench.cli.console import Terminal
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.model_heads import MASKED, TEXT, ModelHead
from workbench.data.batching import Indices, MicroBatch, encoder_inputs
from workbench.errors import BackboneError
from workbench.models import backbones
from workbench.runs import metrics_log, run_directory
from workbench.training.freezing import freezer as freezing
from workbench.training.signal import TrainingSignal
from workbench.training.trainer import Trainer

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

INTENTS = model_heads.classes(["card_arrival", "exchange_rate", "lost_card"], seed=0)
SENTENCES = {
    "card_arrival": [
        "I am still waiting on my card, when will it come?",
        "Has my new card been sent yet?",
        "How long until the card arrives by post?",
        "I ordered a card two weeks ago and it is not here.",
    ],
    "exchange_rate": [
        "What is the rate for changing euros into pounds?",
        "Do you use the interbank exchange rate?",
        "How do you decide what my dollars are worth?",
        "The exchange rate was not what I expected.",
    ],
    "lost_card": [
        "I cannot find my card anywhere, help!",
        "Somebody stole my wallet with the card in it.",
        "Please block the card that I lost.",
        "My card is missing and I am worried.",
    ],
}


@pytest.mark.parametrize(
    ("task", "config", "name"),
    [
        (TEXT, LlamaConfig(), "AutoModelForCausalLM"),
        (TEXT, Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"]), "AutoModelForImageTextToText"),
        (TEXT, Qwen3_5Config(architectures=["Qwen3_5ForCausalLM"]), "AutoModelForCausalLM"),
        (TEXT, LlavaConfig(), "AutoModelForImageTextToText"),
        (TEXT, T5Config(), "AutoModelForSeq2SeqLM"),
        (TEXT, BartConfig(), "AutoModelForSeq2SeqLM"),
        (TEXT, BartConfig(is_encoder_decoder=False), "AutoModelForCausalLM"),
        (MASKED, BertConfig(), "AutoModelForMaskedLM"),
        (INTENTS, LlamaConfig(), "AutoModelForSequenceClassification"),
        (INTENTS, ViTConfig(), "AutoModelForImageClassification"),
    ],
)
def test_the_architecture_and_the_task_decide_the_class(task: ModelHead, config: PretrainedConfig, name: str) -> None:
    assert task.auto_class(config).__name__ == name


@pytest.mark.parametrize(
    ("task", "config", "cure"),
    [
        (
            TEXT,
            ViTConfig(),
            "no causal language model. .* AutoModelForCausalLM or AutoModelForImageTextToText or AutoModelForSeq2SeqLM",
        ),
        (TEXT, WhisperConfig(), "WhisperConfig has no sequence-to-sequence language model"),
        (MASKED, LlamaConfig(), "LlamaConfig has no masked language model. .* AutoModelForMaskedLM loads"),
        (
            INTENTS,
            MoonshineConfig(),
            "no classification head. .* or AutoModelForAudioClassification",
        ),
    ],
)
def test_an_architecture_without_that_head_is_refused(task: ModelHead, config: PretrainedConfig, cure: str) -> None:
    with pytest.raises(BackboneError, match=cure):
        task.auto_class(config)


@dataclass
class Sentences:
    """Sentences with a label each, as the engine wants examples."""

    rows: list[Indices]
    labels: Indices

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Indices:
        return np.asarray([len(row) for row in self.rows])

    @property
    def supervised(self) -> Indices:
        return np.ones(len(self), dtype=np.int64)

    def place(self, index: int) -> str:
        return f"row {index + 1}"

    def sample(self, draws: Indices, *, epoch: int) -> Indices:
        return draws

    @property
    def difficulty(self) -> None:
        return None

    def seen(self, *, epoch: int, step: int, steps: int | None = None) -> Sentences:
        return self

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        rows = [self.rows[int(index)] for index in indices]
        everyone = torch.arange(len(rows))
        return MicroBatch(encoder_inputs(rows), everyone, torch.from_numpy(self.labels[indices]), sum(map(len, rows)))


def _sentences(tokenizer: PreTrainedTokenizerBase) -> Sentences:
    texts = [(number, text) for number, texts in enumerate(SENTENCES.values()) for text in texts]
    rows = [np.asarray(tokenizer(text)["input_ids"], dtype=np.int64) for _, text in texts]
    return Sentences(rows, np.asarray([number for number, _ in texts]))


def _loss(model: Any) -> Callable[[MicroBatch, float], Tensor]:
    def loss(batch: MicroBatch, scale: float) -> Tensor:
        logits = model(**batch.inputs).logits.float()
        return F.cross_entropy(logits[batch.positions_N], batch.labels_N, reduction="sum") * scale

    return loss


@torch.no_grad()
def _logits(model: Any, rows: Sentences) -> Tensor:
    logits: Tensor = model.eval()(**rows.batch(np.arange(len(rows))).inputs).logits.float()
    return logits


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param("float32", marks=pytest.mark.nightly),
        pytest.param("bfloat16", marks=pytest.mark.nightly),
        pytest.param("nf4", marks=pytest.mark.slow),
    ],
)
def test_a_real_encoder_learns_to_classify(weights: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """MiniLM with a fresh head, through the one loop, in micro-batches; what was saved gives the same logits."""
    section = {"id": MINILM, "weights": weights, "compute": "float32"}
    config = RunConfig.model_validate(
        {
            "recipe": "sft",
            "model": section,
            "adapter": {"method": "lora", "rank": 4, "alpha": 8},
            "data": {"train": "none.jsonl"},
            "batch": {"size": 12, "tokens_per_device": 64},
            "train": {"steps": 10, "learning_rate": 6e-3},
            "evaluate": {"every": None},
        }
    )
    tokenizer = backbones.tokenizer(config.model)
    rows = _sentences(tokenizer)
    backbone = backbones.load(config.model, tokenizer, task=INTENTS)
    freezer = freezing.attach(backbone.model, config, seed=0)
    model: Any = freezer.model
    assert model.config.id2label == {0: "card_arrival", 1: "exchange_rate", 2: "lost_card"}
    run = run_directory.start(tmp_path / "run", config, resume=False)
    request.addfinalizer(run.close)
    fit = Trainer(
        model,
        TrainingSignal(rows, _loss(model)),
        freezer,
        width=384,
        held_out=[],
        held_out_loss=lambda: 0.0,
        config=config,
        compute=backbone.compute,
        run=run,
        callback=Terminal(quiet=True),
    )
    fit.work()
    losses = [record["loss"] for record in metrics_log.read(run.path)]
    assert losses[0] == pytest.approx(np.log(3), abs=0.2) and losses[-1] < 0.5 * losses[0]
    wanted = _logits(model, rows)
    assert (wanted.argmax(1).numpy() == rows.labels).mean() > 0.9

    with fit.masters.exposed():
        adapters.save(model, tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name for name in saved if "classifier" in name} == {
        "base_model.model.classifier.weight",
        "base_model.model.classifier.bias",
    }
    other = model_heads.classes(INTENTS.labels, seed=7)  # the saved head, not the seeded one, must answer
    fresh = backbones.load(config.model, tokenizer, task=other).model
    loaded = adapters.load(fresh, tmp_path / "adapter")
    torch.testing.assert_close(_logits(loaded, rows), wanted, rtol=1e-5, atol=1e-5)


def test_the_seed_decides_the_fresh_head_and_nothing_else() -> None:
    def load(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed + 5)
        task = model_heads.classes(["a", "b"], seed=seed)
        return dict(backbones.load(ModelConfig(id=MINILM, weights="float32"), None, task=task).model.named_parameters())

    one, same, other = load(0), load(0), load(1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert [name for name in one if not torch.equal(one[name], other[name])] == ["classifier.weight"]
    assert one["classifier.weight"].std() == pytest.approx(0.02, rel=0.2)


def test_a_head_for_other_classes_is_replaced_and_a_missing_body_is_refused(tmp_path: Path) -> None:
    tiny("Bert", head="SequenceClassification", num_labels=5).save_pretrained(tmp_path)
    section = ModelConfig(id=str(tmp_path), weights="float32")
    assert backbones.load(section, None, task=INTENTS).model.config.num_labels == 3
    config = json.loads((tmp_path / "config.json").read_text())
    for change, cure in (({"num_hidden_layers": 3}, "16 of the tensors"), ({"vocab_size": 65}, "shapes")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(BackboneError, match=f"{cure}.*belong together"):
            backbones.load(section, None, task=INTENTS)


def test_a_backbone_without_the_head_that_the_recipe_needs_is_refused() -> None:
    """MiniLM is a sentence encoder: its weights have no head for hidden tokens."""
    with pytest.raises(BackboneError, match=r"tensors .* such as cls\.predictions"):
        backbones.load(ModelConfig(id=MINILM, weights="float32"), None, task=MASKED)


def test_images_are_classified_alike(tmp_path: Path) -> None:
    tiny("ViT", head="ImageClassification", image_size=8, patch_size=4, num_labels=2).save_pretrained(tmp_path / "vit")
    section = ModelConfig(id=str(tmp_path / "vit"), weights="float32")
    pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 1])

    def fresh() -> Any:
        return backbones.load(section, None, task=INTENTS).model

    model: Any = adapters.attach(fresh(), Lora(rank=4), seed=0)
    before = model(pixel_values=pixels).logits
    assert torch.equal(before, fresh()(pixel_values=pixels).logits)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(pixel_values=pixels).logits, labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    adapters.save(model, tmp_path / "adapter")
    loaded: Any = adapters.load(fresh(), tmp_path / "adapter")
    torch.testing.assert_close(loaded(pixel_values=pixels).logits, model(pixel_values=pixels).logits)
    with model.disable_adapter():
        assert torch.equal(model(pixel_values=pixels).logits, before)


def test_an_encoder_decoder_classifies_too(tmp_path: Path) -> None:
    tiny("T5", head="Seq2SeqLM", **T5_SIZES).save_pretrained(tmp_path)
    model = backbones.load(ModelConfig(id=str(tmp_path), weights="float32"), None, task=INTENTS).model
    assert model(input_ids=torch.tensor([[3, 4, 2]])).logits.shape == (1, 3)
