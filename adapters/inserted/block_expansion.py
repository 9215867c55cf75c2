"""Block expansion: new blocks between those of the backbone train, and the backbone stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import PositiveInt

from workbench.adapters import anatomy
from workbench.adapters.inserted import bottleneck
from workbench.adapters.method import HALF_OR_FULL, ExtraParameters, Method, MethodInfo, Sample, register
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

_CURE = "Write adapter.method=lora, or adapter.method=last-layers, which trains blocks that there are."


@register
class BlockExpansion(Method):
    """LLaMA Pro: after every few blocks a copy of the last one, whose output projections start at zero.

    A copy trains whole: attention, MLP and norms. Merged, it is a plain backbone with more blocks.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "block-expansion": MethodInfo(
            trains="new blocks, copies of some, that add nothing at first",
            paper="Wu et al. 2024, arXiv:2401.02415",
            weights=HALF_OR_FULL,
            why_weights="copies of quantised weights have no gradient",
            no_freezing="it freezes the backbone's own blocks itself",
            token_rows=True,
        )
    }
    method: Literal["block-expansion"] = "block-expansion"
    every: Annotated[PositiveInt, Unit("blocks")] = 4
    """Blocks of the backbone before each new one; the last few have one, too, where fewer are left."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse backbones on which a copy cannot start as the identity, or that configure each block by itself."""
        stacks, name = anatomy.blocks(model), type(model).__name__
        if len(stacks) != 1:
            return f"{name} has {len(stacks)} stacks of blocks, and block-expansion deepens one. {_CURE}"
        try:
            if anatomy.convolves(model) or bottleneck.find_places(model, "pfeiffer").within:
                return (
                    f"the blocks of {name} normalise what they have added, or change its shape, so that no block can "
                    f"add nothing. {_CURE}"
                )
            outputs = self.outputs(model)
        except ConfigError as error:
            return str(error)
        if any(not anatomy.is_linear(model.get_submodule(path)) for path in outputs):
            return f"the experts of {name} are no linear layers, whose outputs could begin at zero. {_CURE}"
        blocks = len(stacks[0])
        settings = anatomy.body_config(model.config).to_dict()
        listed = [key for key, each in settings.items() if isinstance(each, list) and len(each) == blocks > 1]
        if lists := [key for key in listed if key not in ("layer_types", "architectures")]:
            return f"the configuration of {name} has {', '.join(lists)} for each of its blocks. {_CURE}"
        return None

    def outputs(self, model: PreTrainedModel) -> list[str]:
        """Paths of the output projections of attention and MLP in the blocks that are copied."""
        inside = tuple(f"{path}." for path in self.modules(model))
        return [path for path in bottleneck.find_places(model, "houlsby").after if path.startswith(inside)]

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Paths of the blocks that a new one follows."""
        (stack,) = anatomy.blocks(model)
        ends = [*range(self.every - 1, len(stack), self.every), len(stack) - 1]
        return [stack[end] for end in dict.fromkeys(ends)]

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """The configuration of our tuner for this backbone."""
        from workbench.adapters.inserted.block_expansion_tuner import BlockExpansionConfig

        return BlockExpansionConfig(
            task_type=anatomy.task(model),
            blocks=self.modules(model),
            outputs=self.outputs(model),
            modules_to_save=beside.heads or None,
            trainable_token_indices=beside.token_rows,
        )

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Check by a forward pass that the new blocks add nothing.

        Raises:
            ConfigError: They add something, as blocks of some families do even with output projections at zero.
        """
        import torch

        backbone: Any = model.get_base_model()
        if anatomy.without_values(next(backbone.parameters())):
            return
        inputs = anatomy.trial_inputs(backbone)
        training = model.training
        model.eval()
        with torch.no_grad():
            output = model(**inputs)[0]  # logits, or hidden states of a body without a head
            with model.disable_adapter():
                same = torch.equal(model(**inputs)[0], output)
        model.train(training)
        if not same:
            raise ConfigError(
                f"adapter.method={self.method}: the blocks of {type(backbone).__name__} add something even where the "
                f"outputs of attention and MLP are zero. {_CURE}"
            )
