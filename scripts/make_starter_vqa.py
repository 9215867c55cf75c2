"""Cut the shipped share of easy-VQA: questions about pictures of one coloured shape, split by picture.

    python scripts/make_starter_vqa.py easy_vqa/train.zip OUT [--train 1200 --held-out 200]

Writes easy_vqa.zip, the pictures, and easy_vqa_train.jsonl with up to four questions about each of the first ones. Each
of the later ones has a question for a colour, one for a shape, and one for yes or no, where there are such, in
easy_vqa_colour.jsonl, easy_vqa_shape.jsonl and easy_vqa_yes_no.jsonl. easy-VQA: Victor Zhou 2019, MIT.
"""

from __future__ import annotations

import argparse
import collections
import json
import zipfile
from pathlib import Path

SHAPES = ("circle", "rectangle", "triangle")
ASKED = 4  # most questions about a picture that trains, one of each kind first


def main(arguments: argparse.Namespace) -> None:
    with zipfile.ZipFile(arguments.zip) as archive:
        questions = json.loads(archive.read("questions.json"))
        by_picture = collections.defaultdict(list)
        for question, answer, picture in questions:
            by_picture[picture].append((question, answer))
        pictures = sorted(by_picture)[: arguments.train + arguments.held_out]
        with zipfile.ZipFile(arguments.out / "easy_vqa.zip", "w", zipfile.ZIP_STORED) as kept:
            for picture in pictures:
                kept.writestr(zipfile.ZipInfo(f"{picture}.png"), archive.read(f"images/{picture}.png"))
    files = collections.defaultdict[str, list[dict[str, str]]](list)
    for number, picture in enumerate(pictures):
        of_kind = {kind(answer): (question, answer) for question, answer in reversed(by_picture[picture])}
        if number < arguments.train:
            rest = [each for each in by_picture[picture] if each not in of_kind.values()]
            files["train"] += [row(picture, *each) for each in [*of_kind.values(), *rest][:ASKED]]
        else:
            for name, each in of_kind.items():
                files[name].append(row(picture, *each))
    for name, rows in files.items():
        lines = "".join(json.dumps(each) + "\n" for each in rows)
        (arguments.out / f"easy_vqa_{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(rows):,} questions")


def kind(answer: str) -> str:
    """What a question asks for, by its answer."""
    return "yes_no" if answer in ("yes", "no") else "shape" if answer in SHAPES else "colour"


def row(picture: int, question: str, answer: str) -> dict[str, str]:
    """A line of a file."""
    return {"image": f"{picture}.png", "question": question, "answer": answer}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zip", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=1200)
    parser.add_argument("--held-out", type=int, default=200)
    main(parser.parse_args())
