"""The task `tag`: rows of tagged words, a model with a class for each token, its scores, and what the verbs ask.

Legend: S supervised tokens of a row, N those of a micro-batch, L padded length, C tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench import adapters
from workbench.adapters import Full, anatomy, stock
from workbench.config import RunConfig
from workbench.config.model_heads import ModelHead
from workbench.config.sections.tta_config import TtaConfig
from workbench.data import leaks, named_sets, tagged_rows
from workbench.data.batching import Floats, Indices, MicroBatch, WholeRows, encoder_inputs, evenly_spaced
from workbench.data.folds import held_fold
from workbench.data.folds.held_fold import FoldRow
from workbench.data.held_out_split import Splits, hold_out
from workbench.data.leaks import Copies
from workbench.data.tagged_rows import EncodedTags, TagEncoder, TaggedRow, TaggedRows, TagSet
from workbench.errors import DataError
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.evaluation.perplexity import Agreement
from workbench.models import backbones, exported
from workbench.models.backbones import Backbone, Loader
from workbench.recipes.single import word_run
from workbench.recipes.single.single_run import Scored
from workbench.recipes.single.word_run import WordRun
from workbench.recipes.task import ROWS, DryTask, PredictionTable, RowFile, ScoringOptions, Task
from workbench.recipes.tasks.tag import TagConfig, word_views
from workbench.runs import files, provenance, run_directory
from workbench.runs.run_directory import Run
from workbench.training import capacity, preflight
from workbench.training.bank_trainer import Objective
from workbench.training.callbacks import Callback, Silent
from workbench.training.optim.schedules import total_steps
from workbench.training.signal import TrainingSignal

if TYPE_CHECKING:
    import pandas as pd

    from workbench.data.text.quality.survey import SourceRows
    from workbench.evaluation.serving.served_models import ServedModel
    from workbench.recipes.inspection import Inspection


# Rows


class _Record(NamedTuple):
    place: str
    key: str

    @property
    def content(self) -> tuple[str, ...]:
        """What was read, as it stands."""
        return (self.key,)


@dataclass(frozen=True)
class _Source:
    """The rows of a file, which a text is a row of once."""

    name: str
    fingerprint: str
    rows: tuple[TaggedRow, ...]
    scheme: tagged_rows.Scheme
    skipped: tuple[str, ...]

    @property
    def records(self) -> list[_Record]:
        return [_Record(row.place, " ".join(row.words)) for row in self.rows]

    def subset(self, keep: npt.NDArray[np.bool_], note: str | None = None) -> _Source:
        rows = tuple(row for row, kept in zip(self.rows, keep.tolist(), strict=True) if kept)
        return replace(self, rows=rows, skipped=(note, *self.skipped) if note else self.skipped)


@dataclass(frozen=True)
class TaggedSet(WholeRows):
    """Rows as a model reads them, with labels of their first sub-words."""

    rows: tuple[TaggedRow, ...]
    encoded: tuple[EncodedTags, ...]
    name: str
    fingerprint: str
    skipped: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Names of several files; there is one."""
    source_N: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    cleaning: None = None
    copies: Copies = ()
    """Rows that are copies of training rows."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """File and row of row `index`."""
        return self.rows[index].place

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each row."""
        return np.asarray([len(each.input_ids) for each in self.encoded], dtype=np.int64)

    @property
    def longest_sequences(self) -> Indices:
        """Tokens of the longest sequence of each row, which is one."""
        return self.lengths

    @cached_property
    def supervised(self) -> Indices:
        """Words of each row that carry loss."""
        return np.asarray([int(each.supervised.sum()) for each in self.encoded], dtype=np.int64)

    @property
    def truncated(self) -> int:
        """Rows whose last words are cut."""
        return sum(each.words_cut > 0 for each in self.encoded)

    def batch(self, indices: Indices, *, epoch: int = 0) -> MicroBatch:
        """The rows `indices`, padded on the right; labels are those of first sub-words, 0 where a row has no tags."""
        chosen = [self.encoded[int(index)] for index in indices]
        inputs = encoder_inputs([each.input_ids for each in chosen])
        width = inputs["input_ids"].shape[1]
        positions = [number * width + np.flatnonzero(each.supervised) for number, each in enumerate(chosen)]
        labels = [each.labels if len(each.labels) else np.zeros(int(each.supervised.sum()), int) for each in chosen]
        return MicroBatch(
            inputs,
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(labels).astype(np.int64)),
            tokens=sum(len(each.input_ids) for each in chosen),
            rows_B=indices,
        )

    def subset(self, keep: Indices) -> TaggedSet:
        """The rows that `keep` indexes."""
        chosen = [int(index) for index in keep]
        return replace(
            self,
            rows=tuple(self.rows[i] for i in chosen),
            encoded=tuple(self.encoded[i] for i in chosen),
            copies=leaks.taken(self.copies, np.asarray(chosen, dtype=np.int64)),
        )

    def facts(self) -> dict[str, Any]:
        """Facts about this set for the manifest and the report."""
        return {
            "source": self.name,
            "fingerprint": self.fingerprint,
            "rows": len(self),
            "tokens": int(self.lengths.sum()),
            "supervised": int(self.supervised.sum()),
            "skipped": len(self.skipped),
            **leaks.facts(self.copies),
        }


