"""Reading a run directory executes nothing that its config.yaml names, unless a person asks for it."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from workbench import report, schema
from workbench.adapters import METHODS
from workbench.config import RunConfig, plugins
from workbench.config.sections.distill_config import TeacherConfig
from workbench.config.yaml_text import dump_yaml, read_yaml
from workbench.distillation import teacher_sources
from workbench.errors import ConfigError, ResumeError
from workbench.recipes.verbs import evaluate, generate
from workbench.recipes.verbs.combine import combine_runs
from workbench.recipes.verbs.export import export
from workbench.recipes.verbs.merge import merge
from workbench.runs import run_directory, trust
from workbench.runs.trust import Trust
from workbench.schema import Section

NAMING: dict[str, dict[str, Any]] = {
    "plugins": {"plugins": ["x.py"]},
    "evaluate.metric": {"recipe": "classify", "evaluate": {"metric": "my.py:score"}},
    "model.trust_remote_code": {"model": {"id": "starter", "trust_remote_code": True}},
    "tta.function": {"recipe": "crossval", "tta": {"views": ["user"], "function": "x.py"}, "data": {"train": "r.csv"}},
    "data.curriculum.function": {"data": {"train": "r.jsonl", "curriculum": {"by": "function", "function": "x.py"}}},
    "data.sampling.trust": {
        "data": {"train": "r.jsonl", "sampling": {"by": "tokens", "reference": "r", "trust": True}}
    },
    "prefer.trust": {"recipe": "prefer", "prefer": {"reference": "r", "start": "s", "trust": True}},
    "reinforce.trust": {
        "recipe": "reinforce",
        "reinforce": {"start": "s", "trust": True},
        "rewards": [{"kind": "number"}],
    },
    "distill.teacher.trust": {"recipe": "distill", "distill": {"teacher": {"id": "r", "trust": True}}},
    "duplicates.trust": {"recipe": "crossval", "duplicates": {"features": 0.9, "embedder": "r", "trust": True}},
    "correction.trust": {
        "recipe": "crossval",
        "of": "classify",
        "correction": {"neighbours": [5], "embedder": "r", "trust": True},
    },
    "rerank.trust": {"recipe": "rerank", "rerank": {"embedder": "r", "mine": 3, "trust": True}},
    "rewards.0.trust": {"recipe": "reinforce", "rewards": [{"kind": "model", "run": "r", "trust": True}]},
    "rewards.0.file": {"recipe": "reinforce", "rewards": [{"file": "x.py"}]},
    "fleet.members.ann.plugins": {"recipe": "fleet", "fleet": {"members": {"ann": {"plugins": ["x.py"]}}}},
    "fleet.members.ann.data.curriculum.function": {
        "recipe": "fleet",
        "fleet": {"members": {"ann": {"data": {"train": "r.jsonl"}, "data.curriculum.function": "x.py"}}},
    },
}
"""Each setting that names code, in a configuration of a run."""
METHOD = """
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from workbench.adapters import Method, MethodInfo, register
from workbench.schema import CodeFile, NamesCode

@register
class Foreign(Method):
    about: ClassVar = {"foreign": MethodInfo("nothing", "none")}
    method: Literal["foreign"]
    hook: Annotated[Path, NamesCode()] = Path()
    hooks: dict[str, tuple[CodeFile, ...]] = {}
