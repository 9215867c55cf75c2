"""Losses: pure functions of tensors, summed over positions or rows."""

from workbench.losses.chunked_loss import chunked
from workbench.losses.next_token import next_token, token_scores
from workbench.losses.token_log_probs import token_entropies, token_log_probs

__all__ = ["chunked", "next_token", "token_entropies", "token_log_probs", "token_scores"]
