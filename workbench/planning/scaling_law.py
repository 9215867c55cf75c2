"""Advice of a scaling law: which model, and how many tokens, a number of operations would train best from scratch."""

from __future__ import annotations

import math

from workbench.runs import units

TOKENS = 20.0
"""Tokens for each parameter (Hoffmann et al. 2022, arXiv:2203.15556, table 3)."""
OPERATIONS = 6.0
"""Floating-point operations for each parameter and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""


def best(operations: float) -> tuple[float, float]:
    """Parameters N and tokens D = 20 N with 6 N D operations."""
    parameters = math.sqrt(operations / (OPERATIONS * TOKENS))
    return parameters, TOKENS * parameters


def advice(*, operations: float, parameters: int, tokens: float) -> str:
    """A sentence on a run that trains all weights, which says what the law is about."""
    fewer, more = best(operations)
    return (
        f"Scaling law of pretraining, which fine-tuning does not follow (Hoffmann et al. 2022): {operations:.1e} "
        f"operations train a model from scratch best that has {units.count(fewer)} parameters, on "
        f"{units.count(more)} tokens; this run has {units.count(parameters)}, and {units.count(tokens)} tokens."
    )
