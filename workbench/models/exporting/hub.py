"""Upload of a finished export to the Hugging Face hub, where a person asks for it and never otherwise."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import ConfigError, FileError


def require_name(repository: str) -> None:
    """Raise ConfigError where the hub could have no repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError("an owner and a name are needed")
    except HFValidationError as error:
        raise ConfigError(
            f"--push {repository}: no name of a repository ({error}). Write OWNER/NAME, such as me/my-model."
        ) from None


def push(folder: Path, repository: str) -> str:
    """Upload a folder into a repository, which is made private where it is new; returns its address.

    Raises:
        FileError: The hub cannot be reached or refuses. The folder stays as it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export of peft-workbench")
    except Exception as error:  # of the hub's client and whichever library it asks: nothing was pushed
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileError(
            f"--push {repository}: nothing was pushed ({first[:200]}). The finished export is kept at {folder}; "
            f"upload it later with `hf auth login` and `hf upload {repository} {folder}`."
        ) from error
    return str(address)
