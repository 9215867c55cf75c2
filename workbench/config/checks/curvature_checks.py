"""Cross-checks of optimizers that look at the curvature."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions between sophia and the rest of a run, one sentence for each."""
    if config.optimizer.name != "sophia":
        return
    if not config.task.tokens:
        yield (
            f"optimizer.name=sophia draws tokens from what the model predicts, and recipe={config.recipe} has other "
            "labels. Write optimizer.name=adamw."
        )
    if config.regularise.r_drop:
        yield "optimizer.name=sophia draws one token a label, which r_drop predicts twice. Leave one of them out."
