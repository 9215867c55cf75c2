"""Arguments that several verbs share, and the words that a shell completes for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from workbench.errors import ConfigError


class Groups(TyperGroup):
    """Lists verbs by what they are for, which `rich_help_panel` of each says, in this order."""

    BEFORE = "Before a run"
    TRAIN = "Train"
    USE = "Score and use what was trained"
    SHIP = "Merge and ship"
    LEARN = "Look up"

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, self.commands))
        for title in (self.BEFORE, self.TRAIN, self.USE, self.SHIP, self.LEARN):
            rows = [
                (f"{name:{widest}}", command.get_short_help_str(formatter.width - 6 - widest))
                for name, command in self.commands.items()
                if getattr(command, "rich_help_panel", None) == title
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


def complete_recipes(incomplete: str) -> list[str]:
    """Shipped recipes, and YAML files and folders on the way to one."""
    from workbench.recipes import shipped

    return [*_beginning(shipped(), incomplete), *_paths(incomplete, (".yaml", ".yml"))]


def complete_runs(incomplete: str) -> list[str]:
    """Folders on the way to a run, and runs."""
    return [*_paths(incomplete, ())]


def complete_settings(incomplete: str) -> list[str]:
    """Keys with the = that follows, and behind it the values among which a setting chooses."""
    from workbench.config import reference

    key, equals, value = incomplete.partition("=")
    known = reference.settings()
    keys = [each for each in known if not each.is_section and "[]" not in each.key and "NAME" not in each.key]
    if not equals:
        return list(dict.fromkeys(f"{word}=" for word in _beginning([each.key for each in keys], key)))
    words = [word for each in keys if each.key == key for word in each.words]
    return [f"{key}={word}" for word in dict.fromkeys(_beginning(words, value))]


def complete_explained(incomplete: str) -> list[str]:
    """Keys, sections, and names among which a key chooses, such as methods."""
    from workbench.config import reference

    names = [name for key in reference.choosing_keys() for name in reference.choices(key)]
    words = [*(each.key for each in reference.settings()), *names]
    return list(dict.fromkeys(_beginning(words, incomplete)))


def _beginning(words: list[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _paths(incomplete: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Folders that begin so, and files with one of these suffixes."""
    folder, _, name = incomplete.rpartition("/")
    place = Path(f"{folder}/" if "/" in incomplete else ".").expanduser()
    try:
        beside = sorted(place.iterdir())
    except OSError:
        return
    for path in beside:
        if path.name.startswith(name) and (name.startswith(".") or not path.name.startswith(".")):
            if path.is_dir():
                yield f"{incomplete[: len(incomplete) - len(name)]}{path.name}/"
            elif path.suffix in suffixes:
                yield f"{incomplete[: len(incomplete) - len(name)]}{path.name}"


Recipe = Annotated[
    str,
    typer.Argument(help="A YAML file, or a shipped recipe such as sft/quickstart.", autocompletion=complete_recipes),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, such as train.epochs=3.", show_default=False, autocompletion=complete_settings),
]
RunSettings = Annotated[
    list[str] | None,
    typer.Argument(
        help="key=value of data or evaluate, such as data.test=FILE or data.columns='{question: asked}'; "
        "model.id=FOLDER if the backbone has moved.",
        show_default=False,
        autocompletion=complete_settings,
    ),
]
Moved = Annotated[
    list[str] | None, typer.Argument(help="model.id=FOLDER if the backbone has moved.", show_default=False)
]
RunFolder = Annotated[Path, typer.Argument(help="A run directory.", autocompletion=complete_runs)]
Trusted = Annotated[bool, typer.Option("--trust", help="Execute the Python code that the run's config.yaml names.")]


Devices = Annotated[int | None, typer.Option(min=1, help="Share the rows among so many devices of this machine.")]


def _show_versions(asked: bool) -> None:
    """One line, from the metadata of what is installed: importing torch takes seconds."""
    if asked:
        from importlib import metadata

        names = ("peft-workbench", "torch", "transformers", "peft")
        typer.echo(", ".join(f"{name} {metadata.version(name)}" for name in names))
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_versions, help="Versions, and no more.")
]


def weights_of(text: str) -> list[float]:
    """Numbers of `--weights`; raises ConfigError where they are none."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: expected numbers with commas between them, such as 0.5,0.5.") from None
