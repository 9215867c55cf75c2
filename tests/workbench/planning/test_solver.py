"""Which way is chosen, where what each takes is known by a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from workbench.config import RunConfig
from workbench.config.sections.basic_sections import Checkpointing
from workbench.errors import ConfigError
from workbench.models.model_sizes import AdapterSize
from workbench.planning import solver
from workbench.planning.dry_run import DryRun
from workbench.planning.plan import Plan
from workbench.planning.sharded_memory import Contents
from workbench.planning.solver import SolverChoice
from workbench.planning.step_time import StepWork, Timed
from workbench.runs import units

ROWS, LENGTH, COUNT = 32, 100, 1_000_000
FIXED = 16 * COUNT
"""Bytes of a model in float32 with gradients and two states of Adam."""

SHARED = {"zero": "auto", "bucket_bytes": 40_000}


class DryRuns:
    """Stands in for dry runs: everything trains in float32, and activations take 1,000 bytes a token."""

    def __init__(self, memory: int, *, devices: int = 1, device: str = "accelerator", floor: int = 0) -> None:
        self._memory, self._devices, self._device, self._floor = memory, devices, device, floor
        self.recomputable, self.added_up = True, None
        self.seen: list[tuple[object, object, int]] = []
        """Weights, checkpointing and tokens of each dry run."""

    def __call__(self, config: RunConfig) -> Plan:
        parts, wanted = config.distributed.sequence, config.batch.tokens_per_device
        tensor = config.distributed.tensor
        if tensor > 4:
            raise ConfigError("This run cannot be shared as it is:\n  It has 4 heads.")
        rows, length = ROWS * parts * tensor // self._devices, min(LENGTH, config.data.max_tokens) // parts
        tokens = rows * length if wanted == "auto" else wanted
        checkpointing = config.train.checkpointing
        self.seen.append((config.model.weights, checkpointing, tokens))
        weights = COUNT // 2 if config.model.weights == "nf4" else 4 * COUNT // tensor
        activations = max(self._floor, round(tokens * _token_bytes(checkpointing)))
        rest = {"gradients": 4 * COUNT // tensor, "optimizer": 8 * COUNT // tensor}
        return Plan(
            device=self._device,
            weights=config.model.weights,
            checkpointing=checkpointing != "auto" and checkpointing,
            size=AdapterSize(COUNT, COUNT, 4 * COUNT),
            steps=10,
            tokens_per_device=tokens,
            longest=length,
            dry_run=DryRun(
                at_peak={"weights": weights, **rest, "activations": activations},
                evaluation=weights + 8 * COUNT + 1000,
                micro_batches=-(-rows * length // tokens),
                padded_tokens=tokens,
                flops_per_token=1.0,
            ),
            work=StepWork(tokens=rows * length, padded=rows * length, passes=-(-rows * length // tokens)),
            contents=Contents(trained=(COUNT // tensor,), element=4, added_up=self.added_up),
            process=0,
            memory=self._memory,
            devices=self._devices,
            recomputable=self.recomputable,
        )


def _token_bytes(checkpointing: Checkpointing) -> float:
    """Activations of a token: 300 bytes of a block's inputs alone, 650 without results of elementwise operations."""
    if checkpointing in (False, "auto"):
        return 1000
    share = 0 if checkpointing == "elementwise" else float(checkpointing)
    return 650 - 350 * share


def _recomputed(checkpointing: Checkpointing) -> float:
    """Seconds."""
    if checkpointing is False:
        return 0
    return 0.02 if checkpointing == "elementwise" else 0.02 + 0.31 * float(checkpointing)


def timing(plan: Plan) -> Timed:
    """A second, and more for checkpointing, quantised weights and each pass."""
    return exactly(seconds_of(plan))


def exactly(seconds: float) -> Timed:
    return Timed(seconds, seconds, seconds)


def seconds_of(plan: Plan) -> float:
    return 1.0 + _recomputed(plan.checkpointing) + 0.2 * (plan.weights == "nf4") + 0.001 * plan.dry_run.micro_batches


