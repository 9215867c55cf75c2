"""Evaluation of a model: likelihood of held-out tokens, and scored answers to held-out prompts."""

from workbench.evaluation.generation import generate
from workbench.evaluation.scores import (
    GeneratedAnswer,
    Likelihood,
    answer_scores,
    answers,
    complete,
    generation_config,
    likelihood,
    stop_tokens,
    summary,
    write_predictions,
)

__all__ = [
    "GeneratedAnswer",
    "Likelihood",
    "answer_scores",
    "answers",
    "complete",
    "generate",
    "generation_config",
    "likelihood",
    "stop_tokens",
    "summary",
    "write_predictions",
]
