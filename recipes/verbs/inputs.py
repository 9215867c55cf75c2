"""Files that a run reads besides its rows: backbone, chat template, teacher, reference and its own Python code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.config import RunConfig, plugins
from workbench.config.sections.distill_config import TEACHER
from workbench.errors import WorkbenchError
from workbench.models import backbones
from workbench.recipes.single import token_reference
from workbench.recipes.task import implementation
from workbench.runs import provenance
from workbench.runs.run_directory import Run

if TYPE_CHECKING:
    from workbench.distillation.teacher_sources import TeacherSource


def require_same(config: RunConfig, run: Run) -> None:
    """Note what the run reads; raises ResumeError where it goes on with other files than it began with.

    What few recipes read is imported for them alone: each import takes a part of the time to the first step.
    """
    own = [*config.plugins, *filter(None, (config.tta.function, config.data.curriculum.function))]
    provenance.note_files(run, "your code", plugins.fingerprints(own))
    if config.model.id != TEACHER:
        provenance.note_files(run, "backbone", backbones.file_digests(config.model))
    template = config.model.chat_template
    if template is not None and template.is_file():
        provenance.note_files(run, "chat template", {str(template): provenance.digest(template)})
    if token_reference.wanted(config):
        wanted = token_reference.of_tokens(config)
        provenance.note_files(run, "reference", token_reference.named(wanted, config).files)
    if config.reinforce.start is not None:
        adapter = Path(config.reinforce.start).expanduser() / "adapter"
        start_digests = provenance.digests(adapter, title=config.reinforce.start) if adapter.is_dir() else {}
        provenance.note_files(run, "start", start_digests)
    for title, digests in implementation(config).files(config).items():
        provenance.note_files(run, title, digests)
    if config.rewards:
        from workbench.evaluation import rewards

        failed = run.before.get("status") == "failed" and str(run.before.get("reason")).startswith("rewards")
        provenance.note_files(run, "rewards", rewards.digests(config.rewards), corrected=failed)
    if config.distill.teacher.id is not None:
        from workbench.distillation import teacher_sources

        try:
            taught_by = _teacher(teacher_sources.find(config.distill.teacher, config.model))
        except WorkbenchError:
            return  # it may be gone once a cache holds all that it says; where it is needed, the recipe says so
        provenance.note_files(run, "teacher", taught_by)


def _teacher(source: TeacherSource) -> dict[str, str]:
    file_digests = backbones.file_digests(source.model)
    for adapter in source.adapters:
        file_digests |= provenance.digests(adapter, title=str(adapter))
    for name in (
        ("config.yaml", "decision.json", "neighbours.safetensors", "out_of_fold.parquet")
        if source.run is not None
        else ()
    ):
        assert source.run is not None
        path = source.run / name
        file_digests |= {str(path): provenance.digest(path)} if path.is_file() else {}
    return file_digests
