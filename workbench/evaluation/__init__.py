"""Evaluation of a model: likelihood of held-out tokens, and scored answers to held-out prompts."""

from workbench.evaluation.generation import (
    GeneratedAnswer,
    answer_scores,
    answer_table,
    answers,
    answers_to,
    complete,
    complete_ids,
    drawn_prompts,
    generate,
    generation_config,
    stop_tokens,
    summary,
)
from workbench.evaluation.perplexity import Likelihood, likelihood

__all__ = [
    "GeneratedAnswer",
    "Likelihood",
    "answer_scores",
    "answer_table",
    "answers",
    "answers_to",
    "complete",
    "complete_ids",
    "drawn_prompts",
    "generate",
    "generation_config",
    "likelihood",
    "stop_tokens",
    "summary",
]
