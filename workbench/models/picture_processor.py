"""Pictures and recordings beside text: read by the backbone's own processor, once, and kept as what the model is given.

What a processor makes of a picture depends on nothing but the picture, so each is kept in a file of its own, named by
its content: rows that share a picture, other sets, later epochs and later runs read that file. Its numbers have at most
as many values as a byte has for each channel, and are kept exactly as an index into them.

Legend: B rows, L padded length, P pictures.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import mimetypes
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import PIL
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    ProcessorMixin,
)

from workbench.config import ModelConfig, RunConfig, model_heads
from workbench.config.sections.image_config import ImageConfig
from workbench.data.images import picture_sources
from workbench.data.images.picture_sources import MediaKind
from workbench.data.images.picture_store import use
from workbench.data.sound import listening
from workbench.data.sound.sound_files import SOUND, SoundFile
from workbench.data.stored_files import StoredFile, stamp
from workbench.data.text.formats import Example
from workbench.data.text.media import KEY, KINDS, TYPES, KeptPictures, Media
from workbench.errors import BackboneError, DataError
from workbench.models import sound_processor
from workbench.models.backbone_source import source_arguments, source_path
from workbench.models.sound_processor import FeatureProcessor
from workbench.runs import addresses, files

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import GenerationConfig

VERSION = "2"  # raise it when what is kept changes
HEARD = "2"  # the same of recordings
SIDE = 96  # longest side of the small pictures that reports show, in pixels


def of(config: RunConfig, hub: PretrainedConfig) -> PictureProcessor | FeatureProcessor | str | None:
    """What reads the pictures or recordings of rows for a backbone; or why none can be read; None where its task reads
    none."""
    if config.reads_sound:
        return sound_processor.of(config, hub)
    if not config.task.pictured:
        return None
    if hears(hub):
        return HearingProcessor(config.model, type(hub), config.image, config.data.fetch, ())
    if hub.is_encoder_decoder or type(hub) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return (
            f"model.id={config.model.id} ({type(hub).__name__}) reads text alone. Take a backbone that sees, such as "
            "Qwen3-VL, Gemma 3 or LLaVA"
        )
    model: Any = model_heads.of(config).auto_class(hub)._model_mapping[type(hub)]
    if "pixel_values" not in (named := signature(model.forward).parameters):
        return (
            f"model.id={config.model.id} is read as {model.__name__}, which reads text alone. Take a backbone with one "
            "that sees, such as Qwen3.5 or Gemma 3"
        )
    if isinstance(config.image.folder, dict):
        return "image.folder names one folder for all rows of text. Write it as image.folder=FOLDER"
    types = tuple(name for name in TYPES if name in named)
    return PictureProcessor(config.model, type(hub), config.image, config.data.fetch, types)


@dataclass(frozen=True)
class PictureProcessor:
    """Reads pictures as a backbone's processor does.

    Args:
        model: Where the processor is.
        architecture: Of the backbone.
        image: Its folder and max_pixels are used.
        fetch: Whether addresses are read from the network.
        types: Arguments of the model that say which tokens are those of pictures; None: of one that writes text.
        forgets: Whether what is made of pictures is kept until `forget` alone, and never in the cache.
    """

    model: ModelConfig
    architecture: type[PretrainedConfig]
    image: ImageConfig
    fetch: bool = False
    types: tuple[str, ...] | None = None
    forgets: bool = False
    media: ClassVar[MediaKind[Any]] = picture_sources.PICTURE

    @property
    def kind(self) -> str:
        """The key of KINDS that it reads."""
        return "image"

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: other processes load the processor for themselves."""
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__}

    @property
    def numbered(self) -> bool:
        """Whether inputs name the pictures of rows, for a model whose tower's outputs are kept."""
        return bool(self.__dict__.get("_numbered", False))

    def name_rows(self, wanted: bool) -> None:
        """Whether inputs name the pictures of rows from now on."""
        self.__dict__["_numbered"] = wanted

    @cached_property
    def processor(self) -> Any:
        """The stock processor. Raises BackboneError: there is none, or it reads no pictures."""
        loaded = self._stock()
        if getattr(loaded, "image_processor", None) is None or getattr(loaded, "image_token", None) is None:
            raise BackboneError(
                f"model.id={self.model.id}: its processor, {type(loaded).__name__}, reads no pictures beside text. "
                "Fetch preprocessor_config.json too, or leave the rows with pictures out."
            )
        hub = self.architecture.from_pretrained(source_path(self.model), **source_arguments(self.model))
        if hub.image_token_id not in loaded.image_token_ids:  # Llama 4's
            raise BackboneError(
                f"model.id={self.model.id}: its processor, {type(loaded).__name__}, does not name the tokens that "
                "stand for a picture, so that it is trained on text alone. Leave the rows with pictures out."
            )
        return loaded

    def _stock(self) -> Any:
        try:
            return _class_of(self.architecture).from_pretrained(source_path(self.model), **source_arguments(self.model))
        except Exception as error:
            why = " ".join(str(error).split())[:300].rstrip(".")
            if "torchvision" in why.lower():  # PyPI's is built for CUDA, and does not load beside a torch for CPUs
                raise BackboneError(
                    f"model.id={self.model.id}: its processor, by which it reads {self.media.many}, needs torchvision, "
                    "which cannot be imported here. Install the torchvision of this build of torch."
                ) from None
            raise BackboneError(
                f"model.id={self.model.id}: its processor, by which it reads {self.media.many}, cannot be loaded "
                f"({why}). Fetch processor_config.json or preprocessor_config.json too, or install what it names."
            ) from None

    @property
    def loaded(self) -> bool:
        """Whether a picture was read, for which the processor had to be there."""
        return "processor" in self.__dict__

    @property
    def token(self) -> str:
        """What a chat template writes where a picture stands."""
        return str(self.processor.image_token)

    @cached_property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the tokens whose embeddings are those of pictures."""
        return np.asarray([each for each in self.processor.image_token_ids if each is not None], dtype=np.int64)

    @cached_property
    def identity(self) -> str:
        """All that what is kept depends on besides the pictures."""
        import transformers

        versions = (VERSION, PIL.__version__, transformers.__version__)
        settings = [versions, self.processor.to_json_string(), self.image.max_pixels]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]

    @cached_property
    def folder(self) -> Path:
        """Where pictures are kept, in use from now on."""
        if self.forgets:
            aside = TemporaryDirectory(prefix="pictures-")
            weakref.finalize(self, aside.cleanup)
            return Path(aside.name)
        folder = files.cache_folder() / self.media.many / f"text-{self.identity}"
        folder.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, use(folder))
        return folder

    def file_of(self, medium: Media, where: str) -> Any:
        """The picture or recording of a row. Raises DataError: it is not there, or is none."""
        if medium.kind != self.kind:
            raise DataError(f"{where}: has a {KINDS[medium.kind].noun}, and {self.media.many} alone are read here.")
        value = medium.value
        if isinstance(value, str) and addresses.is_address(value) and not value.startswith("file://"):
            if not self.fetch:
                raise DataError(
                    f"{where}: the {self.media.one} is at an address, {value[:100]}, and nothing is read from the "
                    f"network. Write data.fetch=true, or download the {self.media.many} and write their paths."
                )
            value = str(addresses.fetched(value))
        folder = None if medium.folder is None else Path(medium.folder)
        try:
            found = None
            whole = isinstance(value, str) and (value.startswith("data:") or Path(value).is_absolute())
            if self.kind == "image" and isinstance(self.image.folder, str) and folder is not None and not whole:
                found = _finder(self.image.folder, folder)(value)
            return found or picture_sources.file_of(value, where, folder, KINDS[medium.kind].columns[-1], self.media)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None

    def address(self, medium: Media, where: str) -> str:
        """Where the picture of a row is found from anywhere: its address, its whole path, or itself as a data URI.
        Raises as `file_of`."""
        if isinstance(medium.value, str) and addresses.is_address(medium.value):
            return medium.value
        file = self.file_of(medium, where)
        if file.path is not None and not file.member and file.span is None:
            return str(file.path.resolve())
        data, kind = file.read(), mimetypes.guess_type(file.name)[0] or "image/png"
        if file.shape is not None:
            buffer = io.BytesIO()
            file.image(max_pixels=self.image.max_pixels).save(buffer, "PNG")
            data = buffer.getvalue()
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    def kept(self, media: Sequence[Media], where: str) -> KeptPictures:
        """The pictures of a row as the processor makes them, from their file where they were made before. Raises
        DataError: as `file_of`, or one cannot be decoded."""
        found = [self.file_of(medium, where) for medium in media]
        try:
            digests = [file.digest() for file in found]
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        key = hashlib.sha256(b"".join(digests)).hexdigest()[:32]
        known: dict[str, tuple[str, ...]] = self._texts
        if key not in known:
            known[key] = self._stored_texts(key) or self._made(found, key, where)
        stamps = [stamp(str(file.path)) for file in found if file.path is not None]
        return KeptPictures(key, known[key], tuple(stamps))

    @cached_property
    def _texts(self) -> dict[str, tuple[str, ...]]:
        return {}

    def _stored_texts(self, key: str) -> tuple[str, ...]:
        try:
            with safe_open(self.folder / key, framework="np") as opened:
                return tuple(json.loads((opened.metadata() or {})["texts"]))
        except (OSError, SafetensorError, KeyError, ValueError):  # not there, or damaged: made anew
            return ()

    def _opened(self, file: Any) -> Any:
        """A file as the stock processor takes it."""
        return file.image(max_pixels=self.image.max_pixels)

    def _given(self, opened: list[Any]) -> dict[str, Any]:
        """The arguments of the stock processor for what stands in one text."""
        return {"images": [opened]}

    def _small(self, opened: list[Any]) -> list[bytes]:
        return [_jpeg(picture) for picture in opened]

    def _made(self, found: Sequence[StoredFile], key: str, where: str) -> tuple[str, ...]:
        try:
            opened = [self._opened(file) for file in found]
        except DataError as error:
            raise DataError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
        try:
            made: Any = self.processor(
                **self._given(opened),
                text=[self.token * len(opened)],
                return_text_replacement_offsets=True,
                return_tensors="np",
            )
        except (ValueError, ZeroDivisionError) as error:  # sides of a ratio that the processor does not take
            names = "".join(f"{file.name}: " for file in found if file.name != where)
            raise DataError(f"{where}: {names}{type(self.processor).__name__} does not take it: {error}") from None
        texts = tuple(str(each["replacement"]) for each in made.pop("text_replacement_offsets")[0])
        others = ("input_ids", "attention_mask", *TYPES)
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in others}
        small = [base64.b64encode(each).decode() for each in self._small(opened)]
        known = {"texts": json.dumps(texts), "small": json.dumps(small)}
        files.write_bytes(self.folder / key, save(_packed(arrays), known))
        return texts

    def forget(self, key: str) -> None:
        """Delete what was made of the pictures of a row."""
        self._texts.pop(key, None)
        (self.folder / key).unlink(missing_ok=True)

    def small(self, key: str) -> list[bytes]:
        with safe_open(self.folder / key, framework="np") as opened:
            return [base64.b64decode(each) for each in json.loads((opened.metadata() or {})["small"])]

    def sounds(self, key: str) -> list[bytes]:
        return []

    def knows(self, keys: Iterable[str], stamps: Iterable[str]) -> bool:
        """Whether all pictures of rows are still kept, and their files are what they were."""
        same = all(stamp(state.split("\0")[0]) == state for state in set(stamps))
        return same and all((self.folder / key).exists() for key in set(keys) - {""})

    def inputs(self, ids_BL: Tensor, keys: Sequence[str]) -> dict[str, Tensor]:
        """Arguments of the model for the pictures of rows; none where there are no pictures.

        Args:
            ids_BL: Their tokens.
            keys: The file of each row's pictures; empty where it has none.
        """
        import torch

        own = [key for key in keys if key]
        if not own:
            return {}
        inputs = self.arrays(own)
        types = torch.isin(ids_BL, torch.from_numpy(self.token_ids)).long()
        return {**inputs, **{name: types for name in self._type_names}}

    def arrays(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """What the processor made of the pictures of rows, one after another."""
        import torch

        from workbench.data.packing import stacked

        read = [_unpacked(self.folder / key) for key in keys]
        return {name: stacked([torch.from_numpy(each[name]) for each in read]) for name in read[0]}

    @cached_property
    def _type_names(self) -> Sequence[str]:
        """Arguments of the backbone that say which tokens are those of pictures."""
        if self.types is not None:
            return self.types
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[self.architecture]
        return [name for name in TYPES if name in signature(model.forward).parameters]

    @property
    def prompt(self) -> tuple[int, ...]:
        """None: what stands before an answer is in the row."""
        return ()

    @property
    def most(self) -> None:
        """None: a row's own length says it."""

    def rules(self, own: GenerationConfig) -> None:
        """None: answers are free."""

    @property
    def settings(self) -> list[Any]:
        return [self.identity, self.image.folder]

    @property
    def embedded(self) -> bool:
        """Whether the model knows pictures by their embeddings alone: positions of M-RoPE, and attention to both sides
        inside a picture, follow from where pictures stand in a row."""
        return not self._type_names

    @property
    def packs(self) -> bool:
        return self.embedded


