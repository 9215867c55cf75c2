"""Adapters over a frozen backbone: attach, save, load, merge, count. Callers need not know the method.

torch and peft are imported inside the functions, so that a recipe is validated without them. Importing this package
registers our tuners with PEFT: at once where peft is imported already, otherwise as soon as it is.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench import bounds
from workbench.adapters import anatomy, stock
from workbench.adapters.after_import import after_import
from workbench.adapters.inserted.block_expansion import BlockExpansion
from workbench.adapters.inserted.bottleneck import Bottleneck
from workbench.adapters.method import METHODS, NOT_OFFERED, ExtraParameters, Method, MethodInfo, Sample, register
from workbench.adapters.multiplicative.ia3 import Ia3
from workbench.adapters.multiplicative.rotations import Boft, Hra, Oft, Road
from workbench.adapters.prompts import virtual_tokens
from workbench.adapters.prompts.prefix import DeepPrompt, Prefix
from workbench.adapters.prompts.prompt import Prompt, PTuning
from workbench.adapters.updates.adalora import AdaLora
from workbench.adapters.updates.lora import ALora, Lora, LoraPlus
from workbench.adapters.updates.lora_relatives import DeLora, GraLora, RandLora
from workbench.adapters.updates.lora_starts import Corda, Eva, Loftq, LoraGa, Olora, Pissa
from workbench.adapters.updates.lycoris import LoHa, LoKr
from workbench.adapters.updates.miss import Miss
from workbench.adapters.updates.shared_vectors import UniLora, VbLora
from workbench.adapters.updates.singular_subspaces import Osf, Psoft, TinyLora
from workbench.adapters.updates.spectral import C3a, FourierFt, WaveFt
from workbench.adapters.updates.vera import Pvera, Vera
from workbench.adapters.updates.weight_products import Deft, Glora, Hira, Peanut
from workbench.adapters.weights.full import Full
from workbench.adapters.weights.partial import Beft, BitFit, LastLayers, LayerNorm, LinearProbe
from workbench.adapters.weights.sparse_updates import Shira, SparseTuning, SuperTuning
from workbench.adapters.weights.trainable_tokens import TrainableTokens, compute_as_stored
from workbench.errors import BackboneError, ConfigError, FileError, out_of_memory

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "METHODS",
    "NOT_OFFERED",
    "ALora",
    "AdaLora",
    "Beft",
    "BitFit",
    "BlockExpansion",
    "Boft",
    "Bottleneck",
    "C3a",
    "Corda",
    "Count",
    "DeLora",
    "DeepPrompt",
    "Deft",
    "Eva",
    "ExtraParameters",
    "FourierFt",
    "Full",
    "Glora",
    "GraLora",
    "Hira",
    "Hra",
    "Ia3",
    "LastLayers",
    "LayerNorm",
    "LinearProbe",
    "LoHa",
    "LoKr",
    "Loftq",
    "Lora",
    "LoraGa",
    "LoraPlus",
    "Method",
    "MethodInfo",
    "Miss",
    "Oft",
    "Olora",
    "Osf",
    "PTuning",
    "Peanut",
    "Pissa",
    "Prefix",
    "Prompt",
    "Psoft",
    "Pvera",
    "RandLora",
    "Road",
    "Shira",
    "SparseTuning",
    "SuperTuning",
    "TinyLora",
    "TrainableTokens",
    "UniLora",
    "VbLora",
    "Vera",
    "WaveFt",
    "attach",
    "count",
    "detach",
    "is_adapter",
    "load",
    "merge",
    "register",
    "require_fit",
    "require_mergeable",
    "save",
    "saved_config",
]


class Count(NamedTuple):
    """Numbers of parameters; packed values of a quantised weight are counted one by one."""

    total: int
    trainable: int


def attach(
    model: PreTrainedModel,
    config: Method,
    *,
    seed: int = 0,
    new_token_ids: Sequence[int] = (),
    sample: Sample | None = None,
    below: int = 0,
) -> nn.Module:
    """The backbone with a fresh, trainable adapter, and a trainable classification head where it has one.

    Everything else is frozen.

    Args:
        model: A bare backbone; its layers are changed in place.
        config: A method with its settings, such as `Lora(rank=8, alpha=16)`.
        seed: The adapter's random initial values depend on nothing else.
        new_token_ids: Rows of the embedding, and of an untied head, that train beside the adapter.
        sample: Model inputs of some training rows, for methods that start from data.
        below: Number of first blocks that never train, and need no adapter.

    Returns:
        A model of PEFT, called like the backbone; of full fine-tuning the backbone itself. Its parameters that require
        gradients are those to train.

    Raises:
        ConfigError: The method does not work on this backbone; the message says what does.

    Examples:
        >>> import workbench
        >>> from workbench.adapters import Lora, count
        >>> from workbench.config import ModelConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> model = workbench.attach(backbone.model, Lora(rank=4, alpha=8))
        >>> count(model)
        Count(total=6112000, trainable=112128)
    """
    import torch
    from peft import get_peft_model

    from workbench.adapters.precision.expert_layers import group_updates
    from workbench.adapters.precision.peft_layers import compute_in_any_precision
    from workbench.adapters.row_dropout import drop_by_row

    require_fit(model, config)
    if isinstance(config, Full):
        config.release(model)
        return model
    rows = {name: list(new_token_ids) for name in _prepare_rows(model)} if new_token_ids else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_config = config.to_peft(model, ExtraParameters(token_rows=rows, heads=anatomy.fresh_heads(model)))
        anatomy.leave_out(peft_config, model, below=below)
        # A backbone without values, on the meta device, gets an adapter without values.
        counted = model.device.type == "meta" and not config.made_of_values
        with _without_hints(), torch.device("meta") if counted else nullcontext():
            attached = get_peft_model(model, peft_config)
        compute_in_any_precision(attached)
        group_updates(attached)
        drop_by_row(attached)
        config.initialise(attached, sample)
    return attached


def require_fit(model: PreTrainedModel, config: Method) -> None:
    """Raise ConfigError where the method does not work on this backbone."""
    if reason := config.refusal(model):
        raise ConfigError(f"adapter.method={config.method}: {reason}")
    if not isinstance(config, Full) and (head := anatomy.ambiguous_head(model)) is not None:
        raise ConfigError(
            f"adapter.method={config.method}: `{head}` is a part of the head of {type(model).__name__}, and PEFT takes "
            "every layer of that name for it. Take adapter.method=full, or a backbone of another family."
        )


def save(model: nn.Module, folder: Path | str) -> None:
    """Write the adapter in PEFT's format (a fully trained backbone: as a stock model) into `folder`.

    Args:
        model: From `attach` or `load_adapter`.
        folder: Where adapter_config.json and adapter_model.safetensors are written.

    Examples:
        >>> import workbench
        >>> from pathlib import Path
        >>> from workbench.adapters import Lora
        >>> from workbench.config import ModelConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> model = workbench.attach(backbone.model, Lora(rank=4, alpha=8))
        >>> workbench.save_adapter(model, "fresh")
        >>> (Path("fresh") / "adapter_model.safetensors").exists()
        True
    """
    from peft import PeftModel

    from workbench.adapters import model_card
    from workbench.adapters.peft_tuners import as_shipped

    folder = Path(folder)
    if isinstance(model, PeftModel):
        # Rows of added tokens are part of the adapter; the other rows of a resized embedding are not.
        with as_shipped(model) as tensors:
            rows = getattr(model, _ROWS, False)
            model.save_pretrained(str(folder), save_embedding_layers=rows, state_dict=tensors)
        model_card.write(model, folder)
    else:
        stock.save(model, folder)


def load(
    model: PreTrainedModel | PeftModel, folder: Path | str, *, name: str = "default", dropout: float | None = None
) -> nn.Module:
    """The backbone with the adapter that `save_adapter` or PEFT wrote into `folder`, frozen, in evaluation mode.

    Args:
        model: The bare backbone, or one that holds adapters of other names.
        folder: Of adapter_config.json; that of a run is its adapter/.
        name: PEFT's name of the adapter.
        dropout: Train the adapter further, with this share of its inputs dropped; None: do not.

    Returns:
        A model of PEFT, called like the backbone.

    Raises:
        BackboneError: The adapter was made for another backbone; names the tensors that do not fit.
        FileError: A file of the adapter is damaged.

    Examples:
        >>> import workbench
        >>> from workbench.config import ModelConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> model = workbench.load_adapter(backbone.model, "runs/short/adapter")
        >>> model.training, any(each.requires_grad for each in model.parameters())
        (False, False)
    """
    folder = Path(folder)
    from peft import PeftModel
    from safetensors import SafetensorError

    from workbench.adapters.precision.expert_layers import group_updates
    from workbench.adapters.precision.peft_layers import compute_in_any_precision
    from workbench.adapters.row_dropout import drop_by_row

    config = saved_config(folder)
    _require_quick_patterns(folder, config, model)
    if dropout is not None:
        config.inference_mode = False
        if hasattr(config, "lora_dropout"):
            config.lora_dropout = dropout
    rows = _saved_rows(model, folder)
    if getattr(config, "trainable_token_indices", None):
        _prepare_rows(model)  # type: ignore[arg-type]  # PeftModel delegates to it
    if config.peft_type == "TRAINABLE_TOKENS":
        compute_as_stored(model.get_input_embeddings())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # PEFT only warns where the adapter's tensors match no module
            with _without_hints():
                if isinstance(model, PeftModel):
                    model.load_adapter(str(folder), adapter_name=name)
                    loaded = model
                else:
                    loaded = PeftModel.from_pretrained(
                        model, str(folder), adapter_name=name, config=config, is_trainable=dropout is not None
                    )
                if dropout is None:
                    loaded.requires_grad_(False).eval()
        compute_in_any_precision(loaded)
        group_updates(loaded)
        if dropout is not None:
            drop_by_row(loaded)
        setattr(loaded, _ROWS, rows)
        virtual_tokens.require_fitting(loaded, name)
        return loaded
    except (SafetensorError, RuntimeError, OSError, MemoryError) as error:
        if out_of_memory(error):
            raise BackboneError(
                f"{folder}: memory is exhausted while the adapter is loaded. End other programs, or write "
                "model.weights=nf4."
            ) from None
        if not isinstance(error, (SafetensorError, RuntimeError)):
            raise
        if isinstance(error, RuntimeError):
            raise BackboneError(_misfit(folder, model, error)) from None
        raise FileError(f"{folder}/adapter_model.safetensors: damaged ({error}). Restore it, or train again.") from None
    except (ValueError, UserWarning) as error:
        raise BackboneError(_misfit(folder, model, error)) from None


_ROWS = "_saves_embeddings"
"""Attribute of a model whose adapter was saved with all rows of the embeddings, as it is saved again."""


def _saved_rows(model: PreTrainedModel | PeftModel, folder: Path) -> bool:
    """Give the backbone as many rows of embeddings as the adapter in `folder` was trained with.

    Returns:
        Whether the adapter holds all rows of the embedding or the head, besides what `modules_to_save` says.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        embedding: Any = model.get_input_embeddings()
    except NotImplementedError:
        return False  # a backbone of pictures has none
    head = model.get_output_embeddings()
    paths = {f"base_model.model.{path}." for path, each in model.named_modules() if each in (embedding, head)}
    if not paths or not isinstance(getattr(embedding, "weight", None), torch.Tensor):
        return False
    shapes: dict[str, int] = {}
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # it is no dictionary
                path = next((path for path in paths if key.startswith(path)), None)
                if path is None:
                    continue
                side = {"weight": 0, "base_layer.weight": 0, "modules_to_save.weight": 0, "lora_B.weight": 0}
                side |= {"lora_embedding_A": 1}
                if (part := key.removeprefix(path)) in side:
                    shapes[part] = tensors.get_slice(key).get_shape()[side[part]]
    except (SafetensorError, OSError):
        return False  # `load` says what is wrong
    if (rows := max(shapes.values(), default=0)) and rows != embedding.weight.shape[0]:
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(rows, mean_resizing=False)
    saved = saved_config(folder)
    return bool({"weight", "base_layer.weight"} & shapes.keys()) and not getattr(saved, "modules_to_save", None)


