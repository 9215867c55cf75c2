"""Whether the Hugging Face hub answers. Its client tries for a minute and a half where nothing does."""

from __future__ import annotations

import os
from functools import cache
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

_OFFLINE = "HF_HUB_OFFLINE"
FORBIDDEN = os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")
"""Whether the user has said that the hub is not to be asked."""
SECONDS = 5
"""How long the hub may take to answer, unless HF_HUB_ETAG_TIMEOUT says so."""


@cache
def answers() -> bool:
    """Whether the hub, or the mirror that HF_ENDPOINT names, answers; asked once in a process.

    Where it does not, HF_HUB_OFFLINE is set, so that libraries that are imported later read their caches at once.
    """
    if FORBIDDEN:
        return False
    seconds = int(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    address, answered = os.environ.get("HF_ENDPOINT") or "https://huggingface.co", list[bool]()

    def ask() -> None:
        try:
            with urlopen(Request(address, method="HEAD"), timeout=seconds):
                answered.append(True)
        except HTTPError as error:
            if error.code < 500:  # of 5xx many are a proxy's, that cannot reach it
                answered.append(True)
        except (OSError, ValueError):
            return

    asking = Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    asking.start()
    asking.join(seconds)
    if not answered:
        os.environ[_OFFLINE] = "1"
    return bool(answered)
