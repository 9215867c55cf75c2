"""The rows of each step, as `data.sampling`, `data.mix`, `data.curriculum` and `batch.growth` say."""

from __future__ import annotations

from workbench.config import TrainingSections
from workbench.data.batching import Examples
from workbench.data.row_order import RowOrder
from workbench.runs.ranks import Ranks
from workbench.training.reference_losses import ReferenceLosses
from workbench.training.sampling.growing_batch import GrowingBatch
from workbench.training.sampling.infobatch import InfoBatch
from workbench.training.sampling.learned_mix import LearnedMix
from workbench.training.sampling.pools import ImportanceSampling, SelectiveBackprop
from workbench.training.sampling.sampler import Sampler
from workbench.training.sampling.self_paced import SelfPaced
from workbench.training.sampling.weighing import Tilted, TokenSelection

SAMPLERS: dict[str, type[Sampler]] = {
    "infobatch": InfoBatch,
    "importance": ImportanceSampling,
    "selective": SelectiveBackprop,
    "tilted": Tilted,
}


def row_order(
    train: Examples, config: TrainingSections, steps: int | None, ranks: Ranks, reference: ReferenceLosses | None = None
) -> RowOrder | Sampler:
    """The rows of each step of a run of `steps` optimizer steps; None where a budget alone ends it.

    Args:
        reference: What `data.sampling.by=tokens` compares with; None where nothing trains.

    Raises:
        ConfigError: The sampler or the curriculum would never act.
        DataError: No row is easier than another, for a curriculum.
    """
    data = config.data
    if data.sampling.by == "tokens":
        return TokenSelection(train, config, steps, ranks, reference)
    sampler: type[Sampler] | None = SAMPLERS.get(data.sampling.by)
    if config.batch.growth is not None:
        sampler = GrowingBatch
    if data.mix.by == "learned":
        sampler = LearnedMix
    elif data.curriculum.by == "self_paced":
        sampler = SelfPaced
    return RowOrder(train, config, steps) if sampler is None else sampler(train, config, steps, ranks)
