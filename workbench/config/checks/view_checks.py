"""Views at test time that do not go with the task, its rows, or the recipe."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config.sections.run_sections import RunSections

_OF_WORDS = ("views", "copies", "noise", "least_gain", "keep")
"""Settings of views that rows with several labels read, whose probabilities have one way to be merged."""


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions between `tta` and the rest of a run, one sentence for each, which begins with a key."""
    tta, task, of = config.tta, config.task, f"{'recipe' if config.over is None else 'of'}={config.task.name}"
    if not tta.views or not task.views:
        return
    if wrong := [view for view in tta.views if view not in task.views]:
        known = ", ".join(task.views)
        yield f"tta.views: {', '.join(wrong)}: {of} needs views that keep every word. Write some of {known}."
    for key in type(tta).model_fields if not task.labelled else ():
        if key not in _OF_WORDS and tta.differs(key):
            yield f"tta.{key}: is for rows with one label each. With {of} leave it out."
    if task.labelled and (reason := tta.refusal(config.classes, rows=config.data.format if config.media else "text")):
        yield reason
    if config.over is not None and tta.keep is not None:
        yield "tta.keep: is for a run of one adapter. Leave it out; folds.keep=[tta] keeps views in folds."
    if config.over is None and config.budget.timed:
        yield "tta: reads held-out rows again for as long as that takes. Leave budget's limits of time out."
