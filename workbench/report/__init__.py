"""Pages about runs, made from their directories alone: a report of one, a comparison of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.report.pages import Comparison, compare, write

__all__ = ["Comparison", "compare", "write"]


def __getattr__(name: str) -> Any:
    """Import `pages` when it is first asked for: drawing and scoring take more than a second to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from workbench.report import pages

    return getattr(pages, name)
