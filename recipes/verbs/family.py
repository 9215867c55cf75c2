"""`workbench family`: what works with a backbone's architecture, tried on a tiny random model of its config.json."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedModel

from workbench import adapters
from workbench.adapters import Lora, anatomy, stock
from workbench.adapters.banks import bank as banks
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.target_modules import about_experts, about_targets
from workbench.config import ModelConfig
from workbench.config.model_heads import TEXT
from workbench.config.sections.image_config import ImageConfig
from workbench.data.batching import MicroBatch, Row, collate
from workbench.data.packing import PACKED
from workbench.data.sound.sound_files import require_libraries
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.errors import BackboneError, ConfigError, WorkbenchError
from workbench.models import attention_backend, backbones, output_heads, picture_processor, tiny_model
from workbench.models.exporting import lora_limits, onnx_model
from workbench.models.exporting.onnx_model import OnnxModel
from workbench.models.picture_processor import HearingProcessor, PictureProcessor
from workbench.training.freezing import layer_map, prefix_cache

Outcome = Literal["works", "refused", "failed", "none"]
SIGNS: dict[Outcome, str] = {"works": "+", "refused": "-", "failed": "!", "none": "."}
LENGTHS = (9, 4, 13, 1, 6)
"""Tokens of the rows of a trial."""
CLOSE = 1e-5
"""Largest difference of losses, or of logits, that is rounding."""
MERGED = 1e-4
"""The same where sums are added up in another order in every layer."""
LATER = 80
"""Tokens of a text that is longer than the example from which ONNX is written."""
LORA = Lora(rank=4, alpha=8)


@dataclass(frozen=True)
class FamilyFinding:
    """What a trial found: whether it works, and a sentence."""

    subject: str
    outcome: Outcome
    sentence: str


@dataclass(frozen=True)
class FamilyFindings:
    """What works with an architecture."""

    family: str
    """transformers' `model_type`."""
    parameters: int
    """Of the tiny model that was tried."""
    findings: tuple[FamilyFinding, ...]


def family(model: Path | str, *, subjects: Sequence[str] | None = None) -> FamilyFindings:
    """Try what works with the architecture of a backbone, on a tiny random model of its config.json.

    Nothing is read of the backbone but its config.json, and its tokenizer and processor where it sees or hears; each
    subject is tried for real: trained, saved, read again.

    Args:
        model: A folder, or the id of a model on the hub.
        subjects: Some of `SUBJECTS`; None for all.

    Returns:
        The `family`, and `findings`: of each subject an `outcome` and a `sentence`.

    Raises:
        WorkbenchError: There is no such model, or it is no causal language model.

    Examples:
        >>> import workbench
        >>> found = workbench.family("starter", subjects=["LoRA", "packs"])
        >>> [(each.subject, each.outcome) for each in found.findings]
        [('LoRA', 'works'), ('packs', 'works')]
    """
    wanted = list(SUBJECTS) if subjects is None else list(subjects)
    if unknown := [name for name in wanted if name not in SUBJECTS]:
        raise ConfigError(f"{unknown[0]}: expected {', '.join(SUBJECTS)}.")
    section = ModelConfig(id=str(model))
    config = backbones.hub_config(section)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters of them is tried
        trial = FamilyTrial(Path(name), tiny_model.build(config), section)
        return FamilyFindings(config.model_type, trial.parameters, tuple(map(partial(_tried, trial), wanted)))


