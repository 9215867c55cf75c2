"""Settings are told as the sections have them, and editors accept what the workbench accepts."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlparse

import pytest
from jsonschema import Draft202012Validator
from pydantic import PositiveInt, ValidationError

from workbench import recipes
from workbench.adapters import METHODS
from workbench.cli import render
from workbench.config import RunConfig, reference
from workbench.config.freeze_config import POLICIES
from workbench.config.reference import SettingReference
from workbench.config.yaml_text import load_yaml, read_yaml
from workbench.errors import ConfigError
from workbench.recipes.load import load
from workbench.schema import Section, Unit


@pytest.fixture(scope="module")
def settings() -> list[SettingReference]:
    return reference.settings()


@pytest.fixture(scope="module")
def editor() -> Draft202012Validator:
    """The check that an editor makes with the schema."""
    schema = reference.json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_every_setting_has_a_meaning(settings: list[SettingReference]) -> None:
    plugins = {name for name, section in METHODS.items() if section.__module__.startswith("workbench_plugin_")}
    ours = [each for each in settings if not each.of or not plugins.issuperset(each.of)]
    assert [each.key for each in ours if not each.meaning or not each.values] == []


def test_every_key_of_a_run_is_there_with_the_default_that_it_has(settings: list[SettingReference]) -> None:
    run = load("sft/quickstart")
    known = {each.key: each.default for each in settings if not each.of}
    plain: dict[str, Any] = {}
    for section, fields in RunConfig.model_fields.items():
        names = getattr(type(getattr(run, section)), "model_fields", None)
        plain |= {f"{section}.{name}": field for name, field in names.items()} if names else {section: fields}
    assert plain.keys() <= {each.key for each in settings}
    for key, field in plain.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, (int, float, str)) and key in known and key not in ("adapter.method", "freeze.policy"):
            assert load_yaml(known[key]) == default or known[key] == str(default), key


def test_methods_and_policies_are_those_that_there_are(settings: list[SettingReference]) -> None:
    for key, there in (("adapter.method", {*METHODS}), ("freeze.policy", {"none", *POLICIES})):
        assert reference.choices(key).keys() == there and all(reference.choices(key).values())
        (setting,) = reference.look_up(key)
        assert set(setting.values.split(" | ")) == there
    assert reference.choices("batch.size") == {}
    of = {name for each in settings if each.key == "adapter.rank" for name in each.of}
    assert of == {name for name, section in METHODS.items() if "rank" in section.model_fields}


@pytest.mark.parametrize("name", recipes.shipped())
def test_an_editor_accepts_every_shipped_recipe_and_no_other_key(name: str, editor: Draft202012Validator) -> None:
    values = read_yaml(recipes.find(name))
    assert [error.message for error in editor.iter_errors(values)] == []
    for section in (
        name for name, value in values.items() if isinstance(value, dict) and name not in ("sweep", "search")
    ):
        wrong = copy.deepcopy(values)
        wrong[section]["wrnog"] = 1
        assert not editor.is_valid(wrong), section


def _schema_named_by(path: Path) -> Path:
    """The file that a recipe names for editors, which know addresses and paths from the recipe's folder."""
    (line,) = [each for each in path.read_text().splitlines() if each.startswith(recipes.FOR_EDITORS)]
    named = line.removeprefix(recipes.FOR_EDITORS)
    assert not re.search(r"\s", named), "an editor reads up to the first space"
    return Path(unquote(urlparse(named).path)) if named.startswith("file:") else path.parent / named


def test_the_published_schema_is_that_of_the_settings(tmp_path: Path) -> None:
    """In a process that knows no plugins of other tests."""
    command = [sys.executable, "-m", "workbench.cli.verbs", "schema", "--out", str(tmp_path / "schema.json")]
    subprocess.run(command, check=True, capture_output=True)
    assert recipes.SCHEMA.read_text() == (tmp_path / "schema.json").read_text(), (
        f"Write: workbench schema > {recipes.SCHEMA.relative_to(recipes.CONFIGS.parents[1])}"
    )


