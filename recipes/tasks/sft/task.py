"""The tasks of tokens, `sft` and `mlm`, as verbs and recipes over tasks ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from workbench import evaluation
from workbench.adapters import stock
from workbench.config import RunConfig, model_heads
from workbench.config.model_heads import TEXT, ModelHead
from workbench.data import mixture, starter
from workbench.data.batching import evenly_spaced
from workbench.data.rows import RawRow
from workbench.data.sound import transcribed_rows
from workbench.data.sound.sound_files import SoundFile
from workbench.data.text import formats, length_warm_up, prompts, tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.preference_pairs import PreferenceEncoder
from workbench.data.text.prompts import PromptEncoder, read_prompts
from workbench.data.text.quality import cleaning, rules
from workbench.data.text.quality.rules import RowText
from workbench.data.text.quality.survey import SourceRows
from workbench.data.text.row_encoder import OwnEncoder, RowEncoder
from workbench.data.text.stepwise import StepEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import ConfigError, DataError
from workbench.evaluation import generation, transcription
from workbench.evaluation.perplexity import Agreement, agreement, hidden_states
from workbench.evaluation.serving.openai_format import Refusal
from workbench.evaluation.serving.served_models import MOST_SECONDS, ServedModel, SpeechModel, Transcript, Turns
from workbench.losses.chunked_loss import chunk_positions
from workbench.models import backbones, exported, output_heads, sound_processor
from workbench.models.backbones import Backbone, Loader
from workbench.models.exported import ExportedModel
from workbench.models.output_heads import Head
from workbench.models.sound_processor import FeatureProcessor
from workbench.recipes.inspection import SHOWN, Inspection, pieces, unread
from workbench.recipes.single import row_difficulty, start_adapter, token_reference
from workbench.recipes.task import ROWS, DryTask, PredictionTable, RowFile, ScoringOptions, Task
from workbench.recipes.tasks.sft import text_run
from workbench.recipes.tasks.sft.text_run import StartedRun, TextRun, score
from workbench.runs.run_directory import Run
from workbench.training import preflight
from workbench.training.callbacks import Callback, Silent
from workbench.training.capacity import FORWARD_TOKENS
from workbench.training.optim.schedules import total_steps

Encoder = OwnEncoder | PromptEncoder | PreferenceEncoder | StepEncoder
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Keys of a generation_config.json that only sampling reads; Llama 2's has them, and does not sample."""


def _outlook(rows: TokenizedSet, config: RunConfig) -> Iterator[str]:
    """Yield a sentence on each source of which many of the first rows are flagged."""
    for number, (name, own) in enumerate(config.data.training_files.items()):
        members = np.flatnonzero(rows.source_N == number) if rows.sources else np.arange(len(rows))
        first = {rows.place(int(row)) for row in members[: cleaning.OUTLOOK]}
        sentences = cleaning.outlook(cleaning.row_texts_at(own.train, first, own))
        yield from (f"{name}: {sentence}" if name else sentence for sentence in sentences)


def outputs(run: Path, config: RunConfig, *, prompts_alone: bool = False) -> TextReference:
    """Next-token distributions of a finished run for held-out rows.

    Args:
        prompts_alone: Rows are prompts without an answer.
    """
    unmerged = exported.load(run, config)
    template: RowEncoder = unmerged.template
    if prompts_alone and isinstance(template, ChatEncoder):
        template = PromptEncoder(template)
    held_out = tokenized.load(config.data, unmerged.tokenizer, template, seed=config.seed).held_out
    wanted = hidden_states(unmerged.model, unmerged.head, held_out, rows=ROWS)
    return TextReference(config, unmerged, held_out, wanted)


