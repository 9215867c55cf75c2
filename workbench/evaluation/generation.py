"""Text generation: greedy answers to prompts, sampled answers for rollouts, and the scores of answers.

What is generated depends neither on padding nor on the other rows, also for methods with virtual tokens.

Legend: B batch or answers, G answers to a prompt, T most tokens of an answer, V virtual tokens (or vocabulary, in
logits), L prompt with padding on its left, S = V + L, D hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from peft import PeftModel, PeftModelForCausalLM, PeftType, PromptLearningConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.cache_utils import DynamicLayer

from workbench.adapters import anatomy
from workbench.data import named_sets
from workbench.data.batching import Indices, Row, encoder_inputs, evenly_spaced, micro_batches
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.formats import Example
from workbench.data.text.generated_answers import Floats, SampledAnswer
from workbench.data.text.media import MediaProcessor
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.errors import DataError
from workbench.evaluation import metrics, transcript_scores
from workbench.evaluation.forward_passes import ModelResults, over_rows
from workbench.evaluation.perplexity import Likelihood
from workbench.models.exported import ExportedModel
from workbench.runs import files, metrics_log, units
from workbench.runs.run_directory import Run
from workbench.training import capacity
from workbench.training.preflight import longest_sequence

if TYPE_CHECKING:
    import pandas as pd

FILE = "samples.jsonl"
ReadT = TypeVar("ReadT")


def generate(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    config: GenerationConfig,
    *,
    streamer: TextStreamer | None = None,
    halt: Callable[[], bool] | None = None,
    processor: LogitsProcessor | None = None,
    read: Cache | None = None,
    drafter: nn.Module | None = None,
) -> Tensor:
    """Output of `model.generate`: a causal model's prompts and continuations, or a decoder's text.

    Args:
        halt: Called after each token; generation ends where it returns True.
        processor: Changes the logits of each next token.
        read: Cache of all tokens of the prompts but the last; not for methods with virtual tokens.
        drafter: Model whose tokens are drafts, of one text; not for methods with virtual tokens.
    """
    settings: dict[str, Any] = {"generation_config": config, "streamer": streamer}
    if processor is not None:
        settings["logits_processor"] = LogitsProcessorList([processor])
    if read is not None:
        settings["past_key_values"] = read
    if drafter is not None:
        settings["assistant_model"] = drafter
    if halt is not None:

        def halted(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.full((len(input_ids),), halt(), device=input_ids.device)

        settings["stopping_criteria"] = StoppingCriteriaList([halted])
    with _contiguous_for_head(model):
        if isinstance(model, PeftModelForCausalLM):
            kind = model.active_peft_config.peft_type
            if kind in (PeftType.PROMPT_TUNING, PeftType.P_TUNING):
                return _after_soft_prompt(model, **inputs, settings=settings)
            slides = getattr(model.config.get_text_config(), "sliding_window", None) is not None
            if kind == PeftType.PREFIX_TUNING and slides and not inputs["attention_mask"].all():
                return _one_by_one(model, **inputs, settings=settings)
        backbone: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        if anatomy.reads_sound(backbone):  # Whisper's own would cut recordings and begin with other tokens
            write: Any = GenerationMixin.generate
            return write(backbone, **inputs, **settings)  # type: ignore[no-any-return]
        return model.generate(**inputs, **settings)  # type: ignore[operator, no-any-return]


@contextmanager
def _contiguous_for_head(model: Any) -> Iterator[None]:
    """Inside, the output head gets contiguous rows.

    `generate` slices the last position out of each prompt's hidden states, and torch multiplies rows that lie apart
    with a copy of the head for each: on a CPU in bfloat16, 57 MB and 0.1 s a prompt for 49,152 tokens and width 576.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def padded_on_the_left(prompts: Sequence[Indices], *, device: torch.device | None = None) -> dict[str, Tensor]:
    """Inputs padded on the left, so that every prompt ends in the last column, where a causal model continues."""
    backwards = encoder_inputs([prompt[::-1] for prompt in prompts])
    return {name: tensor.flip(1).to(device) for name, tensor in backwards.items()}


