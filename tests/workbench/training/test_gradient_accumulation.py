"""Gradients of a loss of a whole global batch, taken in micro-batches, equal those of one graph of everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import tiny
from tests.run_files import write_lines
from workbench import adapters
from workbench.adapters import Lora
from workbench.adapters.row_dropout import RowDraw, drawing
from workbench.config import DataConfig, ModelConfig, RunConfig
from workbench.config.sections.embed_config import EmbedConfig
from workbench.data.batching import Indices, MicroBatch
from workbench.data.embedding import pair_records, pair_set
from workbench.data.embedding.pair_set import PairSet
from workbench.data.packing import PACKED, PADDED
from workbench.models import attention_backend, backbones, embedder
from workbench.models.embedder import EmbeddingLoss
from workbench.runs.ranks import ALONE
from workbench.training.gradient_accumulation import CachedGradients, Pull
from workbench.training.master_weights import MasterWeights
from workbench.training.signal import Units

STEP = 5
FORMS: dict[str, list[dict[str, Any]]] = {
    "pairs": [
        {"anchor": f"where is {n}" + " now" * (n % 5), "positive": f"{n} is here", "negatives": [f"no {n}"] * (n % 3)}
        for n in range(12)
    ],
    "scored": [
        {"sentence1": f"one {n}", "sentence2": f"other {n % 4}" + " so" * n, "score": n % 3 / 3} for n in range(12)
    ],
    "labelled": [{"text": f"{['cat', 'dog', 'cow'][n % 3]} says {n}" + " yes" * n, "label": n % 3} for n in range(12)],
}
CASES = {
    "contrastive": ("pairs", EmbedConfig()),
    "symmetric in three sizes": ("pairs", EmbedConfig(symmetric=True, sizes=(8, 16), pooling="last")),
    "dot product": ("pairs", EmbedConfig(normalise=False, temperature=2.0)),
    "triplet": ("pairs", EmbedConfig(loss="triplet", margin=0.4)),
    "cosent": ("scored", EmbedConfig()),
    "cosine": ("scored", EmbedConfig(loss="cosine")),
    "classes": ("labelled", EmbedConfig(symmetric=True)),
}


@pytest.fixture(scope="module")
def model(stories: str) -> Any:
    """Stories' tokenizer, and a tiny Llama without a head under LoRA with dropout."""
    attention_backend.register()
    backbone = tiny("Llama", vocab_size=512).base_model
    attached = adapters.attach(backbone, Lora(rank=4, dropout=0.3), seed=0).train()
    generator = torch.Generator().manual_seed(1)
    for parameter in attached.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return attached, backbone, backbones.tokenizer(ModelConfig(id=stories))


@pytest.mark.parametrize(("form", "config"), CASES.values(), ids=CASES.keys())
def test_equal_to_one_graph_for_any_micro_batch(model: Any, form: str, config: EmbedConfig, tmp_path: Path) -> None:
    attached, backbone, tokenizer = model
    rows = _rows(tmp_path, form, config, tokenizer)
    live = embedder.Embedder(attached, backbone, tokenizer, config)
    loss, chosen = EmbeddingLoss(live), np.asarray([7, 2, 11, 0, 5, 9])
    wanted, gradients = _plain(attached, loss, rows, chosen)
    assert wanted.item() > 0 and any(each.abs().max() > 1e-4 for each in gradients)
    for tokens, way in ((10_000, PADDED), (60, PADDED), (24, PADDED), (10_000, PACKED), (60, PACKED)):
        pull, around = Pull(loss), (partial(noise, packed=way.packed), ALONE, ALONE, torch.device("cpu"))
        cached = CachedGradients(pull, pull, MasterWeights(attached, torch.float32), way, *around)
        attached.zero_grad()
        found = cached.add(rows, chosen, step=STEP, tokens=tokens)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        for own, known in zip(_gradients(attached), gradients, strict=True):
            torch.testing.assert_close(own, known, rtol=1e-4, atol=1e-5 * float(known.abs().max()) + 1e-7)


@contextmanager
def noise(batch: MicroBatch, indices: Indices, seen: Units, *, step: int, packed: bool = False) -> Iterator[None]:
    """Dropout as training draws it."""
    with drawing([RowDraw(0, step, indices, seen.lengths[indices], packed)], torch.device("cpu")):
        yield


