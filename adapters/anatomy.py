"""The parts of a backbone that methods name: its repeated blocks, their linear layers, its head, its picture tower."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from workbench.errors import BackboneError

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel


def without_values(tensor: Tensor) -> bool:
    """Whether a tensor is a shape alone: on the meta device, or in a plan."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


def language_model(model: nn.Module) -> str:
    """Path of the part that reads text where towers for pictures or sound stand beside it; empty where there are none.

    Rows of text run nothing else, so that what methods name is in it, and the towers stay as they are.
    """
    from transformers import PretrainedConfig

    whole: Any = model
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or config.is_encoder_decoder or not reads_tokens(model):
        return ""
    if config.get_text_config(decoder=True) is config:
        return ""
    decoder = whole.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def text_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules of the language model by path in the whole; all modules where no towers stand beside it."""
    inside = language_model(model)
    return list(model.get_submodule(inside).named_modules(prefix=inside))


def towers(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of towers and projectors: what stands beside the language model."""
    inside = language_model(model)
    if not inside:
        return []
    own = {id(each) for each in model.get_submodule(inside).parameters()}
    return [each for each in model.get_submodule(inside.rpartition(".")[0]).parameters() if id(each) not in own]


def about_towers(model: nn.Module) -> list[str]:
    """A sentence on the towers, where the model has some."""
    values = sum(each.numel() for each in towers(model))
    sentence = f"{values:,} parameters of towers and projectors beside the language model stay as they are"
    return [sentence] if values else []


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer, whatever is around it, as its family names them; none is inside another."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found: dict[str, nn.Module] = {}
    for path, module in text_modules(model):
        # Base classes count, too: FSDP2 replaces the class of a block by a subclass.
        named = any(each.__name__ in names for each in type(module).__mro__)
        if named and not path.startswith(tuple(f"{block}." for block in found)):  # Qwen2-Audio names attention, too
            found[path] = module
    return list(found.values())


def blocks(model: nn.Module) -> list[list[str]]:
    """Paths of the repeated blocks, one list for each stack; T5 has two, encoder and decoder.

    A stack is an outermost list of modules with weight matrices; lists inside a block (experts) are none. The blocks of
    all stages of a vision backbone are one stack, since they are computed one after another.
    """
    stacks = [
        [block for number, part in enumerate(stack.children()) for block in _of_stage(f"{name}.{number}", part)]
        for name, stack in _stacks(model)
    ]
    return [list(chain.from_iterable(stacks))] if stacks and _is_timm(model) else stacks


def _stacks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from torch import nn

    of_timm = _is_timm(model)
    stacks: list[tuple[str, nn.Module]] = []
    for name, module in text_modules(model):
        if name.startswith(tuple(f"{stack}." for stack, _ in stacks)):
            continue
        sequence = isinstance(module, nn.Sequential) and all(any(each.children()) for each in module)  # in timm
        is_list = isinstance(module, nn.ModuleList) or (of_timm and sequence)
        if is_list and any(is_linear(part) or is_convolution(part) for part in module.modules()):
            stacks.append((name, module))
    return stacks


def _is_timm(model: nn.Module) -> bool:
    """Whether the backbone is a model of the library timm that transformers only wraps."""
    return "timm_model" in model._modules


def _of_stage(path: str, module: nn.Module) -> list[str]:
    """Paths of the blocks of a stage, such as SwinStage; for anything else its own path."""
    from torch import nn

    if type(module) is nn.Sequential:
        return [f"{path}.{number}" for number in range(len(module))]
    if not type(module).__name__.endswith("Stage"):
        return [path]
    lists = {
        name: list(part.children())
        for name, part in module.named_children()
        if isinstance(part, (nn.ModuleList, nn.Sequential))
    }
    # In some families the transition to the next resolution is a list, too, of different layers.
    alike = [name for name, parts in lists.items() if parts and len({type(part) for part in parts}) == 1]
    return [f"{path}.{alike[0]}.{number}" for number in range(len(lists[alike[0]]))] if len(alike) == 1 else [path]