def saved_config(folder: Path) -> PeftConfig:
    """The PEFT configuration of the adapter in `folder`; raises FileError where it is damaged."""
    from peft import PeftConfig

    try:
        config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FileError(f"{folder}/adapter_config.json: damaged ({error}). Restore it, or train again.") from None
    return config


def _require_quick_patterns(folder: Path, config: PeftConfig, model: nn.Module) -> None:
    """Raise FileError where a regular expression of an adapter takes for ever on the names of the model's modules."""
    values: list[Any] = [getattr(config, key, None) for key in ("target_modules", "exclude_modules", "layers_pattern")]
    mapped = [getattr(config, key, None) or {} for key in ("rank_pattern", "alpha_pattern")]
    values += [rf"(.*\.)?({each})$" for names in mapped for each in names]
    patterns = [each for each in values if isinstance(each, str) and re.search("[*+{]", each.removeprefix("(.*\\.)?"))]
    names = [name for name, _ in model.named_modules()]
    search = lambda: [re.fullmatch(each, name) for each in patterns for name in names]  # noqa: E731
    if patterns and (fault := bounds.fault(search)):
        raise FileError(
            f"{folder}/adapter_config.json: a pattern that names modules {fault}: {str(patterns)[:200]}. Write the "
            "names of the modules as a list in its place."
        )


