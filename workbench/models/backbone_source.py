"""Where a backbone is: a folder, or an id on the hub. Without torch, so that a wrong one is told at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from workbench.config import ModelConfig
from workbench.data import starter
from workbench.errors import BackboneError
from workbench.runs import files, hub_connection, run_directory

UNREACHABLE = (
    "the hub cannot be reached and the files are not cached. Write a folder as model.id, use the shipped `starter`, or "
    "fetch it where there is a network: hf download {id}"
)


def located(name: str) -> str:
    """Where `model.id` is: of `starter` the shipped folder, of a run that trained every weight its model."""
    location = starter.resolve(name)
    run = Path(location).expanduser()
    whole = (run / "config.yaml").is_file() and (run / "adapter" / "config.json").is_file()
    return str(run / "adapter") if whole else location


def gguf_file(config: ModelConfig) -> Path | None:
    """The GGUF file that `model.id` names, or that is alone in its folder; None for other backbones.

    Raises:
        BackboneError: There is no such file, or the folder holds several.
    """
    path = Path(located(config.id)).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BackboneError(f"model.id: no file {config.id}. Write model.id=FOLDER/NAME.gguf with one that exists.")
        return path
    given = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not given or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    if len(given) > 1:
        names = ", ".join(each.name for each in given)
        raise BackboneError(
            f"model.id={config.id}: the folder holds {len(given)} GGUF files ({names}). Write the one to train over: "
            f"model.id={shlex.quote(str(Path(config.id) / given[0].name))}"
        )
    return given[0]


def source_path(config: ModelConfig) -> str:
    """A folder, or an id on the hub; raises BackboneError where it can be neither."""
    file = gguf_file(config)
    location = located(config.id) if file is None else str(file.parent)
    folder = Path(location).expanduser()
    looks_local = file is not None or location.startswith((".", "/", "~")) or location.count("/") > 1
    if looks_local and not folder.is_dir():
        raise BackboneError(
            f"model.id: no folder {config.id}. Write model.id=FOLDER with one that exists, a hub id such as "
            "Qwen/Qwen3-0.6B, or `starter`."
        )
    if config.revision is not None and folder.is_dir():
        raise BackboneError(
            f"model.revision={config.revision} names a branch, tag or commit on the hub, but model.id={config.id} is a "
            "folder. Leave model.revision out."
        )
    return str(folder) if looks_local else location


def source_arguments(config: ModelConfig) -> dict[str, Any]:
    """Further arguments of transformers' `from_pretrained`."""
    here = Path(starter.resolve(config.id)).expanduser().exists()
    return {
        "revision": config.revision or "main",
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": not here and not hub_connection.answers(),
    }


def _cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        return True  # not a name that the hub could have, which is told where it is loaded


def require_there(config: ModelConfig) -> None:
    """Refuse what is no backbone, and a hub that cannot be reached, before anything is loaded."""
    require_whole(config)
    source = source_path(config)
    if not Path(source).is_dir() and not hub_connection.answers() and not _cached(source, config.revision):
        raise BackboneError(f"model.id={config.id} cannot be loaded: {UNREACHABLE.format(id=config.id)}")


def require_whole(config: ModelConfig) -> None:
    """Refuse an adapter and a run directory in the place of a backbone, and files that would never end."""
    folder = Path(source_path(config))
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise BackboneError(
                f"model.id={config.id}: {path} is a pipe or a device, not a file. Save or fetch the backbone again."
            )
    if not folder.is_dir() or (folder / "config.json").is_file() or gguf_file(config) is not None:
        return
    run = folder if (folder / "config.yaml").is_file() else folder.parent
    adapter = files.read_json((run / "adapter" if run == folder else folder) / "adapter_config.json")
    if adapter and (run / "config.yaml").is_file():
        under = shlex.quote(str(run_directory.shipped_values(run).get("model", {}).get("id", "BACKBONE")))
        what = "is a run directory" if run == folder else f"is the adapter of the run {run}"
        cure = f"`workbench merge {shlex.quote(str(run))} --out FOLDER`, then model.id=FOLDER"
    elif adapter:
        under = shlex.quote(str(adapter.get("base_model_name_or_path") or "BACKBONE"))
        what, cure = (
            f"is an adapter ({adapter.get('peft_type')} of PEFT)",
            f"`workbench adopt {shlex.quote(str(folder))} --out RUN`, and train.start=RUN beside it",
        )
    else:
        return
    raise BackboneError(
        f"model.id={config.id} {what}, not a backbone. Write model.id={under} for the backbone under it; to train on "
        f"from backbone and adapter together, write {cure}."
    )
