"""Views of conversations rewrite text and keep special tokens, rows and the length that a model may read."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.run_files import write_lines
from workbench.config import DataConfig, ModelConfig
from workbench.config.sections.tta_config import TtaConfig
from workbench.data.text import conversation_views, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.models import backbones

TOKENIZER = backbones.tokenizer(ModelConfig(id="starter"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenizedSet:
    told = [{"prompt": f"Who saw the Old King {n}?", "completion": f" It was Ann, {n} times!"} for n in range(6)]
    path = write_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", told)
    return tokenized.read(str(path), DataConfig(train=str(path)), TOKENIZER, ChatEncoder(TOKENIZER))


def shown(rows: TokenizedSet, **tta: object) -> list[conversation_views.ConversationView]:
    config = TtaConfig.model_validate(tta)
    return list(conversation_views.views(rows, config, TOKENIZER, seed=0, max_tokens=200))


def test_text_between_special_tokens_is_rewritten(rows: TokenizedSet) -> None:
    lower, upper = shown(rows, views=["lower", "upper"])
    special = "|".join(map(re.escape, [*TOKENIZER.all_special_tokens, *TOKENIZER.get_added_vocab()]))
    for row in range(len(rows)):
        text = str(TOKENIZER.decode(rows[row].input_ids))
        for view, change in ((lower, str.lower), (upper, str.upper)):
            parts = [part if re.fullmatch(special, part) else change(part) for part in re.split(f"({special})", text)]
            assert TOKENIZER.decode(view[row].input_ids) == "".join(parts) != text
            assert len(view[row].input_ids) == view.lengths[row] and view[row].supervised[-1]
        np.testing.assert_array_equal(replace(lower, change=str)[row].input_ids, rows[row].input_ids)
    batch = upper.batch(np.asarray([1, 4]))
    assert batch.tokens == upper.lengths[[1, 4]].sum()


def test_typos_are_the_same_again_and_other_ones_in_each_copy(rows: TokenizedSet) -> None:
    (first, second), (again, _) = (shown(rows, views=["typos"], copies=2) for _ in range(2))
    for row in range(len(rows)):
        np.testing.assert_array_equal(first[row].input_ids, again[row].input_ids)
    assert any(first[row].input_ids.tolist() != second[row].input_ids.tolist() for row in range(len(rows)))


def test_a_row_that_would_be_too_long_stays(rows: TokenizedSet) -> None:
    (upper,) = shown(rows, views=["upper"])
    short = replace(upper, max_tokens=int(upper.lengths[0]) - 1)
    np.testing.assert_array_equal(short[0].input_ids, rows[0].input_ids)
