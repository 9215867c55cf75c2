"""The order of a pipeline's passes: complete, in time, of bounded memory, and never in a circle of waiting stages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.training.distributed import pipeline_schedule as schedule
from workbench.training.distributed.pipeline_schedule import Message, StagePass

pipelines = given(stages=st.integers(2, 6), batches=st.integers(0, 12))


@pipelines
@settings(max_examples=60, deadline=None)
def test_each_stage_passes_once_over_each_micro_batch_in_order(stages: int, batches: int) -> None:
    for stage in range(stages):
        order = schedule.one_forward_one_backward(stage, stages=stages, batches=batches)
        for backward in (False, True):
            assert [each.batch for each in order if each.backward is backward] == list(range(batches))


@pipelines
@settings(max_examples=60, deadline=None)
def test_a_stage_keeps_no_more_micro_batches_than_stages_are_left(stages: int, batches: int) -> None:
    for stage in range(stages):
        kept: set[int] = set()
        most = 0
        for each in schedule.one_forward_one_backward(stage, stages=stages, batches=batches):
            (kept.remove if each.backward else kept.add)(each.batch)
            most = max(most, len(kept))
        assert not kept and most == min(stages - stage, batches)


@pipelines
@settings(max_examples=60, deadline=None)
def test_no_stage_waits_for_ever(stages: int, batches: int) -> None:
    """With senders that wait for their receivers: an exchange is over when each of its messages is under way there."""
    orders = [schedule.one_forward_one_backward(stage, stages=stages, batches=batches) for stage in range(stages)]
    plans = [schedule.exchanges(order, stage, stages=stages) for stage, order in enumerate(orders)]
    begun: list[set[tuple[bool, Message]]] = [set() for _ in range(stages)]
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, plan in enumerate(plans):
            if at[stage] == len(plan):
                continue
            sent, received = plan[at[stage]]
            begun[stage] |= {(True, sent)} if sent else set()
            begun[stage] |= {(False, received)} if received else set()
            there = (sent is None or (False, sent) in begun[sent.target]) and (
                received is None or (True, received) in begun[received.source]
            )
            if there:
                at[stage] += 1
                moved = True
    assert at == [len(plan) for plan in plans]
    assert all(
        (not sending, message) in begun[message.source if not sending else message.target]
        for own in begun
        for sending, message in own
    )


@pipelines
@settings(max_examples=60, deadline=None)
def test_what_a_pass_needs_has_been_computed(stages: int, batches: int) -> None:
    """Passes one after another, each as soon as its input is there: all are done, backward after forward."""
    left = [schedule.one_forward_one_backward(stage, stages=stages, batches=batches) for stage in range(stages)]
    done: set[tuple[int, StagePass]] = set()
    ready = True
    while ready:
        ready = False
        for stage, order in enumerate(left):
            if not order:
                continue
            before = stage + 1 if order[0].backward else stage - 1
            if not 0 <= before < stages or (before, order[0]) in done:
                assert not order[0].backward or (stage, StagePass(order[0].batch)) in done
                done.add((stage, order.pop(0)))
                ready = True
    assert not any(left)


@given(stages=st.integers(1, 6), more=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_every_block_is_in_one_stretch_and_stretches_are_even(stages: int, more: int) -> None:
    parts = schedule.stretches(stages + more, stages)
    assert [block for part in parts for block in part] == list(range(stages + more))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes)
