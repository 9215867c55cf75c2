"""`predict` and `generate`: what a finished run's adapter says of the rows of a file, or answers to a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from workbench import evaluation, report
from workbench.config import RunConfig
from workbench.config.task_facts import names
from workbench.data import starter
from workbench.data.rows import excerpt, read_rows
from workbench.data.sound.sound_files import SoundFile
from workbench.data.stored_files import StoredFile
from workbench.data.text import media
from workbench.data.text.formats import Example
from workbench.errors import ConfigError, DataError
from workbench.evaluation import transcription
from workbench.evaluation.forward_passes import dealt_results
from workbench.evaluation.generation import question_of
from workbench.models import exported
from workbench.models.exported import ExportedModel
from workbench.models.sound_processor import FeatureProcessor
from workbench.recipes.task import PredictionTable, ScoringOptions, implementation
from workbench.recipes.verbs import submission
from workbench.recipes.verbs.asked_config import asked_config
from workbench.runs import addresses, files, process_memory, run_directory
from workbench.runs.ranks import joined
from workbench.runs.trust import Trust

if TYPE_CHECKING:
    import pandas as pd

WRITERS = {".jsonl", ".csv", ".parquet"}


def predict(
    run: Path | str,
    input: str,
    overrides: Sequence[str] = (),
    *,
    out: Path | str | None = None,
    like: Path | str | None = None,
    max_new_tokens: int = 256,
    trust: bool = False,
) -> PredictionTable:
    """Answer every row of a file greedily, or name its class, its number, its embedding: what the run learnt.

    Processes that were started together read a share of the rows each; the first writes `out`.

    Args:
        run: A run directory.
        input: Rows in any format that training takes; answers that they hold are ignored.
        overrides: `key=value` words of sections data and evaluate. With `data.on_bad_row=skip` unreadable rows are left
            out.
        out: A .jsonl, .csv or .parquet file to write; None: none.
        like: A leaderboard's sample submission: `out` has its rows in its order, and its columns. Rows that cannot be
            read have a fallback there, which `notes` names. The report of the run links to it where it stands in `run`.
        max_new_tokens: Of an answer, where the model writes text.
        trust: Execute the Python code that the run's config.yaml names.

    Returns:
        `table`, a pandas table with a line for each row, and `left_out`, the rows that could not be read. A line has
        the `index` of its row in the input, from 0, and all columns of the input; those whose names are taken are
        called `input_NAME`, and are left out where the table holds the same values.

    Raises:
        ConfigError: The run predicts nothing, `out` exists already, or a setting would change what was trained.
        DataError: A row cannot be read.

    Examples:
        >>> import workbench
        >>> predicted = workbench.predict("runs/short", "starter/arithmetic_held_out.jsonl", max_new_tokens=2)
        >>> list(predicted.table.columns)
        ['index', 'row', 'input_answer', 'prompt', 'answer']
    """
    run, out = Path(run), None if out is None else Path(out)
    if out is not None and out.suffix not in WRITERS:
        raise ConfigError(f"--out {out}: expected a name that ends in {', '.join(sorted(WRITERS))}.")
    if like is not None and (out is None or out.suffix != ".csv"):
        raise ConfigError("--like writes a file such as the sample. Write --out FILE.csv.")
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already. Name another file, or delete it first.")
    if like is not None:
        submission.read_sample(Path(like))
        overrides = ["data.on_bad_row=skip", *overrides]
    config = asked_config(run, overrides, verb="predict", trust=trust)
    process_memory.keep()
    ranks = joined()
    scoring = dealt_results(ranks)
    if config.task.predicts is None:
        require_text(config, run)
    require_one_turn(config, run)
    if out is not None:
        files.require_writable(out)
    predictions = implementation(config).predict(
        run, input, config, ScoringOptions(scoring, Trust(trust), max_new_tokens)
    )
    if like is not None and out is not None and ranks.first:
        notes = submission.write(predictions, run, input, config, like=Path(like), out=out)
        predictions = predictions._replace(notes=notes)
        if out.resolve().parent == run.resolve():
            report.write(run)  # which links to it
    predictions = predictions._replace(table=_beside_input(predictions, input, config))
    if like is None and out is not None and ranks.first:
        table = predictions.table
        if out.suffix == ".jsonl":
            content = str(table.to_json(orient="records", lines=True, force_ascii=False)).encode()
        else:
            content = str(table.to_csv(index=False)).encode() if out.suffix == ".csv" else table.to_parquet()
        files.write_bytes(out, content)
    return predictions


def _beside_input(predictions: PredictionTable, source: str, config: RunConfig) -> pd.DataFrame:
    """The table, with the columns of the input between the row's place and what the run says of it."""
    import pandas as pd  # 0.2 s, which other verbs need not wait for

    table = predictions.table
    read = predictions.read or list(read_rows(starter.resolve(source), config.data))
    numbers = {row.place: number for number, row in enumerate(read)}

    def number(place: str) -> int:
        """The number of a row, of which the line may be a part: `a.jsonl, row 3, step 2`."""
        while place not in numbers:
            place, comma, _ = place.rpartition(", ")
            assert comma, "every line is of a row that was read"
        return numbers[place]

    index = [number(place) for place in table["row"]]
    inputs: dict[str, list[Any]] = {}
    for name in dict.fromkeys(key for row in read for key in row.columns):
        cells = [_cell(read[each].columns.get(name)) for each in index]
        if len({float if type(cell) is int else type(cell) for cell in cells if cell is not None}) > 1:
            cells = [None if cell is None else str(cell) for cell in cells]
        if name not in table or cells != table[name].tolist():
            inputs[f"input_{name}" if name in table else name] = cells
    first = pd.DataFrame({"index": index, "row": table["row"], **inputs})
    return pd.concat([first, table.drop(columns="row")], axis=1)


