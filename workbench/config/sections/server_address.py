"""Addresses of servers in a configuration."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_ADDRESS = re.compile(r"https?://[^\s/]\S*")


def _an_address(value: str) -> str:
    if not _ADDRESS.fullmatch(value):
        raise ValueError(f"{value!r}: write an address such as http://localhost:8000/v1.")
    return value


ServerAddress = Annotated[str, AfterValidator(_an_address)]
"""An address of HTTP, up to /v1."""
