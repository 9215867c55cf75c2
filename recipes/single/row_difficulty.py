"""The difficulty of training rows for `data.curriculum`, by their file, a user's function or the backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from workbench.config import RunConfig
from workbench.data import row_order
from workbench.data.text.tokenized import raw_rows
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.evaluation.forward_passes import ResultStore
from workbench.evaluation.perplexity import Floats
from workbench.runs import files
from workbench.runs.run_directory import Run
from workbench.training.callbacks import Callback

if TYPE_CHECKING:
    from workbench.data.labelled.labelled_data import LabelledSet
    from workbench.data.labelled.records import RowReader

FILE = "difficulty.parquet"
"""In a run directory: place and loss of every training row by the backbone before training."""
Measure = Callable[[TokenizedSet], Floats]
"""From training rows to their loss (N,) by the backbone."""


def graded(rows: TokenizedSet, config: RunConfig, *, measure: Measure | None = None) -> TokenizedSet:
    """The rows with their difficulty, where the curriculum has one beside their length.

    Args:
        measure: Asks the backbone; None: chance stands in for what it would say.

    Raises:
        ConfigError: The user's file is wrong.
        DataError: A row has no number in the column.
    """
    curriculum = config.data.curriculum
    if not curriculum.graded:
        return rows
    if curriculum.by != "perplexity":
        return replace(rows, difficulty=row_order.row_difficulty(curriculum, raw_rows(rows, config.data)))
    found_N = row_order.random_difficulty(len(rows), seed=config.rows_seed) if measure is None else measure(rows)
    return replace(rows, difficulty=found_N)


def measured(
    rows: TokenizedSet, config: RunConfig, run: Run, callback: Callback, tokenizer: PreTrainedTokenizerBase
) -> Floats:
    """Loss (N,) of each row by the backbone before training, the same in all processes; a resumed run reads `FILE`."""
    if (known_N := _known(run)) is not None:
        return known_N
    from workbench.recipes.single import row_choice  # most curricula ask no backbone

    callback.say(f"Reading {len(rows):,} rows with the backbone, to order them by their loss ...")
    store = ResultStore(run.path if run.ranks.alone else None, callback.stop_requested, run.deadline)
    loss_N = row_choice.backbone_scores("perplexity", rows, config, run, tokenizer, store)
    if run.ranks.first:
        _write(run, list(rows.places()), loss_N)
        store.clear()
    run.ranks.wait()
    return loss_N


def probed(rows: LabelledSet, config: RunConfig, run: Run, callback: Callback, reader: RowReader) -> LabelledSet:
    """The rows with the loss of their class by linear probes of the frozen backbone, where the curriculum asks for it.

    The first process asks, all read what it wrote, and so does a resumed run.
    """
    if config.data.curriculum.by != "loss":
        return rows
    if _known(run) is None:
        from workbench.evaluation.frozen_features import cached_features, probe_losses

        callback.say(f"Linear probes of the frozen backbone order {len(rows):,} rows by their loss ...")
        if run.ranks.first:
            (features_ND,) = cached_features(config.model, reader, [rows.inputs])
            _write(
                run, list(rows.places()), probe_losses(features_ND, rows.targets_NC.argmax(1), seed=config.rows_seed)
            )
        run.ranks.wait()
    return replace(rows, difficulty=_known(run))


def _known(run: Run) -> Floats | None:
    """Losses (N,) that stand in `FILE`; None where nobody has measured them."""
    known = (run.home / FILE).exists()
    run.ranks.wait()
    if not known:
        return None
    import pandas as pd  # 0.2 s, and most runs come without these losses

    read_N: Floats = pd.read_parquet(run.home / FILE)["loss"].to_numpy(dtype=np.float64)
    return read_N


def _write(run: Run, places: list[str], loss_N: Floats) -> None:
    import pandas as pd

    files.write_bytes(run.path / FILE, pd.DataFrame({"place": places, "loss": loss_N}).to_parquet())