class TagSplits(NamedTuple):
    """Training, held-out and test rows, and the tags that they have."""

    train: TaggedSet
    held_out: TaggedSet
    test: TaggedSet | None
    tags: TagSet

    @property
    def splits(self) -> Splits[TaggedSet]:
        """The rows alone."""
        return Splits(self.train, self.held_out, self.test)

    def named(self) -> dict[str, TaggedSet]:
        """Those that there are, by `train`, `held_out` and `test`."""
        return self.splits.named()


def prepare(config: RunConfig) -> tuple[PreTrainedTokenizerBase, TagSplits, list[str]]:
    """Tokenizer, data, and names of the modules that get an adapter; refuses what would fail or teach nothing.

    Raises:
        DataError: A row cannot be read, a held-out text is trained on, or an evaluation row has an unknown tag.
    """
    backbones.of_one_sequence(config.model, recipe=config.recipe, take="an encoder or a causal backbone")
    tokenizer = backbones.tokenizer(config.model)
    data = config.data
    train = _read(data.train, config)
    tests = [_read(path, config) for path in data.test_files.values()]
    if data.own_share is not None:
        train, held = _held_out(train, config)
        helds = [held]
    else:
        helds = [_read(path, config) for path in data.held_out_files.values()]
    named = {"data.held_out": [] if data.fold.trains else helds, "data.test": tests}
    scored = {f"{key}.{number}": each for key, own in named.items() for number, each in enumerate(own)}
    trains, copies = leaks.separate({"": train}, scored, leaks.of_texts, action=data.overlap, but="")
    train = trains[""]
    # A rare tag that no training row has counts in the scores, as it would for whoever uses the model.
    tag_set = TagSet.of([row for source in (train, *helds, *tests) for row in source.rows], train.scheme)
    encoder = TagEncoder(tokenizer, tag_set, max_tokens=data.max_tokens)
    sets = {
        key: replace(
            _encoded(encoder, own), copies=leaks.joined({str(n): each for n, each in enumerate(own)}, copies, key)
        )
        for key, own in {"data.held_out": helds, "data.test": tests}.items()
        if own
    }
    rows = TagSplits(_encoded(encoder, [train]), sets["data.held_out"], sets.get("data.test"), tag_set)
    require_views(rows.held_out, config.tta, config, tokenizer)
    modules = preflight.require_backbone(config, list(rows.named().values()), head_of(tag_set, seed=config.seed))
    return tokenizer, rows, modules


