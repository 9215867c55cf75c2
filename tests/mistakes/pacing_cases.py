"""Mistakes in what trains when, until when and by what, by the section that they are in."""

from __future__ import annotations

Table = dict[str, tuple[str, str, str]]
"""By its name: overrides of my.yaml, or a recipe with overrides; the place and the cure that a message must name."""

TEACHER = "recipe=distill distill.teacher.id=stories"
FREEZING: Table = {
    "policy": ("freeze.policy=lysa", "freeze.policy: unknown policy 'lysa'.", "Did you mean `lisa`?"),
    "policy that is none": ("freeze.policy=7", "freeze.policy: unknown policy 7.", "Known: autofreeze, badam, egeria,"),
    "no section": ("freeze=static", "freeze: expected keys of its own", "such as freeze.policy"),
    "key": ("freeze.polcy=static", "freeze.polcy: unknown key.", "Did you mean `policy`?"),
    "key of a policy": ("freeze.policy=lisa freeze.actve=2", "freeze.actve: unknown key.", "Did you mean `active`?"),
    "key of an unknown policy": ("freeze.policy=statik freeze.layers=2", "policy 'statik'", "Did you mean `static`?"),
    "key without its policy": (
        "freeze.layers=2",
        "freeze.layers: is for freeze.policy=static, not for none",
        "Write freeze.policy=static, or leave freeze.layers out.",
    ),
    "key of another policy": (
        "freeze.policy=lisa freeze.layers=2 freeze.every=3",
        "freeze.layers: is for freeze.policy=static, not for lisa",
        "leave freeze.layers out",
    ),
    "key of several policies": (
        "freeze.every=3",
        "freeze.every: is for freeze.policy=autofreeze|badam|egeria|lisa|smartfrz",
        "Write",
    ),
    "no layer": ("freeze.policy=static freeze.layers=0", "freeze.layers", "greater than 0, found 0"),
    "more than all layers": (
        "freeze.policy=static freeze.layers=99",
        "freeze.layers=99 is more than the 5 blocks",
        "Write a number below 5, or a share such as freeze.layers=0.5",
    ),
    "all layers": (
        "freeze.policy=static freeze.layers=5",
        "freeze.policy=static freezes all 5 blocks",
        "Write freeze.layers=2, or adapter.method=full",
    ),
    "a share that is all": ("freeze.policy=static freeze.layers=0.99", "freezes all 5 blocks", "Write freeze.layers=2"),
    "all layers of a sweep": (
        "recipe=sweep sweep.over.seed=[0,1] evaluate.every=0.5 freeze.policy=static freeze.layers=5",
        "freezes all 5 blocks",
        "Write freeze.layers=2",
    ),
    "more than all layers of folds": (
        "cv.yaml freeze.policy=lisa freeze.active=9",
        "freeze.active=9",
        "freeze.active=5",
    ),
    "more active layers than there are": (
        "freeze.policy=lisa freeze.active=99",
        "freeze.active=99 is more than the 5 blocks",
        "Write freeze.active=5 or less",
    ),
    "blocks of an adapter": (
        "freeze.policy=badam",
        "freeze.policy=badam saves memory where all weights train, and adapter.method=lora",
        "Write adapter.method=full, or freeze.policy=lisa",
    ),
    "steps of all blocks": (
        "'adapter={method: full}' freeze.policy=badam optimizer.name=lion",
        "freeze.policy=badam begins the optimizer anew in each block",
        "Write optimizer.name=adamw|sgd",
    ),
    "no step of a block": ("freeze.policy=badam freeze.every=0", "freeze.every", "greater than 0, found 0"),
    "an order of blocks": ("freeze.policy=badam freeze.order=up", "freeze.order", "'ascending' or 'descending'"),
    "no active layer": ("freeze.policy=lisa freeze.active=0", "freeze.active", "greater than 0, found 0"),
    "thawed after the end": ("freeze.policy=gradual freeze.until=2", "freeze.until", "less than or equal to 1"),
    "frozen at the end": ("freeze.policy=freezeout freeze.first=1", "freeze.first", "less than 1, found 1"),
    "percentile": ("freeze.policy=autofreeze freeze.percentile=0", "freeze.percentile", "greater than 0, found 0"),
    "threshold in percent": (
        "freeze.policy=smartfrz freeze.threshold=50",
        "freeze.threshold",
        "less than or equal to 1",
    ),
    "no threshold": ("freeze.policy=smartfrz freeze.threshold=0", "freeze.threshold", "greater than 0"),
    "threshold of others": (
        "freeze.policy=egeria freeze.threshold=0.5",
        "freeze.threshold: is for freeze.policy=smartfrz, not for egeria",
        "Write freeze.policy=smartfrz",
    ),
    "more than all of it": ("freeze.policy=smartfrz freeze.most=2", "freeze.most", "less than or equal to 1"),
    "window": ("freeze.policy=egeria freeze.window=1", "freeze.window", "greater than or equal to 2, found 1"),
    "method before all layers": (
        "'adapter={method: prompt}' freeze.policy=static",
        "freeze.policy=static does not go with adapter.method=prompt",
        "take adapter.method=lora or full",
    ),
    "method that freezes": (
        "'adapter={method: linear-probe}' freeze.policy=gradual",
        "freeze.policy=gradual does not go with adapter.method=linear-probe",
        "Leave freeze out",
    ),
    "new tokens": (
        "freeze.policy=static model.new_tokens=[<a>]",
        "model.new_tokens train rows of the embeddings",
        "Leave one of them out",
    ),
    "two stacks": (
        "model.id=t5 freeze.policy=static",
        "has 2 stacks of blocks",
        "take an encoder or a causal backbone",
    ),
    "cache": ("freeze.policy=static freeze.cache=ram", "freeze.cache", "'memory', 'disk' or 'off', found 'ram'"),
    "precision of a cache": ("freeze.policy=static freeze.stored=fp8", "freeze.stored", "'bfloat16' or 'float32'"),
    "cache of nothing": (
        "freeze.cache=disk",
        "freeze.cache=disk keeps what frozen blocks give, and freeze.policy=none",
        "Write freeze.policy=static, or leave freeze.cache out",
    ),
    "cache without a prefix": (
        "freeze.policy=lisa freeze.cache=disk",
        "lisa freezes no prefix whose outputs freeze.cache=disk",
        "Leave freeze.cache out",
    ),
    "cache over adapters with dropout": (
        "freeze.policy=gradual freeze.cache=memory adapter.dropout=0.1",
        "freeze.cache=memory keeps what frozen blocks give, and freeze.policy=gradual freezes adapters",
        "Write adapter.dropout=0, or freeze.cache=off.",
    ),
    "cache with dropout": (
        "freeze.policy=static freeze.cache=memory model.dropout=true",
        "freeze.cache=memory keeps what frozen blocks give, and with model.dropout",
        "Write model.dropout=false, or freeze.cache=off",
    ),
    "cache of rows that a student writes": (
        f"{TEACHER} freeze.policy=static freeze.cache=disk distill.on_policy.share=0.5",
        "freeze.cache: distill.on_policy changes rows",
        "Write freeze.cache=off",
    ),
    "cache of blocks that are looked into": (
        f"{TEACHER} freeze.policy=static freeze.cache=memory 'distill.match=[{{what: hidden_mse, layers: last}}]'",
        "freeze.cache: distill.match looks into blocks",
        "Write freeze.cache=off",
    ),
    "all layers of a student": (
        f"{TEACHER} freeze.policy=static freeze.layers=3 distill.student.layers=first-3",
        "freezes all 3 blocks",
        "Write freeze.layers=1",
    ),
    "layers of peers": (
        "recipe=distill distill.peers=2 freeze.policy=lisa",
        "distill.peers: freeze.policy: the members of a bank would freeze different layers",
        "leave that out",
    ),
    "cache of hidden tokens": (
        "recipe=mlm freeze.policy=static freeze.cache=disk",
        "recipe=mlm hides other tokens in each epoch",
        "Write freeze.cache=off",
    ),
}

