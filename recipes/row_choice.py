"""Training rows that the backbone chooses before it trains, as `data.select` by loss, difficulty or gradient says."""

from __future__ import annotations

import io
import shutil
from typing import Literal

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.config.tasks import TEXT
from workbench.data import selection
from workbench.data.text import tokenized
from workbench.data.text.encoded_rows import RowEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError
from workbench.evaluation import row_scores
from workbench.evaluation.result_store import ResultStore
from workbench.evaluation.row_scores import Floats
from workbench.models import backbones, output_heads
from workbench.recipes import gradient_choice
from workbench.recipes.gradient_choice import Begin
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

FILE = "selection.parquet"
"""In a run directory: place, score and fate of every row that there was to choose from."""


def chosen(
    rows: TokenizedSet,
    config: RunConfig,
    run: Run,
    callback: Callback,
    tokenizer: PreTrainedTokenizerBase,
    template: RowEncoder,
    *,
    begin: Begin,
) -> TokenizedSet:
    """The rows that the backbone chooses; a resumed run reads its choice from `FILE`.

    Args:
        begin: Begins the short training in which gradients are compared.

    Raises:
        ConfigError: The backbone does not read and write one text.
        DataError: No row is wanted, or none fits into the budget.
    """
    known, first = (run.home / FILE).exists(), run.ranks.first
    run.ranks.wait()
    store = ResultStore(run.path if run.ranks.alone else None, callback.stop_requested, run.deadline)
    if known:
        score_N: Floats = pd.read_parquet(run.home / FILE)["score"].to_numpy()
    else:
        callback.say(f"Reading {len(rows):,} rows with the backbone, to choose by {config.data.select.by} ...")
        if (aim := config.data.select.target) is not None:
            plain = config.data.model_copy(update={"format": "auto", "columns": {}})
            target = tokenized.read(aim, plain, tokenizer, template)
            score_N = gradient_choice.scores(rows, target, config, run, callback, begin, store)
        else:
            by = config.data.select.by
            assert by == "perplexity" or by == "ifd"
            score_N = backbone_scores(by, rows, config, run, tokenizer, store)
    kept_K, note = selection.chosen(config.data.select, rows.lengths, score_N)
    if first and not known:
        kept_N = np.isin(np.arange(len(rows)), kept_K)
        buffer = io.BytesIO()
        pd.DataFrame({"place": list(rows.places()), "score": score_N, "kept": kept_N}).to_parquet(buffer)
        files.write_bytes(run.path / FILE, buffer.getvalue())
        store.clear()
        shutil.rmtree(run.path / gradient_choice.FOLDER, ignore_errors=True)
    run.ranks.wait()
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
    found = row_scores.row_scores(
        by,
        backbone.model,
        output_heads.find(backbone.model, backbone.model),
        rows.subset(np.arange(ranks.rank, len(rows), ranks.world)),
        start=0 if start is None else start,
        scoring=lambda name: store.by(f"{by} {name}"),
    )
    score_N = np.empty(len(rows))
    for rank, share in enumerate(ranks.gathered(found)):
        score_N[rank :: ranks.world] = share
    return score_N
