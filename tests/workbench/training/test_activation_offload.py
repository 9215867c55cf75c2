"""Inputs of blocks that wait on the host come back as they were, each while the block above it is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import tiny
from tests.workbench.training.fake_cuda import CUDA, fake_cuda
from tests.workbench.training.freezing.fits import build, configured
from tests.workbench.training.freezing.fits import train as train_tiny
from workbench.adapters import Lora, anatomy, attach
from workbench.errors import ConfigError
from workbench.models import activation_recomputation
from workbench.planning.fake_tensors import to_fake
from workbench.training import activation_offload
from workbench.training.activation_checkpointing import ActivationKeeping, keep
from workbench.training.activation_offload import ActivationOffload, PinnedCopies

BLOCKS, TOKENS, WIDTH = 5, 12, 32


class Noting:
    """Copies on a CPU, and what happens in which order; what is on its way back has no values before `arrived`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._coming: list[tuple[Tensor, Tensor]] = []

    def away(self, tensor: Tensor) -> tuple[int, Tensor]:
        number = sum("away" in each for each in self.log)
        self.log.append(f"away {number}")
        return number, tensor.clone()

    def back(self, kept: tuple[int, Tensor]) -> Tensor:
        self.log.append(f"back {kept[0]}")
        self._coming.append((torch.full_like(kept[1], float("nan")), kept[1]))
        return self._coming[-1][0]

    def arrived(self) -> None:
        self.log.append("arrived")
        for tensor, values in self._coming:
            tensor.copy_(values)
        self._coming.clear()


def _model(name: str = "Llama", **settings: Any) -> Any:
    model = attach(tiny(name, num_hidden_layers=BLOCKS, **settings), Lora(rank=3), seed=0)
    keep(model, True)
    return model.train()


def _gradients(model: Any) -> list[Tensor]:
    ids = torch.randint(3, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [each.grad for each in model.parameters() if each.requires_grad]


def _offload(model: Any, copies: Any) -> None:
    offload = ActivationOffload(copies)
    for block in anatomy.decoder_layers(model)[:-1]:
        own: Any = block
        own._gradient_checkpointing_func = offload.around(own._gradient_checkpointing_func)


@pytest.mark.parametrize("tile", [None, 5])
def test_gradients_are_the_same_bits(tile: int | None) -> None:
    wanted = _model()
    activation_recomputation.tile_mlps(wanted, tile)
    model, copies = _model(), Noting()
    activation_recomputation.tile_mlps(model, tile)
    _offload(model, copies)
    for found, each in zip(_gradients(model), _gradients(wanted), strict=True):
        assert torch.equal(found, each)


def test_each_input_comes_back_while_the_block_above_is_computed() -> None:
    model, copies = _model(), Noting()
    _offload(model, copies)
    _gradients(model)
    there = [f"away {number}" for number in range(BLOCKS - 1)]
    assert copies.log[: BLOCKS - 1] == there, "the last block's stays"
    assert copies.log[BLOCKS - 1 :] == [
        *("back 3", "arrived", "back 2"),  # 2 is on its way while block 3 is computed
        *("arrived", "back 1"),
        *("arrived", "back 0"),
        "arrived",
    ]


def test_passes_one_after_another_do_not_disturb_each_other() -> None:
    model, copies = _model(), Noting()
    _offload(model, copies)
    first = [each.clone() for each in _gradients(model)]
    for found, once in zip(_gradients(model), first, strict=True):
        torch.testing.assert_close(found, 2 * once)


def test_a_plan_counts_what_would_wait_and_copies_nothing() -> None:
    model = _model()
    with activation_offload.planned(accelerated=True) as copies:
        activation_offload.begin(model, torch.device("cpu"))
        _gradients(model)
    assert copies.most == (BLOCKS - 1) * 2 * TOKENS * WIDTH * 4 and copies.now == 0


def test_a_cpu_has_no_other_memory() -> None:
    with pytest.raises(ConfigError, match=r"computes on a CPU.*train\.offload_activations=auto"):
        activation_offload.begin(_model(), torch.device("cpu"))
    with activation_offload.planned(accelerated=False), pytest.raises(ConfigError):
        activation_offload.begin(_model(), torch.device("cpu"))


class _Stream:
    """A stream of an accelerator that is not there, which notes what it waits for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def __enter__(self) -> None:
        self._log.append("in")

    def __exit__(self, *_: Any) -> None:
        self._log.append("out")


def test_copies_of_an_accelerator_run_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two wait to leave; what comes back is waited for before it is read. On an accelerator without values."""
    log: list[str] = []
    with fake_cuda(monkeypatch) as found:
        monkeypatch.setattr(torch, "Stream", lambda _: _Stream(log, "copying"))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: _Stream(log, "computing"))
        copies = PinnedCopies(CUDA, pinned=False)
        tensor = torch.zeros(2, 3, device=CUDA, dtype=torch.bfloat16)
        monkeypatch.setattr(activation_offload, "PIECE", 8)
        kept, _ = copies.away(tensor), copies.away(tensor)
        assert [len(each) for each in kept[1]] == [4, 2] and all(each.device.type == "cpu" for each in kept[1])
        away = ["copying waits for computing", "in", "out"]
        assert log == [*away, "computing waits for copying", *away]
        log.clear()
        back = copies.back(kept)
        copies.arrived()
        assert (back.shape, back.dtype, back.device) == (tensor.shape, tensor.dtype, CUDA)
        waits = "computing waits for copying"
        assert log == [waits, "copying waits for computing", "in", "out", waits]
    assert all("copy_" in each for each in found.places), "what is not pinned is waited for, and nothing else"