def _misfit(folder: Path, model: PreTrainedModel | PeftModel, error: Exception) -> str:
    first_lines = "\n  ".join(str(error).splitlines()[:6])
    return (
        f"{folder}: this adapter does not fit the backbone {model.config._name_or_path} "
        f"({type(model).__name__}). Load it onto the backbone that it was trained on.\n  {first_lines}"
    )


def merge(model: nn.Module, config: Method) -> PreTrainedModel:
    """The backbone with the adapter's update added to its weights; a fully trained backbone as it is.

    Raises:
        ConfigError: The method is no update of the weights.
    """
    from peft import PeftModel

    require_mergeable(config)
    if not isinstance(model, PeftModel):
        return model  # type: ignore[return-value]
    # PEFT itself fails where a head is more than a layer.
    for name, head in _heads(model).items():
        model.set_submodule(name, head.modules_to_save[head.active_adapters[0]])
    with _without_hints():
        _untie(model)
        return model.merge_and_unload(safe_merge=True)  # type: ignore[no-any-return]


def detach(model: nn.Module) -> PreTrainedModel | None:
    """The bare backbone that `attach` was given, its heads at their initial values, frozen, in evaluation mode.

    None where its own weights have trained, so that it must be loaded again.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return None
    for name, head in _heads(model).items():
        model.set_submodule(name, head.original_module)
    backbone: Any = model.get_base_model() if model.active_peft_config.is_prompt_learning else model.unload()
    bare: PreTrainedModel = backbone.requires_grad_(False).eval()
    return bare


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


def _heads(model: PeftModel) -> dict[str, Any]:
    """PEFT's wrappers around the modules that train whole, by path."""
    from peft.utils import ModulesToSaveWrapper

    return {name: module for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}


