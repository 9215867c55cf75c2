"""Mistakes in optimizers, averages and schedules, by the section that they are in."""

from __future__ import annotations

from tests.mistakes.pacing_cases import Table

OPTIMIZERS: Table = {
    "name": ("optimizer.name=adam", "optimizer.name: expected 'adamw'", "found 'adam'"),
    "no section": ("optimizer=lion", "optimizer: expected keys of its own", "such as optimizer.name"),
    "setting of another": (
        "optimizer.momentum=0.9",
        "adamw has no momentum",
        "Leave optimizer.momentum out, or write optimizer.name=sgd|muon|lars",
    ),
    "settings of others": ("optimizer.name=lion optimizer.eps=1e-8", "lion has no eps", "write optimizer.name=adamw|"),
    "one beta": ("optimizer.betas=[0.9]", "optimizer.betas", "a list such as [a, b], found [0.9]"),
    "three betas": ("optimizer.betas=[0.9,0.9,0.9]", "optimizer.betas", "at most 2 items"),
    "a whole beta": ("optimizer.betas=[0.9,1]", "optimizer.betas.1", "less than 1, found 1"),
    "whole matrices of an adapter": (
        "optimizer.name=galore",
        "optimizer.name=galore saves memory where whole matrices train, and adapter.method=lora",
        "Write optimizer.name=adamw, or adapter.method=full",
    ),
    "rows of an adapter": (
        "optimizer.name=adam_mini",
        "optimizer.name=adam_mini saves memory",
        "Write optimizer.name=adamw",
    ),
    "rank of others": (
        "optimizer.rank=8",
        "adamw has no rank",
        "Leave optimizer.rank out, or write optimizer.name=galore|apollo",
    ),
    "curvature of others": (
        "optimizer.curvature_every=5",
        "adamw has no curvature_every",
        "Leave optimizer.curvature_every out, or write optimizer.name=sophia|shampoo",
    ),
    "a factor on no curvature": (
        "optimizer.name=shampoo optimizer.curvature_factor=0.1",
        "shampoo has no curvature_factor",
        "or write optimizer.name=sophia",
    ),
    "labels that nobody draws": (
        "recipe=classify optimizer.name=sophia",
        "optimizer.name=sophia draws tokens from what the model predicts, and recipe=classify has other labels",
        "Write optimizer.name=adamw",
    ),
    "one draw of two passes": (
        "optimizer.name=sophia regularise.r_drop=1 adapter.dropout=0.1",
        "optimizer.name=sophia draws one token a label, which r_drop predicts twice",
        "Leave one of them out",
    ),
    "curvature never": ("optimizer.name=sophia optimizer.curvature_every=0", "curvature_every", "greater than 0"),
    "curvature that counts for nothing": (
        "optimizer.name=sophia optimizer.curvature_factor=0",
        "curvature_factor",
        "greater than 0",
    ),
    "a root that sophia has not": (
        "optimizer.name=sophia optimizer.eps=1e-8",
        "sophia has no eps",
        "optimizer.name=adamw|",
    ),
    "momentum of sophia": ("optimizer.name=sophia optimizer.momentum=0.9", "sophia has no momentum", "sgd|muon|lars"),
    "momentum of shampoo": (
        "optimizer.name=shampoo optimizer.momentum=0.9",
        "shampoo has no momentum",
        "sgd|muon|lars",
    ),
    "subspace of shampoo": ("optimizer.name=shampoo optimizer.rank=8", "shampoo has no rank", "galore|apollo"),
    "subspace of others": ("optimizer.rank_every=8", "adamw has no rank_every", "write optimizer.name=galore|apollo"),
    "a vector of rank 4": (
        "'adapter={method: full}' optimizer.name=apollo_mini optimizer.rank=4",
        "apollo_mini has one dimension",
        "write optimizer.name=apollo",
    ),
    "no rank": ("optimizer.name=apollo optimizer.rank=0", "optimizer.rank", "greater than 0, found 0"),
    "no subspace": ("optimizer.name=galore optimizer.rank_every=0", "optimizer.rank_every", "greater than 0, found 0"),
    "scaled away": ("optimizer.name=galore optimizer.rank_scale=0", "optimizer.rank_scale", "greater than 0, found 0"),
    "momentum of a subspace": (
        "'adapter={method: full}' optimizer.name=galore optimizer.momentum=0.9",
        "galore has no momentum",
        "Leave optimizer.momentum out",
    ),
    "a subspace in pieces": (
        "'adapter={method: full}' optimizer.name=galore distributed.zero=2",
        "optimizer.name=galore goes with whole weights",
        "Write optimizer.name=adamw",
    ),
    "a subspace of two stacks": (
        "model.id=t5 'adapter={method: full}' optimizer.name=galore",
        "2 stacks of blocks",
        "Leave them out",
    ),
    "paged on a CPU": ("optimizer.name=paged_adamw", "optimizer.name=paged_adamw", "Write optimizer.name=adamw."),
    "paged in 8 bits on a CPU": (
        "optimizer.name=paged_adamw8bit",
        "this run is on cpu",
        "Write optimizer.name=adamw8bit.",
    ),
    "orthogonal vectors": (
        "'adapter={method: ia3}' optimizer.name=muon",
        "optimizer.name=muon is for matrices inside the transformer blocks, and adapter.method=ia3",
        "Write optimizer.name=adamw, or adapter.method=lora",
    ),
    "orthogonal and frozen": (
        "'adapter={method: full}' optimizer.name=muon freeze.policy=static freeze.layers=5",
        "optimizer.name=muon",
        "Write optimizer.name=adamw",
    ),
    "orthogonal in two stacks": ("model.id=t5 optimizer.name=muon", "2 stacks of blocks", "Leave them out"),
    "layer decay in two stacks": ("model.id=t5 optimizer.layer_decay=0.9", "2 stacks of blocks", "Leave them out"),
    "no layer decay": ("optimizer.layer_decay=0", "optimizer.layer_decay", "greater than 0, found 0"),
    "no rate of the head": ("optimizer.head_rate=0", "optimizer.head_rate", "greater than 0, found 0"),
    "penalty": ("optimizer.l1=-1", "optimizer.l1", "greater than or equal to 0, found -1"),
    "no radius": ("optimizer.sam=0", "optimizer.sam", "greater than 0, found 0"),
    "adaptive nothing": ("optimizer.sam_adaptive=true", "is a kind of SAM, which is off", "Write optimizer.sam=0.5"),
    "nothing to reuse": ("optimizer.sam_reuse=0.7", "sam_reuse is for the steps between", "Write optimizer.sam=0.05"),
    "nothing between": ("optimizer.sam=0.05 optimizer.sam_reuse=0.7", "there are none", "optimizer.sam_every=5"),
    "reused times nothing": (
        "optimizer.sam=0.05 optimizer.sam_every=5 optimizer.sam_reuse=0",
        "optimizer.sam_reuse",
        "greater than 0",
    ),
    "interval of nothing": ("optimizer.sam_every=3", "sam_every says when SAM is used", "Write optimizer.sam=0.05"),
    "lookahead of one": ("optimizer.lookahead=1", "optimizer.lookahead", "greater than or equal to 2, found 1"),
    "part of nothing": (
        "optimizer.lookahead_alpha=0.3",
        "lookahead_alpha is for Lookahead",
        "Write optimizer.lookahead=5",
    ),
    "lookahead with layers that change": (
        "optimizer.lookahead=5 freeze.policy=lisa",
        "optimizer.lookahead=5 holds two values of every weight, and freeze.policy=lisa",
        "Write optimizer.lookahead=null, or leave freeze out",
    ),
    "schedule-free with layers that change": (
        "optimizer.name=schedule_free schedule.name=constant freeze.policy=gradual",
        "optimizer.name=schedule_free holds two values",
        "Write optimizer.name=adamw, or leave freeze out",
    ),
    "schedule-free with a schedule": (
        "optimizer.name=schedule_free schedule.name=cosine",
        "schedule.name=cosine lowers the rate",
        "Write schedule.name=constant",
    ),
    "schedule-free with lookahead": (
        "optimizer.name=schedule_free schedule.name=constant optimizer.lookahead=5",
        "schedule_free averages already",
        "Leave optimizer.lookahead out",
    ),
    "schedule-free without a beta": (
        "optimizer.name=schedule_free schedule.name=constant optimizer.betas=[0,0.9]",
        "its first beta, which cannot be 0",
        "Write optimizer.betas=[0.9, 0.999]",
    ),
    "gradients written over": (
        "'adapter={method: adalora}' optimizer.name=lars",
        "optimizer.name=lars writes over the gradients",
        "Write optimizer.name=adamw, or adapter.method=lora",
    ),
    "scaling from nothing": (
        "optimizer.scaling=sqrt",
        "scaling=sqrt needs the batch size",
        "optimizer.reference_batch=32",
    ),
    "reference of nothing": (
        "optimizer.reference_batch=32",
        "reference_batch is for scaling",
        "optimizer.scaling=sqrt",
    ),
    "noise of one row": (
        "optimizer.noise_scale=10 batch.size=1",
        "optimizer.noise_scale compares parts of a batch",
        "Write batch.size=2 or more",
    ),
    "sharpness in a sweep": (
        "recipe=sweep evaluate.every=0.5 sweep.over.optimizer.sam=[null,0.05]",
        "sweep.over.optimizer.sam: members cannot differ",
        "Write it beside the sweep",
    ),
}

