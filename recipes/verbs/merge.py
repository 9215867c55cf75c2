"""`workbench merge`: one stock model out of backbone and adapter, and how far it is from the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from workbench import adapters
from workbench.adapters import Full
from workbench.adapters.precision import expert_layers
from workbench.config import ModelConfig, RunConfig
from workbench.errors import ConfigError
from workbench.models import backbones, exported, sounds, weight_formats
from workbench.models.backbones import DTYPES, QUANTISED
from workbench.recipes.task import OutputError, RunOutputs, implementation
from workbench.runs import files, run_directory
from workbench.runs.trust import Trust


@dataclass(frozen=True)
class Merged:
    """Outcome of a merge, and its measured error."""

    agreement: OutputError
    sentence: str
    rounded: OutputError | None = None
    """Error of rounding the backbone alone, with the adapter beside it; None where nothing is rounded."""


def merge(
    run: Path | str,
    overrides: Sequence[str] = (),
    *,
    out: Path | str,
    weights: str = "bfloat16",
    trust: bool = False,
) -> Merged:
    """Write backbone and adapter as one stock Hugging Face model, and compare it, reloaded, with the two.

    A quantised backbone is dequantised first: the merged weights are those that the adapter was trained on.

    Args:
        run: A run directory.
        overrides: `model.id=FOLDER`, where the backbone has moved since.
        out: Folder for the model; it must not exist.
        weights: Their precision: `float32`, `bfloat16` or `float16`.
        trust: Execute the Python code that the run's config.yaml names.

    Returns:
        The `agreement` of the outputs on held-out rows, that of the unmerged adapter over a `rounded` backbone, and a
        `sentence` on how the model came to be.

    Raises:
        ConfigError: The method is no update of the weights, the run has several models, or `out` exists.

    Examples:
        >>> import workbench
        >>> merged = workbench.merge("runs/short", out="merged", weights="float32")
        >>> merged.agreement.kl < 1e-3
        True
        >>> from transformers import AutoModelForCausalLM
        >>> type(AutoModelForCausalLM.from_pretrained("merged")).__name__
        'LlamaForCausalLM'
    """
    run, out = Path(run), Path(out)
    if weights not in DTYPES:
        raise ConfigError(f"--weights {weights}: expected {', '.join(DTYPES)}.")
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another folder, or delete it first.")
    config = run_directory.shipped_config(run, Trust(trust), overrides)
    require_one_model(run, config)
    files.require_writable(out)
    reference = implementation(config).outputs(run, config)
    model = merged_model(run, config, reference, weights=weights)
    with files.new_folder(out) as folder:
        write(model, config, reference, folder)
    del model
    stock = reload(out, reference, weights=weights)
    agreement = reference.error(stock, stock)
    del stock
    rounded = (
        None if weights == "float32" or isinstance(config.adapter, Full) else _rounded(run, config, reference, weights)
    )
    return Merged(agreement, added(config, weights) + reference.note, rounded)


def _rounded(run: Path, config: RunConfig, reference: RunOutputs, weights: str) -> OutputError:
    """Error of the adapter over a backbone in the precision `weights`: what rounding changes without a merge."""
    packed = config.model.weights in QUANTISED
    backbone = base_model(run, config, reference, weights=config.model.weights if packed else "float32")
    backbone = as_loaded(reference.settle(backbone.to(DTYPES[weights])))  # type: ignore[arg-type]
    return reference.error(adapters.load(backbone, run / "adapter"), backbone)


def as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """A model of rounded weights, with products in float32 where those of its weights are emulated, as a load has."""
    if backbones.emulates(model):
        model.float()
    sounds.compute_in(model, model.dtype)
    return model


def require_one_model(run: Path, config: RunConfig) -> None:
    """Raise ConfigError where a run's adapter cannot be added into one backbone."""
    adapters.require_mergeable(config.adapter)
    run_directory.require_read_once(run, config)
    if "parts" in files.read_json(run / "decision.json"):
        raise ConfigError(
            f"{run}: a blend is no single model. Teach one adapter what it says: `workbench run distill/ensemble "
            f"distill.teacher.id={run}`, and merge that."
        )
    if config.over is not None and config.over.folds and not config.refits:
        raise ConfigError(
            f"{run}: an ensemble of {config.folds.k} folds is no single model. Run again with folds.refit=true, whose "
            "adapter trains on all rows."
        )


def merged_model(run: Path, config: RunConfig, reference: RunOutputs, *, weights: str) -> PreTrainedModel:
    """Backbone plus update, added in float32, as a stock model in the precision `weights`."""
    packed = config.model.weights in QUANTISED
    backbone = base_model(run, config, reference, weights=config.model.weights if packed else "float32")
    if not isinstance(config.adapter, Full):
        backbone = adapters.merge(adapters.load(backbone, run / "adapter"), config.adapter)
    model = reference.settle(backbone)
    model.to(DTYPES[weights])  # type: ignore[arg-type]
    sounds.compute_in(model, DTYPES[weights])
    model.config.dtype = DTYPES[weights]
    return model


def write(model: PreTrainedModel, config: RunConfig, reference: RunOutputs, folder: Path) -> None:
    """Write a whole model into `folder`, with how its backbone prepares the pictures that stand beside text."""
    reference.save(model, folder)
    if reference.tokenizer is not None:
        backbones.save_processors(config.model, folder)


def reload(folder: Path, reference: RunOutputs, *, weights: str) -> PreTrainedModel:
    """The stock model in a folder, as who takes it loads it."""
    section = ModelConfig.model_validate({"id": str(folder.resolve()), "weights": weights})
    tokenizer = reference.tokenizer and backbones.tokenizer(section)
    return backbones.load(section, tokenizer, task=reference.task).model


def base_model(run: Path, config: RunConfig, reference: RunOutputs, *, weights: str = "float32") -> PreTrainedModel:
    """The backbone under a run's adapter, or a fully trained one, in float32.

    Args:
        weights: A format in which it is packed first, so that its values are those of that format.
    """
    section = config.model.model_copy(update={"weights": weights, "compute": "float32"})
    plain = config.model_copy(update={"model": section})
    backbone = exported.load_backbone(plain, run / "adapter", reference.tokenizer, task=reference.task).model
    if weights not in QUANTISED:
        return backbone
    dense: PreTrainedModel = backbone.dequantize(torch.float32)
    expert_layers.unpack(dense, torch.float32)
    weight_formats.compute_as_stored(dense, torch.float32)
    return dense


def added(config: RunConfig, weights: str) -> str:
    """Sentence on how a whole model came to be."""
    if isinstance(config.adapter, Full):
        return f"Fully trained model written in {weights}."
    backbone = f"{config.model.weights} backbone, dequantised," if config.model.weights in QUANTISED else "Backbone"
    if config.model.sparsity is not None:
        return (
            f"{backbone}, pruned {config.model.sparsity}, plus adapter added in float32, written in {weights}: layers "
            "that the adapter changes are dense again."
        )
    return f"{backbone} plus adapter added in float32, written in {weights}."
