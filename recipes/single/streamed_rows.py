"""Training rows that are streamed: the part of them that a run draws, as files of this machine."""

from __future__ import annotations

from collections.abc import Callable

from workbench.config import RunConfig
from workbench.config.checks import row_checks
from workbench.config.sections.sources_config import StreamingConfig
from workbench.data import streaming
from workbench.data.streaming import RowStream
from workbench.runs.ranks import ALONE, Ranks


def local(config: RunConfig, ranks: Ranks = ALONE, say: Callable[[str], None] = lambda _: None) -> RunConfig:
    """The same configuration with the files of the streamed rows in place of their sources; itself where none are.

    The first of the processes reads what is not here yet.
    """
    data = config.data
    if not data.streaming.on:
        return config
    counts = row_checks.streamed_rows(config)
    own = data.training_files
    streams = {name: RowStream(own[name].train, counts[name], data.streaming.share, config.rows_seed) for name in own}
    here = {name: str(streaming.take(stream, say)) for name, stream in streams.items()} if ranks.first else {}
    paths = ranks.agreed(here)
    changes: dict[str, object] = {"streaming": StreamingConfig()}
    if data.sources:
        named = data.sources.items()
        changes["sources"] = {
            name: source.model_copy(update={"path": paths[name], "limit": None}) for name, source in named
        }
    else:
        changes["train"] = paths[""]
    return config.model_copy(update={"data": data.model_copy(update={**changes, "limit": None})})