def answer_of(ids: Indices, stop: Sequence[int]) -> Indices:
    """Tokens up to and including the first one of `stop`; what follows it is padding."""
    ends = np.flatnonzero(np.isin(ids, stop))
    return ids[: ends[0] + 1] if len(ends) else ids


@contextmanager
def plain(model: nn.Module, backbone: Any) -> Iterator[None]:
    """Inside: evaluation mode, without the penalties that a backbone's generation_config.json may ask for."""
    training, own = model.training, backbone.generation_config
    model.eval()
    backbone.generation_config = GenerationConfig()
    try:
        yield
    finally:
        backbone.generation_config = own
        model.train(training)


def _after_soft_prompt(model: PeftModel, input_ids: Tensor, attention_mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Continuations (B, L + new) of padding, virtual tokens and text in this order, as in training.

    PEFT would put the virtual tokens before the padding, and count the padding as positions of the text.
    """
    backbone: Any = model.get_base_model()
    text_BLD = backbone.get_input_embeddings()(input_ids)
    virtual_BVD = model.get_prompt(len(input_ids)).to(text_BLD.dtype)
    attended_BS = torch.cat([attention_mask.new_ones(virtual_BVD.shape[:2]), attention_mask], 1)
    order_BS = attended_BS.argsort(dim=1, stable=True)  # padding comes first
    embedded_BSD = torch.cat([virtual_BVD, text_BLD], 1)
    new = backbone.generate(
        inputs_embeds=embedded_BSD.gather(1, order_BS[..., None].expand_as(embedded_BSD)),
        attention_mask=attended_BS.gather(1, order_BS),
        **settings,
    )
    return torch.cat([input_ids, new], 1)


def _one_by_one(model: Any, input_ids: Tensor, attention_mask: Tensor, settings: dict[str, Any]) -> Tensor:
    """Continuations (B, L + new), generated row by row: padding would push the prefix out of a sliding window."""
    rows = []
    for ids_L, mask_L in zip(input_ids, attention_mask.bool(), strict=True):
        text_1L = ids_L[mask_L][None]
        output = model.generate(input_ids=text_1L, attention_mask=torch.ones_like(text_1L), **settings)
        rows.append(torch.cat([ids_L[~mask_L], output[0]]))
    return pad_sequence(rows, batch_first=True, padding_value=settings["generation_config"].pad_token_id)


class AnswerSampler:
    """Samples answers of a causal model from softmax(logits / temperature), over ids that the tokenizer knows.

    A prompt is read once for all of its answers. An answer depends on the weights, its prompt and its random numbers
    alone.

    Args:
        model: With its adapter, if it has any.
        known: Size of the tokenizer's vocabulary.
        stop: Tokens that end an answer.
        processor: Reads the pictures of prompts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        known: int,
        stop: Sequence[int],
        temperature: float,
        processor: MediaProcessor | None = None,
    ) -> None:
        self._model, self._known, self._stop, self._temperature = model, known, list(stop), temperature
        self._processor = processor
        self._backbone: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        # Whether later tokens of a prompt decide what its first ones compute (activated LoRA).
        self._invoked = isinstance(model, PeftModel) and bool(
            getattr(model.active_peft_config, "alora_invocation_tokens", None)
        )
        self._virtual = isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning

    def begin(self) -> Self:
        """Itself: the model that generates is the one that trains."""
        return self

    def batches(self, prompts: Sequence[Indices], *, answers: int, tokens: int) -> list[Indices]:
        """Numbers of the prompts of each batch, which depend on the prompts alone; G = `answers`, T = `tokens`."""
        lengths = np.asarray([(len(prompt) + tokens) * answers for prompt in prompts], dtype=np.int64)
        # With a prefix, `generate` may process padded rows one by one.
        width = anatomy.hidden_size(self._backbone.config)
        most = 1 if self._virtual else capacity.forward_tokens(self._backbone.device, width=width)
        return list(micro_batches(np.arange(len(prompts)), lengths, tokens=most))

    def answer(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[Indices]]:
        """Answers to each prompt, each up to and including a stop token, or T tokens long. `draws`: random numbers (G,
        T) of the answers to each prompt. `pictures`: names those of each prompt, where there is a processor."""
        return self._answered(prompts, draws, _SamplingProcessor(draws, self._temperature, known=self._known), pictures)

    def scored(
        self, prompts: Sequence[Indices], draws: Sequence[Floats], pictures: Sequence[str] = ()
    ) -> list[list[SampledAnswer]]:
        processor = _SamplingProcessor(draws, self._temperature, known=self._known)
        processor.log_probs = []
        answers = self._answered(prompts, draws, processor, pictures)
        each_T = iter(torch.stack(processor.log_probs, dim=1).cpu().numpy())
        return [[SampledAnswer(ids, next(each_T)[: len(ids)]) for ids in group] for group in answers]

    @torch.no_grad()
    def _answered(
        self,
        prompts: Sequence[Indices],
        draws: Sequence[Floats],
        processor: _SamplingProcessor,
        pictures: Sequence[str],
    ) -> list[list[Indices]]:
        each, most = draws[0].shape
        settings = generation_config(self._stop, max_new_tokens=most)
        settings.use_cache = True
        with plain(self._model, self._backbone):
            inputs = padded_on_the_left(prompts, device=self._backbone.device)
            reads = min(map(len, prompts)) > 1 and not (self._virtual or self._invoked)
            read = self._read(inputs, each, pictures) if reads else None
            repeated = {name: tensor.repeat_interleave(each, dim=0) for name, tensor in inputs.items()}
            if read is None:
                repeated |= self._seen(repeated["input_ids"], [key for key in pictures for _ in range(each)])
            output = generate(self._model, repeated, settings, processor=processor, read=read)
        answers = [answer_of(ids, self._stop) for ids in output[:, inputs["input_ids"].shape[1] :].cpu().numpy()]
        return [answers[start : start + each] for start in range(0, len(answers), each)]

    def _seen(self, ids_BL: Tensor, pictures: Sequence[str]) -> dict[str, Tensor]:
        """Arguments of the model for the pictures of prompts."""
        found = self._processor.inputs(ids_BL.cpu(), pictures) if self._processor is not None and pictures else {}
        return {name: tensor.to(ids_BL.device) for name, tensor in found.items()}

    def _read(self, inputs: dict[str, Tensor], each: int, pictures: Sequence[str]) -> Cache | None:
        """The cache of all tokens but the last, repeated `each` times; None where a layer caches something else."""
        shorter = {name: tensor[:, :-1] for name, tensor in inputs.items()}
        shorter |= self._seen(shorter["input_ids"], pictures)
        once = GenerationConfig(
            max_new_tokens=1, do_sample=False, use_cache=True, return_dict_in_generate=True, pad_token_id=0
        )
        with _contiguous_for_head(self._backbone):
            cache = self._backbone.generate(**shorter, generation_config=once).past_key_values
        if not (isinstance(cache, Cache) and all(isinstance(layer, DynamicLayer) for layer in cache.layers)):
            return None
        cache.batch_repeat_interleave(each)
        for module in self._backbone.modules():
            if (moved := getattr(module, "rope_deltas", None)) is not None:  # by which pictures moved later positions
                vars(module)["rope_deltas"] = moved.repeat_interleave(each, dim=0)
        return cache


