"""Refusals of teachers whose words cannot be compared with the student's, before a weight is read."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from workbench.config import DataConfig, RunConfig
from workbench.config.sections.distill_config import DistillConfig
from workbench.data.batching import evenly_spaced
from workbench.data.text import tokenized
from workbench.data.text.chat import ChatEncoder
from workbench.data.text.token_masking import MlmEncoder
from workbench.data.text.tokenized_set import TokenizedSet
from workbench.distillation.teacher_sources import TeacherSource
from workbench.errors import ConfigError, DataError
from workbench.models import backbones

ROWS, RENDERED = 1000, 8
"""Training rows whose tokens are looked up in the teacher's vocabulary, and those that its template writes again."""
AROUND = 8
"""Tokens that are shown on either side of a difference."""


def require_comparable(
    config: DistillConfig,
    source: TeacherSource,
    student: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatEncoder | MlmEncoder,
    train: TokenizedSet,
) -> None:
    """Refuse a teacher that predicts other things than the student, in other tokens, or from other renderings of a row.

    Args:
        student: The student as a plain run.
        tokenizer: The student's.
        template: How the student's rows are written.
        train: Those rows.

    Raises:
        ConfigError: it does; the message shows where, and what to write instead.
    """
    name = f"distill.teacher.id={source.name}"
    single = "distill.match" if config.match else "distill.loss=universal" if config.loss == "universal" else None
    if single and len(source.adapters) > 1:
        raise ConfigError(
            f"{name}: {single} compares with one teacher, and these are {len(source.adapters)} adapters. Name one of "
            f"them, or leave {single} out."
        )
    _require_same_task(name, source, student)
    if config.loss == "universal":
        return
    own = source.tokenizer()
    _require_same_tokens(name, student, tokenizer, own, train)
    if train.chat and isinstance(template, ChatEncoder) and own.chat_template is not None:
        theirs = source.template(student, own)
        assert isinstance(theirs, ChatEncoder), "only recipe mlm masks, and its rows are no chat"
        _require_same_rendering(name, source, student.data, (template, tokenizer), (theirs, own))


def _require_same_task(name: str, source: TeacherSource, student: RunConfig) -> None:
    if source.config is not None and source.config.recipe != student.recipe:
        raise ConfigError(
            f"{name}: its run is of recipe={source.config.recipe}, and the student's is distill.of={student.recipe}. "
            "Name a teacher that was trained for the same, or change distill.of."
        )
    theirs, mine = source.hub_config(), backbones.hub_config(student.model)
    if theirs.is_encoder_decoder != mine.is_encoder_decoder:
        kinds = ["reads and writes in one sequence", "has a decoder beside its encoder"]
        raise ConfigError(
            f"{name}: {type(theirs).__name__} {kinds[theirs.is_encoder_decoder]}, and the student, "
            f"{type(mine).__name__}, {kinds[mine.is_encoder_decoder]}: they do not read the same rows. Name a teacher "
            "of the student's kind."
        )


def _require_same_tokens(
    name: str, student: RunConfig, tokenizer: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, train: TokenizedSet
) -> None:
    """Heads may be larger than a vocabulary, and a vocabulary may go on after the other ends, where no row is."""
    mine, theirs = ({number: token for token, number in each.get_vocab().items()} for each in (tokenizer, own))
    sizes = f"the student's tokenizer has {len(tokenizer)} tokens, the teacher's {len(own)}"
    cure = _CURE + (" Or leave model.new_tokens out." if student.model.new_tokens else "")
    different = next((number for number in sorted(mine) if theirs.get(number, mine[number]) != mine[number]), None)
    if different is not None:
        raise ConfigError(
            f"{name}: {sizes}, and token {different} is {mine[different]!r} to the one and {theirs[different]!r} to "
            f"the other, so that their probabilities are not of the same things. {cure}"
        )
    spaced = evenly_spaced(len(train), ROWS)
    for index in spaced:
        for number in train[int(index)].input_ids:
            if int(number) not in theirs:
                raise ConfigError(
                    f"{name}: {sizes}, and it does not know {mine.get(int(number))!r} (token {number}), which "
                    f"{train.place(int(index))} holds. {cure}"
                )


_CURE = (
    "Write distill.loss=universal, which compares models of different vocabularies, or name a teacher with the "
    "student's tokenizer."
)


def _require_same_rendering(
    name: str,
    source: TeacherSource,
    data: DataConfig,
    mine: tuple[ChatEncoder, PreTrainedTokenizerBase],
    theirs: tuple[ChatEncoder, PreTrainedTokenizerBase],
) -> None:
    for example in tokenized.first_examples(data, RENDERED):
        try:
            wanted = mine[0].encode(example, loss_on=data.loss_on).input_ids
        except DataError:
            continue  # the row was left out when the data were read
        try:
            teacher_ids = theirs[0].encode(example, loss_on=data.loss_on).input_ids
        except DataError as error:
            raise ConfigError(f"{name}: its chat template refuses a row. {error}\n  {_same_template(source)}") from None
        if wanted != teacher_ids:
            first = _first_difference(wanted, teacher_ids)
            raise ConfigError(
                f"{name}: its chat template writes rows otherwise than the student's, so that it would be asked about "
                f"texts that it has not learnt to go on from. {example.place}, from token {first} on:\n"
                f"  student: ... {_around(mine[1], wanted, first)}\n"
                f"  teacher: ... {_around(theirs[1], teacher_ids, first)}\n"
                f"  {_same_template(source)}"
            )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _around(tokenizer: PreTrainedTokenizerBase, ids: list[int], place: int) -> str:
    return repr(tokenizer.decode(ids[max(0, place - AROUND) : place + AROUND]))


def _same_template(source: TeacherSource) -> str:
    """The setting that gives the student its teacher's template."""
    saved = None if source.run is None else source.run / "adapter" / "chat_template.jinja"
    words = f" model.new_tokens='[{', '.join(source.model.new_tokens)}]'" if source.model.new_tokens else ""
    if saved is not None and saved.is_file():
        return f"Give the student the teacher's: model.chat_template={saved}{words}"
    return f"Write the teacher's into a file, and name it to the student: model.chat_template=FILE{words}"
