"""Data sets of texts that are embedded: read, and split so that no text is on both sides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.config import DataConfig, RunConfig
from workbench.config.sections.embed_config import LOSSES
from workbench.data import leaks, named_sets
from workbench.data.embedding import pair_records, pair_set
from workbench.data.embedding.pair_records import PairSource
from workbench.data.embedding.pair_set import PairSet
from workbench.data.folds import held_fold
from workbench.data.folds.duplicates import components, normalised
from workbench.data.folds.held_fold import FoldRow
from workbench.data.folds.stratified_folds import Class
from workbench.data.held_out_split import Splits, hold_out
from workbench.data.leaks import Copies
from workbench.data.text import decontamination
from workbench.data.text.quality import cleaning, rules
from workbench.data.text.quality.cleaning import Cleaning
from workbench.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_ROWS = 2  # a row has nothing to be told from in a batch of its own


class PairSources(NamedTuple):
    """Rows of each split before they are encoded."""

    train: PairSource
    held_out: PairSource
    test: PairSource | None
    cleaning: Cleaning | None  # training rows that `data.clean` left out; None where it has no rule
    copies: Mapping[str, Copies]  # rows that are copies of training rows, of held_out and of test

    def encoded(self, encode: Callable[[PairSource], PairSet]) -> Splits[PairSet]:
        """The splits as a model reads them."""
        train, held_out = replace(encode(self.train), cleaning=self.cleaning), encode(self.held_out)
        test = None if self.test is None else replace(encode(self.test), copies=self.copies["test"])
        return Splits(train, replace(held_out, copies=self.copies["held_out"]), test)


def load(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Splits[PairSet]:
    """Read and split; refuses rows with nothing to learn or to measure. Raises ConfigError: the loss is not for rows of
    this form; DataError: rows are malformed, too few, or on both sides."""
    sources = split_of_embeddings(config)

    def encoded(source: PairSource) -> PairSet:
        return pair_set.encode(
            source, tokenizer, config.embed, max_tokens=config.data.max_tokens, seed=config.rows_seed
        )

    return sources.encoded(encoded)


def split_of_embeddings(config: RunConfig) -> PairSources:
    """As `split`, of rows that embeddings can learn from."""
    sources = split(config, lambda train: _require_loss(config, train))
    train = sources.train
    if len(train.records) < LEAST_ROWS:
        raise DataError(
            f"{train.name}: {len(train.records)} row to train on, and a row is told from others. Give more."
        )
    given = config.embed.mine or any(len(record.texts) > 2 for record in train.records)
    if config.batch.size == 1 and config.embed.loss_of(train.form) in ("contrastive", "cosent") and not given:
        raise ConfigError(
            f"batch.size=1: embed.loss={config.embed.loss_of(train.form)} tells a row from the others of its batch, "
            "and there is none. Write batch.size=32 or more."
        )
    return sources


def require_readable(config: RunConfig, limit: int | None, whole: Callable[[RunConfig], object]) -> None:
    """Raise DataError where rows are malformed. `limit`: rows of each file; None: they are split as `whole` does."""
    if limit is None:
        whole(config)
        return
    form = None
    for own in config.data.training_files.values():
        most = limit if own.limit is None else min(own.limit, limit)
        form = pair_records.read(own.train, own, limit=most, form=form).form
    for path in (*config.data.held_out_files.values(), *config.data.test_files.values()):
        pair_records.read(path, config.data, limit=limit, form=form)


def split(config: RunConfig, require: Callable[[PairSource], None]) -> PairSources:
    """Read the rows of all splits, which share no text. `require`: refuses training rows from which the recipe cannot
    learn."""
    assert not config.data.streaming.on, "streamed rows are files of this machine by now"
    data = config.data
    sets = dict[str, PairSource]()  # the form of the rows of all sources is that of the first
    prefixes = named_sets.prefixes({name: own.train for name, own in data.training_files.items()})
    for name, own in data.training_files.items():
        form = next(iter(sets.values())).form if sets else None
        with named_sets.naming(prefixes[name]):
            sets[name] = pair_records.read(own.train, own, limit=own.limit, form=form)
    train = _of_one_class(pair_records.joined(sets))
    require(train)
    held_out, test = (
        {name: _of_one_class(pair_records.read(path, data, form=train.form)) for name, path in files.items()}
        for files in (data.held_out_files, data.test_files)
    )
    if data.own_share is not None:
        train, held_out[""] = _split(train, data, seed=config.rows_seed)
    train, left_out = _cleaned(train, data)
    scored = [*held_out.values(), *test.values()]
    compared = decontamination.evaluation_sets({} if data.fold.trains else held_out, test)
    trains, copies = leaks.separate(
        {"": train}, compared, leaks.of_texts, action=data.overlap, but=" but for case and punctuation"
    )
    train = trains[""]
    if train.form == "labelled":
        labels = {record.label for record in train.records}
        if len(labels) == 1:
            raise DataError(
                f"{train.name}: every label is `{labels.pop()}`, so nothing is a negative. Give rows of another class."
            )
        without = _without_partners(train)
        has_N = np.asarray([record.label not in without for record in train.records])
        if not has_N.any():
            raise DataError(
                f"{train.name}: no class has two different texts, so that no text has a positive. Give more rows of "
                "each."
            )
        alone = int((~has_N).sum())
        train = train.subset(has_N, f"{alone} rows whose class has no other text") if alone else train
        known = {record.label for record in train.records}
        for other in scored:
            for record in other.records:
                if record.label not in known:
                    raise DataError(
                        f"{record.place}: no training row has the class `{record.label}`, so no neighbour can be "
                        "right. Leave the row out, or give training rows of its class."
                    )
    return PairSources(
        train,
        pair_records.joined(held_out),
        pair_records.joined(test) if test else None,
        cleaning=left_out,
        copies={
            "held_out": leaks.joined(held_out, copies, "data.held_out"),
            "test": leaks.joined(test, copies, "data.test"),
        },
    )


def _cleaned(train: PairSource, data: DataConfig) -> tuple[PairSource, Cleaning | None]:
    """Training rows without those with a text that `data.clean` flags, and what it found; None where it has no rule.

    Of duplicates in several sources, whose rows stand one after another, the first stays.
    """
    if not data.clean:
        return train, None
    files = data.training_files.values()
    rows = [rules.row_text_of_texts(each.place, each.texts) for each in train.records]
    counts = np.bincount(train.source_N, minlength=len(files)) if train.sources else [len(rows)]
    left = iter(rows)
    parts = [list(itertools.islice(left, count)) for count in counts]
    reports = cleaning.clean_sources([(own.train, part) for own, part in zip(files, parts, strict=True)], data.clean)
    kept = [report.kept([row.place for row in part]) for report, part in zip(reports, parts, strict=True)]
    return train.subset(np.concatenate(kept)), cleaning.join_cleanings(reports, [""] * len(reports))


def _require_loss(config: RunConfig, train: PairSource) -> None:
    section, form = config.embed, train.form
    if section.loss not in ("auto", *LOSSES[form]):
        raise ConfigError(
            f"embed.loss={section.loss} is not for {form} rows, as {train.name} has. "
            f"Write embed.loss={'|'.join(LOSSES[form])}, or leave it out."
        )
    if form == "scored" and (section.mine or section.symmetric):
        raise ConfigError(
            f"embed.mine and embed.symmetric are for pairs, and {train.name} has scored rows. Leave them out."
        )
    if form == "labelled" and section.differs("mine_below"):
        raise ConfigError(
            f"embed.mine_below is for rows that say nothing of other rows, and {train.name} has texts with classes: "
            "mined negatives are of other classes. Leave it out."
        )
    if form == "labelled" and section.passage_prefix:
        raise ConfigError(
            f"embed.passage_prefix is for rows with two sides, and {train.name} has texts with classes. "
            "Write embed.query_prefix, which is put before each."
        )
    loss = section.loss_of(form)
    bare = next((each for each in train.records if len(each.texts) < 3), None)
    if loss == "triplet" and bare is not None and not section.mine:
        raise DataError(
            f"{bare.place}: embed.loss=triplet needs a negative, and the row has none. Give it a column `negative`, "
            "or write embed.mine=1, or embed.loss=contrastive."
        )
    if loss == "cosine" and (far := next((each for each in train.records if abs(each.score) > 1), None)):
        raise DataError(
            f"{far.place}: `score` is {far.score:g}, and embed.loss=cosine compares it with a cosine. "
            "Scale scores to -1 to 1, or write embed.loss=cosent, which compares their order."
        )
    if form == "scored" and len({each.score for each in train.records}) == 1:
        raise DataError(f"{train.name}: every score is {train.records[0].score:g}, so there is nothing to learn.")


def _split(source: PairSource, data: DataConfig, *, seed: int) -> tuple[PairSource, PairSource]:
    """Split off a share of the rows of each class and source, or a fold; rows that share a text stay on one side.

    Where a share is held out, a class keeps two texts to train on.
    """
    strata: list[tuple[Class, ...]] = [(record.label,) for record in source.records]
    if source.sources:
        strata = [(*own, number) for own, number in zip(strata, source.source_N.tolist(), strict=True)]
    texts = [[normalised(text) for text in record.texts[:2]] for record in source.records]
    numbers = pair_set.numbered(text for own in texts for text in own)
    rows = np.repeat(np.arange(len(texts)), [len(own) for own in texts])
    text_ids = np.asarray([numbers[text] for own in texts for text in own])
    # Texts connect rows to groups: an anchor's other positives tell of its first.
    edges = np.stack([rows, len(texts) + text_ids], axis=1)
    component = components(len(texts) + len(numbers), edges)[: len(texts)].tolist()
    first: dict[int, str] = {}
    # A group is named by its first text, so that the order of rows does not matter.
    for own, number in sorted(zip(texts, component, strict=True)):
        first.setdefault(number, own[0])
    groups = [first[number] for number in component]
    if data.fold.of is not None:
        fold_rows = [
            FoldRow(record.place, record.key, group, classes)
            for record, group, classes in zip(source.records, groups, strata, strict=True)
        ]
        part = held_fold.split(data.fold, fold_rows, config=data, seed=seed)
        return source.subset(part.train_N), source.subset(part.validation_N)
    share = data.own_share
    assert share is not None
    held_out = hold_out(strata, groups=groups, share=share, seed=seed)
    if source.form == "labelled":
        alone = _without_partners(source.subset(~held_out))
        whole = {group for group, record in zip(groups, source.records, strict=True) if record.label in alone}
        held_out &= np.asarray([group not in whole for group in groups])
    if not held_out.any():
        raise DataError(
            f"{source.name}: its {len(source.records)} row(s) cannot be held out in part: they are too few, or share "
            "their texts. Give more rows, or a file of its own as data.held_out."
        )
    return source.subset(~held_out), source.subset(held_out)


def _of_one_class(source: PairSource) -> PairSource:
    """Labelled rows without texts that have several labels, as it is unknown which is right."""
    if source.form != "labelled":
        return source
    labels: dict[str, set[str]] = {}
    for record in source.records:
        labels.setdefault(record.key, set()).add(record.label)
    sure_N = np.asarray([len(labels[record.key]) == 1 for record in source.records])
    if sure_N.all():
        return source
    first = source.records[int(sure_N.argmin())]
    named = ", ".join(f"`{label}`" for label in sorted(labels[first.key])[:3])
    what = f"whose text has several labels, the first {first.place} ({named})"
    if not sure_N.any():
        raise DataError(f"{source.name}: has only rows {what}. Give each text one label.")
    return source.subset(sure_N, f"{int((~sure_N).sum())} rows {what}")


def _without_partners(train: PairSource) -> set[str]:
    """Classes with a single text, which has no positive."""
    texts: dict[str, set[str]] = {}
    for record in train.records:
        texts.setdefault(record.label, set()).add(record.texts[0])
    return {label for label, own in texts.items() if len(own) == 1}
