"""OSF's gradients against the singular vectors of the weights, computed a second time."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.osf.layer import Linear

from tests.conftest import tiny
from workbench import adapters
from workbench.adapters import Osf
from workbench.adapters.precision.peft_layers import OsfLinear
from workbench.training.master_weights import MasterWeights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["q_proj", "up_proj", "down_proj"])  # square, tall, wide
def test_gradients_leave_the_large_parts_alone(dtype: torch.dtype, target: str) -> None:
    model = adapters.attach(tiny("Llama").to(dtype), Osf(targets=[target], kept=0.5), seed=0)
    masters = MasterWeights(model, dtype)
    ids_BL = torch.arange(3, 19).view(2, 8)
    masters.backward(model(input_ids=ids_BL, labels=ids_BL).loss)
    layers = {name: layer for name, layer in model.named_modules() if name.endswith(target)}
    gradients = {name: master.grad for name, master in masters.named().items()}
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for name, layer in layers.items():
        U_OK, _, V_KI = torch.linalg.svd(layer.base_layer.weight.float(), full_matrices=False)
        large = len(V_KI) // 2
        for part, basis_KN in (("U_low", U_OK[:, :large].T), ("V_low", V_KI[:large])):
            grad = gradients[f"{name}.osf_svd_params.default.{part}"]
            grad_NR = grad if part == "U_low" else grad.T
            assert grad_NR.norm() > 0
            assert (basis_KN @ grad_NR).norm() < close * grad_NR.norm()


def test_outputs_are_pefts() -> None:
    """Of trained parts, whatever their gradients are."""
    model = adapters.attach(tiny("Llama"), Osf(kept=0.5), seed=0)
    ids_BL = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter) / 10)
        found = model(input_ids=ids_BL).logits
        for layer in (each for each in model.modules() if type(each) is OsfLinear):
            layer.__class__ = Linear
        torch.testing.assert_close(found, model(input_ids=ids_BL).logits)
