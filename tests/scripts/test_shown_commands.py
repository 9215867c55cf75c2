"""Every command that a page shows parses: its verb, options, recipe and settings exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from tests.own_task import forgotten_afterwards
from tests.scripts.shown_commands import (
    MARK,
    OF_RECIPES,
    PAGES,
    ROOT,
    TUTORIALS,
    anchors,
    blocks,
    commands,
    inline,
    links,
    mentioned,
)
from workbench import recipes
from workbench.cli.verbs import app
from workbench.config import reference, task_facts
from workbench.recipes.load import load

IDS = [str(path.relative_to(ROOT)) for path in PAGES]
PLACEHOLDER = "key=value"


@pytest.fixture(autouse=True)
def forgets_own_tasks() -> Iterator[None]:
    """A page may show a task of a user's own, which no other test knows."""
    with forgotten_afterwards():
        yield


@cache
def known_keys() -> re.Pattern[str]:
    """Matches the key of any setting."""
    keys = (re.escape(each.key.replace("[]", "")).replace("NAME", r"[^.]+") for each in reference.settings())
    return re.compile("|".join([*keys, r"data\.(test|held_out)\.[^.]+"]))  # either of one file or of several by name


@cache
def sections() -> frozenset[str]:
    return frozenset(each.key.partition(".")[0] for each in reference.settings())


@cache
def code_files() -> list[Path]:
    rooms = ("workbench", "adapters", "recipes", "scripts", "tests")
    return [path for room in rooms for path in (ROOT / room).rglob("*.py")]


def require_valid(words: list[str]) -> None:
    """Raise where a command would not parse; a shipped recipe is loaded with its settings."""
    group = get_command(app)
    verb = group.commands[words[0]]  # type: ignore[attr-defined]
    given = verb.make_context(words[0], words[1:]).params
    overrides = [word for word in given.get("overrides") or () if word != PLACEHOLDER]
    for word in overrides:
        key, equals, _ = word.partition("=")
        assert equals and known_keys().fullmatch(key), f"{word}: no such setting"
    recipe = given.get("recipe")
    if recipe in recipes.shipped():
        load(recipe, overrides)
    assert recipe is None or recipe in recipes.shipped() or recipe.isupper() or recipe.endswith((".yaml", ".yml"))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_shown_command_parses(page: Path) -> None:
    mistakes, shown = list[str](), commands(page)
    for words in [*shown, *mentioned(page)]:
        try:
            require_valid(words)
        except Exception as error:  # typer's own have no public names
            if words in shown or type(error).__name__ != "MissingParameter":
                mistakes.append(f"workbench {' '.join(words)}: {error!r} {error}")
    assert not mistakes


def test_a_task_of_ones_own_is_known_where_a_page_shows_it_and_nowhere_else() -> None:
    for _ in range(2):
        assert "focal" not in task_facts.TASKS
        with forgotten_afterwards():
            require_valid(["run", "sft/quickstart", f"plugins=[{ROOT}/scripts/my_task.py]", "recipe=focal"])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_setting_that_a_page_writes_exists(page: Path) -> None:
    found = [re.match(r"([a-z_]+)((?:\.\w+)+)=", code) for code in inline(page)]
    keys = [f"{match[1]}{match[2]}" for match in found if match and match[1] in sections()]
    assert [key for key in keys if not known_keys().fullmatch(key)] == []


@pytest.mark.parametrize(
    "words",
    [
        ["runn", "sft/quickstart"],
        ["run", "sft/quickstart", "--resumed"],
        ["run", "sft/quickstarts"],
        ["run", "sft/quickstart", "adapter.rnk=4"],
        ["run", "my.yaml", "adapter.rnk=4"],
        ["run", "sft/quickstart", "adapter.rank=-4"],
    ],
)
def test_a_command_with_a_mistake_is_found(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"runn|resumed|quickstarts|rnk|-4"):
        require_valid(words)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_shell_block_is_run_or_says_what_it_needs(page: Path) -> None:
    shown = [block for block in blocks(page) if block.language != "yaml"]
    marks = re.findall(rf"^<!-- .*{MARK}", page.read_text(), re.M)
    assert len(marks) == sum(bool(block.needs or block.run_by or block.tiny) for block in shown)
    assert not [block.text for block in shown if not block.language and "workbench " in block.text]
    assert not re.findall(r"(?m)^ {4}(?:workbench|pip|python) .*", page.read_text()), "indented: write a block of sh"
    assert all(re.search("GPU|network|your|machine", block.needs) for block in shown if block.needs)
    assert all((ROOT / block.run_by).is_file() for block in shown if block.run_by)


def test_commands_are_read_from_the_pages_that_have_some() -> None:
    counts = {str(page.relative_to(ROOT)): len(commands(page)) for page in PAGES}
    assert all(counts[name] >= 5 for name in ("README.md", "recipes/tasks/prefer.md", "scripts/launch/README.md"))
    assert all(counts[str(page.relative_to(ROOT))] for page in TUTORIALS)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_file_of_the_code_that_a_page_names_exists(page: Path) -> None:
    named = {code for code in inline(page) if re.fullmatch(r"[\w/-]+\.py", code)}
    assert [name for name in named if not any(str(file).endswith(f"/{name}") for file in code_files())] == []


def test_the_index_of_recipes_names_every_page() -> None:
    index = ROOT / "recipes" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert set(OF_RECIPES) - {index} == linked & set(OF_RECIPES)


def test_tutorials_are_shell_and_what_it_prints() -> None:
    assert {block.language for page in TUTORIALS for block in blocks(page)} == {"sh", "text"}


def test_the_list_of_tutorials_is_whole() -> None:
    listed = re.findall(r"\((\w+\.md)\)", (ROOT / "scripts" / "tutorials" / "README.md").read_text())
    assert sorted({*listed}) == [page.name for page in TUTORIALS]
