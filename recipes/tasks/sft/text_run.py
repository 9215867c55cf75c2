"""Training of a language model: rows in, a scored adapter and a report out.

Recipe sft teaches a causal or sequence-to-sequence model to answer, mlm an encoder to find hidden tokens; `tasks` and
`row_encoder` know what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from workbench import evaluation, losses
from workbench.adapters import ALora, Method, anatomy
from workbench.config import RunConfig, model_heads
from workbench.config.sections.regularise_config import RegulariseConfig
from workbench.config.sections.sampling_config import SelectConfig
from workbench.data import mixture, starter
from workbench.data.batching import Examples, Indices, MicroBatch, evenly_spaced
from workbench.data.held_out_split import Splits
from workbench.data.resampling import weighted
from workbench.data.text import decontamination, formats, length_warm_up, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.media import MediaProcessor
from workbench.data.text.row_encoder import OwnEncoder, conversation_encoder, encoder_of_run
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.data.text.transcripts import TranscriptEncoder
from workbench.errors import ConfigError
from workbench.evaluation import GeneratedAnswer, generation, transcript_scores
from workbench.evaluation.forward_passes import ModelResults, ResultStore
from workbench.evaluation.perplexity import Floats, SummedLosses
from workbench.losses import r_drop
from workbench.losses.chunked_loss import Criterion
from workbench.losses.label_losses import LabelDraws, LabelTap, token_losses
from workbench.models import backbones, exported, output_heads, picture_processor
from workbench.models.backbones import Backbone, Loader
from workbench.models.exported import ExportedModel
from workbench.models.output_heads import Head
from workbench.models.sound_processor import FeatureProcessor
from workbench.recipes.single import row_difficulty, start_adapter, token_reference
from workbench.recipes.single.single_run import Scored, SingleRun
from workbench.runs import provenance
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.bank_trainer import Objective
from workbench.training.callbacks import Callback
from workbench.training.optim.schedules import total_steps
from workbench.training.sampling.loss_based import ReferenceLosses
from workbench.training.signal import Loss, TrainingSignal

if TYPE_CHECKING:
    import pandas as pd

Scores = dict[str, Any]
Choice = Callable[..., TokenizedSet]
"""From training rows, configuration, run, tokenizer and form of rows to the rows that the backbone keeps."""


def begin(
    config: RunConfig, run: Run, callback: Callback, *, kind: type[TextRun], loader: Loader = backbones.load
) -> TextRun:
    """The run with its data, for which the backbone chooses and grades rows where `config` asks for it."""
    # Data first: it is the cheapest thing to get wrong, and needs no weights.
    tokenizer, template, data = prepare(
        config,
        run,
        choose=partial(_chosen, callback=callback),
        measure=partial(row_difficulty.measured, config=config, run=run, callback=callback),
    )
    if data.train.cleaning is not None:
        callback.say(data.train.cleaning.sentence)
    reference = token_reference.losses(config, run, callback, data.train, tokenizer)
    return kind(config, run, callback, tokenizer, template, data, loader=loader, reference=reference)


def prepare(
    config: RunConfig, run: Run, *, choose: Choice | None = None, measure: Callable[..., Floats] | None = None
) -> tuple[PreTrainedTokenizerBase, OwnEncoder, Splits[TokenizedSet]]:
    """Tokenizer, form of the rows, and data; refuses what would fail or teach nothing.

    Args:
        choose: The backbone's choice of training rows, where `data.select` asks for it; None: chance stands in.
        measure: Asks the backbone how difficult training rows are, where `data.curriculum` wants that, the same way.
    """
    tokenizer = backbones.tokenizer(config.model)
    template = encoder_of(config, tokenizer)
    if choose is not None and config.data.select.by_backbone:
        every = config.data.model_copy(update={"select": SelectConfig()})
        data = tokenized.load(every, tokenizer, template, seed=config.seed)
        data = data._replace(train=choose(data.train, config, run, tokenizer=tokenizer, template=template))
    else:
        data = tokenized.load(config.data, tokenizer, template, seed=config.seed)
    asked = None if measure is None else partial(measure, tokenizer=tokenizer)
    data = data._replace(train=row_difficulty.graded(data.train, config, measure=asked))
    if isinstance(template, TranscriptEncoder):
        data = data._replace(train=replace(data.train, collate=template.augmented))
    preflight.require_runnable(config, data)
    require_whole_pictures(config, data.train)
    start_adapter.require(config)
    train = mixture.mixed(data.train, config)
    steps = total_steps(config, len(train))
    mixture.require_passes(train, config, steps)
    length_warm_up.growing(data.train, config.data.length_warm_up, steps)
    provenance.note_data(run, data.facts())
    run.note(told=about_rows(config))
    decontamination.write_matches(data.train.contamination, run)
    return tokenizer, template, data


def encoder_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> OwnEncoder:
    """How the rows of a run are written for its backbone, pictures and recordings included."""
    if config.reads_sound:
        transcript_scores.require_library()  # before a run that could not be scored
    hub, template = backbones.hub_config(config.model), read_template(config)
    return encoder_of_run(config, hub, tokenizer, template=template, processor=picture_processor.of(config, hub))


def conversations(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    """How conversations are written for the backbone of a run, pictures included."""
    hub = backbones.hub_config(config.model)
    processor = picture_processor.of(config, hub)
    assert not isinstance(processor, FeatureProcessor), "checks refuse recordings"
    return conversation_encoder(hub, tokenizer, template=read_template(config), processor=processor)


def require_whole_pictures(config: RunConfig, train: TokenizedSet) -> None:
    """Refuse settings that would cut the tokens of pictures, or that read text alone; raises ConfigError."""
    if not train.pictured:
        return
    own, what = config.distributed, "recordings" if config.reads_sound else "pictures"
    wanted = {
        "data.length_warm_up.start": config.data.length_warm_up.start is not None,
        "token_drop": config.token_drop.is_on,
        "distributed.pipeline": own.pipeline > 1,
        "distributed.sequence": own.sequence > 1,
        "distributed.tensor": own.tensor > 1,
        "freeze.policy": config.freeze.policy != "none" and config.freeze.cache != "off",
        "reinforce.tools": config.reinforce.tools is not None,
        "reinforce.rollouts.url": config.reinforce.rollouts.url is not None,
    }
    for key, is_on in wanted.items():
        if is_on:
            cure = "Write freeze.cache=off." if key == "freeze.policy" else "Leave it out."
            raise ConfigError(f"{key} takes rows for tokens alone, and rows here have {what}. {cure}")
    if getattr(config.adapter, "virtual_tokens", None) is not None:
        raise ConfigError(
            f"adapter.method={config.adapter.method} puts virtual tokens before a text, and rows here have {what}. "
            "Write adapter.method=lora."
        )


def about_rows(config: RunConfig) -> list[str]:
    """Sentence on rows of another task; none where they are of this one."""
    if not config.task.answers or config.media is not None:
        return []
    labelled = [
        own.train
        for own in config.data.training_files.values()
        if formats.format_of(starter.resolve(own.train), own) == "text_label"
    ]
    return [
        f"{source} has texts and labels, and recipe={config.recipe} learns to write the label as an answer. Recipe "
        f"classify learns classes, with a probability and a score of each: workbench run classify/quickstart "
        f"data.train={source}"
        for source in labelled[:1]
    ]


def _chosen(
    rows: TokenizedSet,
    config: RunConfig,
    run: Run,
    *,
    callback: Callback,
    tokenizer: PreTrainedTokenizerBase,
    template: OwnEncoder,
) -> TokenizedSet:
    from workbench.recipes.single import row_choice

    def begin(config: RunConfig, run: Run, callback: Callback, train: TokenizedSet, held_out: TokenizedSet) -> TextRun:
        return TextRun(config, run, callback, tokenizer, template, Splits(train, held_out, None))

    def score(store: ResultStore) -> Floats:
        by = config.data.select.by
        if by == "gradient":
            target = tokenized.target_rows(config.data, tokenizer, template)
            whole_T1 = np.ones((len(target), 1), dtype=bool)
            return row_choice.gradient_scores(rows, target, whole_T1, config, run, callback, begin, store)
        assert by == "perplexity" or by == "ifd"
        return row_choice.backbone_scores(by, rows, config, run, tokenizer, store)[:, None]

    return row_choice.chosen(rows, config, run, callback, score=score)


class TextOutputs(NamedTuple):
    """Outputs of a model for the rows of a split."""

    answers: list[GeneratedAnswer]
    """Answers to some of them."""
    losses: SummedLosses | None = None
    """Loss of each, where there is one by tokens."""


@dataclass(frozen=True)
class TextRun(SingleRun[ExportedModel, TokenizedSet]):
    """A run that learns to predict tokens."""

    tokenizer: PreTrainedTokenizerBase
    template: OwnEncoder
    data: Splits[TokenizedSet]
    reference: ReferenceLosses | None = field(default=None, kw_only=True)
    """Losses of a reference that those of tokens are compared with, where `data.sampling.by=tokens`."""

    @property
    def vocabulary(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    @property
    def rows(self) -> Mapping[str, TokenizedSet]:
        return self.data.named()

    @property
    def adapter(self) -> Method:
        method = with_invocation(self.config.adapter, self.template, self.tokenizer, chat=self.data.train.chat)
        if isinstance(method, ALora):
            self.callback.say(invocation_in_words(self.data.train, method, self.tokenizer))
        return method

    @property
    def new_token_ids(self) -> Sequence[int]:
        return backbones.new_token_ids(self.config.model, self.tokenizer)

    def text(self, row: int) -> str:
        return generation.row_text(self.tokenizer, self.data.train[row], self.data.train.processor)

    def untrained(self, backbone: Backbone) -> ExportedModel | None:
        head = output_heads.find(backbone.model, backbone.model)
        return ExportedModel(backbone.model, head, self.tokenizer, self.template, [])

    def keep_start(self, outputs: TextOutputs) -> dict[str, Any]:
        self._keep_losses(outputs, "held_out_losses_before.parquet")
        return {"answers": {each.place: each.answer for each in outputs.answers}}

    def assemble(self, model: nn.Module, backbone: Backbone) -> ExportedModel:
        stop = evaluation.stop_tokens(self.tokenizer, self.data.train)
        head = output_heads.find(model, backbone.model)
        if self.placement.cuts_weights:  # which it does as the block's own forward pass begins
            head = replace(head, last_block=None)
        return ExportedModel(model, head, self.tokenizer, self.template, stop)

    @property
    def criterion(self) -> Criterion | None:
        """The loss; None: cross-entropy, with what `regularise` adds to it."""
        return None

    def supervise(self, live: ExportedModel, backbone: Backbone, progress: Callable[[], float]) -> TrainingSignal:
        tap, train = LabelTap(token_losses), self.data.train
        rows = weighted(drawn(train, self.config), train.weights)
        packs = self.packs(live)
        if self.criterion is not None:
            return TrainingSignal(rows, token_loss(live.model, live.head, self.criterion), reads_packed=packs)
        draws = LabelDraws()
        loss = next_token_loss(live.model, live.head, tap, self.config.regularise, draws)
        return TrainingSignal(rows, loss, tap=tap, reads_packed=packs, reference=self.reference, draws=draws)

    @property
    def media(self) -> MediaProcessor | None:
        return self.data.train.processor if self.data.train.pictured else None

    def packs(self, live: ExportedModel) -> bool:
        return self.data.train.packs

    def width(self, live: ExportedModel) -> int:
        return live.head.width

    def held_out_loss(self, live: ExportedModel) -> tuple[float, Mapping[str, float]]:
        likelihoods = evaluation.likelihood(live.model, live.head, self.data.held_out)
        return likelihoods.loss, {f"held_out_loss[{name}]": each.loss for name, each in likelihoods.by_source.items()}

    def sampled(self, live: ExportedModel) -> Sequence[GeneratedAnswer]:
        if not self.answers_samples:
            return ()
        config, rows = self.config, self.data.held_out
        chosen = evaluation.drawn_prompts(rows, self.sample_count, seed=config.seed)
        with self.uncompiled():
            return list(
                evaluation.answers_to(
                    live.model, rows, chosen, self.tokenizer, max_new_tokens=config.evaluate.max_new_tokens
                ).values()
            )

    @property
    def answers_samples(self) -> bool:
        """Whether the model that trains writes text, and the first process, which alone lets it, has all of it."""
        return self.task.writes_text and not self.placement.cuts_weights and self.sample_count > 0

    @property
    def sample_count(self) -> int:
        """Prompts of sample answers: none where the run is to write no answers."""
        return min(self.config.evaluate.samples, self.config.evaluate.answers)

    def uncompiled(self) -> AbstractContextManager[object]:
        """Inside it, blocks that are compiled compute as they would not: each length of a text would be compiled."""
        return torch.compiler.set_stance("force_eager") if self.config.train.compile else nullcontext()

    def save(self, live: ExportedModel, folder: Path, *, adapter: Callable[[Path], None] | None = None) -> None:
        exported.save(live.model, folder, self.tokenizer, self.template, live.stop, adapter=adapter)

    @property
    def sampled_rows(self) -> Examples:
        return drawn(self.data.train, self.config)

    @property
    def splits(self) -> Any:
        return self.data

    def member_outputs(self, live: ExportedModel, batch: MicroBatch) -> Tensor:
        return live.head.supervised(live.model, batch.inputs, batch.positions_N)

    def member_loss(self, live: ExportedModel) -> Objective:
        if self.criterion is not None:
            return token_objective(live.head, self.criterion)
        return next_token_objective(live.head, self.config.regularise)

    def of_member(self, live: ExportedModel) -> ExportedModel:
        stop = evaluation.stop_tokens(self.tokenizer, self.data.train)
        return replace(live, tokenizer=self.tokenizer, template=self.template, stop=stop)

    def on_held_out(self, rows: Indices) -> Self:
        return replace(self, data=self.data._replace(held_out=self.data.held_out.subset(rows)))

    def load(self) -> ExportedModel:
        return exported.load(self.run.home, self.config, waiting=self.placement.waiting)

    def load_over(self, backbone: Backbone) -> ExportedModel:
        return exported.load(self.run.home, self.config, backbone=backbone)

    def score(self, model: ExportedModel, rows: TokenizedSet, scoring: ModelResults | None = None) -> Scored:
        with self.scoring_time(rows):
            likelihoods = evaluation.likelihood(model.model, model.head, rows, scoring=scoring)
        with self.run.deadline.phase("answers"):
            answers = answer(model, rows, self.config, scoring)
            others = scores_of_other_pictures(model, rows, self.config, scoring)
        return Scored(evaluation.summary(likelihoods, answers) | others, TextOutputs(answers, likelihoods.rows))

    def predictions(
        self, model: ExportedModel, rows: TokenizedSet, outputs: TextOutputs, before: Mapping[str, Any]
    ) -> pd.DataFrame:
        return evaluation.answer_table(outputs.answers, before=before)

    def write_pictures(self, places: Iterable[str]) -> None:
        """Keep the pictures of some held-out rows for the report."""
        if self.data.held_out.pictured:
            from workbench.evaluation import thumbnails  # with OpenCV

            thumbnails.write_beside_text(self.run.path, self.data.held_out, set(places))

    def write_predictions(self, model: ExportedModel, outputs: Any, before: Mapping[str, Any]) -> None:
        super().write_predictions(model, outputs, before)
        if isinstance(outputs, TextOutputs):
            self.write_pictures(each.place for each in outputs.answers)
        self._keep_losses(outputs, "held_out_losses.parquet")

    def _keep_losses(self, outputs: Any, name: str) -> None:
        if isinstance(outputs, TextOutputs) and outputs.losses is not None:  # a task with answers of its own has none
            from workbench.evaluation import held_out_losses  # with pandas, 0.2 s that the first step need not wait for

            held_out_losses.write(self.run.path, self.data.held_out, outputs.losses, name)


def drawn(train: TokenizedSet, config: RunConfig) -> Examples:
    """The training rows, mixed where there are several sources, or cut to a growing length."""
    if config.data.sources:
        return mixture.mixed(train, config)
    return length_warm_up.growing(train, config.data.length_warm_up, total_steps(config, len(train)))


def next_token_loss(
    model: nn.Module,
    head: Head,
    tap: LabelTap | None = None,
    regularise: RegulariseConfig | None = None,
    draws: LabelDraws | None = None,
) -> Loss:
    """The summed next-token loss of a micro-batch, as the engine wants it."""
    smoother = regularise or RegulariseConfig()

    def hidden(batch: MicroBatch) -> Tensor:
        if smoother.r_drop:
            return r_drop.paired(head.hidden(model, batch.twice().inputs), batch.positions_N)
        return head.supervised(model, batch.inputs, batch.positions_N)

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        return losses.next_token(
            hidden(batch),
            batch.labels_N,
            head.project,
            vocabulary=head.vocabulary,
            weights=head.trainable(),
            scale=scale,
            factor_N=batch.weights_N,
            tap=tap,
            smoothing=smoother.label_smoothing,
            z_loss=smoother.z_loss,
            r_drop=smoother.r_drop,
            draw_N=None if draws is None else draws.numbers(batch.positions_N, tokens=batch.width),
        )

    return loss


def next_token_objective(head: Head, regularise: RegulariseConfig) -> Objective:
    """The same for a member of a bank, of the hidden states of its supervised positions."""

    def loss(hidden_ND: Tensor, labels_N: Tensor, scale: float) -> Tensor:
        return losses.next_token(
            hidden_ND,
            labels_N,
            head.project,
            vocabulary=head.vocabulary,
            weights=head.trainable(),
            scale=scale,
            smoothing=regularise.label_smoothing,
            z_loss=regularise.z_loss,
        )

    return loss


def token_objective(head: Head, criterion: Criterion) -> Callable[..., Tensor]:
    """A loss of logits and labels as one of hidden states (N, D), labels (N,), a factor, and one for each label."""

    def loss(hidden_ND: Tensor, labels_N: Tensor, scale: float, factor_N: Tensor | None = None) -> Tensor:
        targets = [labels_N] if factor_N is None else [labels_N, factor_N]
        return losses.chunked(
            hidden_ND,
            targets,
            criterion,
            head.project,
            vocabulary=head.vocabulary,
            weights=head.trainable(),
            scale=scale,
        )

    return loss


def token_loss(model: nn.Module, head: Head, criterion: Criterion | None = None) -> Loss:
    """The summed loss of a micro-batch over its supervised tokens, whose logits never exist all at once.

    Args:
        model: With its adapter.
        head: From `output_head`.
        criterion: From logits (n, V) and labels (n,) of some positions, and where rows have weights a factor of each
            (n,), to their summed loss, a scalar; None: cross-entropy in nats.

    Returns:
        A function of a micro-batch, on the model's device, and a factor: the summed loss times that, a scalar with a
        graph. A factor of 1 / supervised tokens of the global batch makes it a mean.

    Examples:
        >>> import numpy, torch, workbench
        >>> from workbench.config import ModelConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> model = backbone.model
        >>> rows = workbench.encode_rows([{"question": "Who?", "answer": "A fox."}], tokenizer)
        >>> batch = rows.batch(numpy.arange(1))
        >>> def hinge(logits_nV, labels_n):
        ...     return torch.nn.functional.multi_margin_loss(logits_nV.float(), labels_n, reduction="sum")
        >>> head = workbench.output_head(model, model)
        >>> loss = workbench.token_loss(model, head, hinge)(batch, 1 / len(batch.labels_N))
        >>> loss.shape, bool(loss > 0)
        (torch.Size([]), True)
    """
    if criterion is None:
        return next_token_loss(model, head)
    objective = token_objective(head, criterion)

    def loss(batch: MicroBatch, scale: float) -> Tensor:
        hidden_ND = head.supervised(model, batch.inputs, batch.positions_N)
        return objective(hidden_ND, batch.labels_N, scale, batch.weights_N)

    return loss


def score(
    model: ExportedModel, split: TokenizedSet, config: RunConfig, scoring: ModelResults | None = None
) -> tuple[dict[str, float], list[GeneratedAnswer]]:
    """Loss and answer scores of a saved model on a split, and the answers themselves."""
    answers = answer(model, split, config, scoring)
    scores = evaluation.summary(evaluation.likelihood(model.model, model.head, split, scoring=scoring), answers)
    return scores | scores_of_other_pictures(model, split, config, scoring), answers


def scores_of_other_pictures(
    model: ExportedModel, split: TokenizedSet, config: RunConfig, scoring: ModelResults | None = None
) -> dict[str, float]:
    """What the pictures are worth: loss and F1 where each row shows the pictures of another; empty without any."""
    if (others := split.with_other_pictures()) is None:
        return {}
    answers = answer(model, others, config, scoring)
    scores = evaluation.summary(evaluation.likelihood(model.model, model.head, others, scoring=scoring), answers)
    return {f"{name}_of_other_pictures": scores[name] for name in ("loss", "f1") if name in scores}


def answer(
    model: ExportedModel, split: TokenizedSet, config: RunConfig, scoring: ModelResults | None = None
) -> list[GeneratedAnswer]:
    """A model's answers to some rows of a split."""
    return evaluation.answers(
        model.model,
        split,
        model.tokenizer,
        count=config.evaluate.answers if model_heads.of(config).writes_text else 0,
        max_new_tokens=config.evaluate.max_new_tokens,
        scoring=scoring,
    )