class _SamplingProcessor(LogitsProcessor):
    """Makes the token that each row's next random number picks the most likely one."""

    def __init__(self, draws: Sequence[Floats], temperature: float, *, known: int) -> None:
        self._draws_TB = torch.from_numpy(np.concatenate(draws).T.copy())
        self._temperature, self._known = temperature, known
        self._at = 0
        self.log_probs: list[Tensor] | None = None
        """Log-probabilities (B,) of the picked tokens, one tensor per position; None: they are not computed."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        known_BV = scores[:, : self._known]
        tokens_B = picked(known_BV, self._draws_TB[self._at].to(scores.device), self._temperature)
        self._at += 1
        if self.log_probs is not None:
            log_p_BV = (known_BV.double() / self._temperature).log_softmax(-1)
            self.log_probs.append(log_p_BV.gather(1, tokens_B[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


def picked(logits_BV: Tensor, draws_B: Tensor, temperature: float) -> Tensor:
    """The token (B,) at which the cumulative probability rises above the random number of its row. `draws_B`: in [0,
    1), float64. `temperature`: logits are divided by it, > 0."""
    sums_BV = (logits_BV.double() / temperature).softmax(-1).cumsum(-1)
    wanted_B1 = draws_B[:, None] * sums_BV[:, -1:]
    return torch.searchsorted(sums_BV, wanted_B1, right=True)[:, 0].clamp_max(logits_BV.shape[1] - 1)


@dataclass(frozen=True)
class GeneratedAnswer:
    """A prompt, its reference and the model's answer."""

    place: str
    prompt: str
    reference: str
    answer: str
    source: str = ""  # name of the set that the prompt comes from, where there are several
    heard: bool = False  # whether it is the transcript of a recording, whose words and characters are compared

    @property
    def f1(self) -> float:
        """Token F1 against the reference."""
        return metrics.token_f1(self.answer, self.reference)

    @property
    def rouge_l(self) -> float:
        """ROUGE-L against the reference."""
        return metrics.rouge_l(self.answer, self.reference)


