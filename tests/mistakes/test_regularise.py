"""Mistakes with section `regularise` end in status 2 and a message with place and cure, before training."""

from __future__ import annotations

import pytest

from tests.mistakes.cases import SUMS, AssertRefused, Case

CHECK = "check my.yaml"
CASES = {
    "noise without size": Case(f"{CHECK} regularise.neftune=0", "regularise.neftune", "greater than 0"),
    "noise as a switch": Case(f"{CHECK} regularise.neftune=on", "regularise.neftune", "number"),
    "every block": Case(f"{CHECK} regularise.stochastic_depth=1", "regularise.stochastic_depth", "less than 1"),
    "in percent": Case(f"{CHECK} regularise.label_smoothing=10", "regularise.label_smoothing", "less than 1"),
    "a penalty that rewards": Case(f"{CHECK} regularise.z_loss=-1e-4", "regularise.z_loss", "greater than or equal"),
    "a peer's name": Case(f"{CHECK} regularise.neftune_noise_alpha=5", "unknown key", "neftune"),
    "the other spelling": Case(f"{CHECK} regularize.neftune=5", "unknown key", "regularise"),
    "every value": Case(f"{CHECK} regularise.mixout=1", "regularise.mixout", "less than 1"),
    "values in two places": Case(
        f"{CHECK} regularise.mixout=0.1 optimizer.sam=0.05", "optimizer.sam compares gradients", "Leave one of them out"
    ),
    "noise of values": Case(
        f"{CHECK} regularise.mixout=0.1 optimizer.noise_scale=5", "optimizer.noise_scale", "Leave one of them out"
    ),
    "values in pieces": Case(
        f"{CHECK} regularise.mixout=0.1 distributed.zero=2", "regularise.mixout goes with whole", "zero=0"
    ),
    "equal passes": Case(f"{CHECK} regularise.r_drop=1", "they are the same", "adapter.dropout=0.1"),
    "passes that share a rotation": Case(
        f"{CHECK} regularise.r_drop=1 'adapter={{method: boft, dropout: 0.1}}'", "they are the same", "adapter.dropout"
    ),
    "a reward for chance": Case(f"{CHECK} regularise.r_drop=-1", "regularise.r_drop", "greater than or equal to 0"),
    "two comparisons": Case(
        f"{CHECK} recipe=distill distill.teacher.id=starter adapter.dropout=0.1 regularise.r_drop=1",
        "compares with a teacher",
        "distill.alpha",
    ),
    "pairs of passes": Case(
        f"{CHECK} recipe=prefer adapter.dropout=0.1 regularise.r_drop=1",
        "compares log-probabilities as they are",
        "Leave it out",
    ),
    "passes in one sequence": Case(
        f"{CHECK} regularise.r_drop=1 adapter.dropout=0.1 batch.packing=true",
        "lays padded rows twice",
        "batch.packing=auto",
    ),
    "outputs that change": Case(
        f"{CHECK} regularise.neftune=5 freeze.policy=static freeze.layers=0.5 freeze.cache=memory",
        "they give something else each time",
        "Write freeze.cache=off",
    ),
    "smooth labels of rows": Case(
        f"{CHECK} recipe=classify regularise.label_smoothing=0.1", "not for classify", "classes.smoothing"
    ),
    "small logits of classes": Case(f"{CHECK} recipe=classify regularise.z_loss=1e-4", "not for classify", "See"),
    "words in pictures": Case(
        f"{CHECK} recipe=classify data.format=image regularise.neftune=5", "these rows have none", "Leave it out"
    ),
    "members that differ": Case(
        f"{CHECK} recipe=sweep of=sft 'sweep.over={{regularise.neftune: [1, 5]}}'",
        "it is the same for all members",
        "Write it beside the sweep",
        SUMS,
    ),
    "away from nowhere": Case(f"{CHECK} optimizer.l2_start=-1", "optimizer.l2_start", "greater than or equal to 0"),
    "a start in pieces": Case(
        f"{CHECK} optimizer.l2_start=0.1 distributed.zero=2", "optimizer.l2_start goes with whole", "zero=0"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_says_where_and_what_to_write(case: Case, assert_refused: AssertRefused) -> None:
    assert_refused(case)
