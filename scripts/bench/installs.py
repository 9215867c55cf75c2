"""A wheel and an sdist that twine accepts, installed in new environments outside of the checkout, without constraints.

    python scripts/bench/installs.py --pythons python3.11 python3.12 python3.13 [--of sdist] [--words train.steps=3]
    python scripts/bench/installs.py --extras "" all

Each interpreter, with each of the extras, gets an environment of its own, in which pip chooses the newest versions that
pyproject.toml allows; it then imports nothing of the checkout and runs `workbench run sft/quickstart` with the words.
The table has the seconds and megabytes of the installation and the seconds of the run. pip's own settings hold, such as
an index of torch for CPUs. Needs the packages build and twine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import measuring

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("torch", "transformers", "peft", "pydantic")
VERSIONS = "import importlib.metadata as m, json; print(json.dumps({each: m.version(each) for each in %r}))"


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        built = Path(name) / "dist"
        _call([sys.executable, "-m", "build", "--outdir", str(built), str(ROOT)], Path(name))
        files = sorted(built.iterdir())
        _call([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], Path(name))
        print(
            "twine check:", ", ".join(f"{each.name} {each.stat().st_size / 1e6:.0f} MB" for each in files), flush=True
        )
        package = next(each for each in files if each.suffix == (".whl" if arguments.of == "wheel" else ".gz"))
        rows: list[list[object]] = [["Python", "extras", "installed in s", "MB", "run in s", *SHOWN]]
        for python, extras in itertools.product(arguments.pythons, arguments.extras):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(_row(python, package, extras, arguments.words, Path(folder)))
            print(rows[-1], flush=True)
    print(measuring.markdown(rows))


def _row(python: str, package: Path, extras: str, words: Sequence[str], folder: Path) -> list[object]:
    home = folder / "venv"
    _call([python, "-m", "venv", str(home)], folder)
    own = str(home / "bin" / "python")
    _call([own, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], folder)
    began, before = time.monotonic(), _bytes(home)
    _call([own, "-m", "pip", "install", "--quiet", f"{package}[{extras}]" if extras else str(package)], folder)
    installed, size = time.monotonic() - began, _bytes(home) - before
    began = time.monotonic()
    _call([str(home / "bin" / "workbench"), "run", "sft/quickstart", *words, "--out", "run"], folder)
    ran = time.monotonic() - began
    assert (folder / "run" / "adapter" / "adapter_model.safetensors").exists()
    versions = json.loads(_call([own, "-c", VERSIONS % (SHOWN,)], folder))
    number = _call([own, "-c", "import platform; print(platform.python_version())"], folder).strip()
    return [number, extras, round(installed), f"{size / 1e6:,.0f}", round(ran), *versions.values()]


def _bytes(folder: Path) -> int:
    return sum(each.lstat().st_size for each in folder.rglob("*"))


def _call(command: Sequence[str], folder: Path) -> str:
    """What a command writes, in a folder outside of the checkout."""
    around = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(command, cwd=folder, env=around, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def _arguments() -> argparse.Namespace:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--pythons", nargs="+", default=[sys.executable], help="interpreters")
    found.add_argument("--extras", nargs="+", default=[""], help='such as audio,export; "": none')
    found.add_argument("--of", choices=("wheel", "sdist"), default="wheel")
    found.add_argument("--words", nargs="*", default=[], help="settings of the run, such as train.steps=3")
    return found.parse_args()


if __name__ == "__main__":
    main()