def hears(hub: PretrainedConfig) -> bool:
    """Whether a backbone reads recordings within conversations, and no pictures."""
    known = (
        type(hub) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING and type(hub) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )
    return known and not hub.is_encoder_decoder and "audio_config" in hub.sub_configs


class HearingProcessor(PictureProcessor):
    """Reads the recordings of conversations as a backbone's processor does."""

    media: ClassVar[MediaKind[Any]] = SOUND

    @property
    def kind(self) -> str:
        return "audio"

    @cached_property
    def processor(self) -> Any:
        """The stock processor. Raises BackboneError: there is none, or it does not write the tokens of recordings."""
        stock = _class_of(self.architecture)
        if getattr(stock, "replace_audio_token", None) in (None, ProcessorMixin.replace_audio_token):
            raise BackboneError(
                f"model.id={self.model.id}: its processor, {stock.__name__}, does not say which tokens of a "
                "text stand for a recording, so that it is trained on text alone. Take one such as Qwen2-Audio, or "
                "leave the rows with recordings out."
            )
        return self._stock()

    @property
    def token(self) -> str:
        return str(self.processor.audio_token)

    @cached_property
    def token_ids(self) -> npt.NDArray[np.int64]:
        return np.asarray([self.processor.audio_token_id], dtype=np.int64)

    @cached_property
    def identity(self) -> str:
        import transformers

        settings = [HEARD, transformers.__version__, self.processor.to_json_string()]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]

    @property
    def packs(self) -> bool:
        return False  # not tried

    def _opened(self, file: SoundFile) -> Any:
        own = self.processor.feature_extractor
        longest = getattr(own, "chunk_length", None)  # beyond which it would cut recordings without a word
        return file.wave(own.sampling_rate, several="mix", most=None, on_long="refuse", longest=longest)

    def _given(self, opened: list[Any]) -> dict[str, Any]:
        return {"audio": opened, "sampling_rate": self.processor.feature_extractor.sampling_rate}

    def _small(self, opened: list[Any]) -> list[bytes]:
        return [listening.kept(wave_T, self.processor.feature_extractor.sampling_rate) for wave_T in opened]

    def small(self, key: str) -> list[bytes]:
        return []

    def sounds(self, key: str) -> list[bytes]:
        return super().small(key)