def read_template(config: RunConfig) -> str | None:
    """The chat template that the recipe names, if it names one."""
    path = config.model.chat_template
    if path is None:
        return None
    try:
        return Path(starter.resolve(str(path))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template: {path} cannot be read ({error}). Write the path of a Jinja file, or leave it out."
        ) from None


class StartedRun(TextRun):
    """A run that goes on from the adapter that the section of its recipe names, if it names any."""

    def assemble(self, model: nn.Module, backbone: Backbone) -> ExportedModel:
        live = super().assemble(model, backbone)
        if start_adapter.wanted(self.config).run is not None and self.unscored:
            live.model.eval()
            self.write_before(live)
            live.model.train()
        return live

    def adapted(self, backbone: Backbone, *, blocks: int) -> nn.Module:
        if start_adapter.wanted(self.config).run is None:
            return super().adapted(backbone, blocks=blocks)
        return start_adapter.load(self.config, backbone.model)

    def score_before(self, backbone: Backbone) -> bool:
        if start_adapter.wanted(self.config).run is None:
            return super().score_before(backbone)
        if not self.placement.cuts_weights or not self.unscored:
            return False  # what training starts from is there with the adapter
        self.assemble(self.adapted(backbone, blocks=len(anatomy.decoder_layers(backbone.model))), backbone)
        return True


