"""Mistakes with sparse training and growing batches end in status 2 and a message with place and cure."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import AssertRefused, Case, file

CHECK = "check my.yaml"
SPARSE = f"{CHECK} 'adapter={{method: sparse, %s}}'"
FULL = f"{CHECK} 'adapter={{method: full, sparsity: 0.5}}'"
TWO_OF_FOUR = f"{CHECK} model.sparsity=2:4"
CASES = {
    "nothing": Case(SPARSE % "share: 0", "adapter.share", "greater than 0"),
    "everything": Case(SPARSE % "share: 1", "adapter.share", "less than 1"),
    "less than a weight": Case(SPARSE % "share: 1e-9", "weights. Write", "adapter.share="),
    "rule": Case(SPARSE % "by: fischer", "adapter.by", "'fisher'"),
    "movement from nowhere": Case(SPARSE % "by: movement", "by=movement compares", "Write adapter.trained=RUN"),
    "a training that nobody reads": Case(
        SPARSE % "trained: one", "trained is for by=movement, not for by=fisher", "Leave adapter.trained out"
    ),
    "a training that is not there": Case(
        SPARSE % "by: movement, trained: nowhere", "adapter.trained=nowhere holds no model", "adapter.trained=RUN"
    ),
    "a training of an adapter": Case(
        SPARSE % "by: movement, trained: hollow",
        "adapter.trained=hollow holds no model",
        "full fine-tuning",
        file("hollow", ""),
    ),
    "rows that nobody reads": Case(
        SPARSE % "by: magnitude, rows: 8", "by=magnitude reads no rows", "Leave adapter.rows"
    ),
    "no rows": Case(SPARSE % "rows: 0", "adapter.rows", "greater than 0"),
    "quantised": Case(
        SPARSE % "share: 0.1" + " model.weights=nf4", "it compares single weights", "or adapter.method=lora"
    ),
    "rank of a matrix": Case(SPARSE % "rank: 4", "adapter.rank", "unknown key"),
    "gradients in pieces": Case(
        SPARSE % "share: 0.1" + " distributed.zero=2", "looks at gradients", "distributed.zero=0"
    ),
    "all of the gradient": Case(f"{CHECK} optimizer.gradient_share=1", "optimizer.gradient_share", "less than 1"),
    "none of the gradient": Case(f"{CHECK} optimizer.gradient_share=0", "optimizer.gradient_share", "greater than 0"),
    "a share in pieces": Case(
        f"{CHECK} optimizer.gradient_share=0.1 distributed.zero=2",
        "optimizer.gradient_share goes with whole weights",
        "zero=0",
    ),
    "growth without a measure": Case(
        f"{CHECK} batch.growth=64 train.steps=9", "batch.growth follows the measured", "Write optimizer.noise_scale=10"
    ),
    "growth backwards": Case(
        f"{CHECK} batch.growth=2 optimizer.noise_scale=5 train.steps=9",
        "batch.growth=2 is no growth",
        "Write batch.growth=",
    ),
    "growth of epochs": Case(
        f"{CHECK} batch.growth=64 optimizer.noise_scale=5 train.steps=null train.epochs=2",
        "batch.growth leaves open how many steps",
        "Write train.steps",
    ),
    "no rows at most": Case(f"{CHECK} batch.growth=0", "batch.growth", "greater than 0"),
    "two orders": Case(
        f"{CHECK} batch.growth=64 optimizer.noise_scale=5 train.steps=9 data.curriculum.by=length",
        "batch.growth and data.curriculum both say",
        "Leave one of them out",
    ),
    "growth of rows that losses draw": Case(
        f"{CHECK} batch.growth=64 optimizer.noise_scale=5 train.steps=9 data.sampling.by=tilted",
        "optimizer.noise_scale measures rows that are drawn evenly",
        "Leave it or data.sampling out",
    ),
    "all pruned": Case(f"{CHECK} 'adapter={{method: full, sparsity: 1}}'", "adapter.sparsity", "less than 1"),
    "pruned beside an adapter": Case(f"{CHECK} adapter.sparsity=0.5", "adapter.sparsity", "unknown key"),
    "zeros that are mixed": Case(
        f"{FULL} optimizer.name=muon", "optimizer.name=muon moves a weight", "Write optimizer.name=adamw"
    ),
    "zeros in pieces": Case(
        f"{FULL} distributed.zero=2", "adapter.sparsity keeps single weights", "distributed.zero=0"
    ),
    "another sparsity": Case(f"{CHECK} model.sparsity=1:4", "model.sparsity", "'2:4'"),
    "frozen zeros of all weights": Case(
        f"{TWO_OF_FOUR} adapter.method=full", "adapter.method=full trains such weights", "adapter.sparsity=0.5"
    ),
    "frozen zeros of single weights": Case(
        f"{TWO_OF_FOUR} adapter.method=shira", "adapter.method=shira trains such weights", "Write adapter.method=lora"
    ),
    "frozen zeros of last blocks": Case(
        f"{TWO_OF_FOUR} adapter.method=last-layers", "last-layers trains such", "Write adapter.method=lora"
    ),
    "packed zeros": Case(
        f"{TWO_OF_FOUR} model.weights=nf4", "model.weights=nf4 packs them", "Write model.weights=bfloat16"
    ),
    "frozen zeros in pieces": Case(f"{TWO_OF_FOUR} distributed.zero=3", "model.sparsity with zero=3", "Leave it out"),
    "frozen zeros over devices": Case(
        f"{TWO_OF_FOUR} distributed.tensor=2", "was not tried with model.sparsity", "Write model.sparsity=null"
    ),
    "frozen zeros in stages": Case(
        f"{TWO_OF_FOUR} distributed.pipeline=2", "was not tried with model.sparsity", "Write model.sparsity=null"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