def answers(
    model: nn.Module,
    tokens: TokenizedSet,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    max_new_tokens: int,
    scoring: ModelResults | None = None,
) -> list[GeneratedAnswer]:
    """Greedy answers to the last supervised turn of `count` examples of each set, evenly spaced over it.

    Examples without a prompt (plain text) are skipped.
    """
    spaced = _spaced(tokens, count)
    answer_by_row = answers_to(model, tokens, sorted(spaced), tokenizer, max_new_tokens=max_new_tokens, scoring=scoring)
    return [replace(answer, source=spaced[row]) for row, answer in answer_by_row.items()]


def _spaced(tokens: TokenizedSet, count: int) -> dict[int, str]:
    """The examples that `answers` answers, with the name of the set of each."""
    sets = named_sets.rows_by_set(tokens) or {"": np.arange(len(tokens))}
    return {int(index): name for name, own in sets.items() for index in own[evenly_spaced(len(own), count)]}


def write_largest(model: Any, tokens: TokenizedSet, *, count: int, max_new_tokens: int, passed: int) -> None:
    """Compute the largest batch of `answers` as if all of it were read at once, for a plan: with a cache of every
    token, which holds no less than writing them one by one.

    Args:
        model: A causal model.
        passed: Tokens of a forward pass.
    """
    prompts = [turn.prompt for row in _spaced(tokens, count) if (turn := _last_turn(tokens[row])).start > 1]
    if not prompts:
        return
    lengths = np.asarray(prompts, dtype=np.int64) + max_new_tokens
    rows = next(micro_batches(np.arange(len(lengths)), lengths, tokens=passed))
    device = next(model.parameters()).device
    ids_BL = torch.zeros(len(rows), int(lengths[rows].max()), dtype=torch.long, device=device)
    backbone = model.get_base_model() if isinstance(model, PeftModel) else model
    last = {"logits_to_keep": 1} if "logits_to_keep" in signature(backbone.forward).parameters else {}
    model(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL), use_cache=True, **last)


def answers_to(
    model: nn.Module,
    tokens: TokenizedSet,
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    scoring: ModelResults | None = None,
) -> dict[int, GeneratedAnswer]:
    """Greedy answers to the last supervised turn of each of these rows that has a prompt, by row number."""
    read = {row: tokens[row] for row in rows}
    turns = {row: turn for row in rows if (turn := _last_turn(read[row])).start > 1}
    prompts = [turn.input_ids[: turn.prompt] for turn in turns.values()]
    written = complete(
        model,
        prompts,
        tokenizer,
        stop=stop_tokens(tokenizer, tokens),
        max_new_tokens=max_new_tokens,
        scoring=scoring,
        pictures=[read[row].pictures for row in turns],
        processor=tokens.processor,
    )
    return {
        row: GeneratedAnswer(
            place=tokens.place(row),
            prompt=shown(tokenizer, turn.input_ids[: turn.prompt], tokens.processor) or tokens.place(row),
            reference=_text(tokenizer, turn.input_ids[turn.start : turn.stop]).strip(),
            answer=answer,
            heard=tokens.processor is not None and bool(tokens.processor.prompt),
        )
        for (row, turn), answer in zip(turns.items(), written, strict=True)
    }


