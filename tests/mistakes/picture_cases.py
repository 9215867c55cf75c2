"""Mistakes that a person can make with pictures, in the world of `test_pictures`."""

from __future__ import annotations

import shutil

from tests.mistakes.cases import Case, file
from tests.mistakes.picture_folders import (
    all_equal,
    animals,
    animated,
    backslashes,
    both,
    bytes_without_labels,
    copied,
    deep,
    ended,
    function,
    grey_backbone,
    listed,
    locked,
    made,
    moved,
    one_size_backbone,
    picture,
    pictures,
    table,
    truncated,
    unreadable,
    zeroed,
    zipped,
)

SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'
HEIC = b"\0\0\0\x18ftypheic" + bytes(64)
GROWS = "image.augment.curriculum.strength.start=0.5"
SWEEP = "recipe=sweep of=classify evaluate.every=0.5 sweep.over="
FOLDS = "recipe=crossval of=classify data.held_out=0.05 folds.k=2"
CHECK = "check my.yaml"
CASES = {
    # Folders.
    "empty class folder": Case(
        CHECK, "pets/cow: a class folder without pictures", "Fill it, or remove it", made("pets/cow")
    ),
    "one class": Case(
        CHECK, "every label is `dog`", "Give rows of another class", lambda f: shutil.rmtree(f / "pets/cat")
    ),
    "no pictures": Case(f"{CHECK} data.train=none", "none: holds no pictures", "Known: .jpg", made("none")),
    "no folder": Case(f"{CHECK} data.train=./pest", "./pest: no such file", "Did you mean `pets`?"),
    "one picture": Case(f"{CHECK} data.train=pets/cat/0.png", "a single picture", "Name its folder"),
    "without labels": Case(
        f"{CHECK} data.train=pets/cat", "pets/cat: holds pictures without class folders", "Name the folder above"
    ),
    "two cases": Case(
        CHECK, "the folders `Cat` and `cat` differ only by case", "rename one", pictures("pets/Cat", start=50)
    ),
    "loose pictures": Case(
        CHECK,
        "holds class folders (cat, dog) beside the loose file loose.png",
        "Move loose pictures",
        file("pets/loose.png", picture(99)),
    ),
    "table beside": Case(
        CHECK,
        "pets/labels.csv: a table beside pictures",
        "Name it to read its rows",
        file("pets/labels.csv", "image,label\n"),
    ),
    "unknown file": Case(
        CHECK, "pets/cat/a.mp4: unknown kind of file `.mp4`", "Move it elsewhere", file("pets/cat/a.mp4", b"x")
    ),
    "saved by datasets": Case(
        CHECK,
        "pets/data-0.arrow: a data set as `datasets` saves it",
        'to_parquet("rows.parquet")',
        file("pets/data-0.arrow", b""),
    ),
    "idx files": Case(
        CHECK,
        "pets: holds idx files",
        "Name one: pets/train-images-idx3-ubyte.gz",
        both(file("pets/train-images-idx3-ubyte.gz", b""), file("pets/train-labels-idx1-ubyte.gz", b"")),
    ),
    "two splits": Case(
        CHECK,
        "pets: holds several splits, test, train",
        "Name one: pets/test or pets/train",
        both(moved("pets", "all"), copied("all", "pets/train"), moved("all", "pets/test")),
    ),
    "permission": Case(CHECK, "pets/cat: cannot be read (Permission denied)", "Make it readable", locked),
    "long name": Case(f"{CHECK} data.train={'x' * 300}", "File name too long", "Write a shorter one"),
    # Archives.
    "zip of splits": Case(
        f"{CHECK} data.train=pets.zip",
        "holds several splits, test, train",
        "Name one: pets.zip/test or pets.zip/train",
        zipped,
    ),
    "zip of Windows": Case(
        f"{CHECK} data.train=pets.zip",
        "pets.zip: holds cat\\0.png, with a backslash",
        "Unpack it, and name the folder",
        backslashes,
    ),
    "no member": Case(
        f"{CHECK} data.train=pets.zip/trian", "pets.zip has no folder `trian`", "Did you mean `train`?", zipped
    ),
    "no zip": Case(
        f"{CHECK} data.train=pets.zip",
        "pets.zip: not a zip archive that can be read",
        "Copy or download it again",
        file("pets.zip", b"PK"),
    ),
    "tar": Case(
        f"{CHECK} data.train=pets.tar.gz",
        "archives of this kind are not read",
        "Unpack it and name the folder",
        file("pets.tar.gz", b""),
    ),
    # Files.
    "text": Case(
        CHECK, "pets/cat/9.png: text, not a picture", "Remove it, or give the picture", file("pets/cat/9.png", "a cat")
    ),
    "truncated": Case(CHECK, "pets/cat/9.jpg: the end is missing", "data.on_bad_row=skip", truncated),
    "zeros at the end": Case(CHECK, "pets/cat/9.jpg: the end is missing", "Copy or download it again", zeroed),
    "cut before its end marker": Case(CHECK, "pets/cat/9.jpg: the end is missing", "data.on_bad_row=skip", ended),
    "animated": Case(
        CHECK,
        "pets/cat/9.gif: holds 2 pictures (an animation or pages)",
        "Save the one that the label is about as a PNG",
        animated,
    ),
    "HEIC": Case(CHECK, "pets/cat/9.heic: a HEIC photograph", "Export it as JPEG", file("pets/cat/9.heic", HEIC)),
    "SVG": Case(CHECK, "pets/cat/9.svg: an SVG drawing", "Export it as PNG", file("pets/cat/9.svg", SVG)),
    "zero bytes": Case(CHECK, "pets/cat/9.png: the file is empty", "remove it", file("pets/cat/9.png", b"")),
    "too large": Case(
        f"{CHECK} image.max_pixels=143",
        "12 x 12 are 144 pixels, more than image.max_pixels=143",
        "raise image.max_pixels",
    ),
    "none left": Case(
        f"{CHECK} data.on_bad_row=skip", "pets: none of its pictures can be read", "text, not a picture", unreadable
    ),
    "all equal": Case(CHECK, "pets: 16 row(s), of which 1 differs, are too few", "Give more rows", all_equal),
    # Tables.
    "no picture behind a path": Case(
        f"{CHECK} data.train=pets.csv",
        "row 1 (line 2): `image`: gone.png does not exist",
        "Paths are taken from the table's folder",
        table("image,label", "gone.png,cat", "gone2.png,dog"),
    ),
    "base64 of something else": Case(
        f"{CHECK} data.train=pets.csv",
        "row 1 (line 2): `image`: 'bm8g",
        "is neither a path nor a picture in base64",
        table("image,label", f"{'bm8g' * 5000},cat", f"{'bm8g' * 5000},dog"),
    ),
    "no image column": Case(
        f"{CHECK} data.train=pets.csv", "pets.csv: has no column `image`", "Did you mean `imag`?", listed("imag,label")
    ),
    "no such image column": Case(
        f"{CHECK} data.train=pets.csv image.column=photo", "has no column `photo`", "image.column", listed()
    ),
    "address": Case(
        f"{CHECK} data.train=pets.csv",
        "`image` is an address",
        "Download the pictures",
        table("image,label", "https://example.org/1.png,cat"),
    ),
    "no label column": Case(
        f"{CHECK} data.train=pets.csv",
        "pets.csv: has no column `label` among its columns `image`, `lable`",
        "Write data.columns='{label: NAME}'",
        listed("image,lable"),
    ),
    "bytes without labels": Case(
        f"{CHECK} data.train=pets.parquet",
        "pets.parquet: has no column `label` among its columns `image`, `kind`",
        "Write data.columns='{label: NAME}'",
        bytes_without_labels,
    ),
    "empty label": Case(
        f"{CHECK} data.train=pets.csv",
        "pets.csv, row 1 (line 2): `label` is empty",
        "Move unlabelled rows to a file",
        table("image,label", "pets/cat/0.png,", "pets/dog/0.png,dog"),
    ),
    "no separator": Case(
        f"{CHECK} data.train=pets.csv classes.kind=several",
        "row 1 (line 2): `label` is the text 'cat'",
        "classes.separator",
        listed(),
    ),
    "numbers": Case(f"{CHECK} classes.kind=number", "`label` must be a number, found 'cat'", "classes.kind=one"),
    # Splits.
    "unknown held-out class": Case(
        f"{CHECK} data.held_out=other",
        "no training row has the class `cow`",
        "leave the row out",
        animals,
    ),
    "held out in training": Case(
        f"{CHECK} data.held_out=other",
        "training rows are also in other",
        "data.overlap=drop",
        both(pictures("other/cat", rows=2), pictures("other/dog", start=70, rows=2)),
    ),
    "tested in training": Case(f"{CHECK} data.test=pets", "every row is also in pets", "nothing is left to train on"),
    # Backbones.
    "grey backbone": Case(f"{CHECK} model.id=grey", "pictures of 1 channel", "colour", grey_backbone),
    "size": Case(
        f"{CHECK} image.size=33", "image.size=33 does not fit ViTForImageClassification", "Write image.size=32"
    ),
    "small size": Case(f"{CHECK} image.size=4", "image.size: expected greater than or equal to 8", "found 4"),
    "text backbone": Case(f"{CHECK} model.id=stories", "model.id=stories", "leave data.format out"),
    "vision backbone of text": Case(
        f"{CHECK} data.format=auto data.train=pets.csv", "model.id=vit", "Write data.format=image", listed("text,label")
    ),
    "pictures of sft": Case(f"{CHECK} recipe=sft", "data.format=image is for recipe=classify|crossval", "Leave it out"),
    "forgotten format": Case(f"{CHECK} data.format=auto", "ViTConfig reads pictures", "Write data.format=image"),
    "folder as texts": Case(
        f"{CHECK} data.format=auto model.id=stories",
        "pets: the folder holds no data file",
        "data.format=image reads them as classes of pictures",
    ),
    "renamed pictures": Case(
        f"{CHECK} data.train=pets.csv 'data.columns={{image: photo}}'",
        "data.columns renames `image`",
        "Write image.column=photo",
        listed("photo,label"),
    ),
    "shingles of pictures": Case(
        f"{CHECK} {FOLDS} duplicates.shingle=words duplicates.size=2 duplicates.threshold=0.9",
        "data.format=image has no shingles",
        "leave duplicates.shingle and duplicates.size out",
    ),
    "similar pictures": Case(
        f"{CHECK} {FOLDS} duplicates.threshold=0.3", "duplicates.threshold", "greater than or equal to 0.4"
    ),
    # image.prepare and image.augment.
    "unknown change": Case(
        f"{CHECK} image.augment.rotaton=10", "image.augment.rotaton: unknown key", "Did you mean `rotation`?"
    ),
    "unknown step": Case(f"{CHECK} image.prepare.gray=true", "image.prepare.gray: unknown key", "Known:"),
    "overlay of nothing": Case(
        f"{CHECK} image.prepare.edges_as=overlay",
        "image.prepare: edges_as does nothing without edges",
        "Add edges=canny",
    ),
    "sweep of sizes": Case(
        f"{CHECK} {SWEEP}'{{image.augment.rotation: [5, 10]}}'",
        "members cannot differ in image.augment.rotation",
        "Run a sweep for each value",
    ),
    "two policies": Case(
        f"{CHECK} image.augment.randaugment=2 image.augment.trivialaugment=true",
        "image.augment: randaugment and trivialaugment",
        "Write image.augment.randaugment=0 or image.augment.trivialaugment=false",
    ),
    "flip without a share": Case(
        f"{CHECK} image.augment.horizontal_flip=true",
        "image.augment.horizontal_flip: true would be a probability of 1",
        "such as 0.5",
    ),
    "falling scale": Case(
        f"{CHECK} image.augment.crop_scale=[1,0.5]",
        "image.augment.crop_scale: the least of the two stands first",
        "Write [0.5, 1]",
    ),
    "magnitude alone": Case(
        f"{CHECK} image.augment.randaugment_magnitude=5",
        "randaugment_magnitude does nothing without randaugment",
        "Add randaugment=2",
    ),
    "even median": Case(f"{CHECK} image.prepare.median=4", "image.prepare.median: expected 3, 5, 7, 9 or 11", "4"),
    "mixed numbers": Case(
        f"{CHECK} classes.kind=number image.augment.mixup=0.2",
        "image.augment mixes two labels, which are of kind number",
        "Leave mixup and cutmix out",
    ),
    "growth without an end": Case(
        f"{CHECK} train.steps=null budget.time=1m image.augment.rotation=10 {GROWS}",
        "image.augment.curriculum grows over a known number of steps",
        "Write train.epochs or train.steps too",
    ),
    "one size only": Case(
        f"{CHECK} model.id=levit image.augment.curriculum.resolution.start=0.5",
        "LevitForImageClassification reads pictures of one size",
        "Leave it out",
        one_size_backbone,
    ),
    "kept outputs": Case(
        f"{CHECK} freeze.policy=static freeze.cache=memory image.augment.preset=light",
        "image.augment shows other pictures in each epoch",
        "Write freeze.cache=off",
    ),
    "image for text": Case(
        f"{CHECK} data.format=auto image.size=32", "image is for rows that are pictures", "Write data.format=image"
    ),
    "text settings": Case(
        f"{CHECK} classes.keep=end data.max_tokens=64",
        "data.format=image reads pictures",
        "leave classes.keep and data.max_tokens out, for text alone. A command leaves it out",
    ),
    "pairs": Case(f"{CHECK} classes.kind=pair", "classes.kind=pair compares two texts", "Write kind: one"),
    # Views.
    "views of text": Case(
        f"{CHECK} {FOLDS} tta.views=[lower]",
        "tta.views names views of text (lower), and rows are pictures",
        "Views of pictures are flip",
    ),
    "views of pictures": Case(
        f"{CHECK} {FOLDS} data.format=auto tta.views=[flip]",
        "tta.views names views of pictures (flip), and rows are texts",
        "data.format=image",
    ),
    "wrong picture": Case(
        f"{CHECK} {FOLDS} tta.views=[user] tta.function=mine.py",
        "views() of mine.py, called with the picture of row 0, returned a picture of float64",
        "Return uint8",
        function("[picture / 2]"),
    ),
    "small picture": Case(
        f"{CHECK} {FOLDS} tta.views=[user] tta.function=mine.py",
        "returned a picture of uint8 and shape (16, 32, 3)",
        "of the shape that it got, (32, 32, 3)",
        function("[picture[::2]]"),
    ),
    "no list": Case(
        f"{CHECK} {FOLDS} tta.views=[user] tta.function=mine.py",
        "returned null",
        "Return a list of pictures",
        function("None"),
    ),
    "useless view": Case(
        f"{CHECK} {FOLDS} tta.views=[user] tta.function=mine.py",
        "no picture looks different in it",
        "leave user 1 out of tta.views",
        function("[picture]"),
    ),
    # Plots, and verbs on a finished run.
    "plot": Case(f"{CHECK} --plot views.svg", "--plot views.svg: this plot is a .png", "Write --plot plot.png"),
    "predict: empty": Case("predict one none --out said.csv", "none: holds no pictures", "Known: .jpg", made("none")),
    "predict: texts": Case(
        "predict one texts --out said.csv",
        "texts/0.txt: unknown kind of file `.txt` among pictures",
        "Move it elsewhere",
        both(made("texts"), file("texts/0.txt", "a")),
    ),
    "predict: damaged": Case(
        "predict one more --out said.csv",
        "more/9.png: text, not a picture",
        "data.on_bad_row=skip",
        both(pictures("more"), file("more/9.png", "a")),
    ),
    "predict: text rows": Case(
        "predict one rows.csv --out said.csv",
        "rows.csv: has no column `image`",
        "image.column",
        table("text", "a cat", name="rows.csv"),
    ),
    "evaluate: unknown class": Case(
        "evaluate one data.test=other",
        "no training row has the class `cow`",
        "leave the row out",
        animals,
    ),
    "predict: deep": Case(
        "predict one deep.png --out said.csv",
        "deep.png: has more than 8 bits a value, as no training picture",
        "image.depth=16",
        deep,
    ),
    "evaluate: depth": Case("evaluate one image.depth=12", "evaluate cannot change image.depth", "start a new run"),
    "evaluate: size": Case("evaluate one image.size=64", "evaluate cannot change image.size", "start a new run"),
    "evaluate: format": Case("evaluate one data.format=auto", "evaluate cannot change data.format", "start a new run"),
    "generate": Case("generate one Hi", "recipe classify trains no model that writes text", "workbench predict"),
}
