"""A bank against K plain PEFT adapters: initial values, logits, gradients, what is saved and loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import METHODS, Full, Lora
from workbench.adapters.banks import bank, bank_layers
from workbench.adapters.banks.bank import Bank
from workbench.adapters.banks.bank_layers import MemberRows, Routing
from workbench.config import ModelConfig
from workbench.errors import BackboneError, ConfigError, FileError
from workbench.models import backbones

# Stock PEFT uses what transformers calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

CONFIGS = (
    Lora(rank=3, alpha=6),
    Lora(rank=5, alpha=2, method="rslora"),
    Lora(rank=3, alpha=9, targets="attention"),
)
SEEDS = (4, 5, 6)
ids = torch.tensor([[3, 60, 5, 61, 9], [4, 8, 15, 16, 23], [7, 9, 33, 4, 5], [9, 8, 7, 6, 5], [1, 2, 3, 4, 5]])
SHARES = (2, 1, 2)
"""Rows of `ids` that each member has."""
CLASSIFIERS = ("Bert", "Roberta", "DebertaV2", "Llama")
MODELS = [("CausalLM", name) for name in ("Llama", "GPT2", "OPT", "Falcon", "Phi")] + [
    ("SequenceClassification", name) for name in CLASSIFIERS
]


def double(head: str, name: str) -> PreTrainedModel:
    labels = {"num_labels": 3} if head == "SequenceClassification" else {}
    return tiny(name, head=head, **labels).double().requires_grad_(False)


def disturbed(named: dict[str, nn.Parameter]) -> None:
    """Values that a fresh adapter would not have, the same for the same names."""
    for name, parameter in named.items():
        generator = torch.Generator().manual_seed(len(name) * parameter.numel())
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)


def plain(model: PreTrainedModel, configs: Sequence[Any] = CONFIGS, seeds: Sequence[int] = SEEDS) -> list[nn.Module]:
    """Each adapter alone, on a backbone of its own."""
    return [
        adapters.attach(copy.deepcopy(model), config, seed=seed).eval()
        for config, seed in zip(configs, seeds, strict=True)
    ]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def of_member(made: Bank, member: str) -> dict[str, nn.Parameter]:
    """A member's parameters, by the names that they have in an adapter that is alone."""
    return made.parameters_alone(member)


def routed(made: Bank, rows: Tensor, counts: Sequence[int] = SHARES) -> Any:
    shares = [MemberRows(member, count) for member, count in zip(made.members, counts, strict=True)]
    return made.route(shares, length=rows.shape[1])


@pytest.mark.nightly(
    but=[
        "CausalLM-Llama",
        "CausalLM-GPT2",
        "CausalLM-Falcon",
        "SequenceClassification-Bert",
        "SequenceClassification-DebertaV2",
    ]
)
@pytest.mark.parametrize(("head", "name"), MODELS)
def test_each_member_is_what_it_is_alone(head: str, name: str) -> None:
    """Initial values bit for bit; logits and gradients of a mixed batch; different ranks, scales and targets."""
    require_alone(double(head, name), CONFIGS, SHARES)