def drawn_prompts(tokens: TokenizedSet, count: int, *, seed: int) -> list[int]:
    """Numbers of up to `count` rows that have a prompt, in a random order that `seed` decides."""
    order = np.random.default_rng(seed).permutation(len(tokens)) if count else ()
    return list(islice((int(row) for row in order if _last_turn(tokens[int(row)]).start > 1), count))


def summary(likelihood: Likelihood, answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """The scores by name, as scores.json holds them, of all rows and of each set; answers count where there are any."""
    scores = likelihood.scores | answer_scores(answers)
    for name, own in likelihood.by_source.items():
        of_set = own.scores | answer_scores([answer for answer in answers if answer.source == name])
        scores |= {named_sets.titled(score, name): value for score, value in of_set.items()}
    return scores


def answer_scores(answers: Sequence[GeneratedAnswer]) -> dict[str, float]:
    """Mean F1 and ROUGE-L of answers, or error rates of transcripts, with 95 % intervals (bootstrap over answers);
    empty where there are none."""
    if not answers:
        return {}
    if answers[0].heard:
        edits = [transcript_scores.edits(each.answer, each.reference) for each in answers]
        return units.rounded(transcript_scores.scores(edits))
    value_AS = np.asarray([(each.f1, each.rouge_l) for each in answers])
    return units.rounded(metrics.bootstrap_means(("f1", "rouge_l"), value_AS))


def answer_table(answers: Sequence[GeneratedAnswer], *, before: Mapping[str, str]) -> pd.DataFrame:
    """A row for each answer; `before` has the untrained backbone's answers by place, or none."""
    import pandas as pd

    columns: dict[str, list[Any]] = {
        "row": [each.place for each in answers],
        "prompt": [each.prompt for each in answers],
        "reference": [each.reference for each in answers],
    }
    first = [before[each.place] for each in answers] if before else []
    if answers and answers[0].heard:
        for when, texts in (("before", first), ("after", [each.answer for each in answers])):
            if texts:
                own = [transcript_scores.edits(text, each.reference) for text, each in zip(texts, answers, strict=True)]
                rates = {f"wer_{when}": [each.wer for each in own], f"cer_{when}": [each.cer for each in own]}
                columns |= {when: texts, **rates}
        return pd.DataFrame(columns)
    if before:
        columns["before"] = first
        pairs = [(own, each.reference) for own, each in zip(first, answers, strict=True)]
        columns["f1_before"] = [metrics.token_f1(*pair) for pair in pairs]
        columns["rouge_l_before"] = [metrics.rouge_l(*pair) for pair in pairs]
    columns["after"] = [each.answer for each in answers]
    columns["f1_after"] = [each.f1 for each in answers]
    columns["rouge_l_after"] = [each.rouge_l for each in answers]
    return pd.DataFrame(columns)


def complete(
    model: nn.Module,
    prompts: Sequence[Indices],
    tokenizer: PreTrainedTokenizerBase,
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    scoring: ModelResults | None = None,
    pictures: Sequence[str] = (),
    processor: MediaProcessor | None = None,
) -> list[str]:
    """Greedy continuations of prompts (of an encoder-decoder: its answers), in order; similar lengths share a batch.
    `pictures`: names those of each prompt, which `processor` keeps; none where there is no processor."""

    def text(ids: Indices) -> str:
        return _text(tokenizer, ids).strip()

    return _continued(
        model,
        prompts,
        text,
        stop=stop,
        max_new_tokens=max_new_tokens,
        scoring=scoring,
        pictures=pictures,
        processor=processor,
    )


def complete_ids(
    model: nn.Module,
    prompts: Sequence[Indices],
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    scoring: ModelResults | None = None,
) -> list[list[int]]:
    """The same of prompts without pictures as ids, up to and including the first one of `stop`."""

    def ended(ids: Indices) -> list[int]:
        return [int(each) for each in answer_of(ids, stop)]

    return _continued(model, prompts, ended, stop=stop, max_new_tokens=max_new_tokens, scoring=scoring)


def _continued(
    model: nn.Module,
    prompts: Sequence[Indices],
    read: Callable[[Indices], ReadT],
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    scoring: ModelResults | None,
    pictures: Sequence[str] = (),
    processor: MediaProcessor | None = None,
) -> list[ReadT]:
    device = next(model.parameters()).device
    encodes: bool = model.config.is_encoder_decoder  # type: ignore[union-attr, assignment]
    settings = generation_config(stop, max_new_tokens=max_new_tokens)
    rules = None if processor is None else processor.rules(model.generation_config)  # type: ignore[arg-type]
    if processor is not None and processor.most is not None:
        settings.max_length, settings.max_new_tokens = min(processor.most, len(processor.prompt) + max_new_tokens), None

    def stopping() -> bool:
        return scoring is not None and scoring.store.stopping

    def compute(rows: Indices) -> list[ReadT] | None:
        chosen = [prompts[row] for row in rows]
        inputs = encoder_inputs(chosen) if encodes else padded_on_the_left(chosen)
        begin = 1 if encodes else inputs["input_ids"].shape[1]  # a decoder's own first token is its start token
        if processor is not None:
            inputs |= processor.inputs(inputs["input_ids"], [pictures[row] for row in rows])
        if processor is not None and processor.prompt:
            del inputs["input_ids"]  # which only counts the positions of recordings
            begin = len(processor.prompt)
            inputs["decoder_input_ids"] = torch.tensor([processor.prompt] * len(rows))
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        output = generate(model, on_device, settings, halt=None if scoring is None else stopping, processor=rules)
        if stopping():
            return None  # the answers may be unfinished
        return [read(ids) for ids in output[:, begin:].cpu().numpy()]

    lengths = np.asarray([len(prompt) + max_new_tokens for prompt in prompts], dtype=np.int64)
    content: Iterable[np.ndarray[Any, Any]] = chain(
        prompts, (np.frombuffer(key.encode(), np.uint8) for key in pictures)
    )
    return over_rows(model, lengths, compute, scoring=scoring, content=content)


def generation_config(stop: Sequence[int], *, max_new_tokens: int) -> GenerationConfig:
    """Greedy decoding that ends at any token of `stop`."""
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop),
        pad_token_id=stop[0] if stop else 0,
    )