def _transcribed(run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
    """Transcripts of the recordings of a table, a folder, an archive, or of one file."""
    import pandas as pd

    model = exported.load(run, config)
    processor = model.template.processor
    assert isinstance(processor, FeatureProcessor)
    read, recordings, skipped = list[RawRow](), list[tuple[SoundFile, int]](), list[str]()
    for row in transcribed_rows.read_rows(config.audio, starter.resolve(source), config.data, transcribed=False):
        try:
            if row.mistake:
                raise DataError(row.mistake)
            file: SoundFile = row.columns[config.audio.column]
            recordings.append((file, len(processor.wave(file))))
        except DataError as error:
            if config.data.on_bad_row == "refuse":
                raise DataError(f"{row.place}: {error}") from None
            skipped.append(f"{row.place}: {error}")
        else:
            read.append(row)
    if not read:
        raise DataError(
            f"{source}: none of its recordings can be read. The last one: {skipped[-1] if skipped else 'none'}"
        )
    written = transcription.transcribe(
        model, processor, recordings, max_new_tokens=turn.max_new_tokens, scoring=turn.scoring
    )
    table = pd.DataFrame({"row": [row.place for row in read], "answer": [each.text for each in written]})
    if processor.timed:  # as rows of training have them
        table[transcribed_rows.SEGMENTS] = [
            [{"start": part.start, "end": part.end, "text": part.text.strip()} for part in each.segments or ()]
            for each in written
        ]
    return PredictionTable(table, skipped, read=read)


@dataclass(frozen=True)
class TextReference:
    """Next-token distributions at supervised positions."""

    config: RunConfig
    unmerged: ExportedModel
    rows: TokenizedSet
    wanted_ND: Tensor
    """Hidden states in front of the run's own head."""
    note: str = ""

    @property
    def task(self) -> ModelHead:
        return model_heads.of(self.config)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.unmerged.tokenizer

    def settle(self, model: PreTrainedModel) -> PreTrainedModel:
        if model.can_generate():
            stop = self.unmerged.stop
            # One as a number: the rules of stock Whisper's times take no list.
            model.generation_config.eos_token_id = stop[0] if len(stop) == 1 else stop
            for name in () if model.generation_config.do_sample else SAMPLING:
                setattr(model.generation_config, name, None)
        return model

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        stock.save(model, folder)
        self.tokenizer.save_pretrained(folder)

    def error(self, model: nn.Module, backbone: PreTrainedModel) -> Agreement:
        return self.error_of_head(model, output_heads.find(model, backbone))

    def error_of_head(self, model: nn.Module, head: Head) -> Agreement:
        """Distance of the outputs of a model whose head is known."""
        found_ND = hidden_states(model, head, self.rows, rows=ROWS)
        return agreement(self.unmerged.head, self.wanted_ND, head, found_ND)


def survey(files: Sequence[RowFile], template: Encoder) -> list[SourceRows]:
    """The rows of each file as `data` reports them, with the tokens of their longest sequence.

    Args:
        template: Writes the rows as the task learns from them.
    """
    return [_surveyed(each, template) for each in files]


def _surveyed(source: RowFile, template: Encoder) -> SourceRows:
    """Rows with the tokens of their longest sequence; those that have nothing to learn are unreadable."""
    config = source.data
    skipped: list[str] = []
    rows: list[RowText] = []
    tokens: list[int] = []
    examples = formats.read(
        starter.resolve(config.train),
        config,
        skipped=skipped,
        limit=config.limit,
        conversion=template.conversion,
        reader=template.reader,
    )
    for example in examples:
        try:
            parts = template.expanded(example, loss_on=config.loss_on)
            lengths = [len(template.encode(part, loss_on=config.loss_on).input_ids) for part in parts]
        except DataError as error:
            skipped.append(str(error))
            continue
        visible_example = prompts.without_answer(example) if isinstance(template, PromptEncoder) else example
        rows.append(rules.row_text_of_example(visible_example))
        tokens.append(max(lengths, default=0))
    tokens_N = np.asarray(tokens, dtype=np.int64)
    return SourceRows(source.title, config.train, rows, tokens_N, source.trains, unreadable=tuple(skipped))


class TokenTask(Task):
    """A model of tokens."""

    scores_later = True
    kind: ClassVar[type[TextRun]] = StartedRun

    def begin(self, config: RunConfig, run: Run, callback: Callback, *, loader: Loader = backbones.load) -> TextRun:
        return text_run.begin(config, run, callback, kind=self.kind, loader=loader)

    def inspect(self, config: RunConfig) -> Inspection:
        tokenizer = backbones.tokenizer(config.model)
        template = text_run.encoder_of(config, tokenizer)
        data = tokenized.load(config.data, tokenizer, template, seed=config.seed)
        data = data._replace(train=row_difficulty.graded(data.train, config))
        targets = preflight.require_runnable(config, data)
        text_run.require_whole_pictures(config, data.train)
        start_adapter.require(config)
        train = mixture.mixed(data.train, config)
        steps = total_steps(config, len(train))
        mixture.require_passes(train, config, steps)
        cut = length_warm_up.growing(data.train, config.data.length_warm_up, steps)
        chosen = evenly_spaced(len(data.train), SHOWN)
        return Inspection(
            config=config,
            data=data,
            examples=[
                (data.train.place(i), pieces(template.seen(data.train[i], epoch=0), tokenizer, data.train.processor))
                for i in chosen.tolist()
            ],
            targets=targets,
            steps=steps,
            notes=[
                *text_run.about_rows(config),
                *mixture.in_words(train, config, steps),
                *length_warm_up.in_words(cut),
                *unread(*data),
                *(data.train.contamination.sentences if data.train.contamination else ()),
                *([data.train.cleaning.sentence] if data.train.cleaning else ()),
                *(() if config.reads_sound else _outlook(data.train, config)),
                *token_reference.in_words(config, tokenizer),
            ],
        )

    def require(self, config: RunConfig, data: object) -> None:
        preflight.require_runnable(config, data)  # type: ignore[arg-type]

    def evaluate(self, run: Path, config: RunConfig, turn: ScoringOptions) -> dict[str, float]:
        model = exported.load(run, config)
        split = tokenized.read_files(config.data.test_files, config.data, model.tokenizer, model.template)
        if split is None:
            split = tokenized.load(config.data, model.tokenizer, model.template, seed=config.seed).held_out
        scores, _ = score(model, split, config, turn.scoring)
        return scores

    def predict(self, run: Path, source: str, config: RunConfig, turn: ScoringOptions) -> PredictionTable:
        if not config.task.writes_text:
            return super().predict(run, source, config, turn)
        skipped: list[str] = []
        if config.reads_sound:
            return _transcribed(run, source, config, turn)
        questions = list(read_prompts(source, config.data, skipped))
        model = exported.load(run, config)
        asked = [generation.question_of(model, question) for question in questions]
        prompts, processor = [each.ids for each in asked], model.template.processor
        most, scoring = turn.max_new_tokens, turn.scoring
        written = evaluation.complete(
            model.model,
            prompts,
            model.tokenizer,
            stop=model.stop,
            max_new_tokens=most,
            scoring=scoring,
            pictures=[each.pictures for each in asked],
            processor=processor,
        )
        import pandas as pd  # 0.2 s, which the first step need not wait for

        table = pd.DataFrame(
            {
                "row": [question.place for question in questions],
                "prompt": [generation.shown(model.tokenizer, prompt, processor) for prompt in prompts],
                "answer": written,
            }
        )
        return PredictionTable(table, skipped)

    def serve(self, run: Path, config: RunConfig, name: str, created: int, *, queue: int) -> ServedModel:
        assert config.reads_sound, "models of text share their backbone"
        model = exported.load(run, config)
        processor = model.template.processor
        assert isinstance(processor, FeatureProcessor)
        hub: PretrainedConfig = model.model.config  # type: ignore[assignment]

        def transcribe(data: bytes, language: str | None, timed: bool, halt: Callable[[], bool]) -> Transcript:
            try:
                own = processor if language is None else sound_processor.spoken(processor, config, hub, language)
            except ConfigError as error:
                raise Refusal(str(error).removeprefix("audio."), param="language") from None
            file = SoundFile("file", content=data)
            samples = len(own.wave(file, longest=MOST_SECONDS))
            (said,) = transcription.transcribe(
                model, own, [(file, samples)], max_new_tokens=own.most, timed=timed, halt=halt
            )
            return Transcript(said, own.language, samples / own.format.rate)

        return SpeechModel(name, config.model.id, created, Turns(queue), transcribe, processor.times is not None)

    def outputs(self, run: Path, config: RunConfig) -> TextReference:
        return outputs(run, config)

    def dry(self, config: RunConfig, run: Run) -> DryTask:
        tokenizer, template, data = text_run.prepare(config, run)
        return dry_text(self.kind(config, run, Silent(), tokenizer, template, data))

    def survey(self, config: RunConfig, files: Sequence[RowFile]) -> list[SourceRows]:
        tokenizer = backbones.tokenizer(config.model)
        return survey(files, text_run.encoder_of(config, tokenizer))


def dry_text(single: TextRun, *, looked: float = 0.0, once: int = 0) -> DryTask:
    """A run of a language model as a plan carries it out; arguments as of `DryTask`."""

    held_out = single.splits.held_out

    def assemble(own: TextRun, model: nn.Module, backbone: Backbone) -> ExportedModel:
        return ExportedModel(model, output_heads.known(backbone.model), own.tokenizer, own.template, [])

    def worst(live: ExportedModel) -> list[TokenizedSet]:
        from workbench.planning.dry_run import largest_rows

        positions = chunk_positions(live.head.vocabulary, backbones.device())
        return [held_out.subset(rows) for rows in largest_rows(held_out, tokens=FORWARD_TOKENS, positions=positions)]

    asked = single.config.evaluate
    writes = single.task is TEXT and not backbones.hub_config(single.config.model).is_encoder_decoder

    def largest(live: ExportedModel) -> object:
        if writes:
            count, most = asked.answers, asked.max_new_tokens
            generation.write_largest(live.model, held_out, count=count, max_new_tokens=most, passed=FORWARD_TOKENS)
        return [evaluation.likelihood(live.model, live.head, rows) for rows in worst(live)]

    def read(live: ExportedModel) -> int:
        rows = worst(live)[0]
        evaluation.likelihood(live.model, live.head, rows)
        return int(rows.lengths.sum())

    return DryTask(single, largest, assemble, looked=looked, once=once, read=read)


TASK = TokenTask()