def _jpeg(picture: Image) -> bytes:
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=88, subsampling=0)
    return buffer.getvalue()


def _class_of(architecture: type[PretrainedConfig]) -> Any:
    """Transformers' class that loads the processor of an architecture."""
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    return without_videos(PROCESSOR_MAPPING[architecture]) if architecture in PROCESSOR_MAPPING else AutoProcessor


def without_videos(stock: Any) -> Any:
    """A stock processor class without its part for videos, which needs torchvision and files where pictures do not;
    itself where it has none."""
    parts = list(stock.get_attributes())
    if "video_processor" not in parts:
        return stock
    from transformers import ProcessorMixin

    class Parts(ProcessorMixin):
        """Takes the parts that a stock class hands on, but for that for videos."""

        def __init__(self, *parts: Any, video_processor: None = None, **named: Any) -> None:
            super().__init__(*parts, **named)  # type: ignore[no-untyped-call]

    class WithoutVideos(stock, Parts):  # type: ignore[misc]
        """The stock processor of text and pictures."""

        video_processor = None

        @classmethod
        def get_attributes(cls) -> list[str]:
            """Its parts but that for videos."""
            return [name for name in parts if name != "video_processor"]

    own, asked = stock.__init__, signature(stock.__init__).parameters.get("video_processor")
    if (
        asked is not None and asked.default is Parameter.empty
    ):  # SmolVLM's, from whose code the keys of its file are read
        defaults = (None, *(own.__defaults__ or ()))
        made: Any = FunctionType(own.__code__, own.__globals__, own.__name__, defaults, own.__closure__)
        WithoutVideos.__init__ = made  # type: ignore[method-assign]
    WithoutVideos.__name__ = stock.__name__  # as its file names it
    return WithoutVideos


