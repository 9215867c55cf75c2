"""A page must come of every run directory, say what happened, and reach for nothing outside itself."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.run_files import write_lines
from workbench import report
from workbench.config.yaml_text import dump_yaml
from workbench.errors import ConfigError

CONFIG = {
    "recipe": "sft",
    "model": {"id": "starter"},
    "adapter": {"method": "lora", "rank": 16},
    "data": {"train": "rows.jsonl", "max_tokens": 256},
    "batch": {"size": 32},
    "train": {"learning_rate": 0.002, "max_grad_norm": 1.0},
}
SPLIT = {
    "source": "rows.jsonl",
    "fingerprint": "3fa9c1d2e77b0a11",
    "rows": 2000,
    "tokens": 301_226,
    "supervised_tokens": 25_102,
    "truncated": 8,
    "skipped": 0,
    "lengths": [0, 64, 128, 256],
    "counts": [500, 1200, 300],
}
MANIFEST = {
    "name": "quickstart",
    "created": "2026-03-14T23:41:07+00:00",
    "status": "done",
    "reason": None,
    "versions": {"workbench": "0.1.0", "torch": "2.13.0"},
    "git_commit": "9f3b2c1d8e7a6f5b",
    "hardware": {"device": "cpu", "name": "A processor", "cores": 2, "memory_bytes": 8_200_000_000},
    "model": {
        "id": "starter",
        "weights": "bfloat16",
        "compute": "float32",
        "attention": "sdpa",
        "parameters": 6_214_912,
        "trainable": 311_296,
        "weight_bytes": 12_400_000,
        "notes": ["this CPU has no bfloat16 units"],
    },
    "data": {"train": SPLIT, "held_out": SPLIT | {"rows": 200, "fingerprint": "77"}, "test": None},
    "batch": {"tokens_per_device": 8192, "steps": 40},
    "elapsed_s": 192.0,
    "peak_bytes": 4_100_000_000,
}
SCORES = {
    "before": {"loss": 5.57, "perplexity": 262.4, "token_accuracy": 0.143, "f1": 0.05, "rouge_l": 0.05},
    "after": {"loss": 3.92, "perplexity": 50.4, "token_accuracy": 0.361, "f1": 0.21, "rouge_l": 0.2},
}


def metrics(steps: int) -> list[dict[str, Any]]:
    lines = [
        {
            "step": step,
            "loss": 5.5 - 1.5 * step / steps + 0.1 * (step * 7 % 11),
            "learning_rate": 0.002 * (1 - step / steps),
            "grad_norm": 0.4 + 0.1 * (step % 5),
            "tokens": 4000 + step % 9,
            "supervised_tokens": 300,
            "tokens_per_second": 3000.0 + step * 13 % 700,
            "peak_bytes": 1_000_000_000 + step,
            "elapsed_s": 1.3 * step,
        }
        for step in range(1, steps + 1)
    ]
    for line in lines[steps // 4 - 1 :: steps // 4]:
        line["held_out_loss"] = 5.57 - 1.65 * line["step"] / steps
    return lines


def predictions(rows: int, **changes: str) -> pd.DataFrame:
    answered = [
        {
            "row": f"rows.jsonl, row {row}",
            "prompt": f"Question {row}?",
            "reference": f"reference {row}",
            "before": f"before {row}",
            "after": f"after {row}",
            "f1_before": 0.05,
            "f1_after": row / rows,
            "rouge_l_before": 0.05,
            "rouge_l_after": row / rows,
        }
        | changes
        for row in range(rows)
    ]
    return pd.DataFrame(answered)


def make_run(
    folder: Path,
    *,
    config: dict[str, Any] = CONFIG,
    manifest: dict[str, Any] = MANIFEST,
    lines: list[dict[str, Any]] | None = None,
    scores: dict[str, Any] | None = None,
    answers: pd.DataFrame | None = None,
) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if lines is not None:
        write_lines(folder / "metrics.jsonl", lines)
    if scores is not None:
        (folder / "scores.json").write_text(json.dumps(scores))
    if answers is not None:
        answers.to_parquet(folder / "predictions.parquet")
    return folder


@pytest.fixture
def full_run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", lines=metrics(40), scores=SCORES, answers=predictions(24))


class Page(HTMLParser):
    """Collects what a browser would: references, ids, text; and refuses unbalanced tags."""

    VOID = ("meta", "link", "br", "img", "hr", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [tag] if tag not in self.VOID else []
        self.references += [value or "" for key, value in attrs if key.split(":")[-1] in ("src", "href", "srcset")]
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += [data] if self.open and self.open[-1] != "style" else []


@pytest.mark.parametrize(("last", "word"), [(0.3, "may be chance"), (5.0, "better")])
def test_a_change_within_chance_is_not_called_better(tmp_path: Path, last: float, word: str) -> None:
    """Ten differences of 0.01 and one that makes their spread as large as their mean, or all alike."""
    changes = [0.01] * 9 + [last] if last < 1 else [last] * 10
    answers = predictions(10).assign(f1_after=[0.05 + each for each in changes])
    scores = {when: {"loss": 4.0, "f1": float(answers[f"f1_{when}"].mean())} for when in ("before", "after")}
    path = make_run(tmp_path / "run", lines=metrics(20), scores=scores, answers=answers)
    assert re.search(rf"Answer F1 .* {word}", Page(report.write(path)).text)


def test_page_says_what_happened(full_run: Path) -> None:
    path = report.write(full_run)
    assert path == full_run / "report.html"
    text = Page(path).text
    for said in (
        "Held-out loss fell from 5.57 to 3.92 nats per token; the answers' F1 rose from 0.05 to 0.21.",
        "3 min 12 s",  # time
        "160.2 k",  # tokens: 40 steps of 4,000 and a bit
        "4.1 GB",  # peak memory
        "5.0 % of the parameters",
        "Loss, nats per token 5.57 3.92 -1.65 better",
        "Lowest held-out loss 3.92 at step 40, circled.",
        "this CPU has no bfloat16 units",
        "torch 2.13.0",
        "learning_rate: 0.002",  # the full configuration
    ):
        assert said in text
    assert "not there yet" not in text


def test_page_stands_alone(full_run: Path) -> None:
    path = report.write(full_run)
    page = Page(path)
    assert page.tags.count("svg") == 6
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|@import|url\((?!#)", path.read_text())
    # What the drawings share (clip paths, markers) is found in this page, once.
    assert {"#" + name for name in page.ids} >= {name for name in page.references if name}
    assert all(name.startswith("#") for name in page.references)
    assert len(page.ids) == len(set(page.ids))


def test_every_drawing_has_words_and_takes_the_page_colours(full_run: Path) -> None:
    html = report.write(full_run).read_text()
    labels = re.findall(r'role="img" aria-label="([^"]*)"', html)
    assert len(labels) == 6
    assert all(re.fullmatch(r"[A-Z][\w ]+\. \S.*\.", label) for label in labels)
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert "var(--series-0)" in drawings
    assert not re.search(r"#[0-9a-f]{6}\b(?=[;\"])", drawings)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", html)) - {"--colour", "--share"}
    light, dark = (set(re.findall(r"(--[a-z0-9-]+):", part)) for part in html.split("</style>")[0].split("@media")[:2])
    assert used <= light
    assert light == dark | ({"--colour"} & light)


@pytest.mark.parametrize("present", ["nothing", "metrics", "scores", "predictions"])
def test_missing_parts_are_named(tmp_path: Path, present: str) -> None:
    run = make_run(
        tmp_path / "run",
        manifest={"name": "early", "status": "running"},
        lines=metrics(8) if present == "metrics" else None,
        scores={"before": SCORES["before"]} if present == "scores" else None,
        answers=predictions(2) if present == "predictions" else None,
    )
    text = Page(report.write(run)).text
    assert "Not finished" in text
    sections = {"metrics": "Loss", "scores": "Held-out scores", "predictions": "Answers"}
    for part, title in sections.items():
        assert (f"{title} not there yet" in text) == (part != present)


def test_last_line_may_be_half_written(full_run: Path) -> None:
    with (full_run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')
    assert "40 steps" in Page(report.write(full_run)).text


def test_failed_run_tells_why(tmp_path: Path) -> None:
    manifest = MANIFEST | {"status": "failed", "reason": "The loss exploded at step 13: rows 14, 201"}
    del manifest["elapsed_s"], manifest["peak_bytes"]
    run = make_run(tmp_path / "run", manifest=manifest, lines=metrics(12))
    (run / "before.json").write_text(json.dumps({"scores": SCORES["before"], "answers": ["a king"]}))
    text = Page(report.write(run)).text
    assert "The run failed at step 12 of 40; lowest held-out loss 3.92 nats per token at step 12 (5.57 before" in text
    assert "The loss exploded at step 13: rows 14, 201" in text
    assert "Loss, nats per token 5.57 -" in text
    assert "Time 16 s 12 steps" in text
    assert "Peak memory 1.0 GB" in text


@pytest.mark.parametrize("place", ["name", "reason", "config", "source", "prompt", "reference", "before", "after"])
def test_everything_is_escaped(tmp_path: Path, place: str) -> None:
    attack = "</pre></style><script>alert('&')</script>"
    train = SPLIT | {"source": attack} if place == "source" else SPLIT
    manifest = MANIFEST | {"data": {"train": train}} | ({place: attack} if place in ("name", "reason") else {})
    run = make_run(
        tmp_path / "run",
        config=CONFIG | ({"note": attack} if place == "config" else {}),
        manifest=manifest,
        answers=predictions(3, **{place: attack} if place in ("prompt", "reference", "before", "after") else {}),
    )
    page = Page(report.write(run))
    assert "script" not in page.tags
    assert attack in page.text.replace("''", "'")  # YAML doubles the quote


@pytest.mark.parametrize("rows", [1, 4, 9, 200])
def test_sample_answers_stand_once(tmp_path: Path, rows: int) -> None:
    run = make_run(tmp_path / "run", answers=predictions(rows))
    first = Page(report.write(run)).text
    shown = [int(row) for row in re.findall(r"rows.jsonl, row (\d+)", first)]
    assert len(shown) == len(set(shown)) == min(rows, 9)
    assert shown[: min(rows, 3)] == list(range(rows))[::-1][:3]
    if rows >= 6:
        assert shown[3:6] == [0, 1, 2]
    assert Page(report.write(run)).text == first


def test_long_run_stays_small_and_writes_aside(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lines=metrics(10_000), answers=predictions(64, prompt="word " * 20_000))
    path = report.write(run)
    assert path.stat().st_size < 1_000_000
    assert sorted(file.name for file in run.iterdir()) == [
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "predictions.parquet",
        "report.html",
    ]


def test_of_many_scores_those_that_say_the_same_in_short_are_folded(tmp_path: Path) -> None:
    """What pictures are worth stands among the first, by names in plain words."""
    blind = {"loss_of_other_pictures": 4.5, "f1_of_other_pictures": 0.11}
    of_sets = {f"{name}[{of}]": value for name, value in SCORES["after"].items() for of in ("shape", "colour")}
    scores = {when: SCORES[when] | of_sets | blind for when in ("before", "after")}
    html = report.write(make_run(tmp_path / "run", scores=scores, answers=predictions(4))).read_text()
    table, _, rest = html.partition('<section aria-labelledby="scores">')[2].partition("<details")
    parts = (table, rest.partition("</details>")[0])
    first, folded = (re.findall(r'<th [^>]*class="words">(.*?)</th>', each) for each in parts)
    assert first[3] == "Loss with the pictures of other rows" and "Answer F1, shape" in first
    assert {each.partition(",")[0] for each in folded} == {"Perplexity", "Token accuracy", "Answer ROUGE-L"}
    assert len(folded) == 9 and "of_other" not in html.partition("<details")[0]
    assert "With the pictures of other rows the answers&#39; F1 is 0.11, with their own 0.21" in html


def test_unknown_scores_are_shown_without_a_judgement(tmp_path: Path) -> None:
    scores = {when: SCORES[when] | {"brevity": 0.5 + (when == "after")} for when in ("before", "after")}
    scores["test"] = {"loss": 4.04}
    run = make_run(tmp_path / "run", scores=scores)
    text = Page(report.write(run)).text
    assert "Loss, nats per token 5.57 3.92 -1.65 better 4.04" in text
    assert "brevity 0.500 1.50 +1.00 -" in text


@pytest.mark.parametrize("missing", ["config.yaml", "manifest.json"])
def test_other_folders_are_refused(full_run: Path, tmp_path: Path, missing: str) -> None:
    (full_run / missing).unlink()
    with pytest.raises(ConfigError, match=re.escape(str(full_run)) + rf".*no {missing}(.|\n)*A run directory is"):
        report.compare([full_run], tmp_path / "compare.html")


def test_compare_puts_runs_side_by_side(full_run: Path, tmp_path: Path) -> None:
    better = SCORES | {"after": {"loss": 3.5, "f1": 0.1, "rouge_l": 0.2}}
    config = CONFIG | {"adapter": {"method": "dora", "rank": 16}, "train": {"learning_rate": 0.002, "epochs": 2}}
    manifest = MANIFEST | {"name": "other <b>", "elapsed_s": 60.0}
    other = make_run(tmp_path / "other", config=config, manifest=manifest, lines=metrics(20), scores=better)
    failed = make_run(tmp_path / "failed", manifest={"name": "quickstart", "status": "failed"})
    out = tmp_path / "compare.html"
    comparison = report.compare([full_run, other, failed], out)

    twice = [f"quickstart ({tmp_path / folder})" for folder in ("run", "failed")]
    assert comparison.columns == ("", twice[0], "other <b>", twice[1])
    rows = {row[0]: row[1:] for row in comparison.rows}
    assert rows["status"] == ("done", "done", "failed")
    assert rows["method"] == ("lora", "dora", "lora")
    assert rows["steps"] == ("40", "20", "0")
    assert rows["held-out loss before"] == ("5.57", "5.57", "-")
    assert rows["held-out loss after"] == ("3.92", "3.50", "-")
    assert rows["time"] == ("3 min 12 s", "1 min", "-")
    assert comparison.settings == (
        ("adapter.method", "lora", "dora", "lora"),
        ("train.max_grad_norm", "1.0", "-", "1.0"),
        ("train.epochs", "-", "2", "-"),
    )

    page = Page(out)
    assert page.tags.count("svg") == 2
    assert all(name in page.text for name in comparison.columns)
    starred = re.findall(r'<th[^>]*scope="row">([^<]*)</th>[^\n]*title="best">([^<]*)<', out.read_text())
    assert ("held-out loss after", "3.50") in starred
    assert ("F1 after", "0.210") in starred
    assert not re.search(r"https?:", out.read_text())


def test_compare_tests_runs_against_the_first_on_the_rows_of_both(full_run: Path, tmp_path: Path) -> None:
    table = pd.read_parquet(full_run / "predictions.parquet")
    others = []
    for place, gain in enumerate((0.25, 0.0)):
        others.append(Path(shutil.copytree(full_run, tmp_path / f"other{place}")))
        more = table.assign(f1_after=table["f1_after"] + gain * (np.arange(len(table)) % 2 == 0))
        more.iloc[::-1].to_parquet(others[-1] / "predictions.parquet")
    comparison = report.compare([full_run, *others], tmp_path / "compare.html")
    f1 = [row for row in comparison.paired if row[1] == "f1"]
    assert [(row[0].split("/")[-1], row[2]) for row in f1] == [
        ("other0)", f"{len(table)}"),
        ("other1)", f"{len(table)}"),
    ]
    assert float(f1[0][5]) > 0 and re.fullmatch(r"[+-]0\.\d{4} to \+0\.\d{4}", f1[0][6]) and f1[0][7] == "< 0.0001"
    assert f1[1][5:] == ("+0.0000", "-", "-"), "nothing differs"
    text = Page(tmp_path / "compare.html").text
    assert "On the same rows" in text and f"of {len(comparison.paired)}, a small one comes by chance" in text
    assert report.compare([full_run], tmp_path / "one.html").paired == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"id": "starter"}}, []),
        ({"model": {"id": "another"}}, []),  # which cuts these rows into as many tokens
        ({"model": {"id": "another"}, "held_out": {"tokens": 12}}, ["backbones differ"]),
        ({"held_out": {"tokens": 12}}, ["held-out rows differ"]),
        ({"held_out": {"fingerprint": "78"}}, ["held-out rows differ"]),
        ({"hardware": {"name": "Another processor"}}, ["different hardware"]),
    ],
)
def test_compare_warns_of_what_does_not_compare(
    full_run: Path, tmp_path: Path, changes: dict[str, dict[str, Any]], words: list[str]
) -> None:
    manifest = json.loads((full_run / "manifest.json").read_text())
    for part, values in changes.items():
        (manifest["data"] if part == "held_out" else manifest)[part].update(values)
    other = make_run(tmp_path / "other", manifest=manifest)
    notes = report.compare([full_run, other], tmp_path / "compare.html").notes
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
