"""Pages about runs, made from their directories alone: a report of one, a comparison of several."""

from workbench.report.pages import Comparison, compare, write

__all__ = ["Comparison", "compare", "write"]
