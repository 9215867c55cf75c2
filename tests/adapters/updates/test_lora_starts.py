"""LoRA from somewhere: PiSSA and OLoRA from weights, EVA, CorDA and LoRA-GA from data, LoftQ from rounding."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import METHODS, Eva, Loftq, Method, Pissa
from workbench.adapters.anatomy import dense_weight
from workbench.adapters.updates.lora_start_values import Components, leading_parts
from workbench.config import ModelConfig
from workbench.errors import BackboneError, ConfigError
from workbench.models import backbones
from workbench.models.fused_lora import FusedLoraLinear, fuse
from workbench.training.master_weights import MasterWeights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
RANK, SCALE = 3, 2.0
FROM_WEIGHTS = pytest.mark.parametrize("method", ["pissa", "olora"])


def _config(method: str, **settings: Any) -> Method:
    return METHODS[method].model_validate({"method": method, "rank": RANK, "alpha": SCALE * RANK, **settings})


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _update(layer: Any) -> Tensor:
    """scale * B A, (outputs, inputs)."""
    A_RI, B_OR = _live(layer)
    product: Tensor = B_OR @ A_RI * layer.scaling["default"]
    return product.detach()


def _live(layer: Any) -> tuple[Tensor, Tensor]:
    """A and B; where a start is kept apart, its sum with what training has changed."""
    A_RI, B_OR = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    shifted = "default" in layer.lora_variant
    return (layer.start_A_RI + A_RI, layer.start_B_OR + B_OR) if shifted else (A_RI, B_OR)


def _train(model: nn.Module, steps: int = 8) -> list[float]:
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# PiSSA and OLoRA.


@pytest.mark.parametrize("decomposition", ["exact", "randomised"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_pissa_starts_at_the_nearest_matrix_of_its_rank(name: str, decomposition: str) -> None:
    model = adapters.attach(tiny(name), _config("pissa", decomposition=decomposition), seed=0)
    for layer in _layers(model).values():
        weight = dense_weight(layer.get_base_layer())
        lengths = torch.linalg.svdvals(weight)
        rest = torch.linalg.svdvals(weight - _update(layer))
        torch.testing.assert_close(rest[: len(lengths) - RANK], lengths[RANK:], rtol=1e-3, atol=1e-4)
        A, B = _live(layer)
        torch.testing.assert_close(A.norm(dim=1), B.norm(dim=0))  # each has the root of the singular values


@pytest.fixture(scope="module")
def weight_OI() -> Tensor:
    """A weight whose singular values fall as those of trained ones do: no gap behind the wanted ones."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(size, 300, generator=generator))[0] for size in (400, 300))
    return (U * torch.arange(1, 301) ** -0.5) @ V.T


def test_the_randomised_parts_are_the_exact_ones(weight_OI: Tensor) -> None:
    torch.manual_seed(0)
    rank = 8
    (A, B), (A0, B0) = (leading_parts(weight_OI, rank, decomposition=kind) for kind in ("randomised", "exact"))
    for found, exact in ((A.T, A0.T), (B, B0)):
        cosines = torch.linalg.svdvals(torch.linalg.qr(found)[0].T @ torch.linalg.qr(exact)[0])
        assert cosines.min() > 1 - 1e-4, "the smallest cosine between the two subspaces"
    # No other matrix of this rank is nearer than the exact one.
    assert (weight_OI - B @ A).norm() / (weight_OI - B0 @ A0).norm() < 1 + 1e-5