def _untie(model: PeftModel) -> None:
    """Give each module that an update is added to a weight of its own: a tied embedding or head is not updated with it.

    Rows of added tokens are one update of both, and stay tied.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.nn import Parameter

    shared = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    backbone: Any = model.get_base_model()
    for module in backbone.modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            base: Any = module.get_base_layer()
            weight = base._parameters.get("weight")
            if shared[id(weight)] > 1:
                base.weight = Parameter(weight.detach().clone(), requires_grad=False)
                backbone.config.get_text_config().tie_word_embeddings = False


@contextmanager
def _without_hints() -> Iterator[None]:
    """Silence warnings of PEFT that no user can act on: deprecated calls, settings that it corrects itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        warnings.filterwarnings("ignore", message="Unsupported layer type .*Norm(2d)?'", category=UserWarning)
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        # Trainable tokens tie the rows themselves; nothing else targets an embedding.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
        yield


def _prepare_rows(model: PreTrainedModel) -> list[str]:
    """Leaf names of the modules whose rows can train: the embedding, and the head where the two are not tied.

    PEFT multiplies with their whole weight, which must be stored in the precision that it is computed in.

    Raises:
        BackboneError: The head has a bias, which PEFT would leave out.
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


def _register_tuners() -> None:
    from workbench.adapters.peft_tuners import register_ours

    register_ours()


# A stock `PeftModel.from_pretrained` loads what our tuners saved.
after_import("peft", _register_tuners)
