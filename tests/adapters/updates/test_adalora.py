"""AdaLoRA: ranks go on schedule, where they matter least, and what is left is shipped as plain LoRA."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

import workbench
from tests.conftest import tiny
from tests.run_files import read_losses
from tests.stopping import stop_after
from workbench import adapters
from workbench.adapters import AdaLora, peft_tuners
from workbench.adapters.updates.rank_allocator import RankBudget, RankSchedule
from workbench.errors import Stopped
from workbench.training import checkpoints
from workbench.training.master_weights import MasterWeights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[3, 60, 5, 61, 9, 60, 7]])
STEPS = 20


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()


def _ranks(trainable: dict[str, nn.Parameter]) -> dict[str, list[bool]]:
    return {name: each.flatten().ne(0).tolist() for name, each in trainable.items() if ".lora_E." in name}


def test_the_budget_falls_as_a_cube() -> None:
    budget = RankBudget(begin=10, end=90)
    ranks = [budget.at(step, first=120, last=40) for step in range(1, 101)]
    assert ranks[:10] == [120] * 10 and ranks[89:] == [40] * 11
    assert all(later <= sooner for sooner, later in itertools.pairwise(ranks))
    assert ranks[49] == 40 + 80 // 8  # half way


def test_ranks_go_as_in_pefts_own_allocator() -> None:
    """Importance, allocation and masks, step by step, where PEFT's is called as its documentation says."""
    torch.manual_seed(0)
    theirs = _peft(orth_reg_weight=0.5)
    ours = _peft(orth_reg_weight=0.0)
    ours.load_state_dict(theirs.state_dict())
    here, there = _trainable(ours), _trainable(theirs)
    schedule = RankSchedule(here, RankBudget(begin=2, end=17), rank=2, interval=2, orthogonality=0.5, memory=0.85)
    optimizers = [torch.optim.Adam(each.values(), lr=0.01) for each in (here, there)]
    totals = []
    for step in range(1, STEPS + 1):
        _learn(theirs, optimizers[1])
        theirs.base_model.update_and_allocate(step)
        optimizers[0].zero_grad()
        schedule.penalty().backward()
        ours(input_ids=IDS, labels=IDS).loss.backward()
        optimizers[0].step()
        schedule.after_step(step)
        assert _ranks(here) == _ranks(there), step
        totals.append(sum(map(sum, _ranks(here).values())))
    for name, each in here.items():
        torch.testing.assert_close(each, there[name], rtol=1e-4, atol=1e-6)
    assert totals[0] == 16 and totals[-1] == 8


def _peft(**settings: float) -> Any:
    schedule = {"target_r": 2, "init_r": 4, "tinit": 2, "tfinal": 3, "deltaT": 2, "total_step": STEPS}
    config = AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], **schedule, **settings)
    return get_peft_model(tiny("Llama"), config)


def test_what_matters_most_stays() -> None:
    """Of six triplets with the same values, the two with the largest gradients are left."""
    trainable = {f"layer.lora_{part}.default": nn.Parameter(torch.ones(shape)) for part, shape in _SHAPES.items()}
    schedule = RankSchedule(trainable, RankBudget(begin=0, end=2), rank=2, interval=1, orthogonality=0.0, memory=0.5)
    gradients_R = torch.tensor([0.1, 3.0, 0.2, 0.3, 2.0, 0.1])
    for step in (1, 2):
        trainable["layer.lora_E.default"].grad = gradients_R[:, None] * step
        trainable["layer.lora_A.default"].grad = torch.full((6, 3), 0.01)
        trainable["layer.lora_B.default"].grad = torch.full((4, 6), 0.01)
        schedule.after_step(step)
    assert trainable["layer.lora_E.default"].flatten().tolist() == [0, 1, 0, 0, 1, 0]


_SHAPES = {"A": (6, 3), "E": (6, 1), "B": (4, 6)}


