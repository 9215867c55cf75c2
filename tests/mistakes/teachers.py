"""Mistakes that a person can make with a teacher, a student or a cache, in the world of `test_distillation`."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    place: str
    """What the message must name as the place."""
    cure: str
    words: str
    """Overrides."""


LORA = "distill.teacher.id=lora "
CACHE = "distill.cache.folder=cache distill.cache.k=8 "
CACHED = LORA + CACHE
BOTH = "'distill.teacher.id=[lora, other]' "
OF_CLASSES = "of=classify data.train=labelled.jsonl "
CLASSES = OF_CLASSES + "distill.teacher.id=classes "
FOLDS = OF_CLASSES + "distill.teacher.id=folds "
WRITING = "distill.answers.n=1 "
SERVED = "distill.teacher.url=http://127.0.0.1:9/v1 "
MASKED = "of=mlm data.train=texts.jsonl model.id=masked "


def matched(term: str, words: str = LORA) -> str:
    """`words`, and one term of distill.match."""
    return f"{words} 'distill.match=[{{{term}}}]'"


WRITTEN = {
    # Keys and values.
    "unknown key": Case("distill.los: unknown key", "Did you mean `loss`?", "distill.los=jsd"),
    "unknown key of a term": Case(
        "distill.match.0.lyers: unknown key", "Did you mean `layers`?", matched("what: hidden_mse, lyers: last")
    ),
    "unknown section": Case("distill.studnt: unknown key", "Did you mean `student`?", "distill.studnt.layers=all"),
    "unknown key of the cache": Case("distill.cache.dir: unknown key", "Known: dtype, folder", "distill.cache.dir=c"),
    "loss": Case("distill.loss: expected 'forward_kl', 'reverse_kl'", "found 'kl'", "distill.loss=kl"),
    "recipe of a recipe": Case("of: unknown task 'crossval'", "Known: classify", "of=crossval"),
    "one bound": Case("distill.temperature: [4]", "write one number, or two: from, to", "distill.temperature=[4]"),
    "three bounds": Case("distill.alpha: [0, 1, 0]", "write one number, or two", "distill.alpha=[0,1,0]"),
    "layers misspelt": Case(
        "distill.student.layers: 'evry-2'",
        "write all, important-4, important-50%, every-2",
        "distill.student.layers=evry-2",
    ),
    **{
        f"layers {layers}": Case("write all, important-4, important-50%", layers, f"distill.student.layers={layers}")
        for layers in ("important-400%", "every-2%", "important-0%")
    },
    "control": Case("expected true or false or 'auto'", "found 'maybe'", "distill.control=maybe"),
    "layers unsorted": Case("distill.student.layers: [2, 0]", "in rising order", "distill.student.layers=[2,0]"),
    "layers twice": Case("distill.student.layers: [2, 2]", "each layer once", "distill.student.layers=[2,2]"),
    "no layers": Case("distill.student.layers: []", "such as [0, 2, 4]", "distill.student.layers=[]"),
    **{
        f"{key}={value}": Case(
            f"distill.student.{key}: {value!r}", "a share such as 50%", f"distill.student.{key}={value}"
        )
        for key, value in (("heads", 0), ("neurons", "half"), ("channels", "0%"))
    },
    "importance of nothing": Case(
        "distill.student: importance=fisher", "Leave importance out", "distill.student.importance=fisher"
    ),
    "importance of random weights": Case(
        "random weights are all alike",
        "Leave importance out",
        "'distill.student={heads: 1, weights: random, importance: fisher}'",
    ),
    "match of something": Case(
        "distill.match.0.what: expected 'hidden_mse'", "or 'attention'", matched("what: hidden_states")
    ),
    "match of one": Case("distill.match: expected a list", "found 'relation'", "distill.match=relation"),
    # What goes together.
    "no teacher": Case("distill.teacher.id: name a teacher.", "Write a run directory, a folder", ""),
    "teachers, none": Case("distill.teacher.id: expected", "at least 1 item", "distill.teacher.id=[]"),
    "weights of nobody": Case("model.id: `teacher` asks for the weights", "distill.teacher.id", "model.id=teacher"),
    "another recipe": Case("distill is for recipe=distill", "Leave distill out", "recipe=sft distill.loss=jsd"),
    "peers and a teacher": Case(
        "distill: peers teach each other", "leave distill.teacher.id out", LORA + "distill.peers=2"
    ),
    "peers and a cache": Case("distill: peers compare", "leave distill.cache, match", CACHE + "distill.peers=2"),
    "one peer": Case("distill.peers: expected", "greater than or equal to 2", "distill.peers=1"),
    "cache and match": Case("distill: a cache", "leave distill.cache.folder out", matched("what: relation", CACHE)),
    "cache and answers": Case("distill: a cache", "on_policy out", CACHE + "distill.on_policy.share=0.5"),
    "cache and a schedule": Case(
        "distill: a cache is made at one temperature", "as one number", CACHE + "distill.temperature=[4,1]"
    ),
    "draws and another loss": Case(
        "distill: samples", "write distill.loss=forward_kl", "distill.cache.sampled=true distill.loss=reverse_kl"
    ),
    "a gap and k": Case(
        "gap=0.01 finds the smallest k, and k=8 is given", "Leave one", CACHED + "distill.cache.gap=0.01"
    ),
    "a gap of draws": Case(
        "draws lose nothing", "Leave gap or", "'distill.cache={folder: c, gap: 0.1, sampled: true}'"
    ),
    "a gap of no cache": Case("distill.cache: gap", "Write distill.cache.folder", LORA + "distill.cache.gap=0.1"),
    "a gap of all": Case("distill.cache.gap", "less than 1", LORA + "'distill.cache={folder: c, gap: 1}'"),
    "no gap": Case("distill.cache.gap", "greater than 0", LORA + "'distill.cache={folder: c, gap: 0}'"),
    "a schedule of one number": Case("schedule=cosine", "write distill.alpha='[0.9", LORA + "distill.schedule=cosine"),
    "shares of classes": Case(
        "of=classify takes the plain mean", "leave distill.teacher.shares", CLASSES + "distill.teacher.shares=[1,2]"
    ),
    "universal and a cache": Case("distill: loss=universal", "leave cache out", CACHE + "distill.loss=universal"),
    "other tokens and a gap": Case(
        "not measured of loss=gold", "distill.cache.k=64", "'distill.cache={folder: c, gap: 0.1}' distill.loss=gold"
    ),
    "other tokens and layers": Case(
        "loss=alm compares what two models say", "leave distill.match", matched("what: relation") + " distill.loss=alm"
    ),
    "classes and a cache": Case("distill: of=classify", "leave distill.cache and on_policy out", CLASSES + CACHE),
    "classes and peers": Case("distill: peers", "write of=sft", OF_CLASSES + "distill.peers=2"),
    "unlabelled text": Case("distill.unlabelled", "leave them out", "distill.unlabelled=held.jsonl"),
    "text out of fold": Case("teacher.out_of_fold", "leave them out", "distill.teacher.out_of_fold=true"),
    "masks and a cache": Case("distill: of=mlm hides other tokens", "leave cache and on_policy out", MASKED + CACHE),
    "vectors and a divergence": Case(
        "of=embed does not take distill.loss=jsd",
        "Write distill.loss=cosine|mse|relation",
        LORA + "of=embed distill.loss=jsd",
    ),
    "classes and a distance": Case(
        "of=classify does not take distill.loss=cosine",
        "Write distill.loss=forward_kl|",
        CLASSES + "distill.loss=cosine",
    ),
    "a distance at a temperature": Case(
        "temperature is for probabilities", "Leave it out", LORA + "of=embed distill.temperature=2"
    ),
    "vectors out of fold": Case(
        "of=embed compares outputs alone", "leave distill.match", LORA + "of=embed distill.teacher.out_of_fold=true"
    ),
    "ranks and an address": Case("teacher.url", "Write of=sft", SERVED + LORA + "of=rerank"),
    # A teacher that writes.
    "answers: unknown key": Case(
        "distill.answers.temprature: unknown key", "Did you mean `temperature`?", LORA + "distill.answers.temprature=1"
    ),
    "answers: none": Case("distill.answers.n", "greater than 0", LORA + "distill.answers.n=0"),
    "answers: a kind of rows": Case(
        "distill.answers.to: expected 'best'", "'pairs'", LORA + "distill.answers.to=pairs"
    ),
    "answers: a vote of one": Case(
        "kind=vote compares", "distill.answers.n=2", LORA + "'distill.answers={score: [{kind: vote}]}'"
    ),
    "answers: least of nothing": Case("least is a reward", "Write score=[{kind:", LORA + "distill.answers.least=1"),
    "answers: a reward misspelt": Case(
        "distill.answers.score.0.kind: unknown kind 'nomber'",
        "Did you mean `number`?",
        LORA + "'distill.answers.score=[{kind: nomber}]'",
    ),
    "answers: of nobody": Case("answers: one teacher writes them", "Name one run, folder or hub id", WRITING),
    "answers: of two": Case("answers: one teacher writes them", "Name one run", WRITING + BOTH),
    "answers: of peers": Case("learnt as rows are", "Leave peers out, or answers", WRITING + "distill.peers=2"),
    "answers: classes": Case("answers are texts", "write of=sft", CLASSES + WRITING),
    "answers: a loss": Case("learnt as rows are", "Leave loss out, or answers", LORA + WRITING + "distill.loss=jsd"),
    "answers: alpha and a cache": Case(
        "learnt as rows are", "Leave alpha and cache out", CACHED + WRITING + "distill.alpha=1"
    ),
    "answers: sources": Case(
        "are written to the rows of one file",
        "Write data.train",
        LORA + WRITING + "data.train=null data.sources.a.path=rows.jsonl data.sources.b.path=other.jsonl",
    ),
    "answers: requests at once": Case(
        "distill.answers.requests.at_once", "less than or equal to 100", LORA + "distill.answers.requests.at_once=1000"
    ),
    "answers: no time": Case("requests.timeout", "greater than 0", LORA + "distill.answers.requests.timeout=0"),
    "answers: one price": Case("requests.price", "write two prices", LORA + "'distill.answers.requests.price=[1]'"),
    "answers: an address of weights": Case(
        "teacher.url",
        "Leave all of distill.teacher but url and id out",
        SERVED + LORA + WRITING + "distill.teacher.weights=nf4",
    ),
    "answers: an address with a key": Case(
        "an address holds no key", "set OPENAI_API_KEY", WRITING + "distill.teacher.url=http://me:sesame@there/v1"
    ),
    # A teacher at an address.
    "an address that is none": Case(
        "distill.teacher.url: 'localhost:1'", "such as http://localhost:8000/v1", "distill.teacher.url=localhost:1"
    ),
    "an address of nobody": Case("teacher.url", "write the name of one model there", SERVED + CACHE),
    "an address of two": Case("teacher.url", "the name of one model there", SERVED + BOTH + CACHE),
    "an address of the backbone": Case(
        "teacher.url", "the name of one model there", SERVED + "distill.teacher.id=backbone " + CACHE
    ),
    "an address without a cache": Case("teacher.url", "Write distill.cache.folder=FOLDER", SERVED + LORA),
    "an address and weights": Case(
        "teacher.url",
        "Leave all of distill.teacher but url and id out",
        SERVED + CACHED + "distill.teacher.weights=nf4",
    ),
    "an address of classes": Case("teacher.url", "Write of=sft", SERVED + CLASSES + CACHE),
    "an address and draws": Case(
        "teacher.url", "Leave distill.cache.sampled out", SERVED + CACHED + "distill.cache.sampled=true"
    ),
    "an address and a gap": Case(
        "teacher.url", "Write distill.cache.k=20", SERVED + LORA + "'distill.cache={folder: c, gap: 0.1}'"
    ),
    "an address and a temperature": Case(
        "teacher.url", "Leave distill.temperature out", SERVED + CACHED + "distill.temperature=2"
    ),
    "an address and its weights": Case(
        "model.id: `teacher` asks for weights", "Name a model", SERVED + CACHED + "model.id=teacher"
    ),
}
"""Of the recipe as it is written: `run` does not start."""

FOUND = {
    # Teachers.
    "answers: of classes": Case(
        "recipe classify writes no text", "Name a run of recipe sft", WRITING + "distill.teacher.id=classes"
    ),
    "answers: of folds": Case("writes no text", "Name a run", WRITING + "distill.teacher.id=folds"),
    "answers: of a T5": Case("this is an encoder-decoder", "Name another", WRITING + "distill.teacher.id=t5"),
    "answers: of nobody there": Case(
        "distill.teacher.url=http://127.0.0.1:9/v1 does not answer", "Start the server", SERVED + LORA + WRITING
    ),
    "answers: of an unfinished run": Case(
        "started: no adapter there yet", "--resume", WRITING + "distill.teacher.id=started"
    ),
    "answers: nowhere": Case("nwhere is no run directory", "Write a folder", WRITING + "distill.teacher.id=nwhere"),
    "answers: no column": Case(
        "no column `right`", "Name another one", LORA + "'distill.answers.score=[{kind: number, answer: right}]'"
    ),
    "nowhere": Case("distill.teacher: nwhere is no run directory", "Write a folder", "distill.teacher.id=nwhere"),
    "no such folder": Case(
        "distill.teacher.id: no folder ./nwhere", "with one that exists", "distill.teacher.id=./nwhere"
    ),
    "neither run nor model": Case(
        "distill.teacher.id=empty", "the folder holds no config (config.json)", "distill.teacher.id=empty"
    ),
    "adapter": Case(
        "distill.teacher.id=lora/adapter", "is the adapter of a run. Write lora", "distill.teacher.id=lora/adapter"
    ),
    "revision of a run": Case(
        "distill.teacher.revision=v1", "Leave it out", "distill.teacher.id=lora distill.teacher.revision=v1"
    ),
    "revision of a folder": Case(
        "distill.teacher.revision=v1",
        "Leave distill.teacher.revision out",
        "distill.teacher.id=stories distill.teacher.revision=v1",
    ),
    "unfinished": Case(
        "started: no adapter there yet", "started/config.yaml --out started --resume", "distill.teacher.id=started"
    ),
    "unfinished folds": Case(
        "distill.teacher.id=undecided", "--out undecided --resume", OF_CLASSES + "distill.teacher.id=undecided"
    ),
    "folds for text": Case("distill.teacher.id=folds", "change `of`", "distill.teacher.id=folds"),
    "classes for text": Case("distill.teacher.id=classes", "change `of`", "distill.teacher.id=classes"),
    "text for masks": Case("distill.teacher.id=lora", "change `of`", MASKED + LORA),
    "folds and an adapter": Case("folds is a cross-validation", "Name it alone", "'distill.teacher.id=[folds, lora]'"),
    "one of other tokens": Case("id=starter: the stu", "a teacher with the", "'distill.teacher.id=[full, starter]'"),
    "one of classes": Case("id=classes: its run", "change `of`", "'distill.teacher.id=[lora, full, classes]'"),
    "one of text": Case(
        "id=lora: a run of recipe sft", "Write one of", OF_CLASSES + "'distill.teacher.id=[classes, lora]'"
    ),
    "a student of several": Case(
        "is 2 models that teach together", "Write model.id=", "'distill.teacher.id=[full, stories]' model.id=teacher"
    ),
    "each other": Case(
        "distill.teacher.id=backbone and model.id=teacher",
        "Write a model",
        "distill.teacher.id=backbone model.id=teacher",
    ),
    # What teacher and student read.
    "vocabularies": Case("distill.teacher.id=starter", "Write distill.loss=gold", "distill.teacher.id=starter"),
    "chat templates": Case(
        "distill.teacher.id=chat: its chat template writes rows otherwise",
        "model.chat_template=chat/adapter/chat_template.jinja",
        "distill.teacher.id=chat",
    ),
    "kinds of models": Case("distill.teacher.id=lora", "of the student's kind", LORA + "model.id=t5"),
    "no mask of the student's": Case(
        "has no mask token", "Use an encoder", MASKED + "model.id=stories distill.teacher.id=masked"
    ),
    "no mask of the teacher's": Case(
        "distill.teacher.id=maskless: its tokenizer does not know '<mask>'",
        "the student's tokenizer",
        MASKED + "distill.teacher.id=maskless",
    ),
    "a teacher of padded rows": Case(
        "batch.packing=true: the teacher is albert, and albert is none of the architectures",
        "Write batch.packing=auto",
        MASKED + "distill.teacher.id=albert batch.packing=true",
    ),
    "causal teacher of masks": Case(
        "distill.teacher.id=gpt2: GPT2Config has no masked language model",
        "Take one that AutoModelForMaskedLM loads",
        MASKED + "distill.teacher.id=gpt2",
    ),
    "shares of one": Case(
        "distill.teacher.shares: there is one", "Name several", LORA + "distill.teacher.shares=[1,2]"
    ),
    "shares of three": Case("3 numbers for 2 models", "Write one for each", BOTH + "distill.teacher.shares=[1,2,3]"),
    "universal, several": Case("distill.loss=universal", "Name one of them", BOTH + "distill.loss=universal"),
    # Layers.
    "match, several": Case("distill.match compares with one", "Name one of them", matched("what: relation", BOTH)),
    "no such layer of the teacher": Case(
        "distill.match.0.layers: the teacher has no layer 9",
        "Write 0 to 5",
        matched("what: hidden_mse, layers: {1: 9}"),
    ),
    "no such layer of the student": Case(
        "distill.match.0.layers: the student has no layer 3",
        "Write 0 to 2",
        matched("what: hidden_mse, layers: {3: 1}") + " distill.student.layers=first-2",
    ),
    "embeddings have no attention": Case(
        "distill.match.0.layers", "Write 1 to 5", matched("what: relation, layers: {0: 1}")
    ),
    "attention of a Llama": Case(
        "distill.match.0.what=attention: LlamaForCausalLM", "{what: relation}", matched("what: attention")
    ),
    "heads": Case("distill.match.0.heads", "Write one of 1, 2, 4, 8", matched("what: relation, heads: 7")),
    "attention of a classifier": Case(
        "distill.match.0.what=attention", "{what: relation}", matched("what: attention", CLASSES)
    ),
    "layers of folds": Case(
        "distill.match compares the layers of one model", "Name one run", matched("what: relation", FOLDS)
    ),
    "more layers than there are": Case(
        "distill.student.layers=first-9", "a number up to 5", LORA + "distill.student.layers=first-9"
    ),
    "a layer that is not there": Case(
        "distill.student.layers: there is no layer 9", "the last one being 4", LORA + "distill.student.layers=[0,9]"
    ),
    "more heads than there are": Case(
        "distill.student.heads=99: the backbone has", "Write distill.student.heads=", LORA + "distill.student.heads=99"
    ),
    "no head": Case("leaves none", "Write distill.student.heads=2", LORA + "distill.student.heads=1%"),
    "heads of a BERT": Case(
        "so that heads and channels go together",
        "Write distill.student.heads=2 and distill.student.channels=",
        MASKED + "distill.teacher.id=masked model.id=masked distill.student.heads=2",
    ),
    "layers that are one": Case(
        "distill.student.layers: AlbertConfig",
        "Write distill.student.layers=all",
        MASKED + "distill.teacher.id=albert model.id=albert distill.student.layers=first-1",
    ),
    "weights of several": Case("model.id=teacher: lora, other", "Write model.id=stories", BOTH + "model.id=teacher"),
    # Peers, and what the student writes.
    "peers of layers": Case(
        "distill.peers", "write adapter.method=lora", "distill.peers=2 'adapter={method: last-layers}'"
    ),
    "answers of an encoder-decoder": Case(
        "distill.on_policy.share",
        "take a causal backbone",
        "distill.teacher.id=t5 model.id=t5 distill.on_policy.share=1",
    ),
    "answers beyond the positions": Case(
        "distill.on_policy.max_new_tokens=64",
        "Lower it by",
        "distill.teacher.id=gpt2 model.id=gpt2 distill.on_policy.share=1",
    ),
    "answers beyond the budget": Case(
        "distill.on_policy.max_new_tokens=64",
        "or write auto",
        LORA + "distill.on_policy.share=1 batch.tokens_per_device=80",
    ),
    "answers to nothing": Case(
        "no row of rows.jsonl has a prompt",
        "Leave distill.on_policy out",
        LORA + "distill.on_policy.share=1 data.loss_on=all",
    ),
    # Classes.
    "text for classes": Case("distill.teacher.id=lora", "Write one of recipe classify", OF_CLASSES + LORA),
    "backbone for classes": Case(
        "distill.teacher.id=backbone", "Write a run of recipe classify", OF_CLASSES + "distill.teacher.id=backbone"
    ),
    "model without classes": Case(
        "distill.teacher.id=stories", "Train it by recipe classify", OF_CLASSES + "distill.teacher.id=stories"
    ),
    "a class more": Case("it says nothing of `fox`", "name them alike", CLASSES + "data.train=foxes.jsonl"),
    "a class called otherwise": Case(
        "nothing of `owl`, and no training row has `cat`", "name them alike", CLASSES + "data.train=owls.jsonl"
    ),
    "classes for numbers": Case(
        "distill.teacher.id=classes: its labels are of kind one",
        "Write classes.kind=one",
        CLASSES + "data.train=numbers.jsonl classes.kind=number",
    ),
    "out of no fold": Case("distill.teacher.out_of_fold", "leave it out", CLASSES + "distill.teacher.out_of_fold=true"),
    "out of fold of other rows": Case(
        "distill.teacher.out_of_fold: only 0 of",
        "the data.train of the cross-validation",
        FOLDS + "distill.teacher.out_of_fold=true data.train=strange.jsonl",
    ),
    "no such unlabelled file": Case(
        "hold.jsonl", "Did you mean `held.jsonl`?", CLASSES + "distill.unlabelled=hold.jsonl"
    ),
    "unlabelled columns": Case(
        "columns.jsonl: has no column `text`",
        "data.columns='{text: NAME}'",
        CLASSES + "distill.unlabelled=columns.jsonl",
    ),
    "unlabelled rows are held out": Case(
        "distill.unlabelled: every row of held.jsonl",
        "Give other rows",
        CLASSES + "distill.unlabelled=held.jsonl data.held_out=held.jsonl",
    ),
    # Caches.
    "nobody at the address": Case(
        "distill.teacher.url=http://127.0.0.1:9/v1 does not answer",
        "Start the server, or correct the address",
        SERVED + LORA + "distill.cache.folder=new",
    ),
    "nobody to ask": Case("distill.cache.folder=new holds no", "distill.teacher.id", "distill.cache.folder=new"),
    "a cache among other things": Case(
        "distill.cache.folder=thesis: chapter.tex", "Write a new folder", LORA + "distill.cache.folder=thesis"
    ),
    "a cache in a file": Case(
        "distill.cache.folder=rows.jsonl/new", "Write another folder", LORA + "distill.cache.folder=rows.jsonl/new"
    ),
    "another teacher's": Case(
        "distill.cache.folder=cache", "Write another distill.cache.folder", CACHED + "distill.teacher.id=full"
    ),
    "another tokenizer's": Case("tokenizer: digest", "delete this one", CACHED + "model.new_tokens=[<a>]"),
    "at another temperature": Case("temperature: 1.0 there, 2.0", "delete this", CACHED + "distill.temperature=2"),
    "of an unknown gap": Case(
        "distill.cache.gap=1e-06: cache keeps 8 tokens",
        "a higher gap",
        LORA + "'distill.cache={folder: cache, gap: 0.000001}'",
    ),
    "of other data": Case(
        "distill.cache.folder=cache knows nothing of 10 of 10 training rows, such as other.jsonl",
        "Write another folder, or add these rows",
        CACHED + "data.train=other.jsonl",
    ),
    "of longer rows": Case("another data.max_tokens", "Write another folder", CACHED + "data.max_tokens=16"),
    "a shard is lost": Case(
        "torn/shard-00000.safetensors is not there",
        "Restore it, or delete torn/cache.json",
        CACHED + "distill.cache.folder=torn",
    ),
    "a cache without its index": Case(
        "k: 8 there, 9 asked for",
        "Write another distill.cache.folder",
        LORA + "distill.cache.folder=unfinished distill.cache.k=9",
    ),
    "a teacher that never made the cache": Case(
        "distill.teacher: lra is no run directory", "Write a folder", CACHE + "distill.teacher.id=lra"
    ),
}
"""Of what the recipe names: `check` tells it, and `run` before it reads weights."""

ASKING = {
    "no folder": Case("distill.cache.folder", "Write distill.cache.folder=FOLDER", LORA),
    "no teacher": Case("distill.cache.folder=new", "distill.teacher.id", "distill.cache.folder=new"),
    "classes": Case("distill-cache is for recipe=distill", "Name such a recipe", CLASSES),
    "another recipe": Case("distill-cache is for recipe=distill", "Name such a recipe", "recipe=sft"),
    **{
        name: FOUND[name]._replace(words=f"distill.cache.folder=new {FOUND[name].words}")
        for name in ("nowhere", "vocabularies", "chat templates", "folds for text", "a cache in a file")
    },
    **{name: FOUND[name] for name in ("another teacher's", "of other data", "a shard is lost")},
}
"""Of distill-cache."""
