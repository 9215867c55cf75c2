"""The example of a training loop of a user's own learns, saves what it learnt, and needs public names alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch

import workbench
from workbench import adapters, config
from workbench.config import plugins

SCRIPT = Path(__file__).parents[2] / "scripts" / "own_loop.py"


def test_the_loss_falls_and_what_was_saved_is_what_was_trained(tmp_path: Path) -> None:
    example = plugins.module(SCRIPT, key="plugins")
    rows = example.ROWS.model_copy(update={"limit": 10, "held_out": 0.2, "max_tokens": 96, "truncate": "left"})
    model, losses = example.train(rows, steps=12, size=4)
    assert len(losses) == 12 and sum(losses[-2:]) < 0.8 * sum(losses[:2])

    workbench.save_adapter(model, tmp_path)
    tokenizer = workbench.load_tokenizer(example.BACKBONE)
    bare = workbench.load_backbone(example.BACKBONE, tokenizer).model
    asked = tokenizer("Who lived in the wood?", return_tensors="pt")
    with torch.no_grad():
        untrained = bare(**asked).logits
        saved = workbench.load_adapter(bare, tmp_path)(**asked).logits
        torch.testing.assert_close(saved, model(**asked).logits, rtol=0, atol=0)
    assert not torch.equal(saved, untrained)
    assert 0 < example.score(tmp_path, rows) < 10


def test_it_is_short_and_takes_public_names_alone() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 60
    tree = list(ast.walk(ast.parse(text)))
    imported = {node.module: {each.name for each in node.names} for node in tree if isinstance(node, ast.ImportFrom)}
    ours = {name: names for name, names in imported.items() if name is not None and name.startswith("workbench")}
    public = {"workbench.adapters": adapters.__all__, "workbench.config": config.__all__}
    assert ours.keys() == public.keys() and all(names <= set(public[module]) for module, names in ours.items())
    names = set(re.findall(r"\bworkbench\.(\w+)\(", text))
    assert len(names) > 8 and names <= set(workbench.__all__)
