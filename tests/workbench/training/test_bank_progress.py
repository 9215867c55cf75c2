"""A callback of a bank hears of each step once, in the names of its members."""

from __future__ import annotations

from typing import Any

from workbench.training.bank_progress import BankProgress


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
    assert [each.get("held_out_loss") for each, _ in listener.records] == [None, 2.0, None]
    progress.say("member0001 ends here.")
    assert listener.said == ["rate=2 ends here."] and progress.stop_requested()