def stop_tokens(tokenizer: PreTrainedTokenizerBase, tokens: TokenizedSet) -> list[int]:
    """Tokens that end generation: end of sequence, and special tokens that end a supervised turn in `tokens`."""
    # Tokens that were added as special, such as a template's end of turn, are not in `all_special_ids`.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    turns = [_last_turn(tokens[index]) for index in range(min(64, len(tokens)))]
    stop_ids = {int(turn.input_ids[turn.stop - 1]) for turn in turns if turn.stop}
    if tokenizer.eos_token_id is not None:
        special.add(tokenizer.eos_token_id)
        stop_ids.add(tokenizer.eos_token_id)
    return sorted(stop_ids & special)


def shown(tokenizer: PreTrainedTokenizerBase, ids: Indices, processor: MediaProcessor | None) -> str:
    """A prompt for people to read, without special tokens and those of pictures."""
    if processor is not None and processor.loaded:
        ids = ids[~np.isin(ids, processor.token_ids)]
    return _text(tokenizer, ids)


def row_text(tokenizer: PreTrainedTokenizerBase, row: Row, processor: MediaProcessor | None) -> str:
    """A row for people to read: what carries loss and what does not, in turn, a paragraph each."""
    turns = np.split(row.input_ids, np.flatnonzero(np.diff(row.supervised)) + 1)
    return "\n".join(filter(None, (shown(tokenizer, ids, processor).strip() for ids in turns)))


