"""Answers to the same few held-out prompts at each evaluation of a run, in samples.jsonl of its directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import nn

from workbench.evaluation.scores import GeneratedAnswer
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

    def begin(self, model: M) -> None:
        """Before the first step of a run: the answers of the model that training starts from, as those of step 0."""
        (self._run.path / FILE).unlink(missing_ok=True)  # of a process that ended before its first checkpoint
        modes = {module: module.training for module in model.model.modules()}
        model.model.eval()
        self.take(model, step=0)
        for module, training in modes.items():
            module.training = training

    def take(self, model: M, *, step: int) -> None:
        """After a step: the answers, unless they are there already."""
        if step == self._step:  # the average of the weights is evaluated too
            return
        self._step = step
        with self._run.deadline.phase("samples"):
            answers = self._write(model)
        if answers:
            self._run.append(FILE, [_record(answer, step) for answer in answers])


def _record(answer: GeneratedAnswer, step: int) -> dict[str, int | str]:
    shown = {"row": answer.place, "prompt": answer.prompt, "reference": answer.reference, "answer": answer.answer}
    return {"step": step, **shown}