def test_members_of_equal_shape_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank, scale and number of tokens, as folds have them; the last two differ in one of these each."""
    sizes, together = set[tuple[int, ...]](), bank_layers._together

    def watched(*arguments: Any, **more: Any) -> Any:
        found = together(*arguments, **more)
        sizes.add(tuple(len(part.members) for part in found))
        return found

    monkeypatch.setattr(bank_layers, "_together", watched)
    configs = [*[Lora(rank=3, alpha=6)] * 3, Lora(rank=3, alpha=9)]
    require_alone(double("CausalLM", "Llama"), configs, (1, 1, 2, 1))
    assert sizes == {(2, 1, 1)}


@pytest.mark.parametrize("scales", [(6, 6, 12, 6), (6, 5, 5, 7)])
def test_members_of_unequal_ranks_are_computed_together_in_half_precision(
    scales: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few tokens, and scales that differ by powers of two: as products apart give them."""
    base = tiny("Llama").to(torch.bfloat16).requires_grad_(False)
    configs = [Lora(rank=rank, alpha=scale * rank) for rank, scale in zip((2, 8, 3, 8), scales, strict=True)]
    made = bank.attach(base, configs, seeds=range(4))
    made.train()
    for member in made.members:
        disturbed(of_member(made, member))

    def computed(most: int) -> tuple[Tensor, list[Tensor]]:
        monkeypatch.setattr(bank_layers, "PADDED", most)
        made.model.zero_grad()
        with routed(made, ids[:4], (1, 1, 1, 1)):
            logits = made.model(input_ids=ids[:4]).logits
            logits.float().square().sum().backward()
        return logits, [gradients(of_member(made, member)).clone() for member in made.members]

    (logits, found), (wanted_logits, wanted) = computed(128), computed(0)
    torch.testing.assert_close(logits, wanted_logits, rtol=0.05, atol=0.05)
    assert all((one - other).norm() <= 0.05 * other.norm() for one, other in zip(found, wanted, strict=True))


def require_alone(
    base: PreTrainedModel, configs: Sequence[Any], shares: Sequence[int], *, silent: bool = False
) -> None:
    """Each member gives the logits and gradients that it has alone.

    Args:
        silent: Whether some parameters may have no gradient, as those behind a unit that is off.
    """
    seeds = range(4, 4 + len(configs))
    wanted, made = plain(base, configs, seeds), bank.attach(copy.deepcopy(base), configs, seeds=seeds)
    made.train()
    for member, model in zip(made.members, wanted, strict=True):
        found, own = of_member(made, member), trainable(model)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[key], own[key]) for key in own)
        disturbed(found), disturbed(own)
    rows = ids.repeat(3, 1)[: sum(shares)]
    with routed(made, rows, shares):
        logits = made.model(input_ids=rows).logits
        logits.square().sum().backward()
    start = 0
    for member, model, share in zip(made.members, wanted, shares, strict=True):
        own_logits = model(input_ids=rows[start : start + share]).logits
        own_logits.square().sum().backward()
        torch.testing.assert_close(logits[start : start + share], own_logits, rtol=1e-10, atol=1e-12)
        for key, parameter in of_member(made, member).items():
            own_grad = trainable(model)[key].grad
            assert own_grad is not None and (own_grad.any() or silent), key
            torch.testing.assert_close(parameter.grad, own_grad, rtol=1e-8, atol=1e-10)
        start += share
    assert trainable(made.model).keys() == {key for member in made.members for key in made.parameters_of(member)}


@pytest.mark.nightly(but=["nf4", "bfloat16"])
@pytest.mark.parametrize("weights", ["nf4", "fp4", "int8", "bfloat16", "fp8"])
def test_over_every_kind_of_stored_weight(weights: str, stories: str) -> None:
    """Against PEFT's own layers in training, which compute in float32 over these weights as well."""
    config = ModelConfig.model_validate({"id": stories, "weights": weights, "compute": "float32"})
    base = backbones.load(config, backbones.tokenizer(config)).model
    wanted, made = plain(base), bank.attach(base, CONFIGS, seeds=SEEDS)
    made.train()
    for member, model in zip(made.members, wanted, strict=True):
        disturbed(of_member(made, member)), disturbed(trainable(model))
    with routed(made, ids):
        logits = made.model(input_ids=ids).logits
        logits.logsumexp(-1).sum().backward()
    start = 0
    for member, model, share in zip(made.members, wanted, SHARES, strict=True):
        own_logits = model.train()(input_ids=ids[start : start + share]).logits
        own_logits.logsumexp(-1).sum().backward()
        torch.testing.assert_close(logits[start : start + share], own_logits, rtol=1e-4, atol=1e-4)
        found, own = (gradients(each) for each in (of_member(made, member), trainable(model)))
        assert (found - own).norm() <= 1e-4 * own.norm()
        start += share