"""
READERS: dict[str, Callable[[Path, bool], Any]] = {
    "generate": lambda run, trust: generate.generate(run, "What comes after 1?", max_new_tokens=1, trust=trust),
    "evaluate": lambda run, trust: evaluate.evaluate(run, ["evaluate.answers=0"], trust=trust),
    "predict": lambda run, trust: generate.predict(
        run, str(run / "asked.jsonl"), out=run / "said.jsonl", max_new_tokens=1, trust=trust
    ),
    "merge": lambda run, trust: merge(run, out=run / "merged", weights="float32", trust=trust),
    "export": lambda run, trust: export(run, to="peft", out=run / "exported", trust=trust),
    "combine": lambda run, trust: combine_runs([run], weights=[1.0], rank=None, out=run / "sum", trust=trust),
    "teacher": lambda run, trust: teacher_sources.find(
        TeacherConfig(id=str(run), trust=trust), RunConfig.model_fields["model"].default
    ),
}


@pytest.fixture
def foreign(trained: Path, tmp_path: Path) -> Path:
    """A run whose config.yaml names a file that leaves a mark where it is executed."""
    run = tmp_path / "foreign"
    shutil.copytree(trained, run)
    _mark(run)
    (run / "asked.jsonl").write_text('{"question": "What comes after 1?"}\n')
    values = read_yaml(run / "config.yaml")
    values["plugins"] = [str(run / "plugin.py")]
    values["model"]["trust_remote_code"] = True
    _write(run, values)
    return run


def _mark(run: Path) -> None:
    """A file of Python code that leaves a mark."""
    (run / "plugin.py").write_text(f"import pathlib\npathlib.Path({str(run / 'executed')!r}).touch()\n")


def _write(run: Path, values: dict[str, Any]) -> None:
    (run / "config.yaml").write_text(dump_yaml(values))


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_executes_nothing_of_a_run_and_says_so(
    reader: str, foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(ConfigError) if reader == "combine" else nullcontext():  # it has new tokens, which are not added
        READERS[reader](foreign, False)
    assert not (foreign / "executed").exists()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "workbench.runs.trust"]
    cure = "distill.teacher.trust=true" if reader == "teacher" else "--trust"
    assert str(foreign / "plugin.py") in told and "model.trust_remote_code=true" in told and cure in told


def test_a_run_is_executed_where_it_is_trusted(foreign: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run_directory.shipped_config(foreign, Trust(given=True))
    assert (foreign / "executed").exists() and config.plugins and config.model.trust_remote_code
    assert not [record for record in caplog.records if record.name == "workbench.runs.trust"]


def test_nothing_is_said_of_a_run_that_names_no_code(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_directory.shipped_config(trained)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_comparing_runs_executes_nothing(foreign: Path, tmp_path: Path) -> None:
    report.compare([foreign, foreign], tmp_path / "page.html")
    assert not (foreign / "executed").exists()


def test_a_method_that_only_a_plugin_knows_needs_trust(foreign: Path) -> None:
    (foreign / "plugin.py").write_text(METHOD)
    values = read_yaml(foreign / "config.yaml")
    plain = {**values["model"], "new_tokens": []}
    _write(foreign, {**values, "model": plain, "adapter": {"method": "foreign"}})
    with pytest.raises(ConfigError, match=r"cannot be read without plugins=.*plugin\.py.*--trust"):
        run_directory.shipped_config(foreign)
    assert run_directory.shipped_config(foreign, Trust(given=True)).adapter.method == "foreign"
    del METHODS["foreign"]


def test_a_setting_that_is_new_and_names_code_is_found_by_its_type(foreign: Path) -> None:
    """A method of a plugin has two, in a section that nothing else knows."""
    (foreign / "plugin.py").write_text(METHOD)
    plugins.load([foreign / "plugin.py"])
    hooks = {"hook": "x.py", "hooks": {"after": ["y.py"]}}
    values = {"recipe": "sft", "adapter": {"method": "foreign", **hooks}, "data": {"train": "rows.jsonl"}}
    assert trust.code(values) == {"adapter.hook": "x.py", "adapter.hooks": {"after": ["y.py"]}}
    left = trust.without(values, foreign, Trust())
    assert left == {**values, "adapter": {"method": "foreign"}} and values["adapter"] == {"method": "foreign", **hooks}
    del METHODS["foreign"]


@pytest.mark.parametrize("key", NAMING)
def test_each_setting_that_names_code_is_found_and_left_out(key: str, tmp_path: Path) -> None:
    values = {"recipe": "sft", "data": {"train": "rows.jsonl"}, **NAMING[key]}
    assert list(trust.code(values)) == [key]
    left = trust.without(values, tmp_path, Trust())
    kept = key == "rewards.0.file" or key.startswith("fleet.")  # whoever builds rewards asks; members are not read
    assert list(trust.code(left)) == ([key] if kept else [])
    if not key.startswith("fleet."):
        RunConfig.model_validate(left)


def test_every_setting_of_that_kind_is_marked_and_every_marked_one_is_tried() -> None:
    """By what their docstrings say."""
    sections: list[type[Section]] = [Section]
    for section in sections:
        sections += section.__subclasses__()
    own = [each for each in sections if each.__module__.startswith("workbench.")]
    fields = [(each, name) for each in own for name in each.__annotations__ if name in each.model_fields]
    marked = {name for each, name in fields if schema.code_marks(each.model_fields[name])}
    for each, name in fields:
        text = schema._field_docstrings(each).get(name, "")
        says = re.search(r"Python file|([Ee]xecute|Run) (the )?Python code|[Oo]nly (a file|one) you trust", text)
        assert bool(schema.code_marks(each.model_fields[name])) == bool(says), f"{each.__name__}.{name}: {text}"
    assert marked == {key.rpartition(".")[2] for key in NAMING}


def test_views_that_a_run_uses_need_trust_and_others_are_left_out(foreign: Path) -> None:
    values = read_yaml(foreign / "config.yaml")
    views = {"views": ["user"], "function": str(foreign / "plugin.py")}
    plain = {**values["model"], "new_tokens": [], "chat_template": None}
    _write(foreign, {**values, "recipe": "crossval", "model": plain, "tta": views, "data": {"train": "rows.csv"}})
    (foreign / "decision.json").write_text(json.dumps({"tta": None}))
    assert run_directory.shipped_config(foreign).tta.views == ()
    (foreign / "decision.json").write_text(json.dumps({"tta": {"used": ["user"]}}))
    with pytest.raises(ConfigError, match=r"its predictions need tta\.function=.*--trust"):
        run_directory.shipped_config(foreign)
    assert not (foreign / "executed").exists()


def test_members_of_a_sweep_bring_no_code(trained: Path, tmp_path: Path) -> None:
    """sweep.json says what its best member has otherwise, and comes from the same hands."""
    run = tmp_path / "swept"
    shutil.copytree(trained, run)
    _mark(run)
    values = read_yaml(run / "config.yaml")
    sweep = {"over": {"adapter.rank": [2, 4]}}
    _write(run, {**values, "recipe": "sweep", "sweep": sweep, "evaluate": {"every": 0.5}})
    member = {"member": "one", "settings": {"plugins": [str(run / "plugin.py")], "model.trust_remote_code": True}}
    (run / "sweep.json").write_text(json.dumps({"best": "one", "members": [member]}))
    config = run_directory.shipped_config(run)
    assert not (run / "executed").exists() and not config.plugins and not config.model.trust_remote_code


def test_a_resumed_run_executes_only_what_the_person_names(foreign: Path) -> None:
    values = read_yaml(foreign / "config.yaml")
    mine = {**values, "plugins": [], "model": {**values["model"], "trust_remote_code": False}}
    with pytest.raises(ResumeError, match=r"plugins: .*plugin\.py'\] there"):
        run_directory.start(foreign, RunConfig.model_validate(mine), resume=True)
    assert not (foreign / "executed").exists()


def test_a_run_of_another_version_is_told_in_one_sentence(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "old"
    shutil.copytree(trained, run)
    values = read_yaml(run / "config.yaml")
    _write(run, {**values, "engine": {"kind": "v0"}, "optimiser": "adamw", "batch": {"rows": 3}})
    for reader in READERS.values():
        with pytest.raises(ConfigError) as caught:
            reader(run, False)
        told = str(caught.value)
        assert "\n" not in told and "mistakes" not in told, told
        assert "does not read its config.yaml" in told and "Use that version, or train again." in told


def test_a_reference_is_the_configuration_of_its_run_too(trained: Path, tmp_path: Path) -> None:
    """A resumed run goes on with the reference that it began with, as with its teacher."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))

    def digests() -> dict[str, str]:
        return teacher_sources.find(TeacherConfig(id=str(run)), RunConfig.model_fields["model"].default).files

    before = digests()
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n# changed\n")
    assert [name for name, digest in digests().items() if before[name] != digest] == [str(run / "config.yaml")]
