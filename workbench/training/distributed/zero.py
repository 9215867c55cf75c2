"""Steps that DeepSpeed ZeRO takes: each process holds a share of what trains, or of all weights.

Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.data.batching import MicroBatch
from workbench.models.weight_formats import HALVES
from workbench.training.checkpoint_parts import Held, SavedTensors, TensorPart
from workbench.training.distributed import zero_offload
from workbench.training.distributed.sharding import Loss, Sharded, Trainable, parameter_of, place_model

COUNTED = "step"
"""The optimizer's counter of steps, which all its parameters share."""


class ZeroParameters(Sharded):
    """The trainable parameters of a model whose steps DeepSpeed takes.

    Args:
        sample: Any micro-batch.
    """

    def __init__(self, whole: Trainable, *, sample: Callable[[], MicroBatch]) -> None:
        super().__init__(whole)
        self._module, self._sample = _Forward(whole.model, whole.loss, whole.auxiliary), sample
        self._compute, self._cuts = whole.compute, zero_offload.cuts_weights(whole.config.distributed)
        trained = sum(parameter.numel() for parameter in self._named.values())
        self._settings = zero_offload.deepspeed(whole.config, whole.compute, world=whole.ranks.world, trained=trained)
        self._engine: Any = None

    def adopt(self, optimizer: torch.optim.Optimizer, _: Mapping[str, nn.Parameter]) -> ZeroParameters:
        """From now on DeepSpeed takes the steps of `optimizer`."""
        deepspeed = imported()
        if "nvme" in json.dumps(self._settings["zero_optimization"]):
            zero_offload.require_nvme()
        if self._cuts:
            self._cut(deepspeed)
        self._engine, *_rest = deepspeed.initialize(
            model=self._module,
            optimizer=optimizer,
            model_parameters=list(self._named.values()),
            config=self._settings,
        )
        self._optimizer = optimizer
        return self

    def _cut(self, deepspeed: Any) -> None:
        """Leave a share of each weight here, before the next part of the model comes to the device."""
        cut: Any = None  # a weight that DeepSpeed has cut, and through which it cuts more
        for part in place_model(self._module, self._ranks):
            whole = [parameter for parameter in part.parameters() if not hasattr(parameter, "ds_id")]
            for parameter in whole:
                wanted = self._compute if self._compute in HALVES else parameter.dtype
                # On a host a copy: sending it around writes into it, and it may be a file that is mapped.
                parameter.data = parameter.data.to(wanted, copy=parameter.device.type == "cpu")
            if cut is None:
                deepspeed.zero.Init(module=part, config_dict_or_path=self._settings)
            else:
                cut.convert_to_zero_parameters(param_list=whole)
            cut = next(iter(whole), None) if cut is None else cut

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        """The loss, with a graph."""
        # DeepSpeed takes the mean over processes.
        loss: Tensor = self._engine(batch, scale * self._ranks.world)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients, and send them to where they belong."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def clip(self, max_norm: float) -> Tensor:
        """Clip, and take the step with it; gradients that are no good are found out after it."""
        self._engine.step()
        return torch.as_tensor(self._engine.get_global_grad_norm())

    def take(self) -> None:
        """Do nothing: clipping has taken the step."""

    def clear(self) -> None:
        """Do nothing: the step has freed the gradients."""

    def values(self) -> Mapping[str, Held]:
        """The float32 masters."""
        return {name: self._share(parameter)[1] for name, parameter in self._named.items()}

    def states(self) -> Mapping[str, Held]:
        """Optimizer states."""
        assert self._optimizer is not None
        self._link_states()
        held: dict[str, Any] = next(iter(self._optimizer.state.values()), {})
        states: dict[str, Held] = {}
        for name, parameter in self._named.items():
            for kind in held:
                if kind != COUNTED:
                    states[f"{name}|{kind}"] = self._share(parameter, kind)[1]
                else:
                    states[f"{name}|{kind}"] = torch.as_tensor(held[kind]).detach().cpu().clone()
        return states

    def read(self, saved: SavedTensors) -> None:
        """Read this process's share of masters and states, and set what computes in every process."""
        from deepspeed.utils import safe_get_full_fp32_param

        assert self._optimizer is not None
        kept = saved.stored("optimizer")
        if kept:
            self._make_states()
        for name, parameter in self._named.items():
            self._read(saved, "trainable", name, parameter)
            self._set(parameter, safe_get_full_fp32_param(parameter))
            for key in [key for key in kept if parameter_of(key) == name and key != f"{name}|{COUNTED}"]:
                self._read(saved, "optimizer", key, parameter, key.rpartition("|")[2])
        counted = {key: torch.empty(()) for key in kept if key.endswith(f"|{COUNTED}")}
        saved.fill("optimizer", counted)
        for state in self._optimizer.state.values():
            if COUNTED in state and counted:
                state[COUNTED].fill_(float(next(iter(counted.values()))))

    def _share(self, parameter: nn.Parameter, kind: str | None = None) -> tuple[Tensor, TensorPart]:
        """This process's partition (1-D) of a master, or of an optimizer state, and which part of the whole that is.

        Of a weight that is cut it is a copy on the host.
        """
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        of: Any = parameter
        if self._cuts:
            local = safe_get_local_fp32_param(of) if kind is None else safe_get_local_optimizer_state(of, kind)
            held, shape = local.to("cpu", copy=True), torch.Size(of.ds_shape)
            start = held.numel() * self._ranks.rank
            return held, TensorPart.flat(
                held[: max(0, shape.numel() - start)], start, shape
            )  # the last ones are padded
        if (mapping := getattr(of, "_hp_mapping", None)) is None:  # other processes have all of it
            return torch.empty(0), TensorPart(of.shape, {})
        held = mapping.get_hp_fragment(kind)
        return held, TensorPart.flat(held.detach(), mapping.lp_fragment_address.start, of.shape)

    def _read(self, saved: SavedTensors, stem: str, key: str, parameter: nn.Parameter, kind: str | None = None) -> None:
        """Read this process's partition of a master, or of an optimizer state."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        held, part = self._share(parameter, kind)
        saved.fill(stem, {key: part})
        if self._cuts and kind is None:
            safe_set_local_fp32_param(parameter, held)
        elif self._cuts:
            safe_set_local_optimizer_state(parameter, held, kind)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """The first process' model holds whole masters inside the block, each in the precision in which it came."""
        from deepspeed.utils import safe_get_full_fp32_param

        whole = {
            name: self._kept(safe_get_full_fp32_param(parameter).to(self._stored[name]))
            for name, parameter in self._named.items()
        }
        computed = {name: parameter.data for name, parameter in self._named.items()}
        for name, parameter in self._named.items():
            parameter.data = whole[name]
        try:
            yield
        finally:
            for name, parameter in self._named.items():
                parameter.data = computed[name]

    def _set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the computing copy of a parameter in every process."""
        if self._cuts:
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                if self._ranks.first:
                    parameter.copy_(value)
        else:
            with torch.no_grad():
                parameter.copy_(value)

    def _make_states(self) -> None:
        """Let the optimizer make its tensors, by a step that changes nothing."""
        assert self._optimizer is not None
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self.backward(self.forward(self._sample(), 0.0))
        self._engine.step()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._link_states()

    def _link_states(self) -> None:
        """Let DeepSpeed find the states of all groups of parameters, such as those without weight decay.

        Stages 1 and 2 look for them after the step of the first group, and never again (DeepSpeed 0.19.8).
        """
        zero = self._engine.optimizer
        if not self._cuts and getattr(zero, "_hp_optimizer_states_linked", False):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()


class _Forward(nn.Module):
    """A model, what trains beside it, and its loss as one module: DeepSpeed follows a backward pass from its result."""

    def __init__(self, model: nn.Module, loss: Loss, auxiliary: nn.Module | None) -> None:
        super().__init__()
        self.model, self.auxiliary = model, auxiliary
        self._loss = loss

    def forward(self, batch: MicroBatch, scale: float) -> Tensor:
        return self._loss(batch, scale)


def imported() -> Any:
    """DeepSpeed, without what it prints, and without what it would compile for a CPU's messages at its first start."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # else it guesses aloud
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    os.environ.setdefault("LOCAL_RANK", "0")  # where no launcher says it
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # A compilation that was killed leaves a lock behind that everybody waits for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():  # one process can leave things on the host, too
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if deepspeed.comm.comm.cdb is None:
        deepspeed.init_distributed(verbose=False)
    return deepspeed