class FamilyTrial:
    """A tiny model in a folder, and rows for it; `source` is the backbone that it is like."""

    def __init__(self, folder: Path, model: PreTrainedModel, source: ModelConfig) -> None:
        self.folder, self.backbone, self.source = folder, folder / "backbone", source
        self.parameters = sum(each.numel() for each in model.parameters())
        stock.save(model, self.backbone)
        self.config: PretrainedConfig = model.config
        words, draw = model.config.get_text_config(decoder=True).vocab_size, np.random.default_rng(0)
        self.rows = [Row(draw.integers(8, words, length), np.ones(length, dtype=bool)) for length in LENGTHS]
        self.ids_BL = torch.from_numpy(draw.integers(8, words, (2, LATER)))

    def load(self, weights: Literal["float32", "nf4", "int8"] = "float32") -> PreTrainedModel:
        """The backbone as a run loads it."""
        return backbones.load(ModelConfig(id=str(self.backbone), weights=weights), None).model

    def stock(self) -> PreTrainedModel:
        """The backbone as others load it."""
        model: PreTrainedModel = TEXT.auto_class(self.config).from_pretrained(self.backbone, dtype=torch.float32)
        model.eval()
        return model

    def adapted(self, method: Lora = LORA) -> tuple[nn.Module, PreTrainedModel]:
        """The backbone with an adapter that changes its outputs, and the same without it around."""
        backbone = self.load()
        model, draw = adapters.attach(backbone, method, seed=0), torch.Generator().manual_seed(0)
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.data = torch.randn(each.shape, generator=draw) * 0.1
        return model, backbone

    def saved(self) -> tuple[Path, Tensor]:
        """A folder with the adapter, and the logits (B, L, V) over it."""
        model, _ = self.adapted()
        adapters.save(model, self.folder / "adapter")
        return self.folder / "adapter", self.logits(model)

    def logits(self, model: nn.Module, *, tokens: int = LATER) -> Tensor:
        """Logits (B, L, V) of two rows of tokens."""
        with torch.no_grad():
            logits_BLV: Tensor = model.eval()(input_ids=self.ids_BL[:, :tokens]).logits
        return logits_BLV

    def losses(self, model: nn.Module, backbone: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Summed loss of each row of a batch (B,)."""
        head = output_heads.known(backbone)
        logits_NV = head.project(head.supervised(model, batch.inputs, batch.positions_N))
        loss_N = F.cross_entropy(logits_NV.float(), batch.labels_N, reduction="none")
        return torch.zeros(len(LENGTHS)).index_add(0, batch.row_of_label, loss_N)


def _tried(trial: FamilyTrial, subject: str) -> FamilyFinding:
    try:
        sentence = SUBJECTS[subject](trial)
    except WorkbenchError as error:
        return FamilyFinding(subject, "refused", str(error))
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return FamilyFinding(subject, "failed", f"{type(error).__name__}: {lines[0][:200]}")
    return FamilyFinding(subject, "none" if sentence is None else "works", sentence or "There are none.")


def _require_alike(found: Tensor, wanted: Tensor, what: str, *, close: float = CLOSE) -> None:
    gap = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1))
    if not gap < close:
        raise BackboneError(f"{what} differ by {gap:.1e} of the largest.")


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _gradients(trainable: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Gradients by name; raises BackboneError where there is none."""
    found = {name: each.grad for name, each in trainable.items() if each.grad is not None}
    # A compressor reads rows of more tokens than these.
    if still := [name for name in trainable.keys() - found.keys() if "compressor" not in name]:
        raise BackboneError(f"{len(still)} of its trainable tensors get no gradient, such as {min(still)}.")
    return found


def _lora(trial: FamilyTrial) -> str:
    bare = trial.load()
    names = sorted({name.rsplit(".", 1)[-1] for name in LORA.modules(bare)})
    notes = [about_targets(bare, LORA), about_experts(bare, LORA)]
    model, backbone = trial.adapted()
    output_heads.find(model, backbone)
    model.train()
    alone = torch.stack([trial.losses(model, backbone, collate([row]))[0] for row in trial.rows])
    padded = trial.losses(model, backbone, collate(trial.rows))
    _require_alike(padded, alone, "Losses of rows that are padded together and of each row alone")
    padded.sum().backward()
    _gradients(_trainable(model))
    return " ".join([f"all-linear means {', '.join(names)}.", *filter(None, notes)])


def _experts(trial: FamilyTrial) -> str | None:
    if not anatomy.fused_experts(trial.load()):
        return None
    method = Lora(rank=4, alpha=8, experts=True)
    model, backbone = trial.adapted(method)
    trial.losses(model.train(), backbone, collate(trial.rows)).sum().backward()
    _gradients(_trainable(model))
    return about_experts(backbone, method)


def _quantised(weights: Literal["nf4", "int8"], trial: FamilyTrial) -> str:
    backbone = trial.load(weights)
    linear = len(anatomy.linear_modules(backbone))
    model = adapters.attach(backbone, LORA, seed=0)
    loss = trial.losses(model.train(), backbone, collate(trial.rows)).sum()
    loss.backward()
    _gradients(_trainable(model))
    if not loss.isfinite():
        raise BackboneError("Its loss is not finite.")
    packed = [name for name, each in backbone.named_modules() if type(each).__module__.startswith("bitsandbytes.")]
    return f"{len(packed)} layers of {linear} in the blocks are packed."


def _packs(trial: FamilyTrial) -> str:
    model, backbone = trial.adapted()
    kind = backbone.config.get_text_config().model_type
    if why := attention_backend.packing_refusal(backbone.config, longest=max(LENGTHS), families=None):
        raise BackboneError(f"Rows are padded: {why}.")
    model.train()
    with torch.no_grad():
        alone = torch.stack([trial.losses(model, backbone, collate([row]))[0] for row in trial.rows])
        try:
            packed = trial.losses(model, backbone, PACKED.lay(collate(trial.rows)))
        except RuntimeError:
            if kind in attention_backend.PACKED_FAMILIES:
                raise
            raise BackboneError("Rows are padded: its attention reads no packed ones.") from None
    _require_alike(packed, alone, "Rows are padded: losses of packed rows and of each row alone")
    if kind not in attention_backend.PACKED_FAMILIES:
        raise BackboneError(
            f"Rows are padded: packed ones are exact in this trial, but {kind} is no known architecture."
        )
    return "Losses of packed rows are those of each row alone."


def _prefix_cache(trial: FamilyTrial) -> str:
    backbone = trial.load()
    blocks = [backbone.get_submodule(path) for path in layer_map.stack(backbone)]
    depth = len(blocks) // 2
    adapters.attach(backbone, LORA, seed=0, below=depth)
    if why := prefix_cache.refusal(backbone, blocks=blocks, depth=depth):
        raise BackboneError(f"Outputs of frozen blocks are not kept: {why}.")
    return f"Outputs of the first {depth} of {len(blocks)} blocks are kept while these are frozen."


def _bank(trial: FamilyTrial) -> str:
    batch, gradients = collate(trial.rows), []
    for together in (False, True):
        backbone = trial.load()
        if together:
            bank = banks.attach(backbone, [LORA, LORA], seeds=[0, 1])
            model, name = bank.model, bank.members[1]
            inside: Any = bank.route([MemberRows(name, len(LENGTHS))], length=max(LENGTHS))
            own = bank.parameters_of(name)
        else:
            model, name, inside = adapters.attach(backbone, LORA, seed=1), "default", nullcontext()
            own = _trainable(model)
        model.train()
        with inside:
            trial.losses(model, backbone, batch).sum().backward()
        gradients.append({key.replace(f".{name}.", "."): each for key, each in _gradients(own).items()})
    alone, member = gradients
    for key, wanted in alone.items():
        _require_alike(member[key], wanted, "Gradients in a bank and alone")
    return "A member of a bank has the gradients that it has alone."


def _names(folder: Path) -> set[str]:
    """Names of the tensors of a checkpoint."""
    names = set[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= {*opened.keys()}
    return names


def _merges(trial: FamilyTrial) -> str:
    model, _ = trial.adapted()
    wanted = trial.logits(model)
    merged, folder = adapters.merge(model, LORA), trial.folder / "merged"
    stock.save(merged, folder)
    if odd := _names(trial.backbone) ^ _names(folder):
        raise BackboneError(f"{len(odd)} tensors of a merged model have other names, such as {sorted(odd)[0]}.")
    again = TEXT.auto_class(trial.config).from_pretrained(folder, dtype=torch.float32)
    _require_alike(
        trial.logits(again), wanted, "Logits of the merged model, read again, and of the adapter", close=MERGED
    )
    return "The merged model, read again, gives the same logits, and has the tensors of the backbone."


def _stock_peft(trial: FamilyTrial) -> str:
    adapter, wanted = trial.saved()
    stock = trial.stock()
    bare = trial.logits(stock)
    found = trial.logits(PeftModel.from_pretrained(stock, str(adapter)))
    _require_alike(found, wanted, "Logits by stock PEFT and by a run")
    if torch.allclose(found, bare, atol=1e-3):
        raise BackboneError("The adapter changes nothing by stock PEFT.")
    return "Stock PEFT over the stock model gives the logits of the run."


def _pictures(trial: FamilyTrial) -> str | None:
    architecture = type(trial.config)
    if architecture not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    names, draw = [f"{number}.png" for number in range(3)], np.random.default_rng(0)
    for name, side in zip(names, (60, 33, 60), strict=True):
        Image.fromarray(draw.integers(0, 256, (side, 50, 3), dtype=np.uint8)).save(trial.folder / name)
    return _reads(trial, PictureProcessor(trial.source, architecture, ImageConfig(), forgets=True), names)


def _sound(trial: FamilyTrial) -> str | None:
    architecture = type(trial.config)
    if "audio_config" not in architecture.sub_configs:
        return None
    if not picture_processor.hears(trial.config):
        raise BackboneError("Rows show it pictures and play it no recordings.")
    require_libraries()
    import soundfile

    names, draw = [f"{number}.wav" for number in range(3)], np.random.default_rng(0)
    for name, seconds in zip(names, (0.3, 0.5, 0.3), strict=True):
        soundfile.write(trial.folder / name, draw.uniform(-0.5, 0.5, int(seconds * 16_000)), 16_000)
    return _reads(trial, HearingProcessor(trial.source, architecture, ImageConfig(), types=(), forgets=True), names)


def _reads(trial: FamilyTrial, processor: PictureProcessor, names: Sequence[str]) -> str:
    """Try rows with files beside text, of which the last differs from the first in its file alone."""
    stock = type(processor.processor).__name__
    tokenizer = backbones.tokenizer(trial.source)
    answer = {"role": "assistant", "content": "A fox."}
    asked = {"type": "text", "text": "What is it?"}
    parts = [[{"type": processor.kind, "path": str(trial.folder / name)}, asked] for name in names]
    rows = tokenized.encode(
        [{"messages": [{"role": "user", "content": each}, answer]} for each in parts],
        tokenizer,
        ChatEncoder(tokenizer, processor=processor),
    )
    hub = backbones.hub_config(trial.source)
    words = hub.get_text_config(decoder=True).vocab_size  # all, as its processor writes special tokens
    seeing = FamilyTrial(trial.folder / "whole", tiny_model.build(hub, words=words), trial.source)
    model, backbone = seeing.adapted()
    model.train()
    losses = [seeing.losses(model, backbone, rows.batch(np.asarray([row])))[0] for row in range(len(names))]
    together = seeing.losses(model, backbone, rows.batch(np.arange(len(names))))[: len(names)]
    _require_alike(together, torch.stack(losses), "Losses of rows together and of each row alone")
    if float((losses[0] - losses[-1]).abs()) < CLOSE:
        raise BackboneError(f"Other {processor.media.many} change no loss.")
    together.sum().backward()
    _gradients(_trainable(model))
    return f"Rows with {processor.media.many} are read by its own {stock}."


def _gguf(trial: FamilyTrial) -> str:
    from workbench.models.exporting import gguf_files

    layout = gguf_files.GgufLayout(trial.config)
    for name, _ in trial.stock().named_parameters():
        layout.tensor_name(name)
    return f"Each tensor has a place in GGUF's architecture {layout.name}."


def _onnx(trial: FamilyTrial) -> str:
    onnx_model.require_writable(trial.config)
    stock, path = trial.stock(), trial.folder / onnx_model.FILE
    wanted = [trial.logits(stock, tokens=tokens) for tokens in (8, LATER)]
    onnx_model.write(stock, path, onnx_model.text_inputs(), "logits")
    written = OnnxModel(path, stock, "logits")
    for each in wanted:
        found = trial.logits(written, tokens=each.shape[1])
        if float((found - each).abs().max()) > 1e-3 * float(each.abs().max().clamp_min(1)):
            raise BackboneError(f"Its ONNX gives other logits for texts of {each.shape[1]} tokens.")
    return "onnxruntime gives the model's logits for texts of any length."


def _vllm(trial: FamilyTrial) -> str:
    adapter, _ = trial.saved()
    lora_limits.require(adapter, LORA, lora_limits.VLLM)
    modules = {name for name, _ in trial.stock().named_modules()}
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as opened:
        layers = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in opened.keys()}  # noqa: SIM118
    if odd := layers - modules:
        raise BackboneError(f"vLLM would find no {sorted(odd)[0]} in the stock model.")
    return "Names and sizes of the adapter's tensors are those that vLLM reads."


SUBJECTS: dict[str, Callable[[FamilyTrial], str | None]] = {
    "loads": lambda trial: f"{type(trial.load()).__name__}, {trial.parameters:,} parameters in this trial.",
    "LoRA": _lora,
    "experts": _experts,
    "nf4": partial(_quantised, "nf4"),
    "int8": partial(_quantised, "int8"),
    "packs": _packs,
    "pictures": _pictures,
    "sound": _sound,
    "prefix cache": _prefix_cache,
    "bank": _bank,
    "merge": _merges,
    "stock PEFT": _stock_peft,
    "GGUF": _gguf,
    "ONNX": _onnx,
    "vLLM": _vllm,
}
"""What is tried, by a function that returns a sentence, raises where it does not work, or returns None where the
architecture has no such thing."""
