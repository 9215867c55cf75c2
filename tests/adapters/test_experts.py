"""LoRA over the experts of a mixture, in every family whose experts stand in one parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

import workbench
from tests.conftest import GROUPED, save_tiny, tiny
from tests.run_files import read_scores
from tests.stopping import stop_after
from workbench import adapters
from workbench.adapters import METHODS
from workbench.adapters.anatomy import fused_experts
from workbench.adapters.banks import bank
from workbench.adapters.target_modules import about_experts
from workbench.adapters.updates.lora import Lora
from workbench.errors import ConfigError, Stopped
from workbench.evaluation.perplexity import Agreement
from workbench.recipes.verbs.merge import merge

LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen3Moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GptOss": {**GROUPED, "num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **LATENT,
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16},
        **{"first_k_dense_replace": 1, "num_key_value_heads": 4},
    },
}
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
IDS = torch.arange(3, 27).view(4, 6)


def backbone(family: str) -> PreTrainedModel:
    return tiny(family, **FAMILIES[family])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def moved(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(
    ("family", "method"), [*((family, "lora") for family in FAMILIES), ("Mixtral", "rslora"), ("Mixtral", "lora+")]
)
def test_every_expert_learns_and_comes_back(family: str, method: str, tmp_path: Path) -> None:
    bare, wanted = backbone(family), logits(backbone(family))
    count = len(fused_experts(bare))
    config = METHODS[method].model_validate({"method": method, "rank": 2, "alpha": 4, "experts": True})
    model: Any = adapters.attach(bare, config, seed=0)
    assert torch.equal(logits(model), wanted), "fresh it changes nothing"
    moved(model)
    model(input_ids=IDS).logits.square().sum().backward()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert all(each.grad is not None and each.grad.any() for each in trained.values())
    over = {name for name in trained if ".experts." in name}
    assert len(over) == 2 * count and not any("router" in name or ".gate." in name for name in trained)
    for name in over:  # a stack of each expert's own A or B
        assert 4 * config.rank in trained[name].shape  # type: ignore[attr-defined]
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, wanted)
    changed = logits(model)
    model.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(backbone(family), str(tmp_path))
    torch.testing.assert_close(logits(stock), changed)
    torch.testing.assert_close(logits(model.merge_and_unload()), changed, rtol=1e-4, atol=1e-4)


def test_merged_weights_are_each_experts_own_update() -> None:
    """W_e + scale * B_e A_e, a second time from the stacked matrices: rows of A by expert, columns of B by rank."""
    model: Any = moved(adapters.attach(backbone("Mixtral"), Lora(rank=2, alpha=6, targets="mlp", experts=True), seed=0))
    trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    assert {name.split(".experts.")[0].count("layers") for name in trained} == {1}, "nothing but experts"
    before = {name: each.clone() for name, each in fused_experts(backbone("Mixtral")).items()}
    after = fused_experts(model.merge_and_unload())
    seen = 0
    for name, weight_EOI in before.items():
        experts, outputs, inputs = weight_EOI.shape
        delta = after[name] - weight_EOI
        layer = name.rpartition(".experts.")[0]
        for down in (each for key, each in trained.items() if layer in key and "lora_A" in key):
            if down.shape[1] != inputs and down.shape[1] != outputs:
                continue
            key = next(key for key, each in trained.items() if each is down)
            up = trained[key.replace("lora_A", "lora_B")]
            if up.shape[0] not in (inputs, outputs) or {down.shape[1], up.shape[0]} != {inputs, outputs}:
                continue
            rank = len(down) // experts
            down_ERi = down.view(experts, rank, -1)
            up_oRE = up.view(len(up), rank, experts)
            wanted = 3 * torch.einsum("ore,eri->eoi", up_oRE, down_ERi)
            wanted = wanted if wanted.shape == delta.shape else wanted.transpose(1, 2)
            torch.testing.assert_close(delta, wanted, rtol=1e-4, atol=1e-5)
            seen += 1
    assert seen == len(before)


def test_dense_layers_with_the_names_of_experts_are_left_alone_and_told() -> None:
    """PEFT would put updates of twice the rank on the experts instead, and none on the layers that were named."""
    model = backbone("DeepseekV3")
    said = about_experts(model, Lora())
    assert said is not None and "down_proj, gate_proj, up_proj outside of the experts stay frozen" in said
    attached = adapters.attach(model, Lora(rank=2), seed=0)
    trained = [name for name, each in attached.named_parameters() if each.requires_grad]
    assert trained and all("self_attn" in name for name in trained)
    for targets in (("gate_proj", "up_proj"), ("down_proj",), "mlp"):
        with pytest.raises(ConfigError, match=r"takes .* for its experts.* Write adapter.targets=attention"):
            adapters.attach(backbone("DeepseekV3"), Lora(targets=targets), seed=0)


def test_what_cannot_be_over_experts_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="no experts that stand in one parameter"):
        adapters.attach(llama, Lora(experts=True), seed=0)
    for settings, cure in (({"dropout": 0.1}, "dropout=0"), ({"method": "dora"}, "method=lora")):
        with pytest.raises(ConfigError, match=cure):
            adapters.attach(backbone("Mixtral"), Lora.model_validate({"experts": True, **settings}), seed=0)
    assert "experts" in str(bank.refusal(Lora(experts=True)))
    assert "update of its own" in str(about_experts(backbone("Mixtral"), Lora(experts=True)))


@pytest.mark.slow
@pytest.mark.nightly(but=["nf4"])
@pytest.mark.parametrize("weights", ["float32", "nf4"])
def test_a_run_over_experts_ships_an_adapter_that_scores_as_told_and_merges(
    weights: str, tmp_path: Path, short_stories: str, questions: Path
) -> None:
    folder = save_tiny(tmp_path / "mixture", "Mixtral", "CausalLM", short_stories, max_position_embeddings=128)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
recipe: sft
model: {{id: {folder}, weights: {weights}, compute: float32}}
adapter: {{method: lora, rank: 2, alpha: 4, experts: true}}
data: {{train: {questions}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: 6, learning_rate: 0.02}}
evaluate: {{every: null, answers: 2, max_new_tokens: 4}}
save: {{every: 2}}
"""
    )
    run = workbench.run(recipe, out=tmp_path / "run", quiet=True)
    scores = read_scores(run)
    assert scores["after"]["loss"] < scores["before"]["loss"]
    stop_after_four = tmp_path / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Stopped):
            workbench.run(recipe, out=stop_after_four, quiet=True)
    again = workbench.run(recipe, out=stop_after_four, resume=True, quiet=True)
    assert read_scores(again)["after"] == scores["after"]
    small = ["batch.tokens_per_device=100"]
    parts = workbench.run(recipe, small, out=tmp_path / "parts", quiet=True)
    lines = [(each / "metrics.jsonl").read_text().splitlines() for each in (run, parts)]
    losses = [[json.loads(line)["loss"] for line in each] for each in lines]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    agreement = merge(run, out=tmp_path / "merged", weights="float32").agreement
    assert isinstance(agreement, Agreement) and agreement.top1 == 1
