"""Write the shipped pictures: hands that show the digits 0 to 9, split by person.

    python scripts/make_starter_pictures.py sign_digits.zip workbench/data/starter/sign_digits.zip

The archive given has CLASS/IMG_NUMBER.jpg. Each person showed the digits one after another, so that numbers in order
say who is who: where a digit is not above the one before, the next person begins. Nobody stands on two sides of the
split into `train`, `test` and `unlabelled`. Sign Language Digits Dataset (Arda Mavi, Zeynep Dikle), Apache-2.0.
"""

from __future__ import annotations

import argparse
import io
import itertools
import re
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

SHARES = {"train": 0.58, "test": 0.2, "unlabelled": 0.22}
QUALITY = 78
"""Quality of JPEG: the archive is to stay below 3 MB."""


def main(arguments: argparse.Namespace) -> None:
    with zipfile.ZipFile(arguments.source) as source:
        names = sorted((name for name in source.namelist() if name.endswith(".jpg")), key=_number)
        people = _people(names)
        cuts = np.cumsum([0, *SHARES.values()]) * (people[-1] + 1)
        order = np.random.default_rng(0).permutation(people[-1] + 1)
        with zipfile.ZipFile(arguments.out, "w", zipfile.ZIP_STORED) as out:
            for name, person in zip(names, people, strict=True):
                part = list(SHARES)[int(np.searchsorted(cuts, order[person], side="right")) - 1]
                digit = Path(name).parent.name
                file = f"person{person:03}_{digit}.jpg"
                if part == "unlabelled":
                    file = f"{part}/person{person:03}_{_number(name)}.jpg"
                else:
                    file = f"{part}/{digit}/{file}"
                # A fixed date, so that the same pictures make the same archive.
                out.writestr(zipfile.ZipInfo(file), _smaller(source.read(name)))


def _number(name: str) -> int:
    return int(re.findall(r"\d+", Path(name).stem)[-1])


def _people(names: list[str]) -> list[int]:
    """The person of each picture, counted from 0."""
    digits = [int(Path(name).parent.name) for name in names]
    begins = [later <= earlier for earlier, later in itertools.pairwise(digits)]
    people: list[int] = np.cumsum([0, *begins]).tolist()
    return people


def _smaller(data: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(data)).save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    main(parser.parse_args())
