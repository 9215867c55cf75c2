"""The page on data is one file that asks nothing of the network and executes nothing that rows say."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from workbench.config import DataConfig
from workbench.data.folds.duplicates import DuplicateClusters
from workbench.data.text.quality import survey
from workbench.data.text.quality.rules import Exchange, RowText
from workbench.data.text.quality.survey import Findings, SourceRows
from workbench.report import data_page

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} {"
CONFIG = DataConfig(train="<b>rows</b>.jsonl", max_tokens=8)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def _found(texts: list[str], **more: object) -> list[Findings]:
    rows = [
        RowText(f"<i>file</i>.jsonl, row {at}", text, exchanges=(Exchange(HOSTILE, f"{HOSTILE} {at}"),))
        for at, text in enumerate(texts, start=1)
    ]
    tokens = np.asarray([len(text.split()) for text in texts])
    train = SourceRows("Train", "<b>rows</b>.jsonl", rows, tokens, True, **more)  # type: ignore[arg-type]
    return survey.examine([train, SourceRows("Test", "test.jsonl", rows[:1], tokens[:1], False)])


@pytest.fixture(scope="module")
def braces() -> list[Findings]:
    """Of rows that one rule flags."""
    return _found([f"{{ {at}" for at in range(500)])


@pytest.fixture
def page() -> str:
    labels = [("<script>x</script>",), *[("b",)] * 29]
    found = _found([HOSTILE] * 30, labels=labels, unreadable=("<u>f</u>, row 31: <script>no</script>",))
    return data_page.page("<script>r</script>", CONFIG, found)


def test_what_rows_say_is_escaped(page: str) -> None:
    seen = _Tags()
    seen.feed(page)
    assert not {"script", "img", "i", "u"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "{{ 7 * 7 }}" in page


def test_nothing_is_asked_of_the_network(page: str) -> None:
    seen = _Tags()
    seen.feed(page)
    assert not {"link", "iframe", "object", "base"} & set(seen.tags)
    links = [value for name, value in seen.attributes if name in ("src", "href", "xlink:href", "action")]
    assert all(value is not None and value.startswith("#") for value in links)
    assert not re.search(r"@import|url\((?!#)", page)


def test_every_flag_opens_rows(page: str) -> None:
    for rule in ("c4_curly_brackets", "exact_duplicate", "answer_repeats_prompt", "also_in_evaluation", "unreadable"):
        details = page[page.index(f'<details id="{rule}">') :]
        assert 'class="flagged"' in details[: details.index("</details>")]
    assert page.count("data.clean=[c4_curly_brackets]") == 1 and "data.clean=[unreadable]" not in page


@pytest.mark.slow
def test_rows_of_a_rule_are_few_and_from_all_over(braces: list[Findings]) -> None:
    (rule,) = [rule for rule in data_page.rules(braces) if rule.name == "c4_curly_brackets"]
    assert len(rule.rows) == data_page.SHOWN and rule.counts == ("500", "1") and rule.share == "100 %"
    assert rule.rows[0].place.endswith("row 1") and rule.rows[-1].place.endswith("row 1")
    assert [row.place[-3:] for row in rule.rows[1:-1]] == sorted({row.place[-3:] for row in rule.rows[1:-1]})


@pytest.mark.slow
def test_a_rule_says_where_the_rest_of_its_rows_is(braces: list[Findings]) -> None:
    page = data_page.page("r", CONFIG, braces)
    assert "12 of 501 rows, from all over the files; the others are the lines of flags.parquet" in page
    few = data_page.page("r", CONFIG, _found([f"{{ {at}" for at in range(5)]))
    assert "the others are the lines" not in few


def test_lengths_say_what_is_cut() -> None:
    tokens, characters, *_ = data_page.length_rows(_found(["word " * at for at in range(1, 11)]), CONFIG)
    assert tokens[:2] == ("Train", "tokens") and tokens[2] == "55" and tokens[-2:] == ("10", "2 (20 %)")
    assert characters[1] == "characters" and characters[-1] == ""


def test_pictures_have_no_words() -> None:
    rows = [RowText(f"{at}.png", "") for at in range(3)]
    found = survey.examine([SourceRows("Train", "pictures", rows, None, True, labels=[("a",)] * 3)])
    page = data_page.page("vision", CONFIG, found)
    assert "Languages" not in page and "all pictures are brought to one size" in page
    assert data_page.verdict(found) == "0 of 3 training rows (0 %) are flagged."


def test_pictures_without_classes_stand_beside_their_copies() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 3)).save(file, "JPEG")
    rows = [RowText(f"{at}.png", "") for at in range(3)]
    ones = DuplicateClusters(np.asarray([0, 0, 1]), np.empty((0, 2), int), np.arange(2), np.ones(2), ("a", "b"))
    pictures = {"clusters": ones, "sizes": [(3, 4)] * 3, "jpeg": lambda _: file.getvalue()}
    found = survey.examine([SourceRows("Train", "pictures", rows, None, True, numbers=[1.0, 1.0, 2.0], **pictures)])
    page = data_page.page("vision", CONFIG, found)
    assert page.count('<use href="#picture-') == page.count("<image id=") == 2 and ".pictures {" in page
    assert ">4 x 3</td>" in page and "Gopher" not in page


def test_shares_are_of_the_rows_of_all_training_sources() -> None:
    def source(title: str, texts: list[str], *, trains: bool) -> SourceRows:
        rows = [RowText(f"rows.jsonl, row {at}", text) for at, text in enumerate(texts)]  # both files have one name
        return SourceRows(title, "rows.jsonl", rows, np.asarray([9] * len(texts)), trains)

    read = [source("Train: a", ["{", "cat"], trains=True), source("Train: b", ["{ {", "dog", "Cat."], trains=True)]
    found = survey.examine([*read, source("Held-out", ["{ one"], trains=False)])
    assert data_page.verdict(found).startswith("3 of 5 training rows (60 %) are flagged; 2 others")
    brackets, repeated = (
        next(each for each in data_page.rules(found) if each.name == name)
        for name in ("c4_curly_brackets", "exact_duplicate")
    )
    assert (brackets.trained, brackets.counts, brackets.share) == ("2", ("1", "1", "1"), "40 %")
    assert [(row.title, row.note) for row in repeated.rows] == [("Train: b", "rows.jsonl, row 1 (Train: a)")]
    page = data_page.page("mixed", CONFIG, found)
    assert "Train: b · rows.jsonl, row 2" in page and "40 % of the training rows; Train: a 1; Train: b 1" in page