INVOCATION_ROWS = 10_000
"""Rows that are looked through for the invocation of activated LoRA."""


def with_invocation(method: Method, template: OwnEncoder, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> Method:
    """The method, with the token ids of its invocation where it has one.

    Args:
        chat: Whether the rows are conversations, which the template writes.

    Raises:
        ConfigError: There is nothing that asks for an answer.
    """
    if not isinstance(method, ALora) or (not isinstance(method.invocation, str) and method.invocation):
        return method
    if method.invocation:
        ids = tokenizer.encode(str(method.invocation), add_special_tokens=False)
    else:
        ids = template.generation_prompt() if chat and isinstance(template, ChatEncoder) else []
    if not ids:
        raise ConfigError(
            "adapter.invocation: nothing in these rows asks for an answer, as the generation prompt of a chat template "
            "does. Write the text before the answers, as adapter.invocation='Answer:', or its token ids."
        )
    return method.model_copy(update={"invocation": tuple(ids)})


def last_invocation(ids: Indices, invocation: Sequence[int]) -> int | None:
    """Place of the first token of the last occurrence of `invocation` in a row; None where there is none."""
    if len(ids) < len(invocation):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(invocation))
    places = np.flatnonzero((windows == np.asarray(invocation)).all(axis=1))
    return int(places[-1]) if len(places) else None


def invocation_in_words(rows: TokenizedSet, method: ALora, tokenizer: PreTrainedTokenizerBase) -> str:
    """Rows that have the invocation of a resolved method, and the share of their labels that stand before it.

    Raises:
        ConfigError: No row has it before a token that it could learn from.
    """
    invocation = [int(each) for each in method.invocation]
    text = str(tokenizer.decode(invocation))
    looked = evenly_spaced(len(rows), INVOCATION_ROWS)
    having = after = labels = 0
    for number in looked:
        row = rows[int(number)]
        start = last_invocation(row.input_ids, invocation)
        having += start is not None
        labels += int(row.supervised.sum())
        after += 0 if start is None else int(row.supervised[start + 1 :].sum())
    if not after:
        raise ConfigError(
            f"adapter.invocation: no row of {rows.source} has {text!r} (tokens {invocation}) before a token that "
            "carries loss, so nothing would be learnt. Write the text that stands before the answers."
        )
    share = "" if after == labels else f"; {1 - after / labels:.1%} of the tokens that carry loss teach it nothing"
    return f"The adapter acts from the last {text!r} on, which {having:,} of {len(looked):,} rows have{share}."
