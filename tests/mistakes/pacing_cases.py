"""Mistakes in what trains when and until when, by the section that they are in."""

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
        "freeze.every: is for freeze.policy=autofreeze|badam|egeria|lisa",
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
    "percentile of others": (
        "freeze.policy=egeria freeze.percentile=50",
        "freeze.percentile: is for freeze.policy=autofreeze, not for egeria",
        "Write freeze.policy=autofreeze",
    ),
    "more than all of it": ("freeze.policy=autofreeze freeze.most=2", "freeze.most", "less than or equal to 1"),
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