AVERAGES: Table = {
    "method": ("average.method=emma", "average.method", "'none', 'ema', 'swa', 'lawa' or 'rna', found 'emma'"),
    "key": ("average.metod=ema", "average.metod: unknown key.", "Did you mean `method`?"),
    "nothing to choose by": (
        "average.method=ema",
        "average.method=ema ships the average where its held-out loss is the lower one",
        "Write evaluate.every=0.25",
    ),
    "of folds": ("cv.yaml average.method=ema", "the out-of-fold score is measured on", "Leave average out"),
    "samples of no average": ("average.k=3", "k is for rna and lawa, not for none", "Write average.method=lawa"),
    "samples of a decay": (
        "average.method=ema average.k=3 evaluate.every=1",
        "k is for rna and lawa, not for ema",
        "leave average.k",
    ),
    "decay of samples": (
        "average.method=lawa average.decay=0.9 evaluate.every=1",
        "decay is for ema, not for lawa",
        "Write average.method=ema, or leave average.decay out",
    ),
    "no regularisation": ("average.method=rna average.ridge=0 evaluate.every=1", "average.ridge", "greater than 0"),
    "regularisation of a mean": (
        "average.method=lawa average.ridge=0.1 evaluate.every=1",
        "ridge is for rna, not for lawa",
        "Write average.method=rna, or leave average.ridge out",
    ),
    "one sample": ("average.method=lawa average.k=1 evaluate.every=1", "average.k", "greater than or equal to 2"),
    "start at the end": (
        "average.method=swa average.start=1 evaluate.every=1",
        "average.start",
        "less than 1, found 1",
    ),
    "device": ("average.method=swa average.device=gpu", "average.device", "'same' or 'cpu', found 'gpu'"),
    "of an average": (
        "average.method=ema evaluate.every=1 optimizer.lookahead=5",
        "average.method=ema beside an optimizer that averages already",
        "Leave one of them out",
    ),
    "of ranks": (
        "'adapter={method: adalora}' average.method=ema evaluate.every=1",
        "ranks that adapter.method=adalora took back",
        "Write average.method=lawa, or adapter.method=lora",
    ),
}

