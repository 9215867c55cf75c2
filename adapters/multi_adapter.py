"""Several adapters on one backbone, selected by name, or a different one for each row of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from peft import AdaLoraConfig, LoraConfig, PeftConfig, PeftModel
from transformers import PreTrainedModel

from workbench import adapters
from workbench.errors import ConfigError

BARE = "__base__"
"""Stands for no adapter in a mixed batch."""


def load(model: PreTrainedModel, folders: Mapping[str, Path]) -> PeftModel:
    """The backbone with the adapters in `folders`, by name, frozen; the first is active.

    Raises:
        ConfigError: They have different types, which PEFT cannot hold together, or train rows of tokens.
        BackboneError: One was made for another backbone.
    """
    configs = {name: PeftConfig.from_pretrained(str(folder)) for name, folder in folders.items()}
    kinds = {name: _kind(config) for name, config in configs.items()}
    if len(set(kinds.values())) > 1:
        shown = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise ConfigError(f"Adapters of different kinds ({shown}) do not go on one backbone. Load those of one kind.")
    rows = [name for name, config in configs.items() if getattr(config, "trainable_token_indices", None)]
    if rows and len(configs) > 1:
        raise ConfigError(
            f"{', '.join(rows)} brings rows of new tokens, which change the vocabulary for the others. Load it alone."
        )
    loaded = model
    for name, folder in folders.items():
        loaded = adapters.load(loaded, folder, name=name)  # type: ignore[assignment]
    assert isinstance(loaded, PeftModel)
    use(loaded, next(iter(folders)))
    return loaded


def use(model: PeftModel, name: str) -> None:
    """Make one adapter the active one; nothing trains."""
    _require_known(model, [name])
    model.set_adapter(name, inference_mode=True)


def rows(model: PeftModel, names: Sequence[str]) -> dict[str, list[str]]:
    """Keyword arguments of `model(...)` or `model.generate(...)` by which row i of the batch uses adapter names[i].

    Args:
        names: One for each row; BARE for the backbone alone.

    Raises:
        ConfigError: There is no such adapter, or PEFT cannot compute mixed batches of adapters of this type.
    """
    _require_known(model, [name for name in names if name != BARE])
    for name, config in model.peft_config.items():
        lora = config if isinstance(config, LoraConfig) and not isinstance(config, AdaLoraConfig) else None
        if lora is None or lora.use_dora:
            kind = _kind(config) if lora is None else "DoRA"
            raise ConfigError(
                f"{name} is {kind}, of which PEFT cannot mix several in a batch; lora, rslora and what ships as lora "
                "can. Call use(model, name) and compute the rows of each adapter for themselves."
            )
    return {"adapter_names": list(names)}


def _require_known(model: PeftModel, names: Sequence[str]) -> None:
    unknown = sorted(set(names) - set(model.peft_config))
    if unknown:
        raise ConfigError(f"No adapter is called {', '.join(unknown)}. There are: {', '.join(model.peft_config)}.")


def _kind(config: PeftConfig) -> str:
    return str(config.peft_type).removeprefix("PeftType.")
