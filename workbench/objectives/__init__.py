"""Losses: pure functions of tensors, summed over supervised positions."""

from workbench.objectives.chunked import chunked
from workbench.objectives.next_token import next_token, token_scores

__all__ = ["chunked", "next_token", "token_scores"]
