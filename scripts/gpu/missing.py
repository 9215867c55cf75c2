"""Print the wheels of a folder that this Python lacks, or has in a version that pyproject.toml does not allow.

python scripts/gpu/missing.py FOLDER
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def main(folder: Path) -> None:
    allowed = dict(_ranges(PROJECT.read_text(encoding="utf-8")))
    for wheel in sorted(folder.glob("*.whl")):
        name = parse_wheel_filename(wheel.name)[0]
        try:
            here = version(name)
            fits = name not in allowed or allowed[name].specifier.contains(here, prereleases=True)
        except PackageNotFoundError:
            fits = False
        if not fits:
            print(wheel)


def _ranges(project: str) -> Iterator[tuple[str, Requirement]]:
    """Requirements in quotes, by name; written for Pythons that read no TOML."""
    for text in re.findall(r'^    "([A-Za-z][^"]*>=[^"]*)",$', project, re.MULTILINE):
        found = Requirement(text)
        yield canonicalize_name(found.name), found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
