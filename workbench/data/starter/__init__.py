"""The shipped backbone and data, so that a first run needs no network: 6 M-parameter Llama, FairytaleQA subset."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def resolve(name: str) -> str:
    """`starter` and `starter/FILE` as paths inside the installed package; every other name unchanged."""
    if name == "starter":
        return str(FOLDER)
    if name.startswith("starter/") and not Path(name).exists():
        return str(FOLDER / name.removeprefix("starter/"))
    return name