def _read(source: str, config: RunConfig) -> _Source:
    data, scheme = config.data, config.section(TagConfig).scheme
    read: TaggedRows = tagged_rows.read(
        source,
        data,
        scheme=None if scheme == "auto" else scheme,
        limit=data.limit if source == data.train else None,
    )
    return _Source(read.name, read.fingerprint, read.rows, read.scheme, read.skipped)


def _held_out(source: _Source, config: RunConfig) -> tuple[_Source, _Source]:
    """Split off rows so that each type of entity, or plain tag, has its share; equal texts stay on the same side."""
    fold, share = config.data.fold, config.data.own_share
    plain = source.scheme == "plain"
    strata = [tuple(sorted(set(row.tags) if plain else {span.label for span in row.spans})) for row in source.rows]
    if fold.of is not None:
        pairs = zip(source.records, strata, strict=True)
        rows = [FoldRow(each.place, each.key, each.key, types) for each, types in pairs]
        part = held_fold.split(fold, rows, config=config.data, seed=config.rows_seed)
        return source.subset(part.train_N), source.subset(part.validation_N)
    assert share is not None
    held_N = hold_out(strata, groups=(each.key for each in source.records), share=share, seed=config.rows_seed)
    if not held_N.any():
        raise DataError(
            f"{source.name}: {len(source.rows)} row(s) are too few to hold out a share of {share}. Give more rows, or "
            "a file of its own as data.held_out."
        )
    return source.subset(~held_N), source.subset(held_N)


def _encoded(encoder: TagEncoder, sources: Sequence[_Source]) -> TaggedSet:
    rows = tuple(row for source in sources for row in source.rows)
    return TaggedSet(
        rows,
        tuple(encoder.encode(rows)),
        " + ".join(source.name for source in sources),
        "+".join(source.fingerprint for source in sources),
        tuple(reason for source in sources for reason in source.skipped),
    )