@pytest.mark.parametrize("name", recipes.shipped())
def test_a_shipped_recipe_and_its_copy_name_the_schema(name: str, tmp_path: Path) -> None:
    assert _schema_named_by(recipes.find(name)).samefile(recipes.SCHEMA)
    recipes.copy(name, tmp_path / "below/a folder/mine.yaml")
    assert _schema_named_by(tmp_path / "below/a folder/mine.yaml").samefile(recipes.SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    ["batch: {size: 0}", "adapter: {method: lroa}", "freeze: {policy: lsa}", "adapter: {method: lora, block: 2}"],
)
def test_an_editor_marks_what_the_workbench_refuses(wrong: str, editor: Draft202012Validator) -> None:
    right = {"recipe": "sft", "data": {"train": "rows.jsonl"}}
    assert editor.is_valid(right) and not editor.is_valid({**right, **load_yaml(wrong)})


def test_a_word_finds_keys_then_meanings_else_is_told_what_is_near() -> None:
    assert [each.key for each in reference.look_up("batch.size")] == ["batch.size"]
    assert {each.key for each in reference.look_up("batch")} > {"batch", "batch.size", "batch.packing"}
    assert [each.key for each in reference.look_up("data.sources.mine.weight")] == ["data.sources.NAME.weight"]
    assert {each.key for each in reference.look_up("distill.match")} > {"distill.match", "distill.match[].what"}
    assert {each.key for each in reference.look_up("learning_rate")} == {"train.learning_rate"}
    assert [each.key for each in reference.look_up("NEFTune")] == ["regularise.neftune"]
    assert [each.key for each in reference.look_up("LD-DPO")] == ["prefer.length"]
    assert [each.key for each in reference.look_up("Gauss-Newton-Bartlett")] == ["optimizer.name"], "far below"
    with pytest.raises(ConfigError, match=r"Did you mean `batch\.size`"):
        reference.look_up("bach.size")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_is_told_by_its_name_with_all_keys_that_it_has(name: str) -> None:
    (found,) = [each for each in reference.named_choices(name) if each.key == "adapter.method"]
    keys = {each.key.removeprefix("adapter.") for each in found.settings}
    assert keys == METHODS[name].model_fields.keys() - {"method"}
    assert found.meaning == reference.choices("adapter.method")[name]


NUMBERS = {"seed", "data.seed", "data.fold.number", "data.fold.repeat", "adapter.bound", "search.eta", "grow.factor"}
"""Whole numbers that count nothing."""


def test_every_whole_number_counts_something_and_shares_say_so(settings: list[SettingReference]) -> None:
    plugins = {name for name, section in METHODS.items() if section.__module__.startswith("workbench_plugin_")}
    counts = [each for each in settings if "a whole number" in each.values and not each.is_section]
    counts = [each for each in counts if not each.of or not plugins.issuperset(each.of)]
    assert {each.key for each in counts if not each.unit} == NUMBERS, 'Write Annotated[..., Unit("rows")].'
    units = {each.key: each.unit for each in settings}
    assert units["budget.time"] == "seconds" and units["distributed.bucket_bytes"] == "bytes"
    assert units["train.steps"] == "steps" and units["evaluate.every"] == "steps, or share of the run"
    assert units["masking.share"] == "share, as a fraction of 1"
    assert units["image.augment.mix_probability"] == "probability"
    assert units["train.learning_rate"] == units["data.train"] == units["classes.kind"] == ""


def test_the_schema_has_units_and_a_unit_changes_no_value(editor: Draft202012Validator) -> None:
    class Example(Section):
        size: Annotated[PositiveInt | None, Unit("rows")] = None
        share: float = 0.5
        """Share of the rows."""
        name: Literal["Share"] = "Share"
        """Share of nothing: a word has no unit."""

    properties = Example.model_json_schema()["properties"]
    assert [each.get("unit") for each in properties.values()] == ["rows", "share, as a fraction of 1", None]
    assert Example(size=3).size == 3
    with pytest.raises(ValidationError):
        Example(size=0)
    sections = reference.json_schema()["$defs"]
    assert sections["BatchConfig"]["properties"]["size"]["unit"] == "rows"
    assert sections["MaskingConfig"]["properties"]["share"]["unit"] == "share, as a fraction of 1"
    assert editor.is_valid({"recipe": "sft", "data": {"train": "rows.jsonl", "max_tokens": 64}})


