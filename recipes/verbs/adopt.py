"""`workbench adopt`: a run directory around an adapter that another program wrote in PEFT's format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import GenerationConfig

from workbench import adapters
from workbench.adapters import METHODS, Method, anatomy, model_card
from workbench.adapters.target_modules import short_names
from workbench.config import ModelConfig, RunConfig
from workbench.config.model_heads import TEXT
from workbench.config.yaml_text import override
from workbench.data.text.row_encoder import row_encoder
from workbench.errors import BackboneError, ConfigError, FileError
from workbench.models import backbone_source, backbones, exported
from workbench.recipes.verbs.combine import WEIGHT_FILES
from workbench.runs import files, run_directory
from workbench.schema import parse

ROWS = {"train": "starter/fairytaleqa_train.jsonl", "held_out": "starter/fairytaleqa_held_out.jsonl"}
"""Rows on which `evaluate` and `merge` measure an adapter whose own rows are not known."""
TASKS = (None, "CAUSAL_LM", "SEQ_2_SEQ_LM")
"""PEFT's names of tasks whose models write text."""
NAMES = {
    "PREFIX_TUNING": "prefix",
    "PROMPT_TUNING": "prompt",
    "P_TUNING": "p-tuning",
    "LN_TUNING": "layernorm",
    "TRAINABLE_TOKENS": "trainable-tokens",
    "VBLORA": "vb-lora",
    "UNILORA": "uni-lora",
}
"""Methods whose name is not PEFT's in lower case."""


@dataclass(frozen=True)
class Adopted:
    """What was adopted."""

    method: str
    model: str
    parameters: int
    """Of the adapter."""
    beside: dict[str, Any]
    """Settings of adapter_config.json that section `adapter` has no keys for; they act all the same."""


def adopt(
    folder: Path | str, overrides: Sequence[str] = (), *, model: str | None = None, out: Path | str | None = None
) -> Adopted:
    """Make a run directory of an adapter in PEFT's format, which every verb takes, and training as `train.start`.

    Args:
        folder: Of adapter_config.json and adapter_model.safetensors.
        overrides: `key=value` words of the run's configuration, such as data.train=FILE or model.weights=nf4.
        model: The backbone, a folder or hub id; None: the one that adapter_config.json names.
        out: Run directory to write; None: runs/ and the folder's name.

    Returns:
        The `method`, the `model` under it, the number of `parameters`, and settings `beside` the method's.

    Raises:
        WorkbenchError: No such adapter or backbone, or they do not fit.

    Examples:
        >>> import workbench
        >>> adopted = workbench.adopt("runs/short/adapter", model="starter", out="runs/adopted")
        >>> adopted.method, adopted.model, adopted.beside
        ('lora', 'starter', {})
    """
    folder = Path(folder).expanduser()
    out = Path("runs") / folder.resolve().name if out is None else Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already. Name another folder with --out, or delete it first.")
    saved = _read(folder)
    given = override({"recipe": "sft", "data": ROWS}, overrides)
    base = model or given.get("model", {}).get("id") or saved.base_model_name_or_path
    values = override(given, [f"model.id={json.dumps(base)}"])
    config = parse(RunConfig, values, source="the command line")
    if config.task.head != "text" or not config.task.writes_text:
        raise ConfigError(f"recipe={config.recipe}: adopt makes runs that write text. Leave recipe out.")
    try:
        hub = backbones.hub_config(config.model)
    except BackboneError as error:
        if model or "id" in given.get("model", {}):
            raise
        raise BackboneError(
            f"{folder}: its backbone, {base}, is not to be had: {error} Name a copy of it: workbench adopt {folder} "
            "--model FOLDER"
        ) from None
    config = backbones.with_arriving_weights(config)
    tokenizer = _tokenizer(folder, config.model)
    template = row_encoder(config, hub, tokenizer)
    backbone = backbones.load(config.model, None, task=TEXT)
    whole = anatomy.linear_modules(backbone.model)
    adapted = adapters.load(backbone.model, folder)
    assert isinstance(adapted, PeftModel)
    section, beside = _section(saved, adapted, config.model, whole)
    parameters = _parameters(adapted)

    run = run_directory.start(out, config.model_copy(update={"adapter": section}), resume=False)
    try:

        def copied(aside: Path) -> None:
            for name in WEIGHT_FILES:
                shutil.copyfile(folder / name, aside / name)
            own = files.read_json(aside / WEIGHT_FILES[0])
            files.write_json(aside / WEIGHT_FILES[0], own | {"base_model_name_or_path": base, "revision": None})
            model_card.write(adapted, aside)

        stop = _stop_tokens(config.model, tokenizer)
        exported.save(backbone.model, run.adapter, tokenizer, template, stop, adapter=copied)
        run.note(status="done", adopted={"from": str(folder), "beside": beside})
    finally:
        run.close()
    return Adopted(section.method, str(base), parameters, beside)


