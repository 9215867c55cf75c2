"""Data sets of rerankers: rows of recipe embed, each with the passages among which its own is found."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.sections.embed_config import EmbedConfig
from workbench.config.sections.rerank_config import RERANK_LOSSES
from workbench.data.embedding import pair_data, pair_set, text_units
from workbench.data.embedding.candidate_set import CandidateSet
from workbench.data.embedding.pair_records import PairSource
from workbench.data.embedding.pair_set import PairSet
from workbench.data.embedding.paired_texts import PairTokenizer
from workbench.data.splits import Splits
from workbench.errors import ConfigError, DataError


def load(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Splits[CandidateSet]:
    """Read and split; refuses rows with nothing to learn or to measure.

    Raises:
        ConfigError: The loss is not for rows of this form.
        DataError: Rows are malformed, on both sides, or have no negatives; a query leaves no passage beside it.
    """
    section = config.rerank
    sources = pair_data.split(config, lambda train: _require_loss(config, train))
    joins = PairTokenizer(tokenizer, config.data.max_tokens)
    prefixes = EmbedConfig(query_prefix=section.query_prefix, passage_prefix=section.passage_prefix)

    def encoded(source: PairSource) -> PairSet:
        pairs = pair_set.encode(source, tokenizer, prefixes, max_tokens=config.data.max_tokens, seed=config.seed)
        pairs = replace(pairs, units=text_units.raw_units(pairs.units.texts, tokenizer))
        joins.require_room(pairs.units, pairs.anchor_N)
        return pairs

    def candidates(pairs: PairSet) -> CandidateSet:
        negatives = 0 if pairs.form == "scored" else section.negatives
        rows = CandidateSet(pairs, joins, negatives, seed=config.seed)
        assert len(rows.passage_NC), "refused where a row has too few"
        return rows

    return sources.encoded(encoded).map(candidates)


def _require_loss(config: RunConfig, train: PairSource) -> None:
    section, form = config.rerank, train.form
    if form == "labelled":
        raise DataError(
            f"{train.name}: has texts with classes, and recipe rerank reads anchor and positive (with `negatives`), or "
            "sentence1, sentence2 and score. Write recipe=embed or classify for classes."
        )
    if section.loss not in ("auto", *RERANK_LOSSES[form]):
        raise ConfigError(
            f"rerank.loss={section.loss} is not for {form} rows, as {train.name} has. "
            f"Write rerank.loss={'|'.join(RERANK_LOSSES[form])}, or leave it out."
        )
    if form != "scored":
        return
    if given := [f"rerank.{key}" for key in ("mine", "negatives", "temperature", "candidates") if section.differs(key)]:
        raise ConfigError(
            f"{' and '.join(given)}: for rows with a positive, and {train.name} has scored rows. Leave it out."
        )
    if section.loss_of(form) == "bce" and (
        far := next((each for each in train.records if not 0 <= each.score <= 1), None)
    ):
        raise DataError(
            f"{far.place}: `score` is {far.score:g}, and rerank.loss=bce takes scores for probabilities. Scale scores "
            "to 0 to 1, or write rerank.loss=mse."
        )
    if len({each.score for each in train.records}) == 1:
        raise DataError(f"{train.name}: every score is {train.records[0].score:g}, so there is nothing to learn.")
