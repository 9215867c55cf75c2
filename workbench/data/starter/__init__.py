"""The shipped backbones (a 6 M-parameter Llama, a ViT in `vision`, a Whisper in `sound`) and data sets: a first run needs no network."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def resolve(name: str) -> str:
    """Replace `starter` and `starter/FILE` by paths inside the installed package; other names are unchanged."""
    if name == "starter":
        return str(FOLDER)
    if name.startswith("starter/") and not Path(name).exists():
        return str(FOLDER / name.removeprefix("starter/"))
    return name
