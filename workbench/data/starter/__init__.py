"""The shipped backbones and data sets: a first run needs no network.

A Llama of 6 M parameters, a ViT in `vision`, both as a LLaVA in `vision-language`, and a Whisper in `sound`.
"""

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