def _packed(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Arrays, those of floats as an index into their values."""
    packed = dict[str, npt.NDArray[Any]]()
    for name, array in arrays.items():
        packed[name] = np.ascontiguousarray(array)
        if array.dtype.kind == "f":
            values, index = np.unique(array, return_inverse=True)
            if len(values) <= 2**16:
                packed[name] = index.reshape(array.shape).astype(np.uint8 if len(values) <= 2**8 else np.uint16)
                packed[f"{name}.values"] = values
    return packed


def _unpacked(path: Path) -> dict[str, npt.NDArray[Any]]:
    with safe_open(path, framework="np") as opened:
        names = opened.keys()
        tensors = {name: opened.get_tensor(name) for name in names}
    return {
        name: tensors[f"{name}.values"][array] if f"{name}.values" in tensors else array
        for name, array in sorted(tensors.items())
        if not name.endswith(".values")
    }


def addressed(questions: Sequence[Example], image: ImageConfig, *, fetch: bool) -> list[Example]:
    """Examples whose pictures are told by addresses, which other files and a server can be given. Raises DataError: one
    is not there."""
    reader = PictureProcessor(ModelConfig(), PretrainedConfig, image, fetch)

    def told(example: Example) -> Example:
        messages = [
            {**message, KEY: [replace(each, value=reader.address(each, example.place)) for each in message[KEY]]}
            if KEY in message
            else message
            for message in example.messages
        ]
        return replace(example, messages=tuple(messages))

    return [told(each) for each in questions]


@lru_cache(maxsize=4)
def _finder(named: str, beside: Path) -> Any:
    return picture_sources.finder(named, beside, "image", picture_sources.PICTURE)
