"""Sections that every run has: model, data, batch, training, evaluation, saving."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from workbench.config.sections import metrics
from workbench.config.sections.cleaning_config import CLEAN_RULES, DecontaminateConfig
from workbench.config.sections.curriculum_config import CurriculumConfig, LengthWarmUpConfig
from workbench.config.sections.sampling_config import SamplingConfig, SelectConfig
from workbench.config.sections.sources_config import MixConfig, SourceConfig, StreamingConfig
from workbench.config.sections.text_augment_config import TextAugmentConfig
from workbench.schema import MayExecute, NamesCode, Section, Unit, did_you_mean

WEIGHT = "weight"
"""Column with how often a training row counts, which is read only where `data.columns` names it."""
ID = "id"
"""Column with the name of a row, which tables of predictions carry where `data.columns` names it."""
MARGIN = "margin"
"""Column with how much better the chosen answer of a pair is, which is read only where `data.columns` names it."""
Share = Annotated[float, Field(gt=0, lt=1)]
Every = Annotated[int, Field(gt=0, strict=True)] | Share
"""A number of steps, or a share of the run between 0 and 1."""
RowFormat = Literal[
    "auto",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "question_answer",
    "text_label",
    "text",
    "preference",
    "stepwise",
    "conversation_tree",
    "image",
    "audio",
]
FileKind = Literal["jsonl", "json", "csv", "tsv", "parquet", "arrow", "txt", "conll", "label_first"]
Checkpointing = bool | Literal["auto", "elementwise"] | Share
"""Activations that are recomputed: of all blocks or none, of elementwise operations, or of a share of the blocks."""

Overlap: TypeAlias = Literal["auto", "refuse", "drop", "tell", "exact"]
"""What becomes of rows to score by that are copies of training rows."""


class ModelConfig(Section):
    """The pretrained backbone, and how its weights are held."""

    id: str = Field(default="starter", min_length=1)
    """`starter` (shipped, 6 M parameters; `starter/vision` for pictures, `starter/sound` for speech), a folder, or a
    Hugging Face hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    weights: Literal["auto", "float32", "bfloat16", "float16", "int8", "nf4", "fp4", "fp8"] = "auto"
    """How the backbone's weights are stored. `auto`: bfloat16; without bfloat16 units as the checkpoint stores them.
    Why: half of the memory of float32, with its range. `fp8`: e4m3 with a scale for each output, multiplied with inputs
    in e4m3 with a scale for each token by cards that can (NVIDIA's from compute capability 8.9 on), emulated on others.
    """
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that matrix products run in. `auto`: bfloat16 where the device has units for it, float32 otherwise. Why:
    products in bfloat16 are faster where there are units for them, and sums and the updates of weights stay in float32.
    """
    sparsity: Literal["2:4"] | None = None
    """`2:4`: the linear layers in the blocks keep, of each four consecutive inputs of an output, the two weights that
    are largest in magnitude (Mishra et al. 2021, arXiv:2104.08378), from loading on, frozen; null: all. They are stored
    and multiplied dense, which saves neither time nor memory: it is for an adapter to a backbone that is sparse where
    it will be served. Magnitudes are compared in bfloat16, so that float32 and bfloat16 lose the same weights."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "flex_attention", "eager"] = "auto"
    """Attention kernel. `auto`: torch's own (sdpa) where the family has it, which is flash attention on a GPU, by the
    packages of FlashAttention 3 or 4 where they are installed for its generation; packed rows and servers need it.
    Why: kernels differ in time and memory, and in results by rounding alone."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    new_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Special tokens added to the vocabulary, or that the tokenizer has and the embedding has no rows for; their rows
    are trained and saved with the adapter, and no others."""
    dropout: bool = False
    """Keep the backbone's own dropout (BERT, T5, GPT-2) in training; then losses depend on micro-batches a little.

    Adapters drop by row; the backbone's attention kernels and functions draw their own masks for a whole micro-batch,
    and masks by row would need all attention weights in memory, as no fused kernel does."""
    batch_norm: Literal["frozen", "trained"] = "frozen"
    """Statistics of batch normalisation (ResNet, EfficientNet, MobileNetV2): `frozen`, those of pretraining, also in
    training, so that no row depends on those beside it. `trained` is refused, and says why. Factors and biases train
    with adapter.method=layernorm or full."""
    trust_remote_code: MayExecute = False
    """Run Python code that comes with the backbone. Only for authors you trust. Why: such code can do whatever you can.
    """

    @property
    def values(self) -> str:
        """How its values are changed while loading, which tells models of one `id` apart: `nf4`, `bfloat16 2:4`."""
        return self.weights if self.sparsity is None else f"{self.weights} {self.sparsity}"

    @field_validator("new_tokens")
    @classmethod
    def _different(cls, tokens: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({token for token in tokens if tokens.count(token) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} appears twice. Name each token once.")
        return tokens


class HeldOutFold(Section):
    """One of several folds of the training rows, which is held out in place of a share."""

    of: Annotated[Annotated[int, Field(ge=2)] | None, Unit("folds")] = None
    """Folds; null: there are none, and `data.held_out` says what is held out."""
    number: NonNegativeInt = 0
    """The fold that is held out, from 0. Every row is in one fold, and all answers to a prompt are in the same."""
    repeat: NonNegativeInt = 0
    """Which of several divisions of the rows into folds, from 0."""
    near: Annotated[float, Field(ge=0.4, le=1)] | None = 0.7
    """Rows whose texts are at least so alike share a fold, by the Jaccard similarity of their sets of four characters;
    null: equal texts do."""
    group: str | None = Field(default=None, min_length=1)
    """A column whose equal values share a fold, such as a user's or a document's id."""
    column: str | None = Field(default=None, min_length=1)
    """A column with the fold of each row; no folds are made then."""
    time: str | None = Field(default=None, min_length=1)
    """A column of numbers or dates: the fold is later than all rows that train. Rows that are later still are left
    out, and the first of `of` + 1 blocks in time is never held out."""
    trains: bool = False
    """Train on the fold too, as the adapter of a cross-validation does that is shipped; its held-out loss is then one
    of training rows."""


def _of_texts(value: object) -> object:
    """A mapping whose numbers, which YAML tells from texts, are texts."""
    if not isinstance(value, dict):
        return value
    return {str(key): str(each) if type(each) is int else each for key, each in value.items()}


class DataConfig(Section):
    """Rows to train on, to hold out and to test on, and what is done to them before."""

    train: str = ""
    """A jsonl, json, csv, tsv, parquet or txt file, also compressed (.gz, .bz2, .xz, .zst), a folder of them, or a hub
    data set id (owner/name). A tsv file has no quoting. With format image also a folder of class folders, a zip archive
    of one or a folder inside it, or idx files."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """In place of `train`: several sources by name, mixed as `mix` says. Each has held-out scores of its own, where a
    share of each is held out. Recipes sft, mlm and classify."""
    mix: MixConfig = MixConfig()
    held_out: Share | str | dict[str, str] = 0.05
    """Share of `train`, or of each source, that is held out (duplicates stay on one side), or a file of its own, or
    several by name, each with scores of its own, such as `accuracy[NAME]`; all of them together decide what is best.
    Why: without held-out rows nobody knows whether a run has learnt or memorised."""
    fold: HeldOutFold = HeldOutFold()
    test: str | dict[str, str] | None = None
    """A file that is scored once, at the end, or several by name, each with scores of its own."""
    format: RowFormat | FileKind = "auto"
    """How a row is read. `auto` looks at its columns; `image`: a labelled picture, for a vision backbone; `audio`: a
    recording, for a backbone that hears. Or what a file holds whose name does not tell, such as `tsv`; `label_first`:
    on each line a label, white space and a text, such as `DESC:manner How did it end ?`, or `__label__spam Win now`."""
    header: bool | None = None
    """Whether the first line of a csv or tsv file names the columns. false: they are numbered from 1, as in
    data.columns='{label: 1, text: 2}'. null: it names them."""
    fetch: bool = False
    """Whether pictures that rows name by an address, https://..., are read from the network."""
    encoding: str = "utf-8"
    """How text files are encoded, such as latin1 or utf-16."""
    labels: dict[str, str] | str = Field(default_factory=dict)
    """Files that stand beside files of text and have the label of each of their lines: data.labels=FILE for
    `data.train`, or {file of text: file of labels} for held-out and test files too."""
    label_names: Annotated[dict[str, str] | str, BeforeValidator(_of_texts)] = Field(default_factory=dict)
    """Names of labels, such as {0: negative, 1: positive}, or a file of them: on each line a label and its name, or a
    name alone, which are numbered from 0."""
    columns: Annotated[dict[str, str], BeforeValidator(_of_texts)] = Field(default_factory=dict)
    """Renames columns: {wanted: found}, such as {prompt: question, completion: solution}. {weight: found} names one
    with how often each training row counts in the loss, 1e-6 to 1e6; the loss is divided by the sum of the weights.
    {id: found} names one with a name of each row of `classify`, which predictions and out_of_fold.parquet carry, and of
    `tag`, which out_of_fold.parquet carries.
    {margin: found} names one with by how much the reward of the chosen answer is to be higher (recipe prefer)."""
    ignore: tuple[str, ...] = ()
    """Columns, and keys of messages, that are left out on purpose, such as [images, id]. Others that nothing reads are
    named by `check`, and those that other tools give a meaning (images, tools, weight, train) are refused."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Decides which rows are held out and chosen, and what is hidden or rewritten in them; null: the run's `seed`.
    Members of a sweep over seeds have the same one."""
    limit: Annotated[PositiveInt | None, Unit("rows")] = None
    """Use only the first `limit` rows of `train`; of class folders of pictures as many of each class, as far as it has
    them."""
    streaming: StreamingConfig = StreamingConfig()
    max_tokens: Annotated[int, Field(ge=8), Unit("tokens")] = 1024
    """Longest example in tokens; longer ones are cut, and longer documents of raw text (format text, recipes sft and
    mlm) become consecutive blocks."""
    document_overlap: Annotated[NonNegativeInt, Unit("tokens")] = 0
    """Tokens that each block of a long document repeats from the one before it, as context without loss."""
    truncate: Literal["left", "right"] = "left"
    """Which side of a long example is cut, but for raw text. `left` keeps the last answer, `right` keeps the beginning.
    Why: the answer, which carries the loss, stands at the end."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens carry loss: every assistant turn, only the last one, or every token. Why: prompts are given when the
    model is used, and need not be learnt."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """A malformed row ends the run, or is skipped and counted. Why: a row that is left out unseen changes what is
    learnt."""
    overlap: Overlap = "auto"
    """Held-out and test rows that are copies of rows in `train`, equal or nearly: they end the run (`refuse`), their
    originals are dropped from `train` and counted (`drop`), or they stay, are told, and scores without them stand
    beside those of all rows (`tell`). `auto` refuses equal rows and tells of near-duplicates; `exact` refuses equal
    rows and looks for no others. Why: scores of rows that were trained on flatter."""
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    select: SelectConfig = SelectConfig()
    sampling: SamplingConfig = SamplingConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    augment: TextAugmentConfig = TextAugmentConfig()
    length_warm_up: LengthWarmUpConfig = LengthWarmUpConfig()
    clean: tuple[str, ...] = ()
    """Rules of quality that drop training rows, such as [exact_duplicate, refusal]; `workbench data RECIPE` shows what
    each flags. Held-out and test rows stay; recipe crossval validates on training rows, and so drops them there too."""
    drop_suspects: bool = False
    """Recipe crossval: train all folds again without the training rows whose label is probably wrong (suspects.parquet
    lists them), and keep that where it makes the other labels likelier out of fold. Rows that a
    fold is validated on stay in its scores."""

    @property
    def row_format(self) -> RowFormat:
        """How a row is read; `auto` where `format` says what a file holds."""
        return "auto" if self.format in get_args(FileKind) else cast(RowFormat, self.format)

    def differs(self, key: str) -> bool:
        """Whether the value of a key is not its default; a `format` that says what a file holds is none of rows."""
        return self.row_format != "auto" if key == "format" else super().differs(key)

    @property
    def label_files(self) -> dict[str, str]:
        """The file of labels beside each file of texts that has one."""
        return {} if isinstance(self.labels, str) else self.labels

    @property
    def own_share(self) -> float | None:
        """Share of the training rows that is held out; None where held-out rows are in files of their own."""
        return self.held_out if isinstance(self.held_out, float) else None

    @property
    def training_files(self) -> dict[str, DataConfig]:
        """Each source of training rows by name (empty where there is one), as if it were the only one."""
        return {name: self._of(source) for name, source in self.sources.items()} or {"": self}

    @property
    def weighs(self) -> bool:
        """Whether a column says how often training rows count."""
        return any(WEIGHT in own.columns for own in self.training_files.values())

    @property
    def unweighted(self) -> DataConfig:
        """The same for rows that count once each, such as those that are scored."""
        columns = {name: header for name, header in self.columns.items() if name != WEIGHT}
        if columns == self.columns:
            return self
        return self.model_copy(update={"columns": columns, "ignore": (*self.ignore, self.columns[WEIGHT])})

    def with_columns(self, columns: Mapping[str, str] | None) -> DataConfig:
        """The same with other `columns`, where some are given."""
        return self if columns is None else self.model_copy(update={"columns": dict(columns)})

    @property
    def held_out_files(self) -> dict[str, str]:
        """Files of held-out rows by name, which is empty where there is one; none where a share is held out."""
        return {} if isinstance(self.held_out, float) else _by_name(self.held_out)

    @property
    def test_files(self) -> dict[str, str]:
        """Files of test rows by name, which is empty where there is one."""
        return {} if self.test is None else _by_name(self.test)

    def files_of(self, split: Literal["train", "held_out", "test"]) -> dict[str, DataConfig]:
        """Each file of a split's rows by name (empty where there is one), as if it were the only one and trained on.

        Rows that are held out as a share are in the training files.
        """
        scored = {"held_out": self.held_out_files, "test": self.test_files}.get(split, {})
        whole = self.model_copy(update={"limit": None, "sources": {}})
        return {name: whole.model_copy(update={"train": path}) for name, path in scored.items()} or self.training_files

    def _of(self, source: SourceConfig) -> DataConfig:
        own = {"train": source.path, "limit": source.limit or self.limit, "columns": source.columns or self.columns}
        return self.model_copy(update={**own, "sources": {}})

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, values: object) -> object:
        if isinstance(values, dict) and isinstance(values.get("labels"), str) and values.get("train"):
            return {**values, "labels": {values["train"]: values["labels"]}}
        return values

    @field_validator("encoding")
    @classmethod
    def _of_text(cls, encoding: str) -> str:
        try:
            "a".encode(encoding)
        except LookupError:
            raise ValueError(
                f"no such encoding `{encoding}`. Write one such as utf-8, latin1, cp1252 or utf-16."
            ) from None
        return encoding

    @field_validator("train", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return "" if value is None else value

    @model_validator(mode="after")
    def _sourced(self) -> DataConfig:
        if not self.train and not self.sources:
            raise ValueError("train is required. Write data.train=FILE, or data.sources.")
        if self.train and self.sources:
            raise ValueError("train and sources both name training rows. Leave one of them out.")
        if len(self.sources) == 1:
            raise ValueError("sources mixes two or more; write data.train for a single one.")
        if self.mix != MixConfig() and not self.sources:
            raise ValueError("mix says how sources are mixed, and there is one. Write data.sources, or leave mix out.")
        if self.mix.reference and self.mix.reference.keys() != self.sources.keys():
            raise ValueError(
                f"mix.reference names {', '.join(self.mix.reference)}, and sources {', '.join(self.sources)}. "
                "Write the loss of each source, or leave mix.reference out."
            )
        for key, files in {"sources": self.sources, "held_out": self.held_out, "test": self.test}.items():
            names = list(files) if isinstance(files, dict) else []
            if bad := [name for name in names if not name.replace("_", "").replace("-", "").isalnum()]:
                raise ValueError(f"{key}.{bad[0]}: names have letters, digits, - and _ only.")
        if self.held_out == {} or self.test == {}:
            raise ValueError("held_out or test names no file. Write data.held_out=FILE, or a share such as 0.05.")
        if self.document_overlap > self.max_tokens // 2:
            raise ValueError(
                f"document_overlap is {self.document_overlap}, more than half of max_tokens={self.max_tokens}. Write "
                f"document_overlap={self.max_tokens // 2} or less."
            )
        paths = [source.path for source in self.sources.values()]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(f"sources names {twice[0]} twice. Give it one name and a larger weight.")
        known = [self.train, *paths, *self.held_out_files.values(), *self.test_files.values()]
        for path in self.label_files.keys() - {*known}:
            raise ValueError(
                f"labels: {path} is no file that data names.{did_you_mean(path, known)} Write data.labels as "
                "{file of text: file of labels}."
            )
        return self

    @field_validator("clean")
    @classmethod
    def _known_rules(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for rule in rules:
            if rule not in CLEAN_RULES:
                raise ValueError(f"no such rule `{rule}`.{did_you_mean(rule, CLEAN_RULES)}")
        twice = sorted({rule for rule in rules if rules.count(rule) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} appears twice. Name each rule once.")
        return rules


def _by_name(files: str | dict[str, str]) -> dict[str, str]:
    return {"": files} if isinstance(files, str) else files


class MaskingConfig(Section):
    """Words that recipe mlm hides, for the backbone to guess."""

    share: Share = 0.15
    """Share of a row's tokens that recipe mlm hides and predicts; of these 80 % become the mask token, 10 % another."""


class BatchConfig(Section):
    """Rows of an optimizer step, and how they are computed."""

    size: Annotated[PositiveInt, Unit("rows")] = 32
    """Examples per optimizer step, summed over ranks and micro-batches. Why: gradients of fewer rows are noisy, and of
    more rows each step costs more than it gains on small data (McCandlish et al. 2018); `optimizer.noise_scale`
    measures it."""
    growth: Annotated[PositiveInt | None, Unit("rows")] = None
    """A step has twice as many rows, up to so many, once the measured noise scale (optimizer.noise_scale) is twice the
    batch (McCandlish et al. 2018). The learning rate stays. null: all steps have `size`."""
    tokens_per_device: Annotated[PositiveInt | Literal["auto"], Unit("tokens")] = "auto"
    """Tokens in one forward pass on one device, padding included. Never changes the result. Why: it changes speed and
    memory alone, which a machine finds out by itself."""
    packing: bool | Literal["auto"] = "auto"
    """Lay the rows of a forward pass one after another, without padding and without seeing each other: rows of text in
    every recipe but reinforce. `auto`: where it is faster. Changes rounding, as micro-batches do. Why: on a CPU padding
    costs more than packing from 3 % of it on in float32 and 12 % in bfloat16; on an NVIDIA GPU, where flash attention
    computes all rows at once, from 12 % on in bfloat16."""
    shared_prefix: bool | Literal["auto"] = "auto"
    """Compute what all training rows begin with, such as a system prompt or examples, once in each forward and backward
    pass: for recipe sft. `auto`: where it is faster on a CPU. Changes rounding, as micro-batches do."""


class TrainConfig(Section):
    """Length of the run, learning rate and what bounds a step."""

    epochs: Annotated[PositiveFloat | None, Unit("passes over the training rows")] = None
    """Passes over the training rows; null: 1, or where `budget` limits the run, as many as it allows. Why: what a
    further pass gains depends on the rows, and the held-out loss of the first one tells."""
    steps: Annotated[PositiveInt | None, Unit("steps")] = None
    """Optimizer steps; wins over `epochs` where it is set."""
    start: str | None = None
    """Of recipe sft, also in a sweep or search: a finished or adopted run over the same backbone, from whose adapter
    training goes on; adapter is that run's section. null: a fresh adapter. After full fine-tuning, write
    model.id=RUN/adapter instead."""
    trust: MayExecute = False
    """Execute the Python code that the configuration of `start` names."""
    learning_rate: PositiveFloat = 2.0e-4
    """Peak learning rate. Why: adapters bear, and need, rates some ten times as high as full fine-tuning (QLoRA trains
    with 2e-4 up to 13 B parameters, Dettmers et al. 2023)."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; vectors are never decayed. Why: an adapter starts at no change, and decay
    draws its update back to it."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm. Why: a single batch of unusual rows would else throw an adapter far off.
    """
    checkpointing: Annotated[Checkpointing, Unit("share of the blocks")] = "auto"
    """Recompute activations in the backward pass, to the same bits. `elementwise`: norms, activation functions, casts
    and dropout of every block, so that its products and attention alone are kept. A share of the blocks between 0 and
    1: the first so many are recomputed whole, never the last, and the others as by `elementwise`. true: all of them
    whole. `auto`: on an accelerator the first of these with which the run fits, where it does not without; on a CPU
    nothing is, unless a plan decides (`distributed=auto`). Why: recomputing whole blocks costs a forward pass
    more in each step."""
    mlp_tile: Annotated[PositiveInt | Literal["auto"] | None, Unit("tokens")] = "auto"
    """Tokens of each row for which a block's MLP is computed at a time, so that what it computes between its inputs and
    outputs exists for these alone; each is computed again in the backward pass. Changes rounding, as micro-batches do.
    `auto`: as many as the hidden size, 1,024 at least, where whole blocks are recomputed: there it takes no time.
    null: whole rows."""
    offload_activations: bool | Literal["auto"] = "auto"
    """Keep the inputs of blocks that are recomputed whole in the host's memory, all but the last block's; they are
    copied beside the computation. Never changes the result. `auto`: on an accelerator where one example would not
    fit otherwise."""
    compile: bool = False
    """Compile each decoder layer with torch.compile: slower start, faster steps. Why: a short run ends before the
    compiler has paid for itself."""
    deterministic: bool = False
    """Compute on an accelerator with kernels that add in one order (torch.use_deterministic_algorithms, cuBLAS's
    workspace, attention without cuDNN), so that a killed run resumes bit for bit on as many devices of the kind, with
    the same libraries; an operation that has no such kernel ends the run with its name. A CPU always does. Why: without
    it a resumed run agrees up to rounding, and some backward passes are faster."""
    kernels: Literal["auto", "liger", "torch"] = "auto"
    """Kernels of norms, gated activations and rotary positions, in training and the evaluations within it. `liger`:
    those of the package liger-kernel, which keep fewer activations, where a family computes their formula (Llama,
    Mistral, Qwen 2 and 3, Gemma 1 to 3 do). `torch`: PyTorch's. `auto`: `liger` on a GPU where it is installed, but in
    blocks whose elementwise operations are recomputed, with train.compile, and where devices share weights or rows.
    Both round at the same places; the order of sums differs."""
    rounded: Literal["int4"] | None = None
    """Quantisation-aware training: products multiply by weights that are rounded in each pass as `export --to onnx
    --weights int4` stores them (onnxruntime's MatMulNBits), held-out losses during training included, while what trains
    and is saved stays as it is. Needs adapter.method=full. null: they are not."""


class EvaluateConfig(Section):
    """When held-out rows are scored, and what is asked of them."""

    every: Annotated[Every | None, Unit("steps, or share of the run")] = 0.25
    """Held-out loss while training: every so many steps, or share of the run; null: only before and after. Why: four
    points tell whether a run still learns or overfits, and cost little beside its steps."""
    answers: Annotated[int, Field(ge=0), Unit("rows")] = 64
    """Held-out rows that are answered (greedy decoding) and scored with token F1 and ROUGE-L, before and after;
    of several named sets or sources so many of each.

    Recipes sft and prefer, whose reference is the chosen answer. Recipe reinforce: held-out prompts whose answers are
    rewarded; 0: all of them. Why: writing an answer takes many forward passes, one for each token."""
    max_new_tokens: Annotated[PositiveInt, Unit("tokens")] = 64
    """Longest answer in tokens."""
    samples: Annotated[int, Field(ge=0), Unit("prompts")] = 3
    """Held-out prompts, drawn by the seed, that are answered without training and at each evaluation, greedily: the
    same through the run, in samples.jsonl and on the page of `workbench ui`. Recipes sft, prefer, reinforce and distill
    (of texts), where every device has all weights. At most as many as `answers` but in reinforce; never changes the
    training. 0: none."""
    metric: Annotated[str, NamesCode(metrics.is_code, beside=("better",))] | None = None
    """The score that decides in place of the held-out loss: early stopping, the best checkpoint, search, sweep, stages
    of a cross-validation, blends and the report's first sentence follow it. accuracy, macro_f1, micro_f1, weighted_f1,
    roc_auc and average_precision (one class against the rest), log_loss, mcc, qwk (quadratic weighted kappa), map@3,
    mae, rmse, r2, spearman, or a function of your own in a Python file, FILE.py:FUNCTION. Recipes classify and crossval
    of it. null: the held-out loss."""
    better: Literal["higher", "lower"] | None = None
    """Which values of a function of your own are better; null: higher."""
    patience: Annotated[PositiveInt | None, Unit("evaluations")] = None
    """Stop after this many evaluations without a better held-out loss, or `metric`; null: never. Why: a schedule that
    is cut off before its end never reaches its low rates, where much of the loss is gained."""
    probe: Annotated[NonNegativeInt | Literal["auto"], Unit("rows")] = "auto"
    """Rows, held-out ones among them, whose features by the frozen backbone are compared before recipes classify and
    crossval train: what it knows already, and neighbours of mistakes in the report. `auto`: as many as cost about a
    fiftieth of the training, of backbones up to 500 M parameters; 0: none, and no simple model (counted words or
    gradients and colours) beside the run's score either. Never changes the training."""
    dynamics: bool | Literal["auto"] = "auto"
    """Record the loss of each row in each step that it is drawn in, for dynamics.parquet and the report's map of the
    data (Swayamdipta et al. 2020). `auto`: in runs of up to a million draws. Never changes the training."""

    @property
    def judge(self) -> metrics.Choice | None:
        """The metric that decides; None where the held-out loss does."""
        return None if self.metric is None else metrics.choice(self.metric, self.better)

    @field_validator("metric")
    @classmethod
    def _known(cls, metric: str | None) -> str | None:
        if metric is not None:
            metrics.choice(metric, None)
        return metric

    @model_validator(mode="after")
    def _of_own_metric(self) -> EvaluateConfig:
        if self.better is not None and not metrics.is_code(self.metric):
            raise ValueError(
                "better is for evaluate.metric=FILE.py:FUNCTION: other metrics have a direction. Leave it out."
            )
        return self


class SaveConfig(Section):
    """Checkpoints, and which values ship."""

    every: Annotated[Every | None, Unit("steps, or share of the run")] = 0.25
    """A checkpoint every so many steps, or share of the run; null: only at the end and on request. Why: a run that is
    killed loses a quarter of its steps at most."""
    keep: Annotated[PositiveInt, Unit("checkpoints")] = 2
    """How many of the latest checkpoints are kept, beside the best."""
    asynchronous: bool = False
    """Write checkpoints in the background: a step waits for a copy in the host's memory, not for the disk. Why: of an
    adapter both take milliseconds; a whole model in training is 12 bytes a parameter, on the host once more."""
    ship: Literal["last", "best"] = "last"
    """Which adapter the run saves: that of the last step, or the one with the lowest held-out loss, or the best
    `evaluate.metric`. Why: held-out rows
    that choose a step flatter its score."""


_ADDRESS = re.compile(r"https?://[^\s/]\S*")


def an_address(value: str) -> str:
    """An address of HTTP; raises ValueError where it is none, or holds a key."""
    try:
        parts = urlsplit(value)
    except ValueError:
        parts = None
    if parts is None or not _ADDRESS.fullmatch(value):
        raise ValueError(f"{value!r}: write an address such as http://localhost:8000/v1.")
    if parts.username or parts.password or parts.query:  # which errors, logs and config.yaml would show
        raise ValueError("an address holds no key: set OPENAI_API_KEY to it, and write the address alone.")
    return value


ServerAddress = Annotated[str, AfterValidator(an_address)]
"""An address of HTTP, up to /v1."""
