"""Methods of PEFT that are not offered, and why."""

from __future__ import annotations

LORA_OPTIONS: dict[str, str] = {
    "arrow": "it trains nothing, but chooses among trained adapters. Take adapter.method=lora for each, "
    "and add them up with `workbench combine`.",
    "kasa": "it changes the frozen weights themselves. Take adapter.method=pissa.",
    "layer-replication": "it makes another, deeper backbone, which no setting of an adapter does here. "
    "Take adapter.method=lora.",
    "qalora": "PEFT has it for GPTQ weights alone. Take adapter.method=lora with model.weights=nf4.",
}
"""Options of PEFT's LoRA that are methods to those who know them, and that are not offered."""

NOT_OFFERED: dict[str, str] = {
    **LORA_OPTIONS,
    "adamss": "it clusters the singular vectors of each weight by k-means, which decides its shapes: sizes are not "
    "known before a run, and another machine's decomposition may not fit what was saved. Take adapter.method=psoft.",
    "adaption-prompt": "PEFT builds it into the attention of three families only, as it computed years ago. "
    "Take adapter.method=prefix, which gives attention keys and values of its own.",
    "cartridge": "it distils a long text into a prefix, from conversations about the text that are not in the rows. "
    "Take adapter.method=prefix.",
    "cpt": "it trains the tokens of examples in front of each row, with a loss of its own that weighs these. "
    "Take adapter.method=prompt.",
    "frod": "it is made of the values of all weights together: sizes are not known before a run, and in half precision "
    "the backbone itself is rounded by 2 %. Take adapter.method=osf or psoft.",
    "lily": "PEFT mixes its matrices by an average over all rows of a forward pass, so that a row's outputs depend on "
    "the rows beside it. Take adapter.method=lora.",
    "multitask-prompt-tuning": "it needs the task of each row, which rows here do not have. "
    "Take adapter.method=prompt for one task, or one of data.sources for each.",
    "poly": "it needs the task of each row, which rows here do not have. Take adapter.method=lora.",
    "shadow": "it trains a second, smaller backbone beside the first, with a loss of its own. "
    "Take adapter.method=parallel, or distil into a student (recipe=distill).",
    "xlora": "it trains no adapter, but what chooses among adapters that are trained already. "
    "Train these with adapter.method=lora, and add them up with `workbench combine`.",
}
"""Methods of PEFT's list that `adapter.method` does not have: the reason, and what to write instead."""
