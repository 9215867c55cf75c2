"""A task of your own: that of sft, with a loss that hard tokens carry more of (Lin et al. 2017, arXiv:1708.02002).

    workbench run sft/quickstart 'plugins=[scripts/my_task.py]' recipe=focal focal.gamma=1

A task is facts, a section of its own where it has settings, and a class that carries it out, named `TASK`. Checks,
verbs and recipes over tasks ask these and nothing else: `recipe=sweep of=focal` trains several in one bank, and `plan`,
`evaluate`, `predict`, `serve` and `merge` take such a run. tests/scripts/test_my_task.py holds this file to that.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional as F

from workbench.losses.next_token import NO_LABEL
from workbench.recipes.task import register
from workbench.recipes.tasks import sft
from workbench.recipes.tasks.sft.task import TokenTask
from workbench.recipes.tasks.sft.text_run import TextRun
from workbench.schema import Section


class FocalConfig(Section):
    """The focal loss of tokens."""

    gamma: NonNegativeFloat = 1.0
    """How much less a token counts the better it is predicted already; 0: cross-entropy."""


_OTHER_LOSS = "{key} works on the loss of recipe=sft, and {recipe} has its own: leave {key} out."

register(
    replace(
        sft.FACTS,
        name="focal",
        line="instruction tuning, in which hard tokens count more",
        module=__name__,
        section=FocalConfig,
        refuses=dict.fromkeys(
            ("regularise.label_smoothing", "regularise.z_loss", "regularise.r_drop", "data.sampling"), _OTHER_LOSS
        ),
        records_losses=False,
        students=None,
    )
)


def focal(logits_NV: Tensor, labels_N: Tensor, factor_N: Tensor | None = None, *, gamma: float) -> Tensor:
    """Sum over positions of -(1 - p)^gamma log p, for the probability p of the label, times a factor of each."""
    loss_N = F.cross_entropy(logits_NV.float(), labels_N, reduction="none", ignore_index=NO_LABEL)
    missing_N = -(-loss_N).expm1()  # 1 - p
    loss_N = missing_N**gamma * loss_N if gamma else loss_N
    return loss_N.sum() if factor_N is None else loss_N @ factor_N.to(loss_N)


class FocalRun(TextRun):
    """A run of this task."""

    @property
    def criterion(self) -> Callable[..., Tensor]:
        return partial(focal, gamma=self.config.section(FocalConfig).gamma)


class FocalTask(TokenTask):
    """The verbs of sft, over that run."""

    kind = FocalRun


TASK = FocalTask()
