"""Our bottleneck adapters against AdapterHub's `adapters` library: the same weights, logits and gradients.

Two halves that run in two environments, because AdapterHub pins another transformers: `theirs FOLDER` builds tiny
backbones with their adapters and writes weights and results there, `ours FOLDER` loads them and compares. See
adapterhub_equality.sh, which makes the environment and runs both.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TOLERANCE = 1e-5
REDUCTION = 4
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
BACKBONES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", {**SIZES, "intermediate_size": 48}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**SIZES, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}),
}
THEIR_CONFIGS = {"houlsby": "DoubleSeqBnConfig", "pfeiffer": "SeqBnConfig", "parallel": "ParBnConfig"}
"""Their configuration classes, as they come but for the sizes and the activation."""
PAIRS = [(backbone, method) for backbone in BACKBONES for method in ("houlsby", "pfeiffer")] + [("bert", "parallel")]
"""Their parallel adapter reads the residual stream, ours the MLP's input: the same in BERT only."""
OUR_PLACES = {
    "attention.output.dense.after_bottleneck": "attention.output.adapters.a",
    "output.dense.after_bottleneck": "output.adapters.a",
    "output.dense.beside_bottleneck": "output.adapters.a",
    "output.LayerNorm.within_bottleneck": "output.adapters.a",
    "attn.c_proj.after_bottleneck": "attention_adapters.adapters.a",
    "mlp.c_proj.after_bottleneck": "output_adapters.adapters.a",
    "self_attn.o_proj.after_bottleneck": "attention_adapters.adapters.a",
    "mlp.down_proj.after_bottleneck": "output_adapters.adapters.a",
    "after_bottleneck": "output_adapters.adapters.a",
}
"""The module of one of our adapters inside a block, and of theirs."""
OUR_WEIGHTS = {"bottleneck_down.default": "adapter_down.0", "bottleneck_up.default": "adapter_up"}
transformers.logging.set_verbosity_error()
IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7], [4, 8, 15, 16, 23, 42, 2]])


def build(backbone: str) -> Any:
    """A tiny model with random weights."""
    model, config, sizes = BACKBONES[backbone]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()


def randomise(parameters: list[nn.Parameter], seed: int) -> None:
    """Weights large enough for every term to matter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


def results(model: Any, parameters: dict[str, nn.Parameter]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of a loss in every parameter."""
    found = model(input_ids=IDS, labels=IDS)
    found.loss.backward()
    return found.logits.detach(), {name: each.grad.clone() for name, each in parameters.items()}  # type: ignore[union-attr]


def theirs(folder: Path) -> None:
    """Write `BACKBONE.METHOD.safetensors`: base weights, adapter weights, logits and gradients."""
    hub: Any = importlib.import_module("adapters")  # AdapterHub's, which is in this environment only
    logging.getLogger("adapters").setLevel(logging.ERROR)  # it warns between adding an adapter and activating it
    for backbone, method in PAIRS:
        model = build(backbone)
        randomise([each for each in model.parameters() if each.ndim == 2], 0)
        base = {f"base|{name}": each.detach().clone() for name, each in model.named_parameters()}
        hub.init(model)
        config = getattr(hub, THEIR_CONFIGS[method])(reduction_factor=REDUCTION, non_linearity="gelu")
        model.add_adapter("a", config=config)
        model.train_adapter("a")
        model.eval()
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad and ".a." in name}
        randomise(list(trained.values()), 1)
        logits, gradients = results(model, trained)
        tensors = {f"adapter|{name}": each.detach() for name, each in trained.items()}
        tensors |= {f"gradient|{name}": each for name, each in gradients.items()}
        save_file({**base, **tensors, "logits": logits}, folder / f"{backbone}.{method}.safetensors")


def their_name(ours: str) -> str:
    """AdapterHub's name of one of our parameters."""
    name = ours.removeprefix("base_model.model.")
    stem, kind, tensor = name.rsplit(".", 3)[0], ".".join(name.split(".")[-3:-1]), name.rsplit(".", 1)[1]
    place = next(place for place in OUR_PLACES if stem.endswith(f".{place}"))
    return f"{stem.removesuffix(place)}{OUR_PLACES[place]}.{OUR_WEIGHTS[kind]}.{tensor}"


def ours(folder: Path) -> bool:
    """Print the largest differences for each pair; whether all are within TOLERANCE."""
    from workbench.adapters import Bottleneck, attach

    print(
        f"{'backbone':10}{'method':10}{'AdapterHub':20}{'parameters':>10}{'logits':>12}{'gradients':>12}{'largest':>10}"
    )
    worst = 0.0
    for backbone, method in PAIRS:
        saved = load_file(folder / f"{backbone}.{method}.safetensors")
        model = build(backbone)
        base = {name.removeprefix("base|"): each for name, each in saved.items() if name.startswith("base|")}
        for name, parameter in model.named_parameters():
            parameter.data = base.pop(name)
        assert not base, sorted(base)
        config = Bottleneck.model_validate({"method": method, "reduction": REDUCTION, "activation": "gelu"})
        attached = attach(model, config, seed=0).eval()
        trained = {their_name(name): each for name, each in attached.named_parameters() if each.requires_grad}
        assert trained.keys() == {name.removeprefix("adapter|") for name in saved if name.startswith("adapter|")}
        for name, parameter in trained.items():
            parameter.data = saved[f"adapter|{name}"]
        logits, gradients = results(attached, trained)
        apart = float((logits - saved["logits"]).abs().max())
        gap = max(float((each - saved[f"gradient|{name}"]).abs().max()) for name, each in gradients.items())
        largest = max(float(each.abs().max()) for each in gradients.values())
        count = sum(each.numel() for each in trained.values())
        print(f"{backbone:10}{method:10}{THEIR_CONFIGS[method]:20}{count:10,}{apart:12.1e}{gap:12.1e}{largest:10.2f}")
        worst = max(worst, apart, gap)
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}; the last column is the largest gradient")
    return worst <= TOLERANCE


if __name__ == "__main__":
    half, folder = sys.argv[1], Path(sys.argv[2])
    if half == "theirs":
        theirs(folder)
    elif not ours(folder):
        sys.exit(1)
