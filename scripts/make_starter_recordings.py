"""Make the shipped recordings of spoken digits: a small share of the Free Spoken Digit Dataset, split by speaker.

    python scripts/make_starter_recordings.py recordings.zip workbench/data/starter

The archive has DIGIT_SPEAKER_NUMBER.wav. Written are spoken_digits.zip (flac) and two tables with the columns audio,
label (the digit's word) and speaker: three people to train on, and one who is held out.
"""

from __future__ import annotations

import argparse
import csv
import io
import zipfile
from pathlib import Path

import soundfile

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPEAKERS, HELD_OUT, EACH = ("george", "jackson", "lucas", "nicolas"), "nicolas", 8
NAME = "spoken_digits"


def main(source: Path, out: Path) -> None:
    tables: dict[str, list[tuple[str, str, str]]] = {"train": [], "held_out": []}
    packed = out / f"{NAME}.zip"
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for speaker in SPEAKERS:
            for number in range(EACH):
                for digit, word in enumerate(WORDS):
                    samples, rate = soundfile.read(io.BytesIO(given.read(f"{digit}_{speaker}_{number}.wav")))
                    buffer = io.BytesIO()
                    soundfile.write(buffer, samples, rate, format="FLAC", subtype="PCM_16")
                    name = f"{speaker}/{word}_{number}.flac"
                    archive.writestr(zipfile.ZipInfo(name), buffer.getvalue())
                    tables["held_out" if speaker == HELD_OUT else "train"].append((name, word, speaker))
    for part, rows in tables.items():
        with (out / f"{NAME}_{part}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([("audio", "label", "speaker"), *rows])
    print(f"{packed}: {packed.stat().st_size:,} bytes; {', '.join(f'{k} {len(v)}' for k, v in tables.items())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    main(arguments.source, arguments.out)
