"""Section `distributed`: what each of several devices holds of a model, and what waits outside of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import PositiveInt, field_validator, model_validator

from workbench.schema import Section, Unit

Place = Literal["none", "cpu", "nvme"]
_GONE = {
    "int8": "there are no int8 sums any more. Write distributed.compression.gradients=powersgd or "
    "distributed.compression.gradients=bfloat16, or int4 with distributed.zero=3",
    "onebit": "DeepSpeed has no 1-bit optimizers any more (scripts/launch/FRAMEWORKS.md). Write "
    "distributed.compression.gradients=powersgd",
}
_NOT_WITH_TENSOR = {
    "engine": "deepspeed",
    "replicas": 1,
    "sequence": 1,
    "offload_optimizer": "none",
    "offload_parameters": "none",
}
"""Settings beside `tensor`, and what each has to be."""


class CompressionConfig(Section):
    """Gradients and weights in fewer bits while they travel; off by default, and then every bit is as without.

    A device keeps float32 masters. How far a loss curve is from that of one device was measured:
    scripts/launch/README.md.
    """

    gradients: Literal["none", "bfloat16", "float16", "powersgd", "int4"] = "none"
    """What gradients travel as. bfloat16 or float16: by DDP's communication hooks, or as FSDP2 and DeepSpeed reduce.
    powersgd, with zero=0: two thin matrices in the place of each (Vogels et al. 2019), by DDP's hook; what they leave
    out is added to the next step's gradients (error feedback). int4, with zero=3 of DeepSpeed: qgZ of ZeRO++."""
    weights: Literal["none", "int8"] = "none"
    """What weights travel as, with zero=3 of DeepSpeed. int8: qwZ of ZeRO++ (Wang et al. 2023)."""
    rank: Annotated[PositiveInt, Unit("columns")] = 1
    """Columns of powersgd's matrices: more are more exact and take more bytes."""
    warm_up: Annotated[int, Unit("steps")] = 100
    """Steps at the start in which powersgd sends gradients as they are, 2 or more; torch advises 10 % of all steps."""

    @property
    def is_on(self) -> bool:
        """Whether anything travels in fewer bits."""
        return self.gradients != "none" or self.weights != "none"

    @field_validator("gradients", mode="before")
    @classmethod
    def _still_there(cls, value: object) -> object:
        if isinstance(value, str) and value in _GONE:
            raise ValueError(f"{_GONE[value]}.")
        return value

    @model_validator(mode="after")
    def _of_something(self) -> CompressionConfig:
        fields = type(self).model_fields
        idle = [name for name in ("rank", "warm_up") if getattr(self, name) != fields[name].default]
        if idle and self.gradients != "powersgd":
            names = " and ".join(idle)
            raise ValueError(f"{names} would change nothing without gradients=powersgd. Write that, or leave it out.")
        if self.warm_up < 2:
            raise ValueError(
                f"warm_up={self.warm_up}: PowerSGD begins after 2 steps or more. Write "
                "distributed.compression.warm_up=2."
            )
        return self


