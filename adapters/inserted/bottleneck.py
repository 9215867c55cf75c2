"""Bottleneck adapters of Houlsby, Pfeiffer and He: a small nonlinear network added to hidden states in every block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from workbench.adapters import anatomy
from workbench.adapters.inserted import bottleneck_places
from workbench.adapters.method import ExtraParameters, Method, MethodInfo, register
from workbench.errors import ConfigError
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

NOT_LINEAR = "it is a network with an activation, which no change of the backbone's weights equals"


@register
class Bottleneck(Method):
    """A(x) = scale * up(activation(down(x))), added to the hidden states at one or two places of every block.

    With the residual stream x, and h what attention or MLP adds to it: houlsby adds A(h) to h, at every attention
    and MLP; pfeiffer adds A(s) at the end of the block, s being what the block gives (the input of its last
    normalisation gets it, where the block ends with one); parallel adds A(m) to h, m being what the MLP reads.

    Up-projections start at zero (as in He et al. 2022), so that a fresh adapter changes nothing at all. Houlsby et
    al. 2019 draw both projections from a normal distribution of standard deviation 0.01 instead, and also train the
    layer normalisations, which here stay frozen.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "houlsby": MethodInfo(
            "a bottleneck after attention and one after the MLP",
            "Houlsby et al. 2019, arXiv:1902.00751",
            no_merge=NOT_LINEAR,
            token_rows=True,
        ),
        "pfeiffer": MethodInfo(
            "a bottleneck at the end of each block",
            "Pfeiffer et al. 2021, arXiv:2005.00247",
            no_merge=NOT_LINEAR,
            token_rows=True,
        ),
        "parallel": MethodInfo(
            "a scaled bottleneck beside the MLP",
            "He et al. 2022, arXiv:2110.04366",
            no_merge=NOT_LINEAR,
            token_rows=True,
        ),
    }
    method: Literal["houlsby", "pfeiffer", "parallel"] = "houlsby"
    """houlsby (after attention and after the MLP), pfeiffer (after the MLP) or parallel (beside the MLP)."""
    width: Annotated[PositiveInt | None, Unit("hidden units")] = None
    """Units of the bottleneck; leave it out to set `reduction`."""
    reduction: Annotated[PositiveInt | None, Unit("hidden size / hidden units")] = None
    """Hidden size of the backbone divided by the units of the bottleneck; 16 where neither is set."""
    activation: Literal["relu", "gelu", "gelu_new", "silu", "tanh", "leaky_relu"] = "relu"
    """Activation function between the two projections."""
    scale: PositiveFloat | None = None
    """Factor of what is added; left out 4 for parallel, as in its paper, and 1 for the others."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of what is added that is dropped while training."""

    @model_validator(mode="after")
    def _one_size(self) -> Bottleneck:
        if self.width is not None and self.reduction is not None:
            raise ValueError("width and reduction both say how many units there are. Write one of them.")
        return self

    @property
    def noise(self) -> float:
        return self.dropout

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a backbone whose blocks have no place that is recognised, or a bottleneck without units."""
        try:
            bottleneck_places.find(model, self.method)
            self._width(model)
        except ConfigError as error:
            return str(error)
        return None

    def modules(self, model: PreTrainedModel) -> list[str]:
        """Paths of the modules whose output, or input, it changes."""
        return bottleneck_places.find(model, self.method).changed

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """The configuration of our tuner for this backbone."""
        from workbench.adapters.inserted.bottleneck_tuner import BottleneckConfig

        places = bottleneck_places.find(model, self.method)
        return BottleneckConfig(
            task_type=anatomy.task(model),
            width=self._width(model),
            activation=self.activation,
            scale=self.scale or (4.0 if self.method == "parallel" else 1.0),
            dropout=self.dropout,
            after=places.after,
            within=places.within,
            beside=places.beside,
            modules_to_save=beside.heads or None,
            trainable_token_indices=beside.token_rows,
        )

    def _width(self, model: PreTrainedModel) -> int:
        if self.width is not None:
            return self.width
        hidden = anatomy.hidden_size(model.config)
        reduction = self.reduction or 16
        if reduction > hidden:
            raise ConfigError(
                f"{hidden} hidden units of {type(model).__name__} divided by adapter.reduction={reduction} leave none. "
                "Write adapter.width."
            )
        return hidden // reduction
