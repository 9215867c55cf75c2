"""A callback of a bank gets each step once, in the names of its members and of those that train."""

from __future__ import annotations

from statistics import mean
from typing import Any

from workbench.training.callbacks import BankProgress


class Listener:
    def __init__(self) -> None:
        self.records: list[tuple[dict[str, Any], int]] = []
        self.said: list[str] = []

    def step(self, record: dict[str, Any], *, total: int) -> None:
        self.records.append((record, total))

    def say(self, text: str) -> None:
        self.said.append(text)

    def stop_requested(self) -> bool:
        return True


def test_steps_are_told_once_for_all_members() -> None:
    listener = Listener()
    progress = BankProgress(listener, {"member0000": "rate=1", "member0001": "rate=2"})
    for step, losses in ((1, (4.0, 2.0)), (2, (3.0, 1.0)), (3, (2.5,))):  # the second ends after two
        for number, loss in enumerate(losses):
            record = {"member": f"member000{number}", "step": step, "loss": loss, "tokens_per_second": 100.0}
            held_out = {"held_out_loss": loss + 1} if step == 2 else {}
            progress.step({**record, **held_out}, total=3 - number)
    progress.flush()
    progress.flush()
    told = [(each["step"], each["loss"], each["tokens_per_second"], total) for each, total in listener.records]
    assert told == [(1, 3.0, 200.0, 3), (2, 2.0, 200.0, 3), (3, 2.5, 100.0, 3)]
    assert [each.get("held_out_loss") for each, _ in listener.records] == [None, 2.0, 4.0], "the first's, when alone"
    progress.say("member0001 ends here.")
    assert listener.said == ["rate=2 ends here."] and progress.stop_requested()


def test_a_fleet_reports_the_step_and_the_losses_of_those_that_train() -> None:
    listener = Listener()
    progress = BankProgress(listener, {"m0": "m1", "m1": "user, second", "m2": "third"}, held_out=mean)
    rounds = [
        {"m0": (2, 2, 4.0), "m1": (2, 5, 8.0)},  # step, steps in all, held-out loss
        {"m1": (3, 5, None), "m2": (1, 9, None)},  # the first has left, and the third joined
        {"m1": (4, 5, None), "m2": (2, 9, 1.0)},
        {"m2": (3, 9, None)},
    ]
    for each in rounds:
        for member, (step, total, loss) in each.items():
            record = {"member": member, "step": step, "loss": 1.0, "tokens_per_second": 1.0, "elapsed_s": float(step)}
            progress.step(record if loss is None else {**record, "held_out_loss": loss}, total=total)
        progress.flush()
    shown = [(each["step"], total, each.get("held_out_loss")) for each, total in listener.records]
    assert shown == [(2, 5, 6.0), (1, 9, 8.0), (2, 9, 4.5), (3, 9, 1.0)]
    progress.say("m0, m1 leave.")
    assert listener.said == ["m1, user, second leave."], "no name of a user is taken for one of the bank"


def test_members_that_were_not_evaluated_yet_have_no_held_out_loss() -> None:
    listener = Listener()
    progress = BankProgress(listener, {"m0": "one", "m1": "two"})
    for member, held_out in (("m0", {"held_out_loss": 3.0}), ("m1", {})):
        progress.step({"member": member, "step": 1, "loss": 1.0, "tokens_per_second": 1.0, **held_out}, total=1)
        progress.flush()
    assert listener.records[1][0]["held_out_loss"] is None
