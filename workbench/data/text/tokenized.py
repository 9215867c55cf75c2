"""Tokenised data sets: made once, cached as Arrow files, memory-mapped, and split without leaks."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig
from workbench.data import named_sets, ordered_processes, selection, starter
from workbench.data.batching import Indices
from workbench.data.rows import RawRow, read_rows
from workbench.data.splits import Splits
from workbench.data.text import contamination, encoded_rows, formats
from workbench.data.text.decontamination import TextRow
from workbench.data.text.encoded_rows import RowEncoder
from workbench.data.text.formats import Example
from workbench.data.text.quality import cleaning
from workbench.data.text.token_table import TokenTable
from workbench.data.text.tokenized_set import TokenizedSet, joined
from workbench.errors import DataError
from workbench.runs import files

CODE_VERSION = 3
"""Part of the cache key, beside the columns: raise it when rendering or masking changes."""


def load(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder,
    *,
    seed: int,
    scored: DataConfig | None = None,
) -> Splits[TokenizedSet]:
    """Read, render, tokenise and split; refuses data that would teach or measure nothing.

    Args:
        scored: How held-out and test files are read; None: as the training file.
    """
    read_as = scored or config
    held_out, test = (
        read_each(named, read_as, tokenizer, template) for named in (config.held_out_files, config.test_files)
    )
    files, trains, shares = config.training_files, dict[str, TokenizedSet](), dict[str, TokenizedSet]()
    prefixes = named_sets.prefixes({name: own.train for name, own in files.items()})
    for name, own in files.items():
        assert not own.streaming.on, "streamed rows are files of this machine by now"
        with named_sets.naming(prefixes[name]):
            trains[name] = read(own.train, own, tokenizer, template, limit=own.limit, weighted=True)
        if own.fold.of is not None:
            fold_N = folds(trains[name], of=own.fold.of, seed=seed)
            held = fold_N == own.fold.number
            trains[name], shares[name] = trains[name].subset(~held), trains[name].subset(held)
        elif own.own_share is not None:
            trains[name], shares[name] = hold_out(trains[name], share=own.own_share, seed=seed)
    held_out = held_out or shares
    # A share is read, a second time, as the rows that it was a part of.
    keys = contamination.evaluation_sets({name: files.get(name, read_as) for name in shares}, {})
    sets = contamination.evaluation_sets(held_out, test)
    trains = _cleaned(trains, files, template)
    for name, own in files.items():
        for other in sets.values():
            trains[name] = _without_overlap(trains[name], other, own)
        texts = {
            key: _texts(rows, keys.get(key, read_as), limit=keys[key].limit if key in keys else None)
            for key, rows in sets.items()
        }
        trains[name] = _decontaminated(trains[name], texts, own)
    if config.select.by == "gradient":
        target_rows(config, tokenizer, template)  # what is wrong with them is told before anything trains
    train = _selected(together(trains), trains, config, seed=seed)
    return Splits(train, together(held_out), together(test) if test else None)


def read_files(
    named: Mapping[str, str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, template: RowEncoder
) -> TokenizedSet | None:
    """The rows of files by name together, tokenised; of the one that has no name; None where there is no file."""
    return together(sets) if (sets := read_each(named, config, tokenizer, template)) else None


def read_each(
    named: Mapping[str, str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, template: RowEncoder
) -> dict[str, TokenizedSet]:
    """The rows of each of some files by name, tokenised."""
    return {name: read(path, config, tokenizer, template) for name, path in named.items()}


def together(sets: Mapping[str, TokenizedSet]) -> TokenizedSet:
    """The rows of several sets, which they know by name; of one that has none (``) as they are."""
    return joined(sets) if sets.keys() - {""} else sets[""]


def read(
    source: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder,
    *,
    limit: int | None = None,
    weighted: bool = False,
) -> TokenizedSet:
    """One source, tokenised; from the cache where the same bytes were read so before; `weighted` as in formats.read."""
    path, config = starter.resolve(source), config if weighted else config.unweighted
    fingerprint = formats.fingerprint(path)
    used = {"format", "columns", "max_tokens", "truncate", "loss_on", "on_bad_row"}
    settings = config.model_dump(mode="json", include=used)
    # The name is part of what is cached (places), and which token is eos is not part of the backend.
    tokens_of = [template.identity, tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
    key = [CODE_VERSION, sorted(encoded_rows.SCHEMA.names), Path(path).name, fingerprint, settings, limit, *tokens_of]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "tokens"
    arrow, notes = folder / f"{name}.arrow", folder / f"{name}.json"
    if not notes.exists():
        skipped: list[str] = []
        examples = formats.read(
            path,
            config,
            skipped=skipped,
            limit=limit,
            weighted=weighted,
            conversion=template.conversion,
            reader=template.reader,
        )
        chunks = encoded_rows.chunks(examples, skipped)
        encode = partial(encoded_rows.encode, config=config, encoder=template)
        written = encoded_rows.write(arrow, ordered_processes.results(encode, chunks), config)
        files.write_bytes(notes, json.dumps(written).encode())
    table = TokenTable.from_file(arrow)
    skipped = json.loads(notes.read_text())
    if len(table) == 0:
        raise DataError(f"{source}: no usable row" + (f"; the first was left out: {skipped[0]}" if skipped else "."))
    return TokenizedSet(
        table,
        np.arange(len(table)),
        source,
        fingerprint,
        skipped,
        chat=bool(table[0]["chat"]),
        collate=template.collate,
    )


def target_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase, template: RowEncoder) -> TokenizedSet:
    """The rows of `data.select.target`, whose gradients others are compared with."""
    assert config.select.target is not None
    return read(config.select.target, config.model_copy(update={"format": "auto", "columns": {}}), tokenizer, template)


def first_examples(config: DataConfig, count: int) -> Iterator[Example]:
    """Yield the first training examples of each source as they stand in its file, `count` of each."""
    for own in config.training_files.values():
        examples = formats.read(starter.resolve(own.train), own, skipped=[], limit=own.limit)
        yield from itertools.islice(examples, count)


def hold_out(tokens: TokenizedSet, *, share: float, seed: int) -> tuple[TokenizedSet, TokenizedSet]:
    """Split off `share` of the examples; exact duplicates always stay on the same side."""
    drawn_G, group_N, size_G = _drawn_groups(tokens, seed)
    # As many are drawn as it takes to reach the share.
    wanted = max(1, round(share * len(tokens)))
    count = 1 + int(np.searchsorted(np.cumsum(size_G[drawn_G]), wanted))
    chosen = np.isin(group_N, drawn_G[:count])
    if chosen.all():
        raise DataError(
            f"{tokens.source}: {len(size_G)} distinct row(s) are too few to hold out a share of {share}. "
            "Give more rows, or a file of its own as data.held_out."
        )
    return tokens.subset(~chosen), tokens.subset(chosen)


def folds(tokens: TokenizedSet, *, of: int, seed: int) -> Indices:
    """The fold of each example, from 0; duplicates, and all answers to a prompt, are in the same fold.

    Each group in turn, as drawn, goes to the fold that has the fewest examples by then, of equal ones to the first.

    Raises:
        DataError: There are fewer distinct examples than folds.
    """
    drawn_G, group_N, size_G = _drawn_groups(tokens, seed)
    if len(size_G) < of:
        raise DataError(
            f"{tokens.source}: {len(size_G)} distinct row(s) or prompts are too few for data.fold.of={of} folds. Give "
            "more rows, or fewer folds."
        )
    fold_G, held = np.zeros(len(size_G), dtype=np.int64), np.zeros(of, dtype=np.int64)
    for group in drawn_G:
        fold_G[group] = held.argmin()
        held[fold_G[group]] += size_G[group]
    return fold_G[group_N]


def _drawn_groups(tokens: TokenizedSet, seed: int) -> tuple[Indices, Indices, Indices]:
    """Groups of examples that stay together in a drawn order, the group of each example, and how many each has."""
    _, first_G, group_N, size_G = np.unique(tokens.digests, return_index=True, return_inverse=True, return_counts=True)
    # Groups are numbered by their first example.
    drawn_G = np.argsort(first_G)[np.random.default_rng([seed, 1]).permutation(len(first_G))]
    return drawn_G, group_N, size_G


def cache_folder() -> Path:
    """Where tokenised data and other things worth keeping stand; WORKBENCH_CACHE moves it."""
    base = os.environ.get("WORKBENCH_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "peft-workbench"


def _without_overlap(train: TokenizedSet, held_out: TokenizedSet, config: DataConfig) -> TokenizedSet:
    """`train` without rows that are also in `held_out`: refused, or dropped where the config says so."""
    shared = np.isin(train.digests, held_out.digests)
    if not shared.any():
        return train
    if config.overlap == "drop":
        if shared.all():
            raise DataError(f"{train.source}: every row is also in {held_out.source}; nothing is left to train on.")
        return train.subset(~shared, f"{int(shared.sum())} rows that are also in {held_out.source}")
    first = int(np.flatnonzero(shared)[0])
    known = int(np.flatnonzero(held_out.digests == train.digests[first])[0])
    raise DataError(
        f"{int(shared.sum())} of {len(train)} training rows are also in {held_out.source}, so its scores would "
        f"flatter: {train.place(first)} {'answers the prompt of' if train.judged else 'equals'} "
        f"{held_out.place(known)}.\n"
        "  Write data.overlap=drop to leave them out of training."
    )


def _cleaned(
    train: Mapping[str, TokenizedSet], files: Mapping[str, DataConfig], template: RowEncoder
) -> dict[str, TokenizedSet]:
    """Training rows of each source without those that `data.clean` flags, duplicates in an earlier source included.

    Held-out rows are chosen before: other rules, same scores.
    """
    (rules,) = {config.clean for config in files.values()}
    if not rules:
        return dict(train)
    places = {name: [example_of(place) for place in each.places()] for name, each in train.items()}
    cleaning_reports = cleaning.clean_sources(
        [
            (
                config.train,
                cleaning.row_texts_at(
                    config.train, places[name], config, limit=config.limit, conversion=template.conversion
                ),
            )
            for name, config in files.items()
        ],
        rules,
    )
    return {
        name: replace(each.subset(own.kept(places[name])), cleaning=own)
        for (name, each), own in zip(train.items(), cleaning_reports, strict=True)
    }


def _decontaminated(train: TokenizedSet, sets: Mapping[str, Iterable[TextRow]], config: DataConfig) -> TokenizedSet:
    """`train`, compared with every evaluation set as `data.decontaminate` says; its texts are read a second time."""
    wanted = config.decontaminate
    if wanted.action == "off":
        return train
    sets = {**sets, **contamination.named_sets(config)}
    contamination_report = contamination.find(train.source, _texts(train, config, limit=config.limit), sets, wanted)
    train = replace(train, contamination=contamination_report)
    if wanted.action != "drop" or not contamination_report.matches:
        return train
    dropped = {match.train for match in contamination_report.matches}
    kept = np.fromiter((example_of(place) not in dropped for place in train.places()), dtype=bool, count=len(train))
    return train.subset(kept, f"{len(contamination_report.matches)} rows that hold the text of evaluation rows")


def _selected(train: TokenizedSet, parts: Mapping[str, TokenizedSet], config: DataConfig, *, seed: int) -> TokenizedSet:
    """The rows of `train` that `data.select` keeps; where it chooses by texts, these are read a second time.

    Args:
        parts: The rows of each source, of which `train` consists.
    """
    if config.select.by == "all":
        return train

    def texts() -> Iterator[str]:
        for name, own in config.training_files.items():
            rows_of = (len(list(rows)) for _, rows in itertools.groupby(map(example_of, parts[name].places())))
            for row, count in zip(_texts(parts[name], own, limit=own.limit), rows_of, strict=True):
                yield from itertools.repeat(" ".join(row.texts), count)

    kept, note = selection.selected(
        config.select, train.lengths, seed=seed, texts=texts, target=partial(contamination.texts_of, config)
    )
    return train.subset(kept, note)


def of_files(tokens: TokenizedSet, files: Mapping[str, DataConfig]) -> Iterator[tuple[TokenizedSet, DataConfig]]:
    """Yield the rows of each of several files of a set, and how that is read; all rows where there is one.

    Args:
        files: Each file by the name that its rows have in the set; see `DataConfig.files_of`.
    """
    if not tokens.sources:
        yield tokens, files[""]
        return
    for number, name in enumerate(tokens.sources):
        rows = tokens.subset(tokens.source_N == number)
        yield replace(rows, source=files[name].train, sources={}, prefixes=()), files[name]


def raw_rows(tokens: TokenizedSet, config: DataConfig) -> Iterator[RawRow]:
    """The row of the file that each example came from, in their order, which is that of the file."""
    groups = itertools.groupby(map(example_of, tokens.places()))
    following = next(groups, None)
    for row in itertools.islice(read_rows(starter.resolve(tokens.source)), config.limit):
        if following is not None and row.place == following[0]:
            yield from itertools.repeat(row, len(list(following[1])))
            following = next(groups, None)


def _texts(tokens: TokenizedSet, config: DataConfig, *, limit: int | None = None) -> Iterator[TextRow]:
    """The texts of the rows of a set, in their order, which is that of the file; rows of one example have one."""
    wanted = (place for place, _ in itertools.groupby(map(example_of, tokens.places())))
    following = next(wanted, None)
    for example in formats.read(starter.resolve(tokens.source), config, skipped=[], limit=limit):
        if example.place == following:
            yield contamination.text_row(example)
            following = next(wanted, None)


def example_of(place: str) -> str:
    """Place of the example that was expanded into the row of a place, `rows.jsonl, row 3, answer 1 of 2`."""
    return re.sub(r", answer \d+ of \d+$", "", place)
