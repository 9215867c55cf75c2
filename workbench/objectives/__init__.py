"""Losses: pure functions of tensors, summed over supervised positions."""

from workbench.objectives.next_token import next_token, token_scores

__all__ = ["next_token", "token_scores"]
