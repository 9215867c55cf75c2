"""Updates whose transform trains: C3A, FourierFT and WaveFT, on HF PEFT's tuners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from workbench.adapters.method import MethodInfo, register
from workbench.adapters.target_modules import OnLayers, drawn_seed
from workbench.schema import Unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register
class C3a(OnLayers):
    """W + a matrix of circulant blocks, each a circular convolution with one vector; zero at the start."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "c3a": MethodInfo("circulant blocks: circular convolutions", "Chen et al. 2024, arXiv:2407.19342"),
    }
    changes_transposed: ClassVar[bool] = False
    tuner: ClassVar[str] = "C3AConfig"
    method: Literal["c3a"] = "c3a"
    block: Annotated[PositiveInt | None, Unit("inputs")] = None
    """Width of a block, which divides inputs and outputs of every target; null: the largest that does. A layer has
    inputs * outputs / block parameters."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse blocks that do not divide the sizes of a layer."""
        common = self.common_divisor(model)
        return self.indivisible("block", self.block or 1, common, most=common)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        return dict(block_size=self.block or self.common_divisor(model), init_weights=True)


class Sparse(OnLayers):
    """W + scale * the inverse transform of a matrix that is zero but at random places; all zero at the start."""

    coefficients: Annotated[PositiveInt, Unit("coefficients")] = 1000
    """Numbers that train in each layer."""
    scale: float = Field(default=150.0, gt=0)
    """Factor of the update."""

    def misfit(self, model: PreTrainedModel) -> str | None:
        """Refuse more coefficients than a layer's update has."""
        for path, (inputs, outputs) in self.sizes(model).items():
            if inputs * outputs < self.coefficients:
                return f"{path} has only {inputs * outputs:,} weights. Write adapter.coefficients={inputs * outputs}."
        return None


@register
class FourierFt(Sparse):
    """Coefficients of a discrete Fourier transform in two dimensions."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "fourierft": MethodInfo("random Fourier coefficients of an update", "Gao et al. 2024, arXiv:2405.03003"),
    }
    tuner: ClassVar[str] = "FourierFTConfig"
    method: Literal["fourierft"] = "fourierft"

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The places follow from the run's seed.
        return dict(n_frequency=self.coefficients, scaling=self.scale, random_loc_seed=drawn_seed(), init_weights=True)


@register
class WaveFt(Sparse):
    """Coefficients of a wavelet transform in two dimensions."""

    about: ClassVar[dict[str, MethodInfo]] = {
        "waveft": MethodInfo("random wavelet coefficients of an update", "Bilican et al. 2025, arXiv:2505.12532"),
    }
    tuner: ClassVar[str] = "WaveFTConfig"
    method: Literal["waveft"] = "waveft"
    coefficients: Annotated[PositiveInt, Unit("coefficients")] = 2592
    """Numbers that train in each layer."""
    scale: float = Field(default=25.0, gt=0)
    """Factor of the update."""
    wavelet: str = "db1"
    """Name of the wavelet, such as db1 (Haar), sym4 or coif2."""

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse wavelets that PEFT does not know, beside too many coefficients."""
        from peft.tuners.waveft.constants import WAVELET_REDUCTIONS

        if self.wavelet not in WAVELET_REDUCTIONS:
            known = ", ".join(WAVELET_REDUCTIONS)
            return f"PEFT has no wavelet {self.wavelet!r}. Write adapter.wavelet as one of {known}."
        return super().refusal(model)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        # The places follow from the run's seed.
        return dict(
            n_frequency=self.coefficients, scaling=self.scale, wavelet_family=self.wavelet, random_loc_seed=drawn_seed()
        )