def test_inputs_go_to_the_host_where_recomputing_all_blocks_is_not_enough(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = train_tiny(build("Llama"), configured(train={"steps": 1}), tmp_path / "run").fit
    begun: list[nn.Module] = []
    monkeypatch.setattr(activation_offload, "begin", lambda model, _: begun.append(model))

    def tried(device: str | None, **train: Any) -> list[tuple[Any, bool, int]]:
        """What is kept at each try of a pass that never fits."""
        begun.clear()
        wanted = configured(train={"steps": 1, **train})
        keeping = ActivationKeeping(wanted, fit.freezer.backbone, device and torch.device(device))
        keeping.begin()
        ways: list[tuple[Any, bool, int]] = []

        def compute(tokens: int) -> None:
            ways.append((keeping.now, keeping.offloads, len(begun)))
            raise torch.OutOfMemoryError("fake")

        with pytest.raises(torch.OutOfMemoryError):
            keeping.until_it_fits(compute, 45, longest=45, retry=lambda _: None)
        return ways

    kept: list[tuple[Any, bool, int]] = [(way, False, 0) for way in (False, "elementwise", 0.5, True)]
    assert tried("cuda") == [*kept, (True, True, 1)]
    assert tried("cpu") == tried(None) == kept
    assert tried("cuda", checkpointing=False) == kept[:1]
    assert tried("cuda", checkpointing=True) == [kept[-1], (True, True, 1)]
    assert tried("cuda", checkpointing=True, offload_activations=False) == kept[-1:]
    assert tried("cuda", checkpointing=True, offload_activations=True) == [(True, True, 1)]


def test_fake_models_go_through_a_plan_too() -> None:
    """Blocks whose tensors have no values hand over inputs that have none."""
    from workbench.planning.fake_tensors import fake_tensors

    with fake_tensors(), activation_offload.planned(accelerated=True) as copies:
        model = _model().to("meta")
        to_fake(model, torch.device("cpu"))
        activation_offload.begin(model, torch.device("cpu"))
        _gradients(model)
    assert copies.most == (BLOCKS - 1) * 2 * TOKENS * WIDTH * 4
