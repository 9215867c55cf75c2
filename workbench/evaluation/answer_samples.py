"""Answers to the same few held-out prompts at each evaluation of a run, in samples.jsonl of its directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import nn

from workbench.evaluation.scores import GeneratedAnswer
from workbench.runs import files, metrics_log
from workbench.runs.run_directory import Run

FILE = "samples.jsonl"


class Answering(Protocol):
    """A model with what answering needs."""

    @property
    def model(self) -> nn.Module:
        """The model."""


M = TypeVar("M", bound=Answering)


class AnswerSamples(Generic[M]):
    """Has a model that trains answer, once a step, and keeps the answers.

    Args:
        write: The model's answers, which are greedy: no random number of the training is drawn.
    """

    def __init__(self, run: Run, write: Callable[[M], Sequence[GeneratedAnswer]]) -> None:
        self._run, self._write = run, write
        self._step: int | None = None

    def start_over(self) -> None:
        """Before the first step of a run: forget the answers of a process that ended before its first checkpoint."""
        (self._run.path / FILE).unlink(missing_ok=True)

    def begin(self, model: M) -> None:
        """Before the first step of a run: the answers of the model that training starts from, as those of step 0."""
        self.start_over()
        modes = {module: module.training for module in model.model.modules()}
        model.model.eval()
        self.take(model, step=0)
        for module, training in modes.items():
            module.training = training

    def take_untrained(self, model: M) -> None:
        """After the last step: the answers of an untrained model in front of all others, as those of step 0, once."""
        path = self._run.path / FILE
        others = path.read_bytes() if path.exists() else b""
        if others and json.loads(others.partition(b"\n")[0])["step"] == 0:
            return
        lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in self._records(model, step=0))
        if lines:
            files.write_bytes(path, lines.encode(errors="replace") + others)

    def take(self, model: M, *, step: int) -> None:
        """After a step: the answers, unless they are there already."""
        if step == self._step:  # the average of the weights is evaluated too
            return
        self._step = step
        if records := self._records(model, step=step):
            metrics_log.append(self._run.path / FILE, records)

    def _records(self, model: M, *, step: int) -> list[dict[str, int | str]]:
        with self._run.deadline.phase("samples"):
            return [_record(answer, step) for answer in self._write(model)]


def _record(answer: GeneratedAnswer, step: int) -> dict[str, int | str]:
    shown = {"row": answer.place, "prompt": answer.prompt, "reference": answer.reference, "answer": answer.answer}
    return {"step": step, **shown}