def unlabelled(source: str, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> TaggedSet:
    """The rows of a file, without tags."""
    read = tagged_rows.read(source, config.data, labelled=False)
    encoder = TagEncoder(tokenizer, None, max_tokens=config.data.max_tokens)
    return _encoded(encoder, [_Source(read.name, read.fingerprint, read.rows, read.scheme, read.skipped)])


def in_views(rows: TaggedSet, tta: TtaConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[TaggedSet]:
    """The rows, without tags, in each view that `tta` names."""
    encoder = TagEncoder(tokenizer, None, max_tokens=config.data.max_tokens)
    changed = [tuple(map(change, rows.rows)) for _, change in word_views.views(tta, seed=config.seed)]
    return [replace(rows, rows=own, encoded=tuple(encoder.encode(own))) for own in changed]


def as_read(run: Path, config: RunConfig, rows: TaggedSet, tokenizer: PreTrainedTokenizerBase) -> list[TaggedSet]:
    """The rows, and each view of them where the run at `run` decided to read views."""
    return [rows, *(in_views(rows, config.tta, config, tokenizer) if run_directory.reads_views(run, config) else ())]


def require_views(rows: TaggedSet, tta: TtaConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError where a view changes no row."""
    names = [name for name, _ in word_views.views(tta, seed=config.seed)]
    for name, view in zip(names, in_views(rows, tta, config, tokenizer), strict=True):
        from workbench.crossval import run_views  # which few runs ask for

        pairs = zip(rows.encoded, view.encoded, strict=True)
        run_views.require_change(rows.name, name, ((one.input_ids, other.input_ids) for one, other in pairs))


def head_of(tags: TagSet, *, seed: int) -> ModelHead:
    """A head with a class for each tag, which starts at random."""
    return ModelHead("tokens", tags.names, seed)


# The model


@dataclass(frozen=True)
class Tagger:
    """A model that gives each token the logits of tags."""

    model: nn.Module
    backbone: PreTrainedModel
    """The same, without the adapter around it."""
    tokenizer: PreTrainedTokenizerBase
    tags: TagSet

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Logits (N, C) of the supervised tokens, float32."""
        logits: Tensor = self.model(**batch.inputs).logits
        return logits.flatten(0, 1)[batch.positions_N].float()

    def probabilities(self, rows: TaggedSet, scoring: ModelResults | None = None) -> list[Floats]:
        """Probabilities (S, C) of the tags of each row's supervised tokens."""
        device = next(self.model.parameters()).device

        def compute(numbers: Indices) -> list[list[list[float]]]:
            batch = rows.batch(numbers).to(device)
            p_NC = self.outputs(batch).double().softmax(1)
            return [each.tolist() for each in p_NC.cpu().split(rows.supervised[numbers].tolist())]

        content = (each.input_ids for each in rows.encoded)
        found = over_rows(self.model, rows.lengths, compute, scoring=scoring, content=content)
        return [np.asarray(each, dtype=np.float64).reshape(-1, len(self.tags.names)) for each in found]

    def merged(self, views: Sequence[TaggedSet], scoring: ModelResults | None = None) -> list[Floats]:
        """The same, as the mean over views of the rows, of which the first has them as they are."""
        p_V = [self.probabilities(rows, scoring) for rows in views]
        encoded_R, p_R = (zip(*each, strict=True) for each in ([rows.encoded for rows in views], p_V))
        return [word_views.merged(encoded, p) for encoded, p in zip(encoded_R, p_R, strict=True)]

    def save(self, folder: Path) -> None:
        """Write what belongs beside the weights: the tokenizer and the tags."""
        self.tokenizer.save_pretrained(folder)
        self.tags.write(folder)


def load(run: Path, config: RunConfig, *, waiting: bool = False) -> Tagger:
    """The tagger that the run at `run` shipped, in evaluation mode."""
    folder = run / "adapter"
    exported.require_saved(run, config, tagged_rows.TAGS, "tokenizer.json")
    tags, tokenizer = TagSet.read(folder), exported.load_tokenizer(run, config)
    head = head_of(tags, seed=config.seed)
    backbone = exported.load_backbone(config, folder, tokenizer, task=head, waiting=waiting).model
    model = backbone if isinstance(config.adapter, Full) else adapters.load(backbone, folder)
    return Tagger(model.eval(), backbone, tokenizer, tags)


def predicted(tags: TagSet, rows: TaggedSet, p_RSC: Sequence[Floats]) -> list[Floats]:
    """Probabilities (W, C) of the words of each row, of those of its tokens."""
    pairs = zip(rows.encoded, p_RSC, strict=True)
    return [tagged_rows.word_probabilities(encoded, p_SC, tags) for encoded, p_SC in pairs]


def scores_of(
    tags: TagSet, rows: TaggedSet, p_RWC: Sequence[Floats], p_RSC: Sequence[Floats], *, strict: bool
) -> dict[str, float]:
    """Loss in nats per word, and the scores of entities, or of plain tags."""
    from workbench.evaluation import entity_scores

    if rows.copies:

        def of_some(own: Indices) -> dict[str, float]:
            part = replace(rows.subset(own), copies=())
            return scores_of(tags, part, [p_RWC[row] for row in own], [p_RSC[row] for row in own], strict=strict)

        every = scores_of(tags, replace(rows, copies=()), p_RWC, p_RSC, strict=strict)
        return every | named_sets.scored_apart(rows, of_some)
    chosen = [p_SC[np.arange(len(each.labels)), each.labels] for each, p_SC in zip(rows.encoded, p_RSC, strict=True)]
    loss = -float(np.log(np.maximum(np.concatenate(chosen), 1e-300)).mean())
    true = [row.tags for row in rows.rows]
    found = [tagged_rows.predicted_tags(p_WC, tags) for p_WC in p_RWC]
    if not tags.entities:
        return {"loss": loss, **entity_scores.tag_scores(true, found)}
    return {"loss": loss, **entity_scores.scores(true, found, rule="IOB2" if strict else "conlleval")}


@dataclass(frozen=True)
class TagRun(WordRun[Tagger, TaggedSet]):
    """A run that learns the tags of words."""

    tokenizer: PreTrainedTokenizerBase
    data: TagSplits

    @property
    def rows(self) -> Mapping[str, TaggedSet]:
        return self.data.named()

    @property
    def vocabulary(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    @property
    def task(self) -> ModelHead:
        return head_of(self.data.tags, seed=self.config.seed)

    def finish(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See `SingleRun`. The start is the most frequent tag of the training rows: a fresh head says nothing."""
        if self.run.ranks.first:
            files.write_json(self.run.path / "before.json", {"scores": self.guessed()})
        return super().finish(more)

    def guessed(self) -> Mapping[str, float]:
        """Scores of saying the same of every held-out word: how frequent tags are."""
        labels = np.concatenate([each.labels for each in self.data.train.encoded])
        p_C, held_out = np.bincount(labels, minlength=len(self.data.tags.names)) / len(labels), self.data.held_out
        p_RSC = [np.tile(p_C, (int(count), 1)) for count in held_out.supervised]
        p_RWC = [np.tile(p_C, (len(row.words), 1)) for row in held_out.rows]
        return scores_of(self.data.tags, held_out, p_RWC, p_RSC, strict=self.config.section(TagConfig).strict)

    def assemble(self, model: nn.Module, backbone: Backbone) -> Tagger:
        return Tagger(model, backbone.model, self.tokenizer, self.data.tags)

    def supervise(self, live: Tagger, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        objective = self.member_loss(live)

        def loss(batch: MicroBatch, scale: float) -> Tensor:
            return objective(live.outputs(batch), batch.labels_N, scale)

        return TrainingSignal(self.data.train, loss, reads_packed=self.packs(live))

    def width(self, live: Tagger) -> int:
        return anatomy.hidden_size(live.backbone.config)

    def held_out_loss(self, live: Tagger) -> tuple[float, Mapping[str, float]]:
        scores = self.score(live, self.data.held_out).scores
        name = self.config.task.score if self.data.tags.entities else "accuracy"
        return scores["loss"], {f"held_out_tags[{name}]": scores[name]}

    def save(self, live: Tagger, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
        with files.new_folder(folder) as aside:
            if adapter is None:
                adapters.save(live.model, aside)
            else:
                adapter(aside)
            live.save(aside)

    def load(self) -> Tagger:
        return load(self.run.home, self.config, waiting=self.placement.waiting)

    def score(self, model: Tagger, rows: TaggedSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            p_RSC = model.merged(as_read(self.run.home, self.config, rows, self.tokenizer), scoring)
        return self.scored(rows, p_RSC)

    def predictions(
        self, model: Tagger, rows: TaggedSet, outputs: list[Floats], before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return predictions(model.tags, rows.rows, outputs, labelled=True)

    # What stages of a cross-validation ask.

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.tags.names

    def labels(self, rows: TaggedSet) -> list[Indices]:
        return [each.labels for each in rows.encoded]

    def texts(self, rows: TaggedSet) -> list[str]:
        return [" ".join(row.words) for row in rows.rows]

    def in_views(self, rows: TaggedSet, tta: TtaConfig) -> list[TaggedSet]:
        return in_views(rows, tta, self.config, self.tokenizer)

    def require_views(self, tta: TtaConfig) -> None:
        require_views(self.data.train, tta, self.config, self.tokenizer)

    def probabilities(self, model: Tagger, views: Sequence[TaggedSet], scoring: ModelResults) -> list[Floats]:
        return model.merged(views, scoring)

    def scored(self, rows: TaggedSet, p_RSC: Sequence[Floats]) -> Scored:
        p_RWC = predicted(self.data.tags, rows, p_RSC)
        strict = self.config.section(TagConfig).strict
        return Scored(scores_of(self.data.tags, rows, p_RWC, p_RSC, strict=strict), p_RWC)

    def table(self, rows: TaggedSet, p_RSC: Sequence[Floats], *, labelled: bool) -> pd.DataFrame:
        return predictions(self.data.tags, rows.rows, predicted(self.data.tags, rows, p_RSC), labelled=labelled)

    def unlabelled(self, source: str) -> TaggedSet:
        return unlabelled(source, self.config, self.tokenizer)

    def taught(self, rows: TaggedSet, p_RSC: Sequence[Floats]) -> Self:
        train, tags, added, encoded = self.data.train, self.data.tags, [], []
        for row, each, p_WC in zip(rows.rows, rows.encoded, predicted(tags, rows, p_RSC), strict=True):
            found = tagged_rows.predicted_tags(p_WC, tags)
            if tags.entities:  # an I-X that follows no X begins an entity
                found = tagged_rows.tags_of(tagged_rows.spans_of(found), len(found))
            labels = np.asarray([tags.ids[found[word]] for word in each.words.tolist()], dtype=np.int64)
            added.append(replace(row, tags=found))
            encoded.append(replace(each, labels=labels))
        more = replace(
            train,
            rows=(*train.rows, *added),
            encoded=(*train.encoded, *encoded),
            fingerprint=f"{train.fingerprint}+{rows.fingerprint}",
        )
        return replace(self, data=self.data._replace(train=more))

    # What a bank asks.

    @property
    def splits(self) -> TagSplits:
        return self.data

    def member_outputs(self, live: Tagger, batch: MicroBatch) -> Tensor:
        return live.outputs(batch)

    def member_loss(self, live: Tagger) -> Objective:
        own = len(self.data.tags.names)

        def loss(logits_NC: Tensor, labels_N: Tensor, scale: float) -> Tensor:
            # Other members of a fleet may have more tags.
            return nn.functional.cross_entropy(logits_NC[:, :own], labels_N, reduction="sum") * scale

        return loss

    def of_member(self, live: Tagger) -> Tagger:
        return replace(live, tokenizer=self.tokenizer, tags=self.data.tags)

    def on_held_out(self, rows: Indices) -> Self:
        return replace(self, data=self.data._replace(held_out=self.data.held_out.subset(rows)))


def predictions(tags: TagSet, rows: Sequence[TaggedRow], p_RWC: Sequence[Floats], *, labelled: bool) -> pd.DataFrame:
    """One line a row: its text, its entities with their probabilities, or the tag of each word; if `labelled`, also
    lists of its words and of the probability of each tag."""
    import pandas as pd  # 0.2 s, which the first step need not wait for

    columns: dict[str, list[Any]] = {"row": [row.place for row in rows], "text": [row.text for row in rows]}
    pairs = list(zip(rows, p_RWC, strict=True))
    if labelled:
        columns["label"] = [" ".join(row.tags) for row in rows]
    columns["predicted"] = [" ".join(tagged_rows.predicted_tags(p_WC, tags)) for _, p_WC in pairs]
    if tags.entities:
        found = [tagged_rows.predicted_entities(row, p_WC, tags) for row, p_WC in pairs]
        columns["entities"] = [[dict(each._asdict()) for each in own] for own in found]
    else:
        columns["words"] = [list(row.words) for row in rows]
        columns["probability"] = [p_WC.max(1).tolist() for p_WC in p_RWC]
    if labelled:
        columns["words"] = [list(row.words) for row in rows]
        columns |= {f"p_{tag}": [p_WC[:, c].tolist() for p_WC in p_RWC] for c, tag in enumerate(tags.names)}
    return pd.DataFrame(columns)


# Verbs


class TagAgreement(Agreement):
    """Difference of two taggers over the words of some rows."""

    @property
    def sentence(self) -> str:
        """For a person."""
        return (
            f"On {self.positions:,} held-out words: KL divergence {self.kl:.2e} nats a word, same tag {self.top1:.2%}."
        )


@dataclass(frozen=True)
class TagReference:
    """Outputs of a run for held-out rows."""

    config: RunConfig
    unmerged: Tagger
    rows: TaggedSet
    wanted: list[Floats]
    note: str = ""

    @property
    def task(self) -> ModelHead:
        return head_of(self.unmerged.tags, seed=self.config.seed)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.unmerged.tokenizer

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        stock.save(model, folder)
        self.unmerged.save(folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> TagAgreement:
        found = replace(self.unmerged, model=model, backbone=backbone).probabilities(self.rows)
        one_NC, other_NC = np.concatenate(self.wanted), np.concatenate(found)
        kl = float((one_NC * (np.log(one_NC + 1e-30) - np.log(other_NC + 1e-30))).sum(1).mean())
        same = float((one_NC.argmax(1) == other_NC.argmax(1)).mean())
        return TagAgreement(max(0.0, kl), same, len(one_NC))


class TagTask(Task):
    """Tags of words."""

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> TagRun:
        # Data first: it is the cheapest thing to get wrong, and needs no weights.
        tokenizer, data, _ = prepare(config)
        provenance.note_data(run, data.splits.facts())
        for sentence in [*_unlearnt(data), *leaks.told(data.named())]:
            callback.say(sentence)
        tags = TagRun(config, run, callback, tokenizer, data, loader=loader)
        if config.tta.wanted:
            from workbench.crossval import run_views  # which few runs ask for

            run_views.require_witnesses(data.held_out.name, word_run.judged([tags]).cluster_N)
        return tags

    def inspect(self, config: RunConfig) -> Inspection:
        from workbench.recipes.inspection import SHOWN, Inspection, unread

        _, data, targets = prepare(config)
        train = data.train
        shown = [train.rows[int(i)] for i in evenly_spaced(len(train), SHOWN)]
        what = ", ".join(data.tags.types[:20]) + (", ..." if len(data.tags.types) > 20 else "")
        kind = "types of entities" if data.tags.entities else "tags"
        return Inspection(
            config=config,
            data=data,  # type: ignore[arg-type]
            examples=[
                (
                    row.place,
                    [
                        (f"{word} " if tag == tagged_rows.OUTSIDE else f"{word}[{tag}] ", tag != tagged_rows.OUTSIDE)
                        for word, tag in zip(row.words, row.tags, strict=True)
                    ],
                )
                for row in shown
            ],
            targets=targets,
            steps=total_steps(config, len(train)),
            notes=[
                f"{len(data.tags.types)} {kind}: {what}.",
                *_unlearnt(data),
                *unread(*data.named().values()),
                *leaks.told(data.named()),
            ],
        )

    def head(self, inspection: Any) -> ModelHead:
        return head_of(inspection.data.tags, seed=inspection.config.seed)

    def require(self, config: RunConfig, data: TagSplits) -> None:
        preflight.require_backbone(config, list(data.named().values()), head_of(data.tags, seed=config.seed))

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        tagger = load(run_directory.fold_members(run)[0], config)
        rows = _scored_rows(tagger, config)
        p_RSC = _together(run, config, rows, turn.scoring)
        strict = config.section(TagConfig).strict
        return scores_of(tagger.tags, rows, predicted(tagger.tags, rows, p_RSC), p_RSC, strict=strict)

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        tagger = load(run_directory.fold_members(run)[0], config)
        rows = unlabelled(source, config, tagger.tokenizer)
        p_RWC = predicted(tagger.tags, rows, _together(run, config, rows, turn.scoring))
        return PredictionTable(predictions(tagger.tags, rows.rows, p_RWC, labelled=False), rows.skipped)

    def pooled(self, config: RunConfig, table: pd.DataFrame) -> dict[str, float]:
        from workbench.evaluation import entity_scores

        true, found = ([tags.split() for tags in table[name]] for name in ("label", "predicted"))
        if "entities" not in table:
            return entity_scores.tag_scores(true, found)
        return entity_scores.scores(true, found, rule="IOB2" if config.section(TagConfig).strict else "conlleval")

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        from workbench.evaluation.serving.served_models import ClassModel, Turns

        taggers = [load(each, config) for each in run_directory.fold_members(run)]
        tagger = taggers[0]
        encoder = TagEncoder(tagger.tokenizer, None, max_tokens=config.data.max_tokens)

        def tag(asked: Sequence[str | dict[str, str]]) -> list[dict[str, Any]]:
            if not all(isinstance(each, str) or set(each) == {"text"} for each in asked):
                raise DataError("expected texts, or objects with `text`.")
            texts = [each if isinstance(each, str) else each["text"] for each in asked]
            read = tuple(tagged_rows.text_row(each, place=f"input {n}") for n, each in enumerate(texts, start=1))
            rows = TaggedSet(read, tuple(encoder.encode(read)), "the request", "")
            p_RWC = predicted(tagger.tags, rows, _together(run, config, rows, taggers=taggers))
            said: list[dict[str, Any]] = predictions(tagger.tags, read, p_RWC, labelled=False).to_dict("records")
            return said

        return ClassModel(name, config.model.id, created, Turns(queue), tag, tagger.tags.names)

    def outputs(self, run: Path, config: RunConfig) -> TagReference:
        tagger = load(run, config)
        rows = _scored_rows(tagger, config)
        rows = rows.subset(np.arange(min(ROWS, len(rows))))
        return TagReference(config, tagger, rows, tagger.probabilities(rows))

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        from workbench.planning.dry_run import largest_rows

        tokenizer, data, _ = prepare(config)
        largest = largest_rows(data.held_out, tokens=capacity.FORWARD_TOKENS)
        worst = [data.held_out.batch(rows).to(backbones.device()) for rows in largest]
        single = TagRun(config, run, Silent(), tokenizer, data)
        return DryTask(single, lambda live: [live.outputs(batch) for batch in worst])

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        from workbench.data.text.quality.rules import RowText
        from workbench.data.text.quality.survey import SourceRows

        surveyed = []
        for title, data, trains in files:
            source = _read(data.train, config.model_copy(update={"data": data}))
            texts = [RowText(row.place, row.text) for row in source.rows]
            types = [tuple(sorted({span.label for span in row.spans} or set(row.tags))) for row in source.rows]
            surveyed.append(
                SourceRows(title, source.name, texts, None, trains, labels=types, unreadable=source.skipped)
            )
        return surveyed


def _together(
    run: Path,
    config: RunConfig,
    rows: TaggedSet,
    scoring: ModelResults | None = None,
    *,
    taggers: Iterable[Tagger] | None = None,
) -> list[Floats]:
    """Mean of the probabilities (S, C) of each row's tokens by the taggers of all folds; by the one of another run.
    `taggers`: those that are loaded already; None: they are loaded one after another."""
    folders, members, views = run_directory.fold_members(run), [], list[TaggedSet]()
    for each, tagger in zip(folders, taggers or (load(each, config) for each in folders), strict=True):
        views = views or as_read(run, config, rows, tagger.tokenizer)
        members.append(tagger.merged(views, None if scoring is None else scoring.store.by(each.name)))
    return [np.mean(each, axis=0) for each in zip(*members, strict=True)]


def _unlearnt(data: TagSplits) -> list[str]:
    """Sentence on tags that evaluation rows have and no training row."""
    trained = {tag for row in data.train.rows for tag in row.tags}
    others = [rows for name, rows in data.named().items() if name != "train"]
    unlearnt = sorted({tag for rows in others for row in rows.rows for tag in row.tags} - trained)
    return (
        [f"No training row has {', '.join(unlearnt)}: evaluation rows with it will count as wrong."] if unlearnt else []
    )


def _scored_rows(tagger: Tagger, config: RunConfig) -> TaggedSet:
    """The rows of `data.test` where there are any, else the held-out ones."""
    if config.data.test is not None:
        encoder = TagEncoder(tagger.tokenizer, tagger.tags, max_tokens=config.data.max_tokens)
        return _encoded(encoder, [_read(path, config) for path in config.data.test_files.values()])
    return prepare(config)[1].held_out


TASK = TagTask()