def choose(
    memory: int,
    *,
    devices: int = 1,
    device: str = "accelerator",
    floor: int = 0,
    recomputable: bool = True,
    added_up: tuple[int, int] | None = None,
    timing: Callable[[Plan], Timed] = timing,
    **sections: Any,
) -> tuple[SolverChoice, DryRuns]:
    dry_runs = DryRuns(memory, devices=devices, device=device, floor=floor)
    dry_runs.recomputable, dry_runs.added_up = recomputable, added_up
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "batch": {"size": ROWS}, **sections}
    return solver.choose(RunConfig.model_validate(values), dry_runs, timing), dry_runs


def test_what_fits_as_it_is_is_tried_once() -> None:
    found, dry_runs = choose(FIXED + 1000 * ROWS * LENGTH)
    assert len(dry_runs.seen) == 1
    assert found.cure is None and found.require() is found
    assert found.config.batch.tokens_per_device == ROWS * LENGTH
    assert found.config.train.checkpointing is False and found.config.distributed.zero == 0


@pytest.mark.parametrize("pads", [True, False])
def test_where_rows_are_padded_a_size_between_is_tried(pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in a pass reads the weights most often, and many are padded most: what is between may be the fastest."""
    made = DryRuns.__call__

    def padded(self: DryRuns, config: RunConfig) -> Plan:
        plan = made(self, config)
        return replace(plan, work=replace(plan.work, tokens=plan.work.padded * (0.6 if pads else 1.0)))

    def seconds(plan: Plan) -> Timed:
        tokens = plan.tokens_per_device
        return exactly(2.0 if tokens == LENGTH else 3.0 if tokens == ROWS * LENGTH else 1.0)

    monkeypatch.setattr(DryRuns, "__call__", padded)
    found, _ = choose(FIXED + 700 * ROWS * LENGTH, train={"checkpointing": False}, timing=seconds)
    between = LENGTH < (found.config.batch.tokens_per_device or 0) < ROWS * LENGTH
    assert found.plan.fits and between == pads


def test_devices_that_compute_the_same_rows_have_a_part_of_their_tokens() -> None:
    found, _ = choose(FIXED + 1000 * ROWS * LENGTH // 2, devices=2, distributed={"sequence": 2})
    assert found.plan.fits and found.config.batch.tokens_per_device == ROWS * LENGTH // 2
    assert found.config.distributed.sequence == 2


@pytest.mark.parametrize(("tensor", "wanted"), [(1, ["auto", "nf4"]), (2, ["auto"])])
def test_blocks_that_are_cut_are_not_packed(tensor: int, wanted: list[str]) -> None:
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "distributed": {"tensor": tensor}}
    assert solver.formats(RunConfig.model_validate(values)) == wanted


@pytest.mark.parametrize("tokens", [101, 700, 3199])
def test_smaller_micro_batches_come_before_computing_twice(tokens: int) -> None:
    found, dry_runs = choose(FIXED + 1000 * tokens)
    assert (1 - solver.MARGIN) * (tokens - LENGTH) + LENGTH - 1 <= found.plan.tokens_per_device <= tokens
    assert found.config.train.checkpointing is False
    assert found.plan.fits and len(dry_runs.seen) <= 8
    assert ("auto", False, found.config.batch.tokens_per_device) in dry_runs.seen, "what is chosen was tried"


def test_where_bytes_do_not_grow_evenly_the_micro_batch_still_fills_the_memory() -> None:
    found, _ = choose(FIXED + 2_400_000, floor=2_000_000, train={"checkpointing": False})
    assert found.plan.fits and 2200 <= found.plan.tokens_per_device <= 2400


def test_what_would_not_be_faster_is_not_tried() -> None:
    """Where larger micro-batches take longer, as they hold more padding, so does computing twice."""
    found, dry_runs = choose(
        FIXED + 1000 * 700, timing=lambda plan: exactly(seconds_of(plan) + 1e-3 * plan.tokens_per_device)
    )
    assert found.plan.fits and found.config.batch.tokens_per_device == LENGTH
    assert [checkpointing for _, checkpointing, _ in dry_runs.seen] == [False, False]


def test_checkpointing_is_compared_where_the_backbone_allows_it() -> None:
    """Prefixes stand in a cache, which checkpointing does without, in some backbones and not in others."""
    assert choose(FIXED + 50_000, adapter={"method": "prefix"})[0].config.train.checkpointing == 0.5
    _, dry_runs = choose(FIXED + 50_000, recomputable=False)
    assert not any(checkpointing for _, checkpointing, _ in dry_runs.seen)


@pytest.mark.parametrize(
    ("memory", "wanted"),
    [(101_000, False), (66_000, "elementwise"), (57_000, 0.25), (50_000, 0.5), (40_000, 0.75), (31_000, True)],
)
def test_no_more_is_recomputed_than_the_memory_asks_for(memory: int, wanted: Checkpointing) -> None:
    found, dry_runs = choose(FIXED + memory)
    assert found.plan.fits and found.config.train.checkpointing == wanted == found.plan.checkpointing
    assert ("auto", wanted, LENGTH) in dry_runs.seen, "what is chosen was tried"


@pytest.mark.parametrize(
    ("layout", "memory", "goes"),
    [({"zero": 2, "offload_optimizer": "cpu"}, 8_300_000, True), ({"zero": 3}, 9_500_000, False)],
)
def test_what_goes_with_some_layouts_alone_is_tried_with_these(layout: dict[str, Any], memory: int, goes: bool) -> None:
    """DeepSpeed's third stage has given weights away by the time that norms are computed again."""
    found, _ = choose(memory, devices=4, distributed={**SHARED, **layout})
    assert found.plan.fits and any("checkpointing=" in each.way for each in found.plan.tried) == goes


def test_a_way_that_others_beat_in_the_fewest_passes_is_not_carried_out() -> None:
    """Shares wait for weights in every pass: where one that fits whole is faster, fewer tokens are no dry run."""
    found, dry_runs = choose(9_600_000, devices=4, distributed=SHARED)
    assert [seen for seen in dry_runs.seen if seen[0] == "auto"] == [("auto", False, 800)]
    beaten = [each for each in found.plan.tried if "slower" in each.verdict]
    assert [each.way for each in beaten] == ["auto, zero=3"] and not beaten[0].fits
    taken = next(each for each in found.plan.tried if each.verdict == "taken")
    assert taken.seconds <= beaten[0].seconds


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("memory", [3, 5, 8.2, 9.1, 9.6, 13.1, 16.05, 16.3, 17.2, 20])
def test_the_choice_is_that_of_all_ways_carried_out(
    memory: float, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(memory * COUNT)
    few, dry_runs = choose(limit, devices=devices, distributed=SHARED)
    monkeypatch.setattr(solver, "_beaten", lambda *_: False)
    every, all_dry_runs = choose(limit, devices=devices, distributed=SHARED)
    assert few.plan.fits == every.plan.fits and len(dry_runs.seen) <= len(all_dry_runs.seen)
    assert few.plan.seconds == every.plan.seconds and few.plan.needed == every.plan.needed
    assert few.config == every.config and few.cure == every.cure


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("floor", [0, 900_000])
@pytest.mark.parametrize("checkpointing", [False, 0.5])
def test_no_way_takes_less_than_its_bounds(devices: int, floor: int, checkpointing: Checkpointing) -> None:
    """Neither time, with as many tokens as fit, nor bytes, with the fewest: what is left out on their account is slower
    or does not fit. Each pass waits, and reads the weights again."""
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, "batch": {"size": ROWS}, "distributed": SHARED}

    def reading(plan: Plan) -> Timed:
        return replace(exactly(1.0 + 0.3 * plan.work.passes), reading=0.3)

    for memory in (6.3, 9.6, 16.3):
        dry_runs = DryRuns(int(memory * COUNT), devices=devices, floor=floor)
        own = solver._Solver(RunConfig.model_validate(values), dry_runs, reading)
        for layout in own._layouts:
            train = own._config.train.model_copy(update={"checkpointing": checkpointing})
            way = own._most(own._config.model_copy(update={"distributed": layout, "train": train}))
            for tokens in (LENGTH, 3 * LENGTH, 6 * LENGTH):
                plan = own._plan(way.config, tokens)
                assert plan.needed >= way.at_least
                if plan.fits:
                    assert tokens <= way.most_tokens + 1 and not way.lacking
                    assert (plan.seconds or 0.0) >= own._bound(way) - 1e-9


def test_where_activations_have_no_room_at_all_few_tokens_are_tried_first() -> None:
    """What many take says that without recomputing not even few fit, and nothing is tried to find that out."""
    _, dry_runs = choose(FIXED + 31_000, model={"weights": "float32"})
    most = ROWS * LENGTH
    assert [seen[1:] for seen in dry_runs.seen][:4] == [(False, most), ("elementwise", 100), (True, 100), (True, most)]


def test_of_what_does_not_fit_the_least_is_told() -> None:
    """With the fewest tokens in a pass, whatever was left out on the way there."""
    found, _ = choose(FIXED // 20, distributed={"zero": 0})
    least = min(way.needed for way in found.plan.tried)
    assert found.cure is not None and found.plan.needed == least and found.plan.tokens_per_device == LENGTH


def test_then_checkpointing_and_quantised_weights_last() -> None:
    assert choose(FIXED + 31_000)[0].config.train.checkpointing is True
    found, _ = choose(FIXED - 3_000_000)
    assert found.config.model.weights == "nf4"
    kept, _ = choose(FIXED - 3_000_000, device="cpu", model={"weights": "float32"})
    assert kept.cure is not None and "model.weights=nf4" in kept.cure


def test_every_way_that_was_compared_is_told() -> None:
    found, _ = choose(FIXED * 3 // 5, devices=4, distributed=SHARED)
    *tried, _, cut, left = found.plan.tried
    assert cut.way == "tensor=4" and "not compared" in cut.verdict and "Write distributed.tensor=4" in cut.verdict
    assert left.way == "nf4" and "not compared" in left.verdict and "Write model.weights=nf4" in left.verdict
    told = [each.way for each in tried]
    shared = [*(f"auto, zero={stage}" for stage in (1, 2, 3)), *(f"auto, fsdp2, zero={stage}" for stage in (2, 3))]
    assert [each for each in told if "checkpointing" not in each] == ["auto", *shared]
    assert {each.verdict for each in tried if each.fits} == {"taken"}
    assert all("lacks" in each.verdict or "slower" in each.verdict for each in tried if not each.fits)
    fitting = [each for each in tried if each.fits]
    assert found.plan.seconds == min(each.seconds for each in fitting)
    assert found.config.distributed.zero in (2, 3)


CUT: dict[str, Any] = {
    "distributed": {"zero": "auto", "bucket_bytes": 40_000},
    "timing": lambda plan: replace(exactly(seconds_of(plan)), reading=1e-3),
    "evaluate": {"answers": 0},
}


@pytest.mark.parametrize(("added_up", "wanted"), [((100, 200), 4), ((10**7, 2 * 10**7), 4), (None, 1)])
def test_blocks_are_cut_where_shares_cannot_be_taken(
    added_up: tuple[int, int] | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever devices then add up of each token; from the fewest devices on that hold their parts."""

    def refusal(config: RunConfig, devices: int) -> str:
        return "the optimizer is not shared." if config.distributed.sharded else ""

    monkeypatch.setattr(solver, "_refusal", refusal)
    found, _ = choose(9_600_000, devices=8, added_up=added_up, **CUT)
    assert found.plan.fits == (wanted > 1) and found.config.distributed.tensor == wanted
    told = {each.way.removeprefix("auto, "): each.verdict for each in found.plan.tried}
    if added_up:
        assert told["tensor=4"] == "taken" and told["tensor=2"].startswith(("slower, if it fits", "lacks"))
    else:
        assert told["tensor=8"].startswith("not compared: ")


def test_where_shares_fit_cut_blocks_are_named_and_not_compared() -> None:
    found, _ = choose(9_600_000, devices=8, added_up=(100, 200), **CUT)
    assert found.plan.fits and found.config.distributed.tensor == 1 and found.config.distributed.sharded
    told = {each.way: each.verdict for each in found.plan.tried}
    for size in (2, 4, 8):
        assert told[f"tensor={size}"].endswith(f"Write distributed.tensor={size} for its plan")


def test_states_wait_outside_where_nothing_else_fits() -> None:
    """Shares of quantised weights come before a host, and a host before nothing."""
    found, _ = choose(
        FIXED // 2, devices=4, distributed={**SHARED, "bucket_bytes": 40_000}, model={"weights": "float32"}
    )
    told = [each.way.removeprefix("float32, ") for each in found.plan.tried]
    assert [each for each in told if "to cpu" in each and "checkpointing" not in each] == [
        *(f"zero={stage}, optimizer to cpu" for stage in (2, 3)),
        "zero=3, optimizer to cpu, parameters to cpu",
        "fsdp2, zero=3, optimizer to cpu, parameters to cpu",
    ]
    assert found.plan.fits and found.config.distributed.offload_optimizer == "cpu"


def test_what_a_run_would_refuse_is_never_chosen_and_told() -> None:
    found, _ = choose(FIXED * 3 // 5, devices=4, distributed=SHARED, optimizer={"name": "muon"})
    refused = {each.way: each.verdict for each in found.plan.tried if each.verdict.startswith("refused: ")}
    assert "evaluate.answers" in refused.pop("pipeline=4")
    assert set(refused) >= {"zero=1", "zero=2", "zero=3", "fsdp2, zero=2", "fsdp2, zero=3"}
    assert all("optimizer.name" in each for way, each in refused.items() if "zero" in way)
    assert not found.config.distributed.sharded and found.cure is not None


def test_devices_that_each_hold_all_are_asked_first() -> None:
    """Also where shares would leave room for larger micro-batches."""
    found, _ = choose(FIXED + 1000 * 400, devices=4, distributed=SHARED)
    assert found.plan.fits and not found.config.distributed.sharded


def test_stages_differ_by_arithmetic_alone() -> None:
    _, dry_runs = choose(FIXED * 3 // 5, devices=4, distributed=SHARED)
    assert len(dry_runs.seen) <= 8, (
        "two micro-batches, of three ways to keep activations, one without tiles, the choice"
    )


def test_what_was_written_stays_and_a_cpu_is_its_own_host() -> None:
    found, _ = choose(FIXED // 3, devices=4, distributed={"zero": 1})
    assert all("zero=1" in each.way for each in found.plan.tried if "zero" in each.way)
    found, _ = choose(FIXED // 3, devices=2, device="cpu", distributed={"zero": "auto"})
    assert not any("to cpu" in each.way for each in found.plan.tried)
    wanted, _ = choose(FIXED // 2, devices=4, distributed={"zero": "auto", "offload_optimizer": "cpu"})
    assert all("optimizer to cpu" in each.way for each in wanted.plan.tried)


def test_the_smallest_change_is_one_that_fits() -> None:
    found, _ = choose(FIXED + 20_000, device="cpu", adapter={"method": "full"})
    assert found.cure is not None and "data.max_tokens=50" in found.cure
    again, _ = choose(
        FIXED + 20_000, device="cpu", adapter={"method": "full"}, data={"train": "rows.jsonl", "max_tokens": 50}
    )
    assert again.plan.fits
    with pytest.raises(ConfigError, match=r"does not fit into .* more"):
        found.require()


def test_where_all_weights_fit_in_no_way_an_adapter_may(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DryRuns.__call__

    def lighter(self: DryRuns, config: RunConfig) -> Plan:
        plan = made(self, config)
        if config.adapter.method == "full":
            return plan
        parts = {**plan.dry_run.at_peak, "gradients": 0, "optimizer": 0}
        return replace(plan, dry_run=replace(plan.dry_run, at_peak=parts, evaluation=0))

    monkeypatch.setattr(DryRuns, "__call__", lighter)
    found, _ = choose(FIXED // 2, device="cpu", adapter={"method": "full"})
    assert found.cure is not None and found.cure.endswith("The smallest change that fits: adapter.method=lora.")
    assert choose(FIXED // 2, device="cpu")[0].plan.fits


def test_where_no_change_helps_the_missing_bytes_are_told() -> None:
    found, _ = choose(COUNT, adapter={"method": "full"})
    assert found.cure is not None and "No setting alone helps" in found.cure
    missing = found.plan.needed - COUNT
    assert f"{units.size(missing)} more" in found.cure
    assert choose(COUNT + missing, adapter={"method": "full"})[0].plan.fits