SCHEDULES: Table = {
    "name": ("schedule.name=plane", "schedule.name: expected 'linear'", "found 'plane'"),
    "no section": ("schedule=cosine", "schedule: expected keys of its own", "such as schedule.name"),
    "decay of another": (
        "schedule.name=cosine schedule.decay=0.5",
        "decay and decay_shape are for wsd, not for cosine",
        "Write schedule.name=wsd, or leave them out",
    ),
    "floor of a constant": (
        "schedule.name=constant schedule.floor=0.1",
        "constant never falls to floor 0.1",
        "Leave schedule.floor out",
    ),
    "cycle without a rise": ("schedule.name=one_cycle schedule.warmup=0", "one_cycle needs a", "schedule.warmup=0.3"),
    "root without a rise": (
        "schedule.name=inverse_sqrt schedule.warmup=0",
        "inverse_sqrt needs",
        "schedule.warmup=0.05",
    ),
    "start without a rise": ("schedule.start=0.1 schedule.warmup=0", "start 0.1 is where", "leave schedule.start out"),
    "floor above the start": ("schedule.name=one_cycle schedule.floor=0.1", "above start 0.0", "schedule.start=0.1"),
    "a plateau unseen": ("schedule.name=plateau", "evaluate.every=null measures none", "Write evaluate.every=0.1"),
    "a plateau in time": (
        "schedule.name=plateau evaluate.every=1 budget.time=5m",
        "a budget of time leaves them out",
        "Write schedule.name=linear",
    ),
    "a plateau of folds": ("cv.yaml schedule.name=plateau", "out-of-fold score", "Write schedule.name=linear"),
    "a plateau after the end": (
        "schedule.name=plateau evaluate.every=1 evaluate.patience=2 save.ship=best",
        "evaluate.patience=2 ends the run before schedule.patience=2",
        "Write evaluate.patience=5",
    ),
    "no patience": ("schedule.name=plateau schedule.patience=0", "schedule.patience", "greater than 0, found 0"),
    "a share as patience": ("schedule.name=plateau schedule.patience=0.1", "schedule.patience", "valid integer"),
    "a drop to nothing": ("schedule.name=plateau schedule.drop=0", "schedule.drop", "greater than 0, found 0"),
    "a drop that is none": ("schedule.name=plateau schedule.drop=1", "schedule.drop", "less than 1, found 1"),
    "patience of another": ("schedule.patience=3", "patience and drop are for plateau", "Write schedule.name=plateau"),
    "drop of another": ("schedule.name=wsd schedule.drop=0.1", "not for wsd", "or leave them out"),
    "a peer's factor": ("schedule.name=plateau schedule.factor=0.1", "schedule.factor: unknown key", "Known:"),
    "a plateau of an average": (
        "schedule.name=plateau evaluate.every=1 optimizer.name=schedule_free",
        "schedule.name=plateau lowers the rate",
        "Write schedule.name=constant",
    ),
    "all warm-up": ("schedule.warmup=1", "schedule.warmup", "less than 1, found 1"),
}