def test_the_penalty_is_zero_where_rows_and_columns_are_orthonormal_and_pulls_towards_it() -> None:
    values = {"A": torch.eye(2, 5), "E": torch.zeros(2, 1), "B": torch.eye(4, 2)}
    trainable = {f"layer.lora_{part}.default": nn.Parameter(value) for part, value in values.items()}
    schedule = RankSchedule(trainable, RankBudget(begin=0, end=9), rank=1, interval=1, orthogonality=0.5, memory=0.5)
    assert schedule.penalty().item() == 0
    trainable["layer.lora_A.default"].data *= 2  # its gram matrix is 4 I, at a distance of sqrt(2 * 3**2)
    penalty = schedule.penalty()
    assert penalty.item() == pytest.approx(0.5 * (18**0.5 + 0) / 2)
    penalty.backward()
    gradient = trainable["layer.lora_A.default"].grad
    assert gradient is not None and bool((gradient * trainable["layer.lora_A.default"]).sum() > 0)


def test_half_precision_has_its_ranks_taken_in_the_masters(llama: PreTrainedModel) -> None:
    config = AdaLora(rank=1, initial_rank=3, before=0, after=0)
    model = adapters.attach(llama.requires_grad_(False).bfloat16(), config, seed=0)
    masters = MasterWeights(model, torch.bfloat16)
    hook = config.train_hook(masters.named(), steps=3)
    optimizer = torch.optim.AdamW(list(masters), lr=0.01)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        hook.after_step(step)
        masters.refresh()
    layers = len(_ranks(masters.named()))
    assert sum(map(sum, _ranks(masters.named()).values())) == layers
    assert _ranks(_trainable(model)) == _ranks(masters.named())
    assert all(each.dtype == torch.bfloat16 for each in _trainable(model).values())


def test_stock_peft_loads_the_ranks_that_are_left_as_lora(llama: PreTrainedModel, tmp_path: Path) -> None:
    model = adapters.attach(tiny("Llama", tie_word_embeddings=False), AdaLora(rank=3), seed=0)
    generator = torch.Generator().manual_seed(0)
    for number, (name, each) in enumerate(_trainable(model).items()):
        if ".lora_E." in name:  # 0 to 4 of 5 are left; some layers lose all
            each.data = torch.randn(each.shape, generator=generator)
            each.data[number % 5 :] = 0
    with torch.no_grad():
        wanted = model.eval()(input_ids=IDS).logits
        changed = float((wanted - llama(input_ids=IDS).logits).abs().max())
    adapters.save(model, tmp_path)
    stock = PeftModel.from_pretrained(llama, str(tmp_path)).eval()
    torch.testing.assert_close(stock(input_ids=IDS).logits, wanted, rtol=1e-5, atol=1e-5)
    assert changed > 0.1
    shapes = {name: len(each) for name, each in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert {rank for name, rank in shapes.items() if "lora_A" in name} == {1, 2, 3, 4}
    assert isinstance(model.base_model, peft_tuners.OwnForm) and model.peft_config["default"].init_r == 5


@pytest.mark.slow
def test_a_run_reaches_its_ranks_and_a_stopped_one_resumes_to_the_same_bits(
    tmp_path: Path, short_stories: str, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=short_stories, train=questions, steps=STEPS))
    straight = workbench.run(recipe, out=tmp_path / "straight", quiet=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 9)
        with pytest.raises(Stopped, match="after step 9"):
            workbench.run(recipe, out=tmp_path / "broken", quiet=True)
    taken = checkpoints.read_tensors(tmp_path / "broken" / "checkpoints" / "step-00000009", "method")
    left = sum(int(each.sum()) for name, each in taken.items() if name.startswith("kept|"))
    broken = workbench.run(recipe, out=tmp_path / "broken", resume=True, quiet=True)

    losses = [read_losses(run) for run in (straight, broken)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    found, wanted = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (broken, straight))
    assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
    layers = 2 * 7  # of the two blocks
    ranks = [len(each) for name, each in wanted.items() if "lora_A" in name]
    assert sum(ranks) == 2 * layers < left < 4 * layers
    assert len(set(ranks)) > 1, "importance decided, not the order"


RECIPE = """
recipe: sft
model: {{id: {model}, weights: float32}}
adapter: {{method: adalora, rank: 2, initial_rank: 4, dropout: 0.1}}
data: {{train: {train}, held_out: 0.1}}
batch: {{size: 8}}
train: {{steps: {steps}, learning_rate: 1.0e-2}}
evaluate: {{every: null, answers: 0}}
save: {{every: null}}
"""
