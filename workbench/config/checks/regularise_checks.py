"""Settings of a run under which `regularise` would do something else than it says, or nothing."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.config import task_facts
from workbench.config.sections.run_sections import RunSections


def mistakes(config: RunSections) -> Iterator[str]:
    """Contradictions to section `regularise`, one sentence for each."""
    section = config.regularise
    yield from section.misfits(pictures=config.reads_pictures, cache=config.freeze.cache)
    if config.task.labelled:
        for key in ("label_smoothing", "z_loss"):
            if getattr(section, key):
                tokens = task_facts.names(lambda task: task.tokens)
                yield f"regularise.{key} is for recipe={tokens}, not for {config.recipe}. See classes.smoothing."
    for key in ("sam", "noise_scale") if section.mixout else ():
        if getattr(config.optimizer, key):
            yield (
                f"optimizer.{key} compares gradients where the values are, and regularise.mixout puts some where they "
                "began. Leave one of them out."
            )
    if section.r_drop:
        yield from _of_two_passes(config)


def with_a_teacher(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yield each setting that a teacher's loss has no place for, and what to write instead."""
    for key in ("label_smoothing", "z_loss", "r_drop"):
        if getattr(config.regularise, key):
            yield (
                f"regularise.{key}",
                "the loss of a distillation compares with a teacher. Leave it out; distill.alpha weighs both.",
            )


def _of_two_passes(config: RunSections) -> Iterator[str]:
    """Where two passes over a row are the same."""
    section = config.regularise
    by_row = config.adapter.noise > 0 and config.adapter.method != "boft"  # whose rows share one rotation
    if not (by_row or config.model.dropout or section.noisy):
        yield (
            "regularise.r_drop compares two passes over a row with different dropout, and nothing is dropped, so that "
            "they are the same. Write adapter.dropout=0.1 (of lora, say), or model.dropout=true."
        )