@pytest.mark.parametrize(
    ("text", "papers"),
    [
        ("LoRA (Hu et al. 2021, arXiv:2106.09685).", ("Hu et al. 2021, arXiv:2106.09685",)),
        ("Li et al. (2018), and Loshchilov & Hutter 2017", ("Li et al. 2018", "Loshchilov & Hutter 2017")),
        ("(Li, Zhang and He, NeurIPS 2022, arXiv:2108.06084)", ("Li, Zhang and He, NeurIPS 2022, arXiv:2108.06084",)),
        ("One (Li et al., ICLR 2023); again Li et al., ICLR 2023", ("Li et al., ICLR 2023",)),
        ("Usually 0.7, at most 2000 rows.", ()),
    ],
)
def test_papers_are_found_where_a_text_cites_them(text: str, papers: tuple[str, ...]) -> None:
    assert reference.papers(text) == papers


def test_a_setting_has_the_papers_of_its_docstring_or_else_of_its_section(
    settings: list[SettingReference], capsys: pytest.CaptureFixture[str]
) -> None:
    papers = {(each.key, each.of): each.papers for each in settings}
    assert papers["regularise.neftune", ()] == ("Jain et al. 2024",)
    assert papers["freeze.active", ("lisa",)] == ("Pan et al. 2024, arXiv:2403.17919",)
    assert papers["adapter.rank", ("vera",)] == ("Kopiczko et al. 2023, arXiv:2310.11454",)
    shared = [cited for (key, of), cited in papers.items() if key == "adapter.rank" and len(of) > 2]
    assert shared and not any(shared), "what several methods have is from no paper of one"
    assert papers["batch.size", ()] == ()
    render.settings(reference.look_up("data.length_warm_up.start"), "data.length_warm_up.start")
    told = capsys.readouterr().out
    assert "\n  unit       tokens\n" in told and "\n  paper      Li, Zhang and He, NeurIPS 2022, arXiv:2108" in told
    render.choices(reference.named_choices("dora"))
    assert "\n  paper      Liu et al. 2024, arXiv:2402.09353\n" in capsys.readouterr().out


def test_the_reason_for_a_default_stands_apart_from_the_meaning(
    settings: list[SettingReference], capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = {each.key: each.why for each in settings if each.why}
    assert {"batch.packing", "data.sampling.by", "data.overlap", "train.checkpointing"} <= reasons.keys()
    met_first = {"train.learning_rate", "schedule.name", "batch.size", "model.weights", "data.held_out", "folds.k"}
    assert met_first <= reasons.keys() and len(reasons) > 30
    assert not [key for key, why in reasons.items() if not why.endswith(".") or not why[0].islower()]
    assert not [each.key for each in settings if "Why:" in each.meaning]
    render.settings(reference.look_up("data.overlap"), "data.overlap")
    assert "  why        scores of rows that were trained on flatter." in capsys.readouterr().out


def test_a_name_that_is_a_key_is_the_key_and_an_unknown_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.named_choices("model") == [] and reference.named_choices("lsia") == []
    render.choices(reference.named_choices("lisa"))
    told = capsys.readouterr().out
    assert told.startswith("freeze.policy=lisa\n  meaning    LISA (Pan et al. 2024") and "freeze.active = 2 " in told


def test_what_is_printed_is_whole_for_one_key_and_a_line_each_for_several(capsys: pytest.CaptureFixture[str]) -> None:
    render.settings(reference.look_up("freeze.policy"), "freeze.policy")
    told = capsys.readouterr().out
    assert told.startswith("freeze.policy\n  values     none | ") and "LISA (Pan et al. 2024" in told
    render.settings(reference.look_up("batch"), "batch")
    assert "batch.size = 32  " in capsys.readouterr().out
    render.settings([each for each in reference.settings() if "." not in each.key], "")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(RunConfig.model_fields) + 1 and max(map(len, lines)) <= 120