def _cell(value: Any) -> Any:
    """A value of the input as every kind of file can hold it; a picture or recording by its name."""
    value = value.name if isinstance(value, StoredFile) else value
    return value if value is None or isinstance(value, (str, bool, int, float)) else json.dumps(value, default=str)


def generate(
    run: Path | str,
    prompt: str,
    overrides: Sequence[str] = (),
    *,
    pictures: Sequence[Path | str] = (),
    recordings: Sequence[Path | str] = (),
    max_new_tokens: int = 256,
    trust: bool = False,
    write: Callable[[str], object] = lambda text: None,
) -> str:
    """One greedy answer to a prompt, which is rendered as the training rows were; or the transcript of a recording.

    Args:
        run: A run directory.
        prompt: What a user would say; the beginning of a text, where the run learnt raw text; the path of a recording
            of any length, where it learnt to transcribe.
        overrides: `model.id=FOLDER`, where the backbone has moved since.
        pictures: Files that stand before the prompt, or at its marks `<image>`, where the backbone sees.
        recordings: The same at marks `<audio>`, where it hears within conversations.
        max_new_tokens: Of the answer.
        trust: Execute the Python code that the run's config.yaml names.
        write: Called with each piece of the answer as it comes.

    Returns:
        The answer.

    Raises:
        ConfigError: The run trains no model that writes text.

    Examples:
        >>> import workbench
        >>> pieces = []
        >>> answer = workbench.generate("runs/short", "Who lived in the wood?", max_new_tokens=4, write=pieces.append)
        >>> "".join(pieces) == answer
        True
    """
    run = Path(run)
    config = run_directory.shipped_config(run, Trust(trust), overrides)
    if config.reads_sound and config.task.writes_text:
        beside = {"--picture": pictures, "--recording": recordings}
        return _transcript(run, prompt, config, beside=beside, max_new_tokens=max_new_tokens, write=write)
    require_text(config, run)
    require_one_turn(config, run)
    model = exported.load(run, config)
    raw = files.read_json(run / "manifest.json").get("data", {}).get("train", {}).get("chat") is False
    # Whole paths, since those of rows may be names in image.folder, which stands beside their table.
    given = {
        column: [
            str(each) if addresses.is_address(str(each)) else str(Path(each).expanduser().absolute()) for each in files
        ]
        for column, files in (("images", pictures), ("audios", recordings))
        if files
    }
    asked = tuple(media.placed([{"role": "user", "content": prompt}], given, "the prompt "))
    as_text = raw and not given
    question = question_of(
        model, Example("the prompt", text=((prompt, False),)) if as_text else Example("the prompt", messages=asked)
    )
    ids = torch.from_numpy(question.ids)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if question.pictures and model.template.processor is not None:
        inputs |= model.template.processor.inputs(ids, [question.pictures])
    device = next(model.model.parameters()).device
    answer = Pieces(model.tokenizer, write)
    evaluation.generate(
        model.model,
        {name: tensor.to(device) for name, tensor in inputs.items()},
        evaluation.generation_config(model.stop, max_new_tokens=max_new_tokens),
        streamer=answer,
    )
    return answer.text


