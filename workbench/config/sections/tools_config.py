"""Section `reinforce.tools`: tools that a policy calls in several turns, and environments that it acts in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from workbench.config.sections.basic_sections import an_address
from workbench.schema import NamesCode, Section, Unit


class ToolsConfig(Section):
    """Tools and environments of a Python file or of a server, and what they may take."""

    file: Annotated[Path, NamesCode(stays=True)] | None = None
    """The Python file with the tools; null: `environment` is a server. Only a file you trust. What the model writes
    becomes arguments of its functions, in processes of their own."""
    functions: tuple[str, ...] | None = None
    """Functions in it that are tools: each has types, a docstring, and a line for each parameter under `Args:`. null:
    every function defined in it whose name does not begin with an underscore."""
    environment: str | None = None
    """A class in it, of which each episode has an instance: `reset(row) -> list[dict] | str | None` gives the messages
    that the episode begins with (a text: those of the row and it; None: those of the row), `reward() -> float |
    dict[str, float]` its reward beside those of section rewards. Its other methods are tools, too;
    `step(call_or_text) -> (observation, done)` is given calls that are none of them, and what the model says without a
    call. Or the address of a server that speaks OpenEnv's protocol, such as http://localhost:8000, of which each
    episode has a session; rewards of its steps are added up. null: there are tools alone."""
    turns: Annotated[int, Field(ge=1), Unit("turns")] = 4
    """Turns that the model writes in an episode at most; the last one is not carried out."""
    seconds: Annotated[PositiveFloat, Unit("seconds")] = 10.0
    """Seconds that a call, and each method of an environment, may take."""
    memory: Annotated[ByteSize, Unit("bytes")] = ByteSize(512 * 2**20)
    """Memory that it may take, beside what the file takes when it is imported."""
    output: Annotated[PositiveInt, Unit("characters")] = 2000
    """Characters of a result that the model reads; what is longer is cut, and told as a tool error."""
    at_once: Annotated[PositiveInt, Unit("calls")] = 4
    """Calls that run at the same time."""
    credit: Literal["episode", "turn", "gigpo"] = "episode"
    """What a turn is learnt by. episode: the episode's reward; turn: what rewards rose by in this turn and in those
    after it, each rise compared with all rises in the episodes of the prompt (process supervision of DeepSeekMath, Shao
    et al. 2024, arXiv:2402.03300, section 4.1.3). The environment's `reward()` is then asked after every turn for the
    reward so far, if it has one; section rewards and lengths count in the last one. gigpo: the episode's reward, plus
    what turns that read the same (what tools answered last, or the prompt) earned from there on, compared with one
    another (Feng et al. 2025, arXiv:2505.10978)."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.95
    """With credit=gigpo: what a reward counts for the turn before, as a share."""
    state_weight: NonNegativeFloat = 1.0
    """With credit=gigpo: factor of what turns that read the same are compared by."""
    failed: Literal["drop", "score"] = "score"
    """What becomes of an episode whose environment fails, takes too long, or returns nonsense. score: its environment's
    reward is 0; drop: nothing is learnt from it, and it is not counted in its group's mean."""

    @property
    def at_address(self) -> bool:
        """Whether the environment is a server."""
        return self.environment is not None and self.environment.startswith(("http://", "https://"))

    def misfits(self) -> Iterator[str]:
        """Contradictions within the section, one sentence for each."""
        if not self.at_address:
            if self.file is None:
                yield (
                    "reinforce.tools.file names no Python file with tools. Write one, or the address of a server in "
                    "reinforce.tools.environment."
                )
            return
        try:
            an_address(str(self.environment))
        except ValueError as error:
            yield f"reinforce.tools.environment: {error}"
        for key in ("file", "functions"):
            if getattr(self, key) is not None:
                yield f"reinforce.tools.{key} and a server as environment both say what the tools are. Leave one out."
