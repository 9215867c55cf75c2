"""Take out of bitsandbytes' wheel the binaries of other platforms than one, such as cuda130, and the CPU's.

    python scripts/gpu/thin.py WHEEL cuda130

The wheel holds one binary for each version of CUDA, and a machine loads one of them.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

BINARY = re.compile(r"bitsandbytes/libbitsandbytes_([a-z]+[0-9]*[a-z0-9_]*)\.so")


def main(wheel: Path, kept: str) -> None:
    thin = wheel.with_suffix(".thin")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(thin, "w", zipfile.ZIP_DEFLATED) as part:
        found = {name: match[1] for name in whole.namelist() if (match := BINARY.fullmatch(name))}
        if kept not in found.values():
            thin.unlink()
            sys.exit(f"{wheel.name} has no binary for {kept}, but for {', '.join(sorted(found.values()))}")
        left_out = {name for name, platform in found.items() if platform not in (kept, "cpu")}
        for name in whole.namelist():
            if name.endswith(".dist-info/RECORD"):
                lines = whole.read(name).decode().splitlines(keepends=True)
                part.writestr(name, "".join(line for line in lines if line.split(",")[0] not in left_out))
            elif name not in left_out:
                part.writestr(whole.getinfo(name), whole.read(name))
    thin.replace(wheel)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