class DistributedConfig(Section):
    """How devices share a run; how many there are is said by `--devices` or by who starts the processes."""

    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    """DeepSpeed ZeRO stage: what each device holds a share of. 0: nothing, each holds all; 1: the optimizer's state;
    2: gradients, too; 3: weights, too. `auto`: 0 where that plainly fits, else the fastest layout that fits by a plan:
    a stage, with its engine and what is offloaded where these are not written. A run says which and why, notes it, and
    keeps it where it is resumed on as many devices."""
    engine: Literal["deepspeed", "fsdp2"] = "deepspeed"
    """Sharding engine. fsdp2 is torch's, with stages 2 and 3: a device holds a share of every weight, and a block whole
    while it computes (zero=3) or from its forward to its backward pass (zero=2)."""
    replicas: Annotated[PositiveInt, Unit("copies")] = 1
    """Copies of all weights, with engine=fsdp2: devices of a copy share them, such as those of one machine, and only
    gradients travel between copies."""
    sequence: Annotated[PositiveInt, Unit("devices")] = 1
    """Devices that compute the same rows together, each a part of the tokens, and in attention a part of the heads
    (Ulysses): for rows that are too long for one device. Others share the rows of a step."""
    tensor: Annotated[PositiveInt, Unit("devices")] = 1
    """Devices that compute the same rows together, each a part of the heads of attention and of the MLP's features, of
    whose weights it holds that part (Megatron-LM): for a backbone that is too large for one device. Others share the
    rows of a step."""
    pipeline: Annotated[PositiveInt, Unit("devices")] = 1
    """Devices of which each holds a stretch of the blocks, and its optimizer's state: micro-batches of packed rows, all
    of one length, go through them one after another (pipeline parallelism). Others share the rows of a step."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """In which order the devices of a pipeline compute (torch.distributed.pipelining). interleaved: each holds two
    stretches, for a smaller bubble and more messages; zero_bubble: so too, in a V, and gradients of weights fill the
    bubble (ZBV)."""
    offload_optimizer: Place = "none"
    """Where the optimizer's state, and its step, wait: in the host's memory, or in files under `nvme`."""
    offload_parameters: Place = "none"
    """Where weights are kept until a block needs them, with zero=3."""
    nvme: Path | None = None
    """A folder on a fast disk."""
    bucket_bytes: Annotated[PositiveInt, Unit("bytes")] = 100_000_000
    """Bytes of gradients, or of weights with zero=3, that are communicated at once."""
    overlap: bool = True
    """Communicate while devices compute."""
    compression: CompressionConfig = CompressionConfig()
    """Gradients and weights in fewer bits while they travel."""
    deepspeed: Path | None = None
    """A DeepSpeed JSON of your own, instead of all above."""

    @property
    def rows_together(self) -> int:
        """Devices that compute the same rows."""
        return self.sequence * self.tensor * self.pipeline

    @property
    def together(self) -> int:
        """The fewest devices that have as many copies, and parts of rows or blocks, as are asked for."""
        copies = self.replicas * (2 if self.replicas > 1 else 1)
        alone = self.rows_together * copies == 1
        return math.lcm(self.rows_together, copies, 2 if self.compression.is_on and alone else 1)

    @property
    def together_only(self) -> DistributedConfig:
        """The parts of rows or blocks that devices compute together, and nothing else."""
        return DistributedConfig(zero=0, sequence=self.sequence, tensor=self.tensor, pipeline=self.pipeline)

    @property
    def settled(self) -> DistributedConfig:
        """The same where each device holds all, if that is left to choose."""
        return self.model_copy(update={"zero": 0}) if self.zero == "auto" else self

    @property
    def sharded(self) -> bool:
        """Whether devices hold shares of what trains; not before `auto` is decided."""
        return self.zero not in ("auto", 0) or self.deepspeed is not None

    @property
    def words(self) -> str:
        """How devices share a run, in words."""
        if not self.sharded:
            parts = [
                f"{name}={value}" for name in ("sequence", "tensor", "pipeline") if (value := getattr(self, name)) > 1
            ]
            return ", ".join(parts) or "each device holds all"
        if self.deepspeed is not None:
            return f"as {self.deepspeed} says"
        places = {"optimizer": self.offload_optimizer, "parameters": self.offload_parameters}
        away = [f"{name} to {place}" for name, place in places.items() if place != "none"]
        return ", ".join([*(["fsdp2"] if self.engine == "fsdp2" else []), f"zero={self.zero}", *away])

    @model_validator(mode="before")
    @classmethod
    def _all_auto(cls, value: object) -> object:
        return {} if value == "auto" else value

    @model_validator(mode="after")
    def _compressible(self) -> DistributedConfig:
        gradients, weights = self.compression.gradients, self.compression.weights
        if self.compression.is_on and self.rows_together > 1:
            name = next(each for each in ("tensor", "pipeline", "sequence") if getattr(self, each) > 1)
            raise ValueError(
                f"compression was not tried with {name}. Leave compression out, or write distributed.{name}=1."
            )
        if gradients == "powersgd" and (self.sharded or self.engine != "deepspeed"):
            raise ValueError(
                f"compression.gradients=powersgd is of whole gradients, and {self.engine} with zero={self.zero} cuts "
                "them. Write distributed.compression.gradients=bfloat16, or distributed.zero=0."
            )
        if (gradients == "int4" or weights != "none") and (self.zero != 3 or self.engine != "deepspeed"):
            name = f"gradients={gradients}" if gradients == "int4" else f"weights={weights}"
            raise ValueError(
                f"compression.{name} is a part of ZeRO++, which DeepSpeed has for zero=3. Write distributed.zero=3 and "
                "distributed.engine=deepspeed, or leave it out."
            )
        return self

    @model_validator(mode="after")
    def _fitting(self) -> DistributedConfig:
        if self.tensor > 1:
            others = {name: getattr(self, name) for name in _NOT_WITH_TENSOR}
            changed = [f"zero={self.zero}"] if self.sharded else []
            changed += [f"{name}={value}" for name, value in others.items() if value != _NOT_WITH_TENSOR[name]]
            if changed:
                raise ValueError(
                    f"tensor={self.tensor} cuts weights, too, and was not tried with {', '.join(changed)}. "
                    f"Leave {' and '.join(each.split('=')[0] for each in changed)} out, or write distributed.tensor=1."
                )
        if self.zero == 0 and self.offload_optimizer != "none":
            raise ValueError(
                f"offload_optimizer={self.offload_optimizer} is a part of ZeRO. Write distributed.zero=2 or "
                "distributed.zero=3."
            )
        if self.zero not in ("auto", 3) and self.offload_parameters != "none":
            raise ValueError(f"offload_parameters={self.offload_parameters} needs zero=3, and zero is {self.zero}.")
        if self.zero not in ("auto", 3) and self.offload_optimizer == "nvme":
            raise ValueError(f"offload_optimizer=nvme needs zero=3, and zero is {self.zero}.")
        if "nvme" in (self.offload_optimizer, self.offload_parameters) and self.nvme is None:
            raise ValueError("offloading to nvme needs a folder on a fast disk. Write nvme=FOLDER.")
        if self.replicas > 1 and self.engine != "fsdp2":
            raise ValueError(
                f"replicas={self.replicas} copies weights that devices share by engine=fsdp2. "
                "Write distributed.engine=fsdp2 and distributed.zero=3, or leave replicas out."
            )
        if self.pipeline == 1 and self.schedule != "1f1b":
            raise ValueError(
                f"schedule={self.schedule} is of a pipeline. Write distributed.pipeline=2, or leave schedule out."
            )
        if self.pipeline > 1 and (others := self._beside_pipeline()):
            beside = ", ".join(f"{name}={value}" for name, value in others.items())
            raise ValueError(
                f"pipeline={self.pipeline} gives each device whole blocks, and {beside} would cut or move them, or "
                f"their rows. Leave out {', '.join(others)}, or pipeline."
            )
        if self.engine == "fsdp2":
            if self.zero not in ("auto", 2, 3):
                raise ValueError(f"engine=fsdp2 shares what zero=2 or zero=3 does, and zero is {self.zero}.")
            if "nvme" in (self.offload_optimizer, self.offload_parameters):
                raise ValueError("engine=fsdp2 leaves things in the host's memory only. Write cpu for nvme.")
            if self.offload_optimizer != self.offload_parameters:
                raise ValueError(
                    "engine=fsdp2 leaves weights and the optimizer in the host's memory together. "
                    "Write distributed.offload_parameters=cpu and distributed.offload_optimizer=cpu, or neither."
                )
        if self.deepspeed is not None:
            written = self.model_fields_set - {"deepspeed"}
            if written:
                raise ValueError(
                    f"deepspeed={self.deepspeed} says everything itself. Leave out {', '.join(sorted(written))}."
                )
        return self

    def _beside_pipeline(self) -> dict[str, object]:
        """Settings that share or move weights or rows in another way."""
        names = (
            *(["zero"] if self.sharded else []),
            "engine",
            "replicas",
            "sequence",
            "tensor",
            "offload_optimizer",
            "offload_parameters",
            "deepspeed",
        )
        without = DistributedConfig()
        return {name: value for name in names if (value := getattr(self, name)) != getattr(without, name)}
