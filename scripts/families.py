"""Write the page of what works with which family, from trials on the tests' tiny models.

python scripts/families.py results --out adapters/FAMILIES.md

Every sign comes from `workbench family`, which trains, saves and reads again for each of them: half an hour on a core.
What it says is kept in a folder, and what is there is not tried again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

from tests import every_family
from workbench.recipes.verbs.family import SIGNS, SUBJECTS, FamilyFinding, FamilyFindings, family

VERSIONS = ("peft-workbench", "torch", "transformers", "peft", "bitsandbytes", "onnxruntime")
HEAD = """\
# What works with which family

Written by `scripts/families.py` from trials on tiny random models, never by hand. `workbench family MODEL` does the
same for your own model, from its `config.json`, in a minute, and says a sentence on each.

| column | what is tried |
|---|---|
| loads | the backbone is loaded whole, as its checkpoint's own class |
| LoRA | `adapter.targets=all-linear`: padded rows have the losses of each alone; every trainable tensor learns |
| experts | `adapter.experts=true` trains the experts that stand in one parameter |
| nf4, int8 | LoRA trains over packed weights |
| packs | losses of packed rows are those of each row alone |
| pictures, sound | rows with them, by its own processor: each has its own loss, and other pixels or samples another |
| prefix cache | outputs of frozen blocks are kept |
| bank | a member has the gradients that it has alone |
| merge | the merged model, read again, has the adapter's logits and the backbone's tensors |
| stock PEFT | PEFT over the stock model has the run's logits |
| GGUF, ONNX | `export --to gguf`, `onnx`: every tensor has a place; logits are equal for texts of 8 and of 80 tokens |
| vLLM | names and sizes of an adapter's tensors are those that vLLM reads |

`+` works, `-` is refused with a reason, `!` failed, `.` the family has none, `?` not tried.

Encoder-decoders and encoders that hear (Whisper, Moonshine, wav2vec2, HuBERT, AST) are no causal language models: what
works with them is in [speech to text](../recipes/tasks/sft.md#speech-to-text) and
[sound](../recipes/tasks/classify.md#sound)."""


def page(found: Mapping[str, FamilyFindings]) -> str:
    """The page: a table of signs, and the reasons below it."""
    lines = [HEAD, "", "## Families", "", f"| family | {' | '.join(SUBJECTS)} |", f"|---|{'---|' * len(SUBJECTS)}"]
    reasons: dict[str, dict[str, list[str]]] = {subject: defaultdict(list) for subject in SUBJECTS}
    for name, each in found.items():
        signs = {finding.subject: SIGNS[finding.outcome] for finding in each.findings}
        lines.append(f"| {name} | {' | '.join(signs.get(subject, '?') for subject in SUBJECTS)} |")
        for finding in each.findings:
            if finding.outcome in ("refused", "failed"):
                sentence = finding.sentence.replace(each.family, "FAMILY").replace("](", "] (")  # no link
                reasons[finding.subject][re.sub(r"/\S*/FAMILY", "FAMILY", " ".join(sentence.split()))].append(name)
    lines += ["", "## Why not", ""]
    lines += [
        f"- **{subject}**, {', '.join(names)}: {sentence}"
        for subject, every in reasons.items()
        for sentence, names in every.items()
    ]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in VERSIONS)
    return "\n".join([*lines, "", f"With {versions}, on a CPU.", ""])


def tried(name: str, results: Path, subjects: Sequence[str]) -> FamilyFindings:
    """What was found for a family of the tests, now or before."""
    file, before = results / f"{name}.json", dict[str, FamilyFinding]()
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        before = {each["subject"]: FamilyFinding(**each) for each in kept["findings"]}
    if wanted := [subject for subject in subjects if subject not in {*before, *every_family.untried(name)}]:
        with tempfile.TemporaryDirectory() as folder:
            found = family(every_family.save(name, Path(folder) / name), subjects=wanted)
        before |= {each.subject: each for each in found.findings}
        kept = asdict(replace(found, findings=tuple(before[each] for each in SUBJECTS if each in before)))
        file.write_text(json.dumps(kept), encoding="utf-8")
        print(name, "".join(SIGNS[each.outcome] for each in found.findings), flush=True)
    return FamilyFindings(kept["family"], kept["parameters"], tuple(before.values()))


def main() -> int:
    """Try all families and write the page."""
    parser = argparse.ArgumentParser(description="Write the page of what works with which family.")
    parser.add_argument("--out", type=Path, required=True, help="the page, such as adapters/FAMILIES.md")
    parser.add_argument("results", type=Path, help="the folder of what was found")
    parser.add_argument("--without", action="append", default=[], help="a column that is left as it was found before")
    arguments = parser.parse_args()
    arguments.results.mkdir(exist_ok=True)
    subjects = [each for each in SUBJECTS if each not in arguments.without]
    text = page({name: tried(name, arguments.results, subjects) for name in every_family.FAMILIES})
    arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
