"""Progressive stacking: which blocks compute when, what a stacking makes of them, and of the run around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import tiny
from workbench.config.checks.block_checks import OPTIMIZERS
from workbench.config.sections.grow_config import GrowConfig
from workbench.errors import BackboneError, ConfigError, TrainingError
from workbench.planning.counters import Operations
from workbench.training import progressive_stacking
from workbench.training.checkpoints import Progress
from workbench.training.freezing.layer_map import stack
from workbench.training.loss_guard import comparable
from workbench.training.master_weights import MasterWeights
from workbench.training.progressive_stacking import ProgressiveStacking

IDS = torch.arange(3, 33).view(5, 6)
FAMILIES = {"Llama": "CausalLM", "GPT2": "CausalLM", "DebertaV2": "MaskedLM", "Bert": "MaskedLM"}


def stacking(
    family: str = "Llama", *, blocks: int = 4, compute: torch.dtype = torch.float32, **settings: Any
) -> tuple[Any, ProgressiveStacking, MasterWeights]:
    model = tiny(family, head=FAMILIES[family], num_hidden_layers=blocks).eval()
    masters = MasterWeights(model, compute)
    found = [model.get_submodule(path) for path in stack(model)]
    growth = ProgressiveStacking(model, found, GrowConfig.model_validate({"at": [0.5], **settings}), masters)
    growth.install()
    return model, growth, masters


class Member:
    """As much of a training as a stacking reads and changes, on the way to a share of its ten steps."""

    def __init__(self, values: MasterWeights, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.progress, self.total = Progress(), 10
        self.optimizer = torch.optim.AdamW(list(values)) if optimizer is None else optimizer
        self.notes: dict[str, Any] = {}
        self.forgot = 0
        self.loss_guard = SimpleNamespace(clear=self._clear)
        budget = SimpleNamespace(unlimited=True)
        self.task = SimpleNamespace(config=SimpleNamespace(budget=budget), run=SimpleNamespace(note=self.notes.update))

    def _clear(self) -> None:
        self.forgot += 1

    def at(self, step: int) -> Any:
        self.progress = Progress(step=step, share=step / self.total, best_loss=1.0, best_step=step)
        return self


def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS).logits
    return found.detach()


def stacked_by_hand(model: Any, *, first: int) -> Any:
    """A stock model of as many blocks, block i with the weights of block i mod `first`, by names of its state alone."""
    path = stack(model)[0].rpartition(".")[0]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in state:
        if name.startswith(f"{path}."):
            number, _, rest = name.removeprefix(f"{path}.").partition(".")
            state[name] = model.state_dict()[f"{path}.{int(number) % first}.{rest}"].clone()
    found = type(model)(model.config).eval()
    found.load_state_dict(state)
    return found


def test_blocks_come_as_the_schedule_says() -> None:
    twice = GrowConfig(at=(0.125, 0.3))
    assert [twice.depth(step, step / 40, blocks=12) for step in (0, 4, 5, 11, 12, 39)] == [3, 3, 6, 6, 12, 12]
    assert [GrowConfig(at=(0.1,), factor=4).depth(0, share, blocks=24) for share in (0.0, 0.1)] == [6, 24]
    assert GrowConfig().depth(0, 0.0, blocks=5) == 5


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 7])
def test_blocks_that_cannot_be_divided_are_right_on_average(blocks: int) -> None:
    grow = GrowConfig(at=(0.5,))
    depths = [grow.depth(step, 0.0, blocks=blocks) for step in range(2000)]
    assert sum(depths) / 2000 == pytest.approx(blocks / 2, abs=2e-3)
    assert max(depths) - min(depths) == blocks % 2


@pytest.mark.parametrize("family", FAMILIES)
def test_before_it_grows_it_is_a_stock_model_of_its_first_blocks(family: str) -> None:
    model, growth, masters = stacking(family)
    growth.follow(Member(masters).at(0), lambda _: None)
    first = tiny(family, head=FAMILIES[family], num_hidden_layers=2).eval()
    first.load_state_dict({name: model.state_dict()[name] for name in first.state_dict()})
    assert torch.equal(logits(model), logits(first))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("at", "factor", "first"), [((0.5,), 2, 2), ((0.5,), 4, 1), ((0.2, 0.5), 2, 1)])
def test_grown_it_computes_what_stacking_by_hand_does(
    family: str, at: tuple[float, ...], factor: int, first: int
) -> None:
    model, growth, masters = stacking(family, at=at, factor=factor)
    wanted = stacked_by_hand(model, first=first)
    member = Member(masters)
    for step in range(8):
        growth.follow(member.at(step), lambda _: None)
    assert torch.equal(logits(model), logits(wanted))
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.state_dict().items())
    assert model.config.num_hidden_layers == 4 and member.forgot == len(at)
    assert [each["step"] for each in member.notes["grow"]["stackings"]] == [round(10 * each) for each in at]


def test_masters_are_stacked_with_what_computes() -> None:
    _, growth, masters = stacking(compute=torch.bfloat16)
    for master in masters:
        master.data.add_(torch.rand_like(master) * 1e-4)  # finer than bfloat16
    masters.refresh()
    member = Member(masters)
    growth.follow(member.at(0), lambda _: None)
    growth.follow(member.at(5), lambda _: None)
    named, computing = masters.named(), masters.computing()
    for name, master in named.items():
        if ".layers.2." in name or ".layers.3." in name:
            lower = name.replace(".layers.2.", ".layers.0.").replace(".layers.3.", ".layers.1.")
            assert torch.equal(master, named[lower]) and torch.equal(computing[name], computing[lower])
    assert all(torch.equal(computing[name], master.to(torch.bfloat16)) for name, master in named.items())


def test_blocks_that_are_not_there_are_not_computed_and_do_not_train() -> None:
    model, growth, masters = stacking()
    member = Member(masters)
    operations, trained = [], []
    for step in (0, 5):
        growth.follow(member.at(step), lambda _: None)
        assert growth.metrics == {"blocks": 2 if step == 0 else 4}
        with Operations() as counted, growth.during(step, step / 10):
            model(input_ids=IDS).logits.sum().backward()
        operations.append(counted.count)
        numbers = range(4)
        trained.append(
            [n for n in numbers if all(each.grad is not None for each in model.model.layers[n].parameters())]
        )
        assert [n for n in numbers if model.model.layers[n].self_attn.q_proj.weight.requires_grad] == trained[-1]
        model.zero_grad()
    assert trained == [[0, 1], [0, 1, 2, 3]]
    whole, half = (tiny("Llama", num_hidden_layers=blocks) for blocks in (4, 2))
    wanted = []
    for plain in (half, whole):
        with Operations() as counted:
            plain(input_ids=IDS).logits.sum().backward()
        wanted.append(counted.count)
    assert operations == wanted and operations[0] < operations[1]


@pytest.mark.parametrize("name", [each for each in OPTIMIZERS if not each.startswith("paged_")])
def test_the_optimizer_begins_anew(name: str) -> None:
    """After a stacking it takes the steps of a new one over the same values."""
    from workbench.config import RunConfig
    from workbench.training.optim import optimizers

    values = {"recipe": "sft", "data": {"train": "x.jsonl"}, "adapter": {"method": "full"}, "grow": {"at": [0.5]}}
    config = RunConfig.model_validate({**values, "optimizer": {"name": name}})

    def made(model: Any) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        layers = {key: 1 + int(key.split(".")[2]) for key in named if ".layers." in key}
        groups = optimizers.groups(named, config, layers=layers, blocks=4, fresh=())
        for group in groups:
            group["lr"] = 1e-3
        return optimizers.build(groups, config)

    def steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        for _ in range(3):
            model(input_ids=IDS).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, growth, masters = stacking()
    optimizer = made(model)
    growth.follow(Member(masters, optimizer=optimizer).at(0), lambda _: None)
    steps(model, optimizer)
    member = Member(masters, optimizer=optimizer).at(5)
    growth.follow(member, lambda _: None)
    other = tiny("Llama", num_hidden_layers=4).eval()
    other.load_state_dict(model.state_dict())
    steps(model, optimizer)
    steps(other, made(other))
    assert all(torch.equal(each, other.state_dict()[key]) for key, each in model.state_dict().items())
    assert member.progress == Progress(step=5, share=0.5)


def test_off_nothing_is_in_the_way_and_nothing_is_written() -> None:
    model, growth, masters = stacking(at=[])
    growth.follow(member := Member(masters).at(0), lambda _: None)
    with growth.during(0, 0.0):
        assert torch.equal(logits(model), logits(tiny("Llama", num_hidden_layers=4).eval()))
    assert "forward" not in vars(model.get_submodule(stack(model)[-1]))
    assert not growth.hooks and not growth.metrics and not member.notes
    growth.require_grown()


def test_a_checkpoint_tells_how_many_blocks_train() -> None:
    for step, blocks in ((0, 2), (5, 4)):
        _, growth, masters = stacking()
        member = Member(masters)
        for each in range(step + 1):
            growth.follow(member.at(each), lambda _: None)
        model, later, _ = stacking()
        later.load(growth.state())
        assert later.metrics == {"blocks": blocks}
        before = logits(model)
        later.follow(member.at(step), lambda _: None)
        assert torch.equal(logits(model), before)  # it is not stacked twice


def test_a_run_that_ends_before_it_has_grown_says_so() -> None:
    _, growth, masters = stacking(at=[0.9])
    growth.follow(Member(masters).at(8), lambda _: None)
    with pytest.raises(TrainingError, match="2 of 4 blocks"):
        growth.require_grown()


def test_a_run_too_short_to_grow_is_refused_at_its_first_step() -> None:
    _, growth, masters = stacking(at=[0.9])
    member = Member(masters)
    member.total = 4
    with pytest.raises(ConfigError, match="of 4 steps none begins"):
        growth.follow(member.at(0), lambda _: None)


def test_blocks_of_other_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"copies block 1 to block 2"):
        progressive_stacking.require(GrowConfig(at=(0.5,)), [nn.Linear(2, 3), nn.Linear(3, 2)])
    progressive_stacking.require(GrowConfig(at=(0.5,)), [nn.Linear(2, 3), nn.Linear(2, 3)])


def test_blocks_that_change_the_resolution_are_refused() -> None:
    from tests.vision_backbones import tiny_vision

    model = tiny_vision("ResNet")
    blocks = [model.get_submodule(path) for path in stack(model)]
    growth = ProgressiveStacking(model, blocks, GrowConfig(at=(0.5,)), MasterWeights(model, torch.float32))
    with pytest.raises(BackboneError, match="Leave grow out"):
        growth.install()


def test_losses_are_compared_as_far_back_as_the_blocks_are_the_same() -> None:
    lines = [{"loss": loss, "supervised_tokens": 7, "blocks": blocks} for loss, blocks in ((1, 2), (9, 4), (8, 4))]
    assert comparable(lines) == [(9, 7), (8, 7)] and comparable([]) == []
    assert comparable([{"loss": loss, "supervised_tokens": 7} for loss in (1.0, 2.0)]) == [(1.0, 7), (2.0, 7)]
