"""Models that runs saved: what is scored, served and merged is read from disk again, never the live model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from workbench import adapters
from workbench.adapters import Full
from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.model_heads import ModelHead
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.row_encoder import OwnEncoder, encoder_of_run
from workbench.errors import ConfigError, FileError
from workbench.models import backbones, output_heads, picture_processor
from workbench.models.output_heads import Head
from workbench.models.picture_processor import PictureProcessor
from workbench.models.sound_processor import FeatureProcessor
from workbench.runs import files, run_directory
from workbench.runs.resume_command import finish

BEGIN = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id")
"""Settings of a generation_config.json that begin a text, for encoder-decoders."""


@dataclass(frozen=True)
class ExportedModel:
    """A saved adapter over a freshly loaded backbone, in evaluation mode, with its tokenizer."""

    model: nn.Module
    head: Head
    tokenizer: PreTrainedTokenizerBase
    template: OwnEncoder
    stop: list[int]  # tokens at which generation ends; none where the model writes no text


def save(
    model: nn.Module,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    template: OwnEncoder,
    stop: list[int],
    *,
    adapter: Callable[[Path], None] | None = None,
) -> None:
    """Write adapter, tokenizer, chat template and stop tokens into `folder`, atomically. `adapter`: writes the adapter,
    where the model holds several and only one is meant."""
    if isinstance(template, ChatEncoder):
        tokenizer.chat_template = template.source
    with files.new_folder(folder) as aside:
        adapters.save(model, aside) if adapter is None else adapter(aside)
        tokenizer.save_pretrained(aside)
        if isinstance(template.processor, FeatureProcessor):
            template.processor.save(aside)
        elif isinstance(template.processor, PictureProcessor) and (aside / "config.json").exists():  # a whole model
            backbones.save_processors(template.processor.model, aside)
        known = getattr(model, "generation_config", None)
        begin = {name: getattr(known, name, None) for name in BEGIN}
        GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id, **begin).save_pretrained(aside)


def load(
    run: Path, config: RunConfig, *, waiting: bool = False, backbone: backbones.Backbone | None = None
) -> ExportedModel:
    """The model that the run at `run` shipped. `waiting`: on the host, as `backbones.load` says. `backbone`: takes the
    adapter, instead of one that is loaded; as it came."""
    folder = run / "adapter"
    require_saved(run, config, "tokenizer.json", "generation_config.json")
    tokenizer = load_tokenizer(run, config)
    backbone = backbone or load_backbone(config, folder, tokenizer, waiting=waiting)
    model = backbone.model if isinstance(config.adapter, Full) else adapters.load(backbone.model, folder)
    head = output_heads.find(model, backbone.model)
    hub = backbone.model.config
    own = config.model_copy(update={"model": model_under(config, folder)})
    template = encoder_of_run(config, hub, tokenizer, processor=picture_processor.of(own, hub))
    return ExportedModel(model, head, tokenizer, template, stop_tokens(run))


def stop_tokens(run: Path) -> list[int]:
    """Tokens at which the answers of the run at `run` end."""
    stop = GenerationConfig.from_pretrained(run / "adapter").eos_token_id or []
    return [stop] if isinstance(stop, int) else list(stop)


def require_saved(run: Path, config: RunConfig, *more: str) -> None:
    """Raise an error where the run at `run` has saved nothing yet, or lacks a file of its adapter or of `more`."""
    folder = run / "adapter"
    if not folder.exists():
        raise ConfigError(f"{run}: no adapter there yet. Finish the run first: {finish(run_directory.whole(run))}")
    full = isinstance(config.adapter, Full)
    needed = ("config.json",) if full else ("adapter_config.json", "adapter_model.safetensors")
    missing = [name for name in (*needed, *more) if not (folder / name).is_file()]
    if missing:
        raise FileError(
            f"{folder}: {', '.join(missing)} missing. Restore it, or write the adapter again: "
            f"{finish(run_directory.whole(run))}"
        )


def load_tokenizer(run: Path, config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that the run at `run` saved, with its new tokens."""
    folder = str((run / "adapter").resolve())
    return backbones.tokenizer(config.model.model_copy(update={"id": folder, "new_tokens": (), "revision": None}))


def load_backbone(
    config: RunConfig,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    task: ModelHead | None = None,
    waiting: bool = False,
) -> backbones.Backbone:
    """The backbone under the adapter in `folder`; for full fine-tuning the model in `folder` itself. `task`: by default
    what the recipe trains. `waiting`: on the host, as `backbones.load` says."""
    return backbones.load(model_under(config, folder), tokenizer, task=task or model_heads.of(config), waiting=waiting)


def model_under(config: RunConfig, folder: Path) -> ModelConfig:
    """Section model with the place of the backbone of `load_backbone`."""
    if isinstance(config.adapter, Full):
        return config.model.model_copy(update={"id": str(folder.resolve()), "revision": None})
    return config.model