def leave_out(config: PeftConfig, model: nn.Module, *, below: int) -> None:
    """Exclude the first `below` blocks of the only stack, where PEFT's configuration can exclude modules.

    Otherwise the adapter in these blocks must be frozen.
    """
    if below and "exclude_modules" in {field.name for field in dataclasses.fields(config)}:
        (stack,) = blocks(model)
        config.exclude_modules = rf"({'|'.join(map(re.escape, stack[:below]))})\..*"  # type: ignore[attr-defined]


def linear_modules(model: nn.Module) -> list[str]:
    """Paths of the linear layers inside the stacks, quantised ones too."""
    return [name for name, module in inside_stacks(model) if is_linear(module)]


def convolutions(model: nn.Module) -> list[str]:
    """Paths of the convolutions inside the stacks, without grouped and depthwise ones."""
    return [name for name, module in inside_stacks(model) if is_convolution(module)]


def convolves(model: nn.Module) -> bool:
    """Whether blocks hold convolutions, depthwise ones too: their hidden states are maps, not sequences of patches."""
    from torch import nn

    return any(isinstance(module, nn.Conv2d) for _, module in inside_stacks(model))


def inside_stacks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules inside the stacks, by path."""
    inside = tuple(f"{name}." for name, _ in _stacks(model))
    return [(name, module) for name, module in model.named_modules() if name.startswith(inside)]


def fused_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters inside the blocks that hold the matrices of all experts (E, ., .), by path, packed ones too."""
    inside = tuple(f"{name}." for name, _ in _stacks(model))
    return {
        name: each
        for name, each in model.named_parameters()
        if name.startswith(inside) and len(shape := whole_shape(each)) == 3 and min(shape[1:]) > 1  # 1: scales of heads
    }


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of a parameter before bitsandbytes packed it."""
    state = getattr(parameter, "quant_state", None)
    return tuple(parameter.shape if state is None else state.shape)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product with its own weight; GPT-2's Conv1D is one, Llama 4's router is none."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D) or (isinstance(module, nn.Linear) and _is_product(module))


def _is_product(layer: nn.Linear) -> bool:
    """Whether a layer whose class may compute something else (routers, groups of inputs) returns x W^T + b."""
    import torch

    kind = type(layer)
    if kind.forward is torch.nn.Linear.forward or kind.__module__.startswith(("bitsandbytes.", "workbench.")):
        return True
    shapes: Any = copy.copy(layer)
    shapes._parameters = {name: each if each is None else each.to("meta") for name, each in layer._parameters.items()}
    inputs_BI = torch.empty(2, layer.in_features, device="meta", dtype=layer.weight.dtype)
    try:
        outputs: Any = shapes.forward(inputs_BI)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return isinstance(outputs, torch.Tensor) and outputs.shape == (2, layer.out_features)


def is_convolution(module: nn.Module) -> bool:
    """Whether a module is a two-dimensional convolution without groups; depthwise ones have groups."""
    from torch import nn

    return isinstance(module, nn.Conv2d) and module.groups == 1


def features(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, quantised ones too."""
    from torch import nn

    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.nx, layer.nf)