def _read(folder: Path) -> PeftConfig:
    """The configuration of the adapter in a folder that has its weights; raises an error that says what is missing."""
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            continue
        if name == WEIGHT_FILES[1] and (folder / "adapter_model.bin").is_file():
            raise FileError(
                f"{folder}: its weights are adapter_model.bin, a pickle, which can execute code when it is read. If "
                "you trust its authors, load it with PEFT and write it with save_pretrained."
            )
        raise FileError(f"{folder}: no {name} there. Name the folder of an adapter in PEFT's format.")
    saved = adapters.saved_config(folder)
    if saved.task_type not in TASKS:
        raise ConfigError(
            f"{folder}: task_type={saved.task_type}. Adapters of models that write text are adopted "
            f"({', '.join(filter(None, TASKS))}); train this task's here, with recipe classify, tag or embed."
        )
    return saved


def _tokenizer(folder: Path, model: ModelConfig) -> Any:
    """The tokenizer beside the adapter; the backbone's where there is none."""
    own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    update = {"id": str(folder.resolve()), "revision": None} if own else {}
    return backbones.tokenizer(model.model_copy(update=update))


def _section(
    saved: PeftConfig, adapted: PeftModel, model: ModelConfig, linear: Sequence[str]
) -> tuple[Method, dict[str, Any]]:
    """Section `adapter` for an adapter, and what the section has no keys for.

    Raises:
        ConfigError: No method here is alike.
    """
    kind = str(getattr(saved.peft_type, "value", saved.peft_type))
    name = NAMES.get(kind, kind.lower())
    values: dict[str, Any] = {}
    known = {"num_virtual_tokens": "virtual_tokens", "r": "rank", "lora_alpha": "alpha", "alpha": "alpha"}
    if isinstance(saved, LoraConfig):
        name = "alora" if saved.alora_invocation_tokens else "dora" if saved.use_dora else "lora"
        name = "rslora" if name == "lora" and saved.use_rslora else name
        values = {"dropout": saved.lora_dropout}
        known |= {} if name != "alora" else {"alora_invocation_tokens": "invocation"}
    if name not in METHODS:
        raise ConfigError(
            f"adapter_config.json: peft_type={kind} is no method here. `workbench ls adapters` lists them."
        )
    fields = METHODS[name].model_fields
    values |= {key: getattr(saved, own) for own, key in known.items() if key in fields and getattr(saved, own, None)}
    changed = {
        path.removeprefix("base_model.model.")
        for path, module in adapted.named_modules()
        if isinstance(module, BaseTunerLayer) and not path.endswith(".token_adapter")  # named by their indices
    }
    if "targets" in fields and (layers := sorted(changed & set(linear))):
        values["targets"] = tuple(short_names(backbones.skeleton(model, task=TEXT), layers))
    section = METHODS[name].model_validate({"method": name, **values})
    beside = {
        key: value
        for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices", "bias", "use_rslora")
        if (value := getattr(saved, key, None)) and value != "none" and not (key == "use_rslora" and name == "rslora")
    }
    if more := sorted(changed - set(linear)):
        beside["other modules"] = more
    return section, json.loads(json.dumps(beside, default=str))


def _parameters(adapted: PeftModel) -> int:
    from peft import get_peft_model_state_dict

    return sum(each.numel() for each in get_peft_model_state_dict(adapted, save_embedding_layers=False).values())


def _stop_tokens(model: ModelConfig, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: of the backbone's generation_config.json, and the tokenizer's own."""
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        known = GenerationConfig.from_pretrained(backbone_source.source_path(model)).eos_token_id or []
    except OSError:
        known = []
    return sorted({*stops, *([known] if isinstance(known, int) else known)})
