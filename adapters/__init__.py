"""Small trainable parts over a frozen backbone: attach, save, load, merge, count. The engine never asks which.

torch and peft are imported inside the functions, so that a recipe is validated without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from workbench.adapters import anatomy
from workbench.adapters.adalora import AdaLora
from workbench.adapters.full import Full
from workbench.adapters.lora import Lora, LoraPlus
from workbench.adapters.method import METHODS, About, Beside, Method, Sample, register
from workbench.adapters.prefix import DeepPrompt, Prefix
from workbench.adapters.prompt import Prompt, PTuning
from workbench.adapters.shipping import as_shipped
from workbench.errors import BackboneError, ConfigError, FileError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "METHODS",
    "About",
    "AdaLora",
    "Beside",
    "Count",
    "DeepPrompt",
    "Full",
    "Lora",
    "LoraPlus",
    "Method",
    "PTuning",
    "Prefix",
    "Prompt",
    "attach",
    "count",
    "is_adapter",
    "load",
    "merge",
    "register",
    "require_fit",
    "require_mergeable",
    "save",
]


class Count(NamedTuple):
    """Parameters, quantised ones counted as what they stand for."""

    total: int
    trainable: int


def attach(
    model: PreTrainedModel,
    config: Method,
    *,
    seed: int,
    new_token_ids: Sequence[int] = (),
    sample: Sample | None = None,
) -> nn.Module:
    """The backbone with a fresh, trainable adapter, and a trainable classification head where it has one.

    Everything else is frozen.

    Args:
        seed: Decides the adapter's random initial values, and nothing else does.
        new_token_ids: Rows of the embedding, and of an untied head, that train beside the adapter.
        sample: Model inputs of some training rows, for methods that start from data.

    Raises:
        ConfigError: the method does not work on this backbone; the message says what does.
    """
    import torch
    from peft import get_peft_model

    require_fit(model, config)
    if isinstance(config, Full):
        return model.requires_grad_(True)
    rows = {name: list(new_token_ids) for name in _prepare_rows(model)} if new_token_ids else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_config = config.to_peft(model, Beside(token_rows=rows, heads=anatomy.fresh_heads(model)))
        with _without_hints():
            attached = get_peft_model(model, peft_config)
        config.initialise(attached, sample)
    return attached


def require_fit(model: PreTrainedModel, config: Method) -> None:
    """Raise ConfigError where the method does not work on this backbone."""
    if reason := config.refusal(model):
        raise ConfigError(f"adapter.method={config.method}: {reason}")


def save(model: nn.Module, folder: Path) -> None:
    """Write the adapter in PEFT's format (a fully trained backbone: as a stock model) into `folder`."""
    from peft import PeftModel

    if isinstance(model, PeftModel):
        # Rows of added tokens are part of the adapter; the other rows of a resized embedding are not.
        with as_shipped(model) as tensors:
            model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=tensors)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card template, all "[More Information Needed]"
    else:
        model.save_pretrained(folder)  # type: ignore[operator]


def load(model: PreTrainedModel, folder: Path) -> nn.Module:
    """The backbone with the adapter that `save` or PEFT wrote into `folder`, frozen, in evaluation mode.

    Raises:
        BackboneError: the adapter was made for another backbone: the tensors that do not fit are named.
        FileError: a file of the adapter is damaged.
    """
    from peft import PeftConfig, PeftModel
    from safetensors import SafetensorError

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise FileError(f"{folder}/adapter_config.json: damaged ({error}). Restore it, or train again.") from None
    if getattr(config, "trainable_token_indices", None):
        _prepare_rows(model)
    try:
        with _without_hints():
            warnings.simplefilter("error", UserWarning)  # PEFT only warns where the adapter's tensors match no module
            return PeftModel.from_pretrained(model, str(folder)).eval()
    except SafetensorError as error:
        raise FileError(f"{folder}/adapter_model.safetensors: damaged ({error}). Restore it, or train again.") from None
    except (RuntimeError, ValueError, UserWarning) as error:
        raise BackboneError(
            f"{folder}: this adapter does not fit the backbone {model.config._name_or_path} "
            f"({type(model).__name__}). Load it onto the backbone that it was trained on.\n  {_first_lines(error)}"
        ) from None


def merge(model: nn.Module, config: Method) -> PreTrainedModel:
    """The backbone with the adapter's update added into its weights; a fully trained backbone as it is.

    Raises:
        ConfigError: the method is no update of the weights.
    """
    from peft import PeftModel

    require_mergeable(config)
    if not isinstance(model, PeftModel):
        return model  # type: ignore[return-value]
    return model.merge_and_unload(safe_merge=True)  # type: ignore[no-any-return, operator]


def require_mergeable(config: Method) -> None:
    """Raise ConfigError where the method cannot be added into the backbone's weights."""
    if reason := config.facts.no_merge:
        raise ConfigError(
            f"adapter.method={config.method} cannot be merged: {reason}. Keep backbone and adapter apart: "
            "`workbench generate`, `predict` and `evaluate` serve them together."
        )


def count(model: nn.Module) -> Count:
    """Total and trainable parameters of a model with its adapter."""
    total = trainable = 0
    for parameter in model.parameters():
        # bitsandbytes packs two 4-bit values into a byte; its quant_state remembers the shape.
        state = getattr(parameter, "quant_state", None)
        size = state.shape.numel() if state is not None else parameter.numel()
        total += size
        trainable += size if parameter.requires_grad else 0
    return Count(total, trainable)


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter, rather than a whole model."""
    return (folder / "adapter_config.json").exists()


@contextmanager
def _without_hints() -> Iterator[None]:
    """Keep two warnings to itself: PEFT's use of what transformers calls deprecated, and a setting that it corrects."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        yield


def _prepare_rows(model: PreTrainedModel) -> list[str]:
    """Leaf names of the modules whose rows can be trained: the embedding, and the head where its weights are its own.

    PEFT multiplies with their whole weight, so it has to be stored in the precision that it is computed in.

    Raises:
        BackboneError: the head has a bias, which PEFT would leave out.
    """
    import torch

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.bias is not None:
        raise BackboneError(
            f"model.new_tokens: the output head of {type(model).__name__} has a bias, with which PEFT cannot train "
            "single rows. Leave model.new_tokens out, or take another backbone."
        )
    computed = embedding(torch.zeros(1, 1, dtype=torch.int64, device=model.device)).dtype
    wanted = [embedding] if head.weight is embedding.weight else [embedding, head]
    for module in wanted:
        module.weight.data = module.weight.data.to(computed)
    names = {id(module): name.rsplit(".", 1)[-1] for name, module in model.named_modules()}
    return [names[id(module)] for module in wanted]


def _first_lines(error: Exception) -> str:
    return "\n  ".join(str(error).splitlines()[:6])