def test_the_randomised_parts_depend_on_the_seed_alone(weight_OI: Tensor) -> None:
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(leading_parts(weight_OI, 8, decomposition="randomised")[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_no_wide_matrix_is_decomposed_whole(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact decomposition of 4,096 x 4,096 takes a core more than a minute, and 8 B parameters have 224 of them."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 1040, "intermediate_size": 8, "num_attention_heads": 2}
    wide = tiny("Llama", **sizes, num_key_value_heads=2)
    fresh = copy.deepcopy(wide)
    decompositions = {name: getattr(torch.linalg, name) for name in ("svd", "qr")}

    def thin(name: str) -> Any:
        def decompose(matrix: Tensor, *arguments: Any, **settings: Any) -> Any:
            assert min(matrix.shape) < 1024, f"{name} of {tuple(matrix.shape)}"
            return decompositions[name](matrix, *arguments, **settings)

        return decompose

    for name in decompositions:
        monkeypatch.setattr(torch.linalg, name, thin(name))
    config = _config(method, targets=["v_proj"])
    (layer,) = _layers(adapters.attach(wide, config, seed=0)).values()
    assert layer.start_A_RI.any()
    if method == "pissa":
        with pytest.raises(AssertionError, match="svd of"):
            adapters.attach(fresh, _config(method, targets=["v_proj"], decomposition="exact"), seed=0)


def test_olora_starts_at_orthonormal_columns_of_the_weights(llama: PreTrainedModel) -> None:
    for layer in _layers(adapters.attach(llama, _config("olora"), seed=0)).values():
        A, B = _live(layer)
        torch.testing.assert_close(B.T @ B, torch.eye(RANK), rtol=0, atol=1e-5)
        weight = layer.get_base_layer().weight
        torch.testing.assert_close(B.T @ weight, A, rtol=0, atol=1e-4)  # its projection


@FROM_WEIGHTS
def test_the_same_losses_as_pefts_which_takes_the_start_out_of_the_weights(method: str) -> None:
    ours = adapters.attach(tiny("Llama"), _config(method), seed=0)
    names = list(_config(method).modules(tiny("Llama")))
    config = LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules=names, init_lora_weights=method)  # type: ignore[arg-type]
    theirs = get_peft_model(tiny("Llama"), config)
    losses = _train(ours), _train(theirs)
    assert losses[0][-1] < 0.9 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@FROM_WEIGHTS
def test_stock_peft_loads_it_as_plain_lora_over_the_original_weights(
    llama: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    bare = copy.deepcopy(llama)
    model = adapters.attach(llama, _config(method), seed=0)
    _train(model)
    wanted = model(input_ids=IDS).logits.detach()
    for _ in range(2):  # saving changes nothing that a second time would see
        adapters.save(model, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["peft_type"], written["r"], written["init_lora_weights"]) == ("LORA", 2 * RANK, True)
    stock = PeftModel.from_pretrained(bare, str(tmp_path)).eval()
    torch.testing.assert_close(stock(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-4)


@FROM_WEIGHTS
def test_fused_layers_know_the_start(llama: PreTrainedModel, method: str) -> None:
    model = adapters.attach(llama, _config(method), seed=0)
    _train(model, 2)
    found = []
    for fused in (False, True):
        if fused:
            fuse(model)
            assert any(isinstance(module, FusedLoraLinear) for module in model.modules())
        model.zero_grad()
        outputs = model(input_ids=IDS, labels=IDS)
        outputs.loss.backward()
        gradients = [each.grad for each in model.parameters() if each.requires_grad]
        found.append([outputs.logits.detach(), *gradients])
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [1e-4, 1e-2])
@pytest.mark.parametrize("method", ["pissa", "olora", "corda", "lora-ga"])
def test_a_small_update_survives_half_precision(llama: PreTrainedModel, method: str, change: float) -> None:
    """The difference of B A x and B0 A0 x, each rounded to bfloat16, would be all rounding."""
    sample = [{"input_ids": IDS}]
    model = adapters.attach(llama.bfloat16(), _config(method), seed=0, sample=lambda: iter(sample))
    if method == "lora-ga":
        _config(method).choose(model, iter([model(**sample[0], labels=IDS).loss]))
    masters = MasterWeights(model, torch.bfloat16)
    torch.manual_seed(3)
    for master in masters:
        master.data.add_(torch.randn_like(master) * change)
    masters.refresh()
    values = masters.named()
    for name, layer in _layers(model).items():
        dA, dB = (values[f"{name}.lora_{part}.default.weight"].double() for part in "AB")
        A0, B0 = layer.start_A_RI.double(), layer.start_B_OR.double()
        x = torch.randn(20, dA.shape[1]).bfloat16()
        exact = x.double() @ ((B0 + dB) @ (A0 + dA) - B0 @ A0).T * layer.scaling["default"]
        found = layer.lora_variant["default"].forward(
            layer, "default", x, torch.zeros_like(exact, dtype=torch.bfloat16)
        )
        assert (found.double() - exact).norm() < 0.01 * exact.norm(), name


def test_dropout_leaves_the_start_alone(llama: PreTrainedModel) -> None:
    """In the papers the start is a part of the weights: where all else is dropped, W - scale * B0 A0 is left."""
    layer = next(iter(_layers(adapters.attach(llama, _config("pissa", dropout=0.999999), seed=0)).values()))
    x = torch.randn(5, 32)
    found = layer.train()(x)
    torch.testing.assert_close(found, x @ (layer.get_base_layer().weight - _update(layer)).T, rtol=1e-4, atol=1e-4)


def test_a_rank_above_a_weights_shorter_side_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"k_proj is only 16 wide\. Write adapter\.rank=16 or less"):
        adapters.attach(llama, Pissa(rank=17), seed=0)


@pytest.mark.parametrize(
    "settings",
    [{"method": "pissa", "decomposition": "randomised"}, {"method": "olora"}, {"method": "eva"}, {"method": "corda"}],
)
def test_a_resumed_run_starts_from_the_same_bits(settings: dict[str, Any]) -> None:
    """It attaches again, and only then reads what training had made of A and B."""
    sample = [{"input_ids": torch.arange(60)[None]}]
    states = []
    for _ in range(2):
        torch.manual_seed(torch.seed())
        model = adapters.attach(tiny("Llama"), _config(**settings), seed=0, sample=lambda: iter(sample))
        states.append([*model.parameters(), *model.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


# EVA.


@pytest.mark.parametrize("cut", [[700], [300, 400], [5, 300, 20, 375]])
def test_components_are_those_of_all_rows_however_they_come(cut: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(700, 12) * torch.linspace(4, 0.5, 12) + torch.randn(12)
    components = Components(4)
    for part in x.split(cut):
        components.add(part)
    found, shares = components.directions()
    _, lengths, wanted = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    # Components beyond the fourth are forgotten on the way, which costs a little.
    torch.testing.assert_close((found * wanted[:4]).sum(1).abs(), torch.ones(4), rtol=0, atol=0.02)
    torch.testing.assert_close(shares, lengths[:4] ** 2 / (lengths**2).sum(), rtol=0.02, atol=0)


def test_eva_starts_along_what_each_layers_inputs_do(llama: PreTrainedModel) -> None:
    bare, inputs = copy.deepcopy(llama), {}
    for name in ("q_proj", "o_proj"):
        layer = bare.model.layers[1].self_attn.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, x, name=name: inputs.update({name: x[0].flatten(0, 1)}))
    sample = [{"input_ids": IDS}]
    bare(**sample[0])
    model: Any = adapters.attach(llama, Eva(rank=RANK, rho=1), seed=0, sample=lambda: iter(sample))
    attention = model.base_model.model.model.layers[1].self_attn
    for name, x in inputs.items():
        wanted = torch.linalg.svd(x - x.mean(0), full_matrices=False)[2][:RANK]
        found = attention.get_submodule(name).lora_A["default"].weight
        torch.testing.assert_close((found * wanted).sum(1).abs(), torch.ones(RANK), rtol=0, atol=1e-4)
    assert attention.q_proj.lora_A["default"].weight.equal(attention.v_proj.lora_A["default"].weight)
    assert {layer.r["default"] for layer in _layers(model).values()} == {RANK}


def test_eva_shares_out_the_same_sum_of_ranks_at_the_same_scale(llama: PreTrainedModel, tmp_path: Path) -> None:
    bare = copy.deepcopy(llama)
    layers = len(_config("eva").modules(llama)) * 2
    sample = [{"input_ids": row[None]} for row in torch.arange(60).view(4, 15)]
    model = adapters.attach(llama, _config("eva", rho=3.0), seed=0, sample=lambda: iter(sample))
    ranks = [layer.r["default"] for layer in _layers(model).values()]
    assert sum(ranks) == RANK * layers and len(set(ranks)) > 1 and max(ranks) <= 3 * RANK
    assert {layer.scaling["default"] for layer in _layers(model).values()} == {SCALE}
    assert all(each.dtype == torch.float32 for each in model.parameters() if each.requires_grad)
    _train(model, 3)
    adapters.save(model, tmp_path)
    stock = PeftModel.from_pretrained(bare, str(tmp_path)).eval()
    torch.testing.assert_close(stock(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_layers_whose_inputs_never_vary_have_no_adapter_and_are_not_named(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    """PEFT's own names for the layers that are left would mean the emptied one too."""
    bare, sample = copy.deepcopy(llama), [{"input_ids": torch.arange(3, 60)[None]}]
    llama.model.layers[0].self_attn.v_proj.weight.data.zero_()  # so that o_proj sees nothing
    bare.model.layers[0].self_attn.v_proj.weight.data.zero_()
    model = adapters.attach(llama, _config("eva", rho=3.0), seed=0, sample=lambda: iter(sample))
    assert "base_model.model.model.layers.0.self_attn.o_proj" not in _layers(model)
    adapters.save(model, tmp_path)
    assert _layers(adapters.load(bare, tmp_path)).keys() == _layers(model).keys()


# CorDA.


def test_corda_takes_the_parts_that_the_inputs_excite_most(llama: PreTrainedModel) -> None:
    """Of W C, with C the covariance of the layer's inputs: what is left has the other singular values, and no more."""
    model = adapters.attach(llama, _config("corda"), seed=0, sample=lambda: iter([{"input_ids": IDS}]))
    caught: dict[str, Tensor] = {}
    for name, layer in _layers(model).items():
        layer.register_forward_pre_hook(
            lambda _, given, name=name: caught.update({name: given[0][0].detach().double()})
        )
    logits = model.eval()(input_ids=IDS).logits
    with model.disable_adapter():
        torch.testing.assert_close(logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    for name, layer in _layers(model).items():
        x_NI = caught[name]
        covariance = x_NI.T @ x_NI / len(x_NI)
        covariance += 0.01 * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
        weight = dense_weight(layer.get_base_layer()).double()
        whole = torch.linalg.svdvals(weight @ covariance)
        rest = torch.linalg.svdvals((weight - _update(layer).double()) @ covariance)
        kept = whole[RANK:]
        torch.testing.assert_close(rest[: len(kept)], kept, rtol=1e-3, atol=1e-4 * float(whole[0]))
        assert float(rest[len(kept) :].max()) < 1e-4 * float(whole[0])


def test_corda_keeps_no_knowledge_without_rows_of_it() -> None:
    with pytest.raises(ValueError, match=r"keeps knowledge that rows of its own show.*Write `adapter.mode=ipm`"):
        _config("corda", mode="kpm")


def test_corda_needs_a_sample(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="corda starts from training rows"):
        adapters.attach(llama, _config("corda"), seed=0)


def test_eva_needs_a_sample(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="eva starts from training rows"):
        adapters.attach(llama, Eva(rank=RANK), seed=0)


# LoRA-GA.


def _quantised(folder: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The backbone in nf4, and as it was."""
    config = ModelConfig(id=folder, weights="nf4", compute="float32")
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return backbones.load(config, backbones.tokenizer(config)).model, original


@pytest.mark.parametrize("family", ["stories", "GPT2"])
def test_loftq_gives_back_the_largest_part_of_what_quantisation_took(family: str, stories: str, tmp_path: Path) -> None:
    folder = stories
    if family != "stories":  # its linear layers are stored transposed, and one of them is square
        folder = str(tmp_path)
        tiny(family, vocab_size=512, hidden_size=64, intermediate_size=128).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(stories) / name, folder)
    quantised, original = _quantised(folder)
    ids = torch.arange(5, 45)[None]
    wanted, before = (each(input_ids=ids).logits.detach() for each in (original, quantised))
    model = adapters.attach(quantised, Loftq(rank=8, alpha=24), seed=0)
    for name, layer in _layers(model).items():
        whole = dense_weight(original.get_submodule(name.removeprefix("base_model.model.")))
        lost = whole - dense_weight(layer.get_base_layer())
        rest = torch.linalg.svdvals(lost)[8:].norm()
        torch.testing.assert_close((lost - _update(layer)).norm(), rest, rtol=1e-3, atol=1e-5)
    after = model(input_ids=ids).logits
    assert (after - wanted).norm() < 0.95 * (before - wanted).norm()


def test_loftq_says_what_it_lacks(stories: str, tmp_path: Path, llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"these weights are not quantised\. Write model\.weights=nf4"):
        adapters.attach(llama, Loftq(rank=4), seed=0)
    quantised, _ = _quantised(stories)
    quantised.config._name_or_path = str(tmp_path)
    with pytest.raises(BackboneError, match=r"holds no safetensors\. Take adapter\.method=lora"):
        adapters.attach(quantised, Loftq(rank=4), seed=0)