def dense_weight(layer: Any) -> Tensor:
    """The weight (outputs, inputs) of a linear layer, dequantised."""
    import torch
    from transformers.pytorch_utils import Conv1D

    stored = layer.weight
    if (waiting := vars(layer).get("unpacked")) is not None:  # for its device: what it will multiply with there
        stored = type(stored)(waiting, quant_type=stored.quant_type).to(waiting.device)
        stored.quant_state.dtype = layer.compute_dtype
    if getattr(stored, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit  # a second to import, and most runs need none of it

        four: Tensor = dequantize_4bit(stored.data, stored.quant_state)
        return four
    if stored.dtype == torch.int8:
        from bitsandbytes.functional import int8_vectorwise_dequant

        scales = layer.state.SCB if stored.SCB is None else stored.SCB  # the first forward pass moves them
        eight: Tensor = int8_vectorwise_dequant(stored.data, scales)
        return eight
    if "weight_scale" in layer._buffers:  # of a layer in FP8
        rounded: Tensor = layer.dense(torch.float32)
        return rounded
    weight: Tensor = stored.detach()
    return weight.T if isinstance(layer, Conv1D) else weight


def is_attention(path: str) -> bool:
    """Whether a module inside a block belongs to its attention."""
    return any("attn" in part or "attention" in part for part in path.lower().split("."))


def task(model: PreTrainedModel) -> str | None:
    """PEFT's name of the model's task; None where PEFT has none."""
    name = type(model).__name__
    if reads_sound(model):  # whose arguments PEFT's classes of tasks do not know
        return None
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    if model.config.is_encoder_decoder:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if model.can_generate() or name.endswith(("ForCausalLM", "LMHeadModel")) else None


def fresh_heads(model: PreTrainedModel) -> list[str]:
    """Names of the modules of a classification head: random at first, so it trains and is saved with any adapter."""
    if not type(model).__name__.endswith(("Classification", "ClassificationWithTeacher")):
        return []
    if _is_timm(model):
        wrapped: Any = model._modules["timm_model"]
        head = wrapped.get_classifier()
        return [f"timm_model.{name}" for name, module in wrapped.named_modules() if module is head]
    inside = body(model)
    return [
        name
        for name, module in model.named_children()
        if name != inside and any(True for _ in module.parameters()) and not (_is_bare(model) and _convolves(module))
    ]


def ambiguous_head(model: PreTrainedModel) -> str | None:
    """A module of the head whose name also ends the path of another module (SwiftFormer's `norm`), or None."""
    names = [name for name, _ in model.named_modules()]
    return next((head for head in fresh_heads(model) if sum(name.endswith(head) for name in names) > 1), None)


def body(model: PreTrainedModel) -> str:
    """Name of the child below the head; empty where there is none.

    Classifiers of CLIP and SigLIP do not name it, nor do those of Whisper: it is the child that reads the input.
    """
    if not _is_bare(model):
        return model.base_model_prefix if model.base_model is not model else ""
    return next((name for name, child in model.named_children() if _convolves(child)), "")


def _is_bare(model: PreTrainedModel) -> bool:
    """Whether a backbone for pictures or sound does not name the child below its head."""
    return model.base_model is model and not reads_tokens(model)


def _convolves(module: nn.Module) -> bool:
    from torch import nn

    return any(is_convolution(each) or isinstance(each, nn.Conv1d) for each in module.modules())


def reads_pictures(model: nn.Module) -> bool:
    """Whether a backbone reads pictures rather than tokens."""
    return getattr(model, "main_input_name", "input_ids") == "pixel_values"


def reads_sound(model: nn.Module) -> bool:
    """Whether a backbone reads the features of recordings: samples, or bands of frequencies."""
    return getattr(model, "main_input_name", "input_ids") in ("input_values", "input_features")


def reads_tokens(model: nn.Module) -> bool:
    """Whether a backbone reads tokens of a vocabulary rather than pictures or sound alone."""
    return not (reads_pictures(model) or reads_sound(model))


def trial_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """A short text, or a picture or recording of the backbone's own size, as arguments; works on the meta device."""
    import torch

    if reads_pictures(model):
        blank_13HW = blank_picture(model)
        return {"pixel_values": torch.linspace(-1, 1, blank_13HW.numel()).to(blank_13HW).view_as(blank_13HW)}
    if not reads_sound(model):
        tokens_BL = torch.arange(2, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
        return {"input_ids": tokens_BL}
    hub: Any = model.config
    bands, weight = getattr(hub, "num_mel_bins", None), next(model.parameters())
    if bands is None:  # a second of a wave
        shape: tuple[int, ...] = (1, 16_000)
    elif hasattr(hub, "max_source_positions") and hub.model_type == "whisper":
        shape = (1, bands, 2 * hub.max_source_positions)
    else:
        shape = (1, getattr(hub, "max_length", 100), bands)
    features = torch.linspace(-1, 1, math.prod(shape)).to(weight.device, torch.float32).view(shape)
    inputs = {model.main_input_name: features}
    if model.can_generate():
        inputs["decoder_input_ids"] = torch.arange(2, 6, device=weight.device)[None] % hub.vocab_size
    return inputs


def block_width(model: PreTrainedModel, block: str) -> int:
    """Width of the hidden states in a block; in some backbones for pictures it grows from stage to stage."""
    if reads_pictures(model):
        for module in model.get_submodule(block).modules():
            weight = module._parameters.get("weight")
            if is_norm(module) and weight is not None and weight.ndim == 1:
                return len(weight)
    return hidden_size(model.config)


def width_at(model: PreTrainedModel, path: str) -> int:
    """Width of the residual stream at a module of a block."""
    around = [block for stack in blocks(model) for block in stack if f"{path}.".startswith(f"{block}.")]
    return block_width(model, around[0]) if around else hidden_size(model.config)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return "norm" in type(module).__name__.lower() or isinstance(module, _BatchNorm)


def unread(model: PreTrainedModel) -> list[str]:
    """Paths of modules whose outputs the head does not read: the norm of CLIP's pooled token."""
    pooled = f"{body(model)}.post_layernorm"
    return [pooled] if model.config.model_type == "clip" and reads_pictures(model) else []


def body_config(hub: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that describes the model below the head; of a CLIP classifier, the vision tower."""
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    if type(hub) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        vision: PretrainedConfig = getattr(hub, "vision_config", hub)
        return vision
    return hub.get_text_config()


def hidden_size(hub: PretrainedConfig) -> int:
    """Width of the hidden states in front of the head, by a backbone's configuration.

    Configurations of MobileNetV2 and of timm's models do not say it: 1,280, as in most of them.
    """
    config = body_config(hub)
    for name in ("hidden_size", "hidden_sizes", "embed_dim", "num_features", "hidden_dim"):
        if width := getattr(config, name, None):
            return int(width if isinstance(width, int) else width[-1])
    return 1280


INTERPOLATE = "interpolate_pos_encoding"
"""The argument that makes a tower interpolate its position embeddings to the size of its pictures."""
USUAL = 224
"""Side in pixels where the configuration says none."""


def picture_tower(model: PreTrainedModel) -> nn.Module:
    """The module below the head."""
    return model.get_submodule(body(model))


def picture_stem(model: PreTrainedModel) -> nn.Conv2d:
    """The first convolution, which reads the pixels; raises BackboneError where there is none."""
    from torch import nn

    conv = next((module for module in picture_tower(model).modules() if isinstance(module, nn.Conv2d)), None)
    if conv is None:
        raise BackboneError(
            f"{type(model).__name__} reads pictures by no convolution, which is not known here yet. "
            "Take another backbone, such as facebook/dinov2-small."
        )
    return conv


def picture_size(hub: PretrainedConfig) -> int | None:
    """The side in pixels that a backbone was trained with, by its configuration; None where it says none."""
    vision: Any = getattr(hub, "vision_config", hub)
    of_timm = getattr(hub, "pretrained_cfg", None) or {}
    size = getattr(vision, "image_size", None) or of_timm.get("input_size")
    return size if size is None or isinstance(size, int) else int(max(size))


def blank_picture(model: PreTrainedModel, size: int | None = None) -> Tensor:
    """One black picture (1, 3, size, size) on the backbone's device, by default of its own size."""
    import torch

    weight, side = picture_stem(model).weight, size or picture_size(model.config) or USUAL
    return torch.zeros(1, weight.shape[1], side, side, device=weight.device, dtype=weight.dtype)


def reads_size(model: PreTrainedModel, size: int | None = None) -> bool:
    """Whether the tower accepts pictures of this side, by default of its own; works on the meta device, too."""
    try:
        compute_picture(model, blank_picture(model, size))
    except (ValueError, RuntimeError, AssertionError):
        return False
    return True


def compute_picture(model: PreTrainedModel, picture_13HW: Tensor) -> None:
    """Run the tower on a picture, in evaluation mode and without gradients; works on the meta device, too."""
    import torch

    own, side = picture_size(model.config), picture_13HW.shape[-1]
    named = {INTERPOLATE: True} if own not in (None, side) and interpolates(model) else {}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            picture_tower(model)(picture_13HW, **named)
    finally:
        model.train(training)


def interpolates(model: PreTrainedModel) -> bool:
    """Whether the tower takes INTERPOLATE."""
    return INTERPOLATE in inspect.signature(picture_tower(model).forward).parameters
