"""Tuners whose saved adapter is another than the live one: PiSSA and AdaLoRA ship plain LoRA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor


class OwnForm:
    """Mixed into a PEFT tuner: says what is saved in place of its own configuration and tensors."""

    @abstractmethod
    def shipped(self, name: str, tensors: dict[str, Tensor]) -> tuple[PeftConfig, dict[str, Tensor]]:
        """Configuration and tensors that stock PEFT loads onto the original backbone.

        Args:
            name: Of the adapter.
            tensors: The whole model's, by name; may be changed and returned. The live configuration is not.
        """


@contextmanager
def as_shipped(model: PeftModel) -> Iterator[dict[str, Tensor] | None]:
    """Inside, PEFT saves `model` as its tuner ships it, given the tensors that this yields; None means its own."""
    tuner = model.base_model
    if not isinstance(tuner, OwnForm):
        yield None
        return
    live = dict(model.peft_config)
    tensors: dict[str, Tensor] = dict(model.state_dict())
    try:
        for name in live:
            model.peft_config[name], tensors = tuner.shipped(name, tensors)
        yield tensors
    finally:
        model.peft_config.update(live)
