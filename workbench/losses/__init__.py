"""Losses: pure functions of tensors, summed over positions or rows."""

from workbench.losses.chunked import chunked
from workbench.losses.next_token import next_token, token_scores

__all__ = ["chunked", "next_token", "token_scores"]