def _text(tokenizer: PreTrainedTokenizerBase, ids: Indices | Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class _Turn:
    input_ids: Indices
    prompt: int  # tokens of the prompt at the beginning of the row
    start: int
    stop: int


def _last_turn(row: Row) -> _Turn:
    """The last contiguous supervised tokens of a row, and its prompt."""
    marked = np.flatnonzero(row.supervised)
    gaps = np.flatnonzero(np.diff(marked) > 1)
    start = int(marked[gaps[-1] + 1] if len(gaps) else marked[0])
    return _Turn(row.input_ids, row.source or start, start, int(marked[-1]) + 1)


def prompt_of(row: Row) -> Indices:
    """The tokens that an answer to a row follows; of a text without a prompt its first half."""
    turn = _last_turn(row)
    return row.input_ids[: turn.prompt if turn.start > 1 else -(-len(row.input_ids) // 2)]


class Answering(Protocol):
    """Something that holds a model which answers."""

    @property
    def model(self) -> nn.Module: ...


M = TypeVar("M", bound=Answering)


class AnswerSamples(Generic[M]):
    """Answers to the same few held-out prompts at each evaluation of a run, in FILE of its directory. `write`: the
    model's greedy answers; they use none of the training's random numbers."""

    def __init__(self, run: Run, write: Callable[[M], Sequence[GeneratedAnswer]]) -> None:
        self._run, self._write = run, write
        self._step: int | None = None

    def start_over(self) -> None:
        """Before the first step of a run: delete answers of a process that ended before its first checkpoint."""
        (self._run.path / FILE).unlink(missing_ok=True)

    def begin(self, model: M) -> None:
        """Before the first step of a run: take the answers of the untrained model, as those of step 0."""
        self.start_over()
        modes = {module: module.training for module in model.model.modules()}
        model.model.eval()
        self.take(model, step=0)
        for module, training in modes.items():
            module.training = training

    def take_untrained(self, model: M) -> None:
        """After the last step: insert the answers of an untrained model as those of step 0, if they are missing."""
        path = self._run.path / FILE
        others = path.read_bytes() if path.exists() else b""
        if others and json.loads(others.partition(b"\n")[0])["step"] == 0:
            return
        lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in self._records(model, step=0))
        if lines:
            files.write_bytes(path, lines.encode(errors="replace") + others)

    def take(self, model: M, *, step: int) -> None:
        """After a step: take the answers, once per step."""
        if step == self._step:  # averaged weights are evaluated at the same step
            return
        self._step = step
        if records := self._records(model, step=step):
            metrics_log.append(self._run.path / FILE, records)

    def _records(self, model: M, *, step: int) -> list[dict[str, int | str]]:
        with self._run.deadline.phase("samples"):
            return [
                {
                    "step": step,
                    "row": each.place,
                    "prompt": each.prompt,
                    "reference": each.reference,
                    "answer": each.answer,
                }
                for each in self._write(model)
            ]


class Question(NamedTuple):
    """A prompt as a model reads it."""

    ids: Indices
    pictures: str
    """Names its pictures, as the processor of the model's template keeps them; empty where it has none."""

    def answered(self, ids: Indices) -> Row:
        """The row of an answer to it, which alone carries loss."""
        whole = np.concatenate([self.ids, ids])
        return Row(whole, np.arange(len(whole)) >= len(self.ids), pictures=self.pictures)


def question_of(model: ExportedModel, example: Example) -> Question:
    """What an answer to `example` starts from; raises DataError where there is nothing, or too much to read."""
    if not isinstance(model.template, ChatEncoder):
        raise DataError(
            f"{example.place} is a text, and the model hears recordings. `workbench predict RUN FILE` writes the "
            "transcripts of those of a table or a folder."
        )
    ids = np.asarray(model.template.question(example), dtype=np.int64)
    if not len(ids):
        raise DataError(f"{example.place} is empty. Write at least one word.")
    hub: Any = model.model.config
    limit = longest_sequence(hub)
    if limit is None:
        most = None
    else:
        adapter = model.model.active_peft_config if isinstance(model.model, PeftModel) else None
        virtual = adapter.num_virtual_tokens if isinstance(adapter, PromptLearningConfig) else 0
        most = limit - virtual - int(not hub.is_encoder_decoder)
    if most is not None and len(ids) > most:
        raise DataError(
            f"{example.place} has {len(ids):,} tokens, and the model reads prompts of {most:,} at most. Shorten it."
        )
    return Question(ids, model.template.pictures_of(example))