@pytest.mark.parametrize("head, name", [("CausalLM", "GPT2"), ("SequenceClassification", "Bert")])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-6),
        pytest.param(torch.float64, 1e-14, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0.05, marks=pytest.mark.slow),
    ],
)
def test_a_member_that_reads_alone_is_merged_where_that_is_exact(
    head: str, name: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = list[object]()
    apply = bank_layers._RoutedProduct.apply
    monkeypatch.setattr(bank_layers._RoutedProduct, "apply", lambda *given: (products.append(0), apply(*given))[1])
    made = bank.attach(double(head, name).to(dtype), CONFIGS[:2], seeds=SEEDS[:2])  # of all layers
    rows = ids.repeat(20, 1)
    for member in made.members:
        disturbed(of_member(made, member))
        with made.only(member):
            before = {key: each.clone() for key, each in made.model.state_dict().items()}
            wanted = made.model(input_ids=rows).logits.detach()
            products.clear()
            with torch.no_grad():
                found = made.model(input_ids=rows).logits
                assert bool(products) == (dtype == torch.bfloat16)
                products.clear()
                made.model(input_ids=rows[:1, :2])
                assert products, "two tokens are cheaper by the products of the adapter"
        assert float((found.softmax(-1) - wanted.softmax(-1)).abs().max()) < tolerance
        assert all(torch.equal(each, before[key]) for key, each in made.model.state_dict().items())


@pytest.mark.slow
def test_a_member_over_quantised_weights_is_not_merged(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_layers.RoutedLora, "_merged", lambda *_: pytest.fail("merged"))
    config = ModelConfig.model_validate({"id": stories, "weights": "nf4", "compute": "float32"})
    made = bank.attach(backbones.load(config, backbones.tokenizer(config)).model, CONFIGS, seeds=SEEDS)
    with made.only(made.members[0]), torch.no_grad():
        made.model(input_ids=ids.repeat(20, 1))


def gradients(named: dict[str, nn.Parameter]) -> Tensor:
    return torch.cat([each.grad.flatten() for _, each in sorted(named.items()) if each.grad is not None])


@pytest.mark.nightly(but=["CausalLM-GPT2", "SequenceClassification-Bert"])
@pytest.mark.parametrize(("head", "name"), MODELS[:2] + MODELS[-4:-2])
def test_saved_as_plain_adapters_and_loaded_back(head: str, name: str, tmp_path: Path) -> None:
    base = double(head, name)
    made = bank.attach(copy.deepcopy(base), CONFIGS, seeds=SEEDS)
    folders = [tmp_path / member for member in made.members]
    for member, folder, model in zip(made.members, folders, plain(base), strict=True):
        disturbed(of_member(made, member)), disturbed(trainable(model))
        made.save(member, folder)
        adapters.save(model, tmp_path / "alone")
        own = load_file(tmp_path / "alone" / "adapter_model.safetensors")
        found = load_file(folder / "adapter_model.safetensors")
        assert found.keys() == own.keys() and all(torch.equal(found[key], own[key]) for key in own)
        assert _config(folder) == _config(tmp_path / "alone")
        assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "alone").iterdir()}

    loaded = bank.load(copy.deepcopy(base), folders)
    assert not trainable(loaded.model)
    together = all_logits(loaded, {"input_ids": ids})
    for number, folder in enumerate(folders):
        stock = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()(input_ids=ids).logits
        torch.testing.assert_close(together[number], stock, rtol=1e-10, atol=1e-12)
        with loaded.only(loaded.members[number]):
            torch.testing.assert_close(loaded.model(input_ids=ids).logits, stock, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(together[0], together[1], atol=1e-2)


def all_logits(together: Bank, inputs: Mapping[str, Tensor]) -> Tensor:
    """Logits (K, B, ...) of every member for the same rows, in one forward pass without gradients."""
    count, length = next(iter(inputs.values())).shape[:2]
    repeated = {name: torch.cat([tensor] * len(together.members)) for name, tensor in inputs.items()}
    with torch.no_grad(), together.route([MemberRows(member, count) for member in together.members], length=length):
        logits: Tensor = together.model(**repeated).logits
    return logits.reshape(len(together.members), count, *logits.shape[1:])


def _config(folder: Path) -> dict[str, Any]:
    """What PEFT wrote; it keeps names in sets."""
    written = json.loads((folder / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in written.items()}


def test_the_largest_bank_has_no_names_within_names(llama: PreTrainedModel, tmp_path: Path) -> None:
    """PEFT finds an adapter's tensors by name: member 1 must not take member 10's."""
    made = bank.attach(llama, [Lora(rank=1)] * 11, seeds=range(11))
    made.save(made.members[1], tmp_path / "one")
    assert len(load_file(tmp_path / "one" / "adapter_model.safetensors")) == len(made.parameters_of(made.members[1]))


def test_a_bank_computes_only_for_somebody(llama: PreTrainedModel) -> None:
    made = bank.attach(llama, CONFIGS, seeds=SEEDS)
    with pytest.raises(RuntimeError, match=r"with bank\.route"):
        made.model(input_ids=ids)


def test_a_layer_that_chooses_among_tokens_is_refused() -> None:
    routing = Routing(counted=True)
    routing.set([MemberRows("a", 2), MemberRows("b", 3)], length=4)
    assert list(routing.slices(torch.zeros(5, 4, 1))) == [("a", slice(0, 2)), ("b", slice(2, 5))]
    assert list(routing.slices(torch.zeros(20, 1))) == [("a", slice(0, 8)), ("b", slice(8, 20))]
    for tokens in (7, 10, 40):
        with pytest.raises(BackboneError, match=r"as experts do.*Leave it out of adapter\.targets"):
            list(routing.slices(torch.zeros(tokens, 1)))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Full(), "a bank holds no full: it trains the backbone that all members share; its adapters train one after"),
        (METHODS["prompt"].model_validate({"method": "prompt"}), "a bank holds no prompt: it puts virtual tokens"),
        (METHODS["adalora"].model_validate({"method": "adalora"}), "a bank holds no adalora: its ranks move"),
    ],
)
def test_what_cannot_share_a_bank_is_told(llama: PreTrainedModel, config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bank.attach(llama, [Lora(), config], seeds=[0, 1])
    assert bank.refusal(Lora()) is None and bank.refusal(METHODS["lora+"].model_validate({"method": "lora+"})) is None


def test_adapters_that_a_bank_cannot_load(llama: PreTrainedModel, tmp_path: Path) -> None:
    bare = copy.deepcopy(llama)
    for name, model, config in (
        ("plain", bare, Lora(rank=2)),
        ("prompt", bare, METHODS["prompt"].model_validate({"method": "prompt"})),
        ("wide", tiny("Llama", hidden_size=64), Lora(rank=2)),
    ):
        adapters.save(adapters.attach(copy.deepcopy(model), config, seed=0), tmp_path / name)
    with pytest.raises(ConfigError, match=r"prompt: a bank holds no PROMPT_TUNING adapter\. Load it alone"):
        bank.load(copy.deepcopy(bare), [tmp_path / "plain", tmp_path / "prompt"])
    with pytest.raises(BackboneError, match="wide: this adapter does not fit the backbone"):
        bank.load(copy.deepcopy(bare), [tmp_path / "plain", tmp_path / "wide"])
    (tmp_path / "plain" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(FileError, match=r"plain/adapter_model\.safetensors: damaged"):
        bank.load(copy.deepcopy(bare), [tmp_path / "plain"])
