"""An operator that destroys texts is told, one that does not is not, and always in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from transformers import AutoTokenizer

from tests.conftest import MINILM, write_animals
from tests.run_files import write_lines
from workbench.config import RunConfig
from workbench.config.sections.classes_config import ClassesConfig
from workbench.config.sections.text_augment_config import TextAugmentConfig
from workbench.data.labelled.text_reader import AugmentedTexts, FieldTokenizer, TokenRows
from workbench.evaluation.label_preservation import LEVEL, MOST, Rewriting, chosen, compare, rewritings
from workbench.recipes.verbs import features
from workbench.recipes.verbs.check import check

Ask = Callable[..., RunConfig]
DESTROYED = {"operators": ["drop_words", "no_punctuation"], "noise": 0.95}
"""Of a text a single word stays, and of an animal's mostly not its name; marks are nothing that it is known by."""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def ask(tmp_path: Path, stories: str) -> Ask:
    """A recipe of animals, with sections and settings of `data.augment` replaced."""

    def asked(augment: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
        rows = write_animals(tmp_path / "rows.jsonl", range(150))
        aside = {} if sections.get("recipe") == "crossval" else {"held_out": 0.4}
        data = {"train": str(rows), **aside, "augment": augment or {}}
        base = {"recipe": "classify", "model": {"id": stories, "weights": "float32"}, "data": data}
        return RunConfig.model_validate({**base, **sections})

    return asked


def texts(rows: list[str], *, seed: int = 0, **augment: Any) -> AugmentedTexts:
    encoder = FieldTokenizer(AutoTokenizer.from_pretrained(MINILM), ClassesConfig(), max_tokens=64)
    places = tuple(f"row {number}" for number in range(len(rows)))
    config = TextAugmentConfig.model_validate(augment)
    return AugmentedTexts(tuple((each,) for each in rows), places, config, seed, encoder)


@pytest.mark.nightly(but=["crossval"])
@pytest.mark.parametrize("recipe", ["classify", "crossval"])
def test_destroyed_texts_are_told_and_harmless_marks_are_not(ask: Ask, recipe: str) -> None:
    folds = {"recipe": recipe, "folds": {"k": 2}, "duplicates": {"on_duplicate": "ignore"}}
    model = {"id": MINILM, "weights": "float32"}  # a causal one reads a text at its last token, often a mark
    found = features.features(ask(DESTROYED, model=model, **(folds if recipe == "crossval" else {})))
    assert found.preservation is not None and found.known is not None
    harmful, harmless = found.preservation.effects
    assert harmful.is_harmful and harmful.turned.low > 0.2 and "Write a lower data.augment.noise" in harmful.sentence
    assert "(now 0.95), or leave drop_words out of data.augment.operators." in harmful.sentence
    assert not harmless.is_harmful and harmless.turned.mean < 0.1 and "significantly" not in harmless.sentence
    assert found.preservation.plain.mean == found.known.probe.linear, "rows are those that the probe is judged by"


def test_it_is_repeated_bit_for_bit_and_another_seed_rewrites_otherwise(ask: Ask) -> None:
    first, again = (features.features(ask(DESTROYED)) for _ in range(2))
    assert first == again and "drop_words" in first.sentence
    rows = ["The cat sat on a mat, and so did I."] * 2 + ["A dog runs after nine other dogs."]
    kept = [
        [each.inputs.encoded[row].input_ids.tolist() for each in rewritings(texts(rows, seed=seed, **DESTROYED))[:1]
         for row in range(3)]
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert kept[0] == kept[1] != kept[2] and kept[0][0] == kept[0][1], "a function of seed and text alone"


def test_without_augmentation_the_verb_says_what_it_said(ask: Ask, tmp_path: Path) -> None:
    plain, rewritten = (features.features(ask(augment), out=tmp_path / "f.parquet") for augment in (None, DESTROYED))
    assert plain.preservation is None and len(plain.sentence.splitlines()) == 2
    assert rewritten.sentence.splitlines()[:2] == plain.sentence.splitlines()
    assert (plain.rows, plain.width, plain.known) == (rewritten.rows, rewritten.width, rewritten.known)


def test_shares_and_p_are_wilsons_and_mcnemars() -> None:
    """Both written out; rows that an operator leaves alone do not count."""
    rng = np.random.default_rng(0)
    wanted_M = rng.choice(["a", "b", "c"], size=90)
    before_M = np.where(rng.random(90) < 0.9, wanted_M, "c")
    changed_S = np.arange(10, 70)
    after_S = np.where(rng.random(60) < 0.6, wanted_M[changed_S], "a")
    inputs = TokenRows(texts(["A cat."]).tokens(0))
    asked = [Rewriting("typos", changed_S, inputs, 0.1), Rewriting("upper", changed_S[:5], inputs, None)]
    found = compare(asked, before_M, [after_S, before_M[changed_S[:5]]], wanted_M, likeliest=0.4)
    typos, upper = found.effects
    share, z = float((after_S != before_M[changed_S]).mean()), stats.norm.ppf(0.975)
    centre, spread = share + z**2 / 120, z * np.sqrt(share * (1 - share) / 60 + z**2 / (4 * 60**2))
    bounds = (centre - spread) / (1 + z**2 / 60), (centre + spread) / (1 + z**2 / 60)
    assert (typos.turned.mean, typos.turned.low, typos.turned.high) == pytest.approx((share, *bounds))
    right, was = after_S == wanted_M[changed_S], before_M[changed_S] == wanted_M[changed_S]
    lost, gained = int((was & ~right).sum()), int((right & ~was).sum())
    p = min(1.0, 2 * stats.binom.cdf(min(lost, gained), lost + gained, 0.5))
    assert typos.accuracy.p == pytest.approx(p) and typos.is_harmful == (p < LEVEL / 2 and lost > gained)
    assert upper.turned.mean == 0 and upper.accuracy.p is None and not upper.is_harmful


def test_a_probe_that_knows_nothing_says_so() -> None:
    wanted_M = np.asarray(["a", "b"] * 20)
    asked = [Rewriting("upper", np.arange(40), TokenRows(texts(["A cat."]).tokens(0)), None)]
    blind, seeing = (
        compare(asked, before_M, [before_M], wanted_M, likeliest=0.5) for before_M in (np.asarray(["a"] * 40), wanted_M)
    )
    assert "this says little" in blind.sentences[-1] and "this says little" not in " ".join(seeing.sentences)


def test_a_lower_noise_is_advised_only_where_it_changes_less() -> None:
    short, long = (texts(["word " * words + "end"], operators=["drop_words"]) for words in (3, 60))
    assert rewritings(short)[0].noise is None and rewritings(long)[0].noise == 0.1
    assert rewritings(texts(["Word"], operators=["drop_words"])) == [], "a single word stays"
    assert len(chosen(MOST + 7)) == MOST and chosen(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["several", "number"])
def test_labels_that_are_not_one_class_are_said_not_to_be_known(ask: Ask, kind: str, tmp_path: Path) -> None:
    rows = [
        {"text": f"It is, so to say, {n}.", "label": ["odd"] * (n % 2) if kind == "several" else n} for n in range(20)
    ]
    write_lines(tmp_path / "own.jsonl", rows)
    data = {"train": str(tmp_path / "own.jsonl"), "held_out": 0.25}
    plain, rewritten = (
        ask(data=data | {"augment": augment}, classes={"kind": kind}) for augment in ({}, {"operators": ["drop_words"]})
    )
    said = " It is not known whether texts keep such labels where data.augment rewrites them."
    asked = features.features(rewritten).sentence
    assert said in asked and asked.replace(said, "") == features.features(plain).sentence
    assert not any("workbench features" in note for note in check(rewritten).notes)


def test_check_names_the_command_where_texts_are_rewritten(ask: Ask) -> None:
    names = [
        sum("`workbench features RECIPE`" in note for note in check(ask(each)).notes) for each in (None, DESTROYED)
    ]
    assert names == [0, 1]