BUDGETS: Table = {
    "time": ("budget.time=90x", "budget.time: '90x' is no time", "Write 90m, 1h30m, 45s"),
    "number of a time": ("budget.time=1.2.3h", "budget.time: '1.2.3h' is no time", "Write 90m"),
    "time that is none": ("budget.time=true", "budget.time: True is no time", "or a number of seconds"),
    "negative time": ("budget.time=-5m", "budget.time: '-5m' is no time", "Write 90m"),
    "no time": ("budget.time=0s", "budget.time", "greater than 0 or 'slurm'"),
    "no Slurm job": ("budget.time=slurm", "budget.time=slurm: this is no Slurm job", "such as budget.time=90m"),
    "no section": ("budget=90m", "budget: expected keys of its own", "such as budget.time"),
    "key": ("budget.tme=90m", "budget.tme: unknown key.", "Did you mean `time`?"),
    "energy without power": ("budget.energy=5", "energy 5 needs a rate", "Write budget.power as well"),
    "money without a price": ("budget.money=5", "money 5 needs a rate", "Write budget.price as well"),
    "power alone": ("budget.power=5", "power 5 limits nothing by itself", "Write budget.energy as well"),
    "price alone": ("budget.price=5", "price 5 limits nothing by itself", "Write budget.money as well"),
    "rates of other amounts": ("budget.money=5 budget.power=3", "power 3 limits nothing", "Write budget.price as well"),
    "unit of energy": ("budget.energy=1kWh budget.power=9", "budget.energy", "a valid number, found '1kWh'"),
    "no tokens": ("budget.tokens=0", "budget.tokens", "greater than 0, found 0"),
    "less than a step": (
        "budget.tokens=10",
        "budget.tokens=10 is used up within the first step",
        "Write budget.tokens=",
    ),
    "time of folds": (
        "cv.yaml budget.time=90m",
        "recipe=crossval has stages whose time is not known",
        "Write train.steps or budget.tokens",
    ),
    "time of a sweep": (
        "recipe=sweep sweep.over.seed=[0,1] evaluate.every=0.5 budget.money=3 budget.price=1",
        "budget: a sweep cannot end in time",
        "Write train.steps or budget.tokens",
    ),
    "method that plans steps": (
        "'adapter={method: adalora}' budget.tokens=9000",
        "adapter.method=adalora plans over a known number of steps",
        "Leave budget out and write train.steps",
    ),
}

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
        "optimizer.name=galore needs whole matrices",
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