def _transcript(
    run: Path,
    path: str,
    config: RunConfig,
    *,
    beside: Mapping[str, Sequence[Path | str]],
    max_new_tokens: int,
    write: Callable[[str], object],
) -> str:
    if given := [option for option, each in beside.items() if each]:
        raise ConfigError(
            f"{run} writes the transcript of the one recording that stands in place of a prompt. Leave {given[0]} out."
        )
    file = Path(starter.resolve(path)).expanduser()
    if not file.is_file():
        raise DataError(
            f"{run} transcribes recordings, and {excerpt(path)} is {'a folder' if file.is_dir() else 'no file'}. Write "
            f"the path of one, or `workbench predict {run} FOLDER --out FILE.csv` for those of a folder or a table."
        )
    model = exported.load(run, config)
    processor = model.template.processor
    assert isinstance(processor, FeatureProcessor)
    recording = SoundFile(path, file)
    samples = len(processor.wave(recording))
    (said,) = transcription.transcribe(model, processor, [(recording, samples)], max_new_tokens=max_new_tokens)
    write(said.text)
    return said.text


class Pieces(TextStreamer):
    """Gathers an answer while it is written, and hands on each piece."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.text = write, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with text that later tokens do not change."""
        self.text += text
        self.write(text)


def load_run(run: Path | str, overrides: Sequence[str] = (), *, trust: bool = False) -> ExportedModel:
    """The model that a finished run shipped: its adapter over a freshly loaded backbone, in evaluation mode.

    Args:
        run: A run directory.
        overrides: `model.id=FOLDER`, where the backbone has moved since.
        trust: Execute the Python code that the run's config.yaml names.

    Returns:
        `model`, called like the backbone; its output `head`; `tokenizer`; `template`, which writes rows as token ids;
        and `stop`, the tokens at which answers end.

    Raises:
        ConfigError: The run trains no model that writes text, or is not finished.

    Examples:
        >>> import workbench
        >>> shipped = workbench.load_run("runs/short")
        >>> asked = shipped.tokenizer("Once upon a time", return_tensors="pt")
        >>> shipped.model(**asked).logits.shape
        torch.Size([1, 4, 6144])
    """
    run = Path(run)
    config = run_directory.shipped_config(run, Trust(trust), overrides)
    require_text(config, run)
    return exported.load(run, config)


def require_one_turn(config: RunConfig, run: Path) -> None:
    """Raise ConfigError where answers would end at the first call, since nobody here calls the run's tools."""
    if config.reinforce.tools is not None:
        raise ConfigError(
            f"{run} was trained to answer in turns, with reinforce.tools, and this verb writes one turn without them. "
            f"`workbench evaluate {run} data.test=FILE` plays whole episodes."
        )


def require_text(config: RunConfig, run: Path) -> None:
    """Raise ConfigError where a run trains no model that writes answers to texts."""
    if config.media is not None and config.task.writes_text:
        raise ConfigError(
            f"{run} writes the transcripts of recordings, and this verb asks with texts. "
            f"`workbench generate {run} FILE` transcribes one, `workbench predict` those of a table or a folder."
        )
    if config.task.writes_text:
        return
    predicts = "" if config.task.predicts is None else f", `workbench predict` can {config.task.predicts[1]}"
    raise ConfigError(
        f"{run}: recipe {config.recipe} trains no model that writes text. `workbench evaluate` scores it{predicts}; "
        f"answers come from recipes {names(lambda task: task.writes_text).replace('|', ', ')}."
    )