def _rows(folder: Path, form: str, config: EmbedConfig, tokenizer: Any) -> PairSet:
    path = folder / "rows.jsonl"
    write_lines(path, FORMS[form])
    source = pair_records.read(str(path), DataConfig(train=str(path)))
    found = pair_set.encode(source, tokenizer, config, max_tokens=40)
    if config.loss != "triplet":
        return found
    return found.with_negatives([found.positive_N[[(n + 1) % 12, (n + 5) % 12]] for n in range(12)])


def _plain(model: torch.nn.Module, loss: EmbeddingLoss, rows: PairSet, chosen: Any) -> tuple[Tensor, list[Tensor]]:
    """All texts at once in one graph, with the dropout of the step."""
    model.zero_grad()
    units, numbers, terms = loss.of(rows, chosen)
    batch = units.batch(numbers)
    with noise(batch, numbers, units, step=STEP):
        outputs_UD = loss.outputs(batch)
        whole = torch.stack([term(outputs_UD) for term in terms()]).sum()
        whole.backward()
    return whole.detach(), _gradients(model)


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_terms_are_the_same_however_few_similarities_are_held(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.models import embedder

    config = EmbedConfig(symmetric=True)
    rows = _rows(tmp_path, "pairs", config, model[2])
    loss = EmbeddingLoss(embedder.Embedder(*model, config))
    outputs = torch.randn(len(rows.units.texts), 32)
    whole = embedder.mean_loss(loss.embedder, rows, outputs, size=12)
    monkeypatch.setattr(embedder, "COMPARED", 30)
    _, _, terms = loss.of(rows, np.arange(12))
    assert len(list(terms())) > 2
    assert embedder.mean_loss(loss.embedder, rows, outputs, size=12) == pytest.approx(whole, rel=1e-6)


def test_the_loss_of_a_configuration(model: Any, tmp_path: Path) -> None:
    """Symmetric InfoNCE in two sizes, written out from texts, knows nothing of units and terms."""
    config = EmbedConfig(symmetric=True, sizes=(8,), temperature=0.2)
    rows = _rows(tmp_path, "pairs", config, model[2]).subset(np.arange(6))
    outputs = torch.randn(len(rows.units.texts), 32, dtype=torch.float64)
    number = {text: at for at, text in enumerate(rows.units.texts)}
    chosen = rows.records
    parts = []
    for size in (8, 32):
        embedded = torch.nn.functional.normalize(outputs[:, :size], dim=1)
        anchors = embedded[[number[each.texts[0]] for each in chosen]]
        positives = embedded[[number[each.texts[1]] for each in chosen]]
        negatives = embedded[[number[text] for each in chosen for text in each.texts[2:]]]
        forth = anchors @ torch.cat([positives, negatives]).T / 0.2
        back = positives @ anchors.T / 0.2
        for logits in (forth, back):
            parts.append(-logits.log_softmax(1).diagonal().mean() / 4)
    found = embedder.mean_loss(embedder.Embedder(*model, config), rows, outputs, size=6)
    assert found == pytest.approx(float(sum(parts)), rel=1e-5)


def test_memory_holds_one_graph(model: Any, tmp_path: Path) -> None:
    """The second pass frees each micro-batch's graph before the next is made; the last graph is the first's own."""
    config = EmbedConfig()
    rows = _rows(tmp_path, "pairs", config, model[2])
    passes: list[bool] = []

    class Counted(EmbeddingLoss):
        def outputs(self, batch: Any) -> Tensor:
            passes.append(torch.is_grad_enabled())
            return super().outputs(batch)

    pull, masters = Pull(Counted(embedder.Embedder(*model, config))), MasterWeights(model[0], torch.float32)
    cached = CachedGradients(pull, pull, masters, PADDED, noise, ALONE, ALONE, torch.device("cpu"))
    cached.add(rows, np.arange(12), step=0, tokens=10_000)
    assert passes == [True], "one micro-batch is computed once"
    passes.clear()
    cached.add(rows, np.arange(12), step=0, tokens=60)
    without = passes.count(False)
    assert without >= 2 and passes == [False] * without + [True] * (without + 1)


def test_configuration() -> None:
    assert RunConfig.model_validate({"recipe": "embed", "data": {"train": "a"}}).embed == EmbedConfig()
