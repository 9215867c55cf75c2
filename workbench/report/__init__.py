"""Pages about runs, made from their directories alone: a report of one, a comparison of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.report.pages import Comparison, compare, write

__all__ = ["Comparison", "compare", "write"]


def __getattr__(name: str) -> Any:
    """What draws and scores takes more than a second to import, and is asked for at the end of a run."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from workbench.report import pages

    return getattr(pages, name)
