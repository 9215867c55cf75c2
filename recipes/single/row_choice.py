"""Training rows that the backbone chooses before it trains, as `data.select` by loss, difficulty or gradient says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Literal

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.model_heads import TEXT
from workbench.data import selection
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.evaluation import perplexity
from workbench.evaluation.forward_passes import ResultStore
from workbench.evaluation.perplexity import Floats
from workbench.models import backbones, output_heads
from workbench.recipes.single import gradient_choice
from workbench.recipes.single.gradient_choice import R
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

FILE = "selection.parquet"
"""In a run directory: place, score and fate of every row that there was to choose from."""


def chosen(rows: R, config: RunConfig, run: Run, callback: Callback, *, score: Callable[[ResultStore], Floats]) -> R:
    """The rows that the backbone chooses; a resumed run reads its choice from `FILE`.

    Args:
        score: Asks the backbone about all rows, each for every part of a target (N, G), with the same answer in all
            processes; what is known so far is in the store.

    Raises:
        ConfigError: The budget holds all rows.
        DataError: No row is wanted, or none fits into the budget.
    """
    known = (run.home / FILE).exists()
    run.ranks.wait()
    store = ResultStore(run.path if run.ranks.alone else None, callback.stop_requested, run.deadline)
    if known:
        table = pd.read_parquet(run.home / FILE)
    else:
        selection.most_kept(config.data.select, rows.lengths)  # a wrong budget is told before anything is asked
        callback.say(f"Reading {len(rows):,} rows with the backbone, to choose by {config.data.select.by} ...")
        score_NG = score(store)
        kept_N = np.isin(np.arange(len(rows)), selection.chosen(config.data.select, rows.lengths, score_NG))
        table = pd.DataFrame({"place": list(rows.places()), "score": score_NG.max(1), "kept": kept_N})
        if run.ranks.first:
            files.write_bytes(run.path / FILE, table.to_parquet())
            shutil.rmtree(run.path / gradient_choice.FOLDER, ignore_errors=True)
            store.clear()
    run.ranks.wait()
    kept_K = np.flatnonzero(table["kept"])
    note = selection.note(config.data.select, table["score"].to_numpy(), kept_K)
    callback.say(f"Training on {len(kept_K):,} of {len(rows):,} rows; left out: {note}.")
    return rows.subset(kept_K, note)


def backbone_scores(
    by: Literal["perplexity", "ifd"],
    rows: TokenizedSet,
    config: RunConfig,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    store: ResultStore,
) -> Floats:
    """Scores of all rows by their losses before training, the same in all processes, each of which computes a share.

    Raises:
        ConfigError: The backbone does not read and write one text.
    """
    backbone = backbones.load(config.model, tokenizer, task=TEXT)
    if by == "ifd" and backbone.model.config.is_encoder_decoder:
        raise ConfigError(
            f"data.select.by=ifd reads answers without their prompts, and {config.model.id} is an encoder-decoder, "
            "which has to read something.\n  Write data.select.by=perplexity."
        )
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ranks = run.ranks
    local_scores = perplexity.row_scores(
        by,
        backbone.model,
        output_heads.find(backbone.model, backbone.model),
        rows.subset(np.arange(ranks.rank, len(rows), ranks.world)),
        start=0 if start is None else start,
        scoring=lambda name: store.by(f"{by} {name}"),
    )
    score_N = np.empty(len(rows))
    for rank, share in enumerate(ranks.gathered(local_scores)):
        score_N[rank :: ranks.world] = share
    return score_N
