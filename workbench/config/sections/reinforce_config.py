"""The section `reinforce`: how a model learns from rewards of answers that it writes itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from workbench.config.sections.basic_sections import ServerAddress
from workbench.config.sections.tools_config import ToolsConfig
from workbench.schema import MayExecute, Section, Unit

Baseline = Literal["group", "group_scaled", "leave_one_out", "batch"]
Normalise = Literal["answer", "token", "constant", "whole", "mean_ratio"]
Beyond = Literal["cut", "cap"]
ONLINE_DPO = "online_dpo"


@dataclass(frozen=True)
class Settings:
    """A published combination of settings, of which a section may replace each."""

    baseline: Baseline = "group_scaled"
    normalise: Normalise = "answer"
    clip: float = 0.2
    clip_high: float | None = None
    beyond: Beyond = "cut"
    beta: float = 0.0
    kl: Literal["loss", "reward"] = "loss"
    resample: int = 0
    overlong: float = 0.0
    """Share of max_new_tokens from whose begin on long answers are punished, counted from the end."""


METHODS = {
    "grpo": Settings(beta=0.04),
    "dr_grpo": Settings("group", "constant"),
    "dapo": Settings(normalise="token", clip_high=0.28, resample=3, overlong=0.2),
    "rloo": Settings("leave_one_out", "whole", beta=0.05, kl="reward"),
    "reinforce++": Settings("batch", "token", beta=0.01, kl="reward"),
    "gspo": Settings(normalise="mean_ratio", clip=3e-4, clip_high=4e-4),
    "cispo": Settings(normalise="token", clip_high=4.0, beyond="cap"),
    ONLINE_DPO: Settings(beta=0.1),
}
_OF_RATIOS = (
    "baseline",
    "normalise",
    "clip",
    "clip_high",
    "beyond",
    "kl",
    "kl_target",
    "entropy_bonus",
    "drop_cut",
    "importance_cap",
)
"""Keys of losses of single answers."""


SERVED_CAP = 2.0
"""Cap of the importance weights where a server draws answers."""


class RolloutsConfig(Section):
    """A server that writes the answers: it computes faster, and not quite as training does."""

    url: ServerAddress | None = None
    """Address of a server that writes the answers, such as http://localhost:8000/v1: vLLM with --enable-lora and
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or `workbench serve RUN --load-adapters`. It is sent the prompts, and the key
    that OPENAI_API_KEY in the environment holds, and reads the adapter in the run directory. null: they are written
    here."""
    id: str | None = None
    """The name of the backbone there."""
    sync_every: Annotated[PositiveInt, Unit("rollouts")] = 1
    """Rollouts that are written, one for all updates on it, before the server is given the weights of now."""
    staleness: Annotated[NonNegativeInt, Unit("updates")] = 0
    """Updates by which the weights that write answers may be older than those that the answers teach: the server writes
    those of the next steps while this one trains, so far ahead and no farther. Tokens are weighed for it
    (importance_cap). 0: it writes, then the run trains."""


class ReinforceConfig(Section):
    """Learning from rewards of own answers: advantages, loss, reference, start."""

    method: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce++", "gspo", "cispo", "online_dpo"] = "grpo"
    """A published combination of baseline, normalise, clip, clip_high, beyond, beta, kl, resample and overlong_buffer,
    each of which may be written beside it. online_dpo: DPO of the best against the worst answer to each prompt."""
    answers: Annotated[int, Field(ge=2), Unit("answers to a prompt")] = 8
    """Answers that are written to each prompt of a step."""
    max_new_tokens: Annotated[PositiveInt, Unit("tokens")] = 256
    """Most tokens of an answer, the one that ends it included; of an episode with tools those of all turns, and of what
    tools answered."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, where answers are drawn and where their probabilities are computed."""
    updates: Annotated[PositiveInt, Unit("steps")] = 1
    """Optimizer steps on the same answers, each on all of them. From the second one on, ratios of probabilities are
    not 1, and are clipped."""
    baseline: Baseline | None = None
    """Compares a reward with the mean of the answers to its prompt (group), divided by their standard
    deviation, too (group_scaled); the mean of the others (leave_one_out); mean and standard deviation of all tokens of
    the step (batch). null: as `method` has it."""
    normalise: Normalise | None = None
    """How tokens count: mean over each answer, then over answers (answer); mean over all tokens of the step (token);
    sum over each answer divided by max_new_tokens (constant); each answer as one action, whose ratio is the product of
    those of its tokens (whole), or their geometric mean (mean_ratio). null: as `method` has it."""
    clip: Annotated[float | None, Field(gt=0, lt=1)] = None
    """By how much the ratio of probabilities may fall below 1, and rise above, before it has no gradient. null: gspo
    0.0003, else 0.2."""
    clip_high: PositiveFloat | None = None
    """By how much it may rise above 1. null: as `method` has it, dapo 0.28, gspo 0.0004, cispo 4, else `clip`."""
    beyond: Beyond | None = None
    """What happens beyond that. cut: a token teaches no more (PPO); cap: it still does, weighed by the highest ratio,
    and no ratio is too low (CISPO, MiniMax 2025, arXiv:2506.13585). null: cispo cap, else cut."""
    beta: NonNegativeFloat | None = None
    """Factor of the divergence from the reference, which is the model that training starts from; online_dpo: of DPO.
    null: grpo 0.04, rloo 0.05, reinforce++ 0.01, online_dpo 0.1, else 0."""
    kl: Literal["loss", "reward"] | None = None
    """Where that divergence is added: to the loss of each token (k3), or taken off the reward. null: as `method`."""
    kl_target: Annotated[PositiveFloat | None, Unit("nats per token")] = None
    """Divergence from the reference that beta is steered to, as metrics.jsonl tells it in update[kl]: after each
    rollout beta is multiplied by 1 + clip(divergence / kl_target - 1, -0.2, 0.2) * answers of the rollout / kl_horizon
    (Ziegler et al. 2019, arXiv:1909.08593, section 2.2, who count it by answer). null: beta stays."""
    kl_horizon: Annotated[PositiveInt, Unit("answers")] = 10_000
    """Answers over which that acts: the more, the slower beta changes."""
    measure_kl: bool = False
    """Tell the divergence also where beta is 0; the reference reads each answer for it."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Factor of the entropy (nats) of the distribution that each token is drawn from, at `temperature`, which is taken
    off the loss as the divergence is added to it, so that answers stay varied (Schulman et al. 2017, arXiv:1707.06347,
    eq. 9); 0: none, and the output head is not computed a second time for it."""
    resample: Annotated[NonNegativeInt | None, Unit("times")] = None
    """How often prompts whose answers all have one reward, before long ones are punished, are replaced by others
    (dynamic sampling); those that are left after that stay, and teach nothing. null: dapo 3, else 0."""
    overlong_buffer: Annotated[NonNegativeInt | None, Unit("tokens")] = None
    """Tokens before max_new_tokens from which an answer's reward falls, in a straight line by 1 (soft overlong
    punishment). null: dapo a fifth of max_new_tokens, else 0."""
    length_reward: NonNegativeFloat = 0.0
    """Factor of a reward for short answers, which is added before answers are compared: from 0.5 for the shortest of
    the answers to a prompt in a straight line to -0.5 for the longest, by tokens that the model drew. An answer whose
    reward is below 1 gets 0 at most (Kimi k1.5, 2025, arXiv:2501.12599, section 2.3.3). 0: lengths do not count."""
    drop_cut: bool = False
    """Answers that reached max_new_tokens carry no loss (overlong filtering)."""
    rollouts: RolloutsConfig = RolloutsConfig()
    tools: ToolsConfig | None = None
    """Tools that the model calls over several turns, and an environment that it acts in. null: answers are one turn."""
    importance_cap: NonNegativeFloat | None = None
    """The loss of a token is multiplied by its probability in training over that by which it was drawn, at most this
    (truncated importance sampling, Yao et al. 2025); 0: by 1. null: 2 where a server draws (rollouts.url), else 0."""
    start: str | None = None
    """A finished run over the same backbone with an adapter like this one, from which training goes on, such as one of
    recipe sft; it is the reference, too. null: a fresh adapter, and the backbone."""
    warm_up: str | None = None
    """Rows with answers in any format, which recipe sft teaches first, within this run: a model that never earns a
    reward learns nothing from rewards. What it knows by then is where training starts from, and the reference."""
    warm_up_steps: Annotated[PositiveInt, Unit("steps")] = 30
    """Optimizer steps on those rows, of batch.size rows each."""
    warm_up_rate: PositiveFloat | None = None
    """Their learning rate; null: train.learning_rate."""
    draws: Annotated[NonNegativeInt, Unit("answers to a prompt")] = 0
    """Answers that are drawn at `temperature` to each of the evaluate.answers prompts where a finished run is scored,
    beside the greedy one: their mean reward (`mean@8`) and the chance that one or more of k are right, with a reward of
    1 or more (`pass@1`, `pass@2`, ...; unbiased, Chen et al. 2021, arXiv:2107.03374); 0: none."""
    trust: MayExecute = False
    """Execute the Python code that the configuration of `start` names."""

    @property
    def settings(self) -> Settings:
        """The settings of the method, with those of the section in their place."""
        known = METHODS[self.method]
        return Settings(
            baseline=self.baseline or known.baseline,
            normalise=self.normalise or known.normalise,
            clip=self.clip or known.clip,
            clip_high=self.clip_high or known.clip_high or self.clip or known.clip,
            beyond=self.beyond or known.beyond,
            beta=known.beta if self.beta is None else self.beta,
            kl=self.kl or known.kl,
            resample=known.resample if self.resample is None else self.resample,
        )

    @property
    def buffer(self) -> int:
        """Tokens before the last possible one from which long answers are punished; 0: none are."""
        if self.overlong_buffer is not None:
            return self.overlong_buffer
        return round(METHODS[self.method].overlong * self.max_new_tokens)

    @property
    def pairs(self) -> bool:
        """Whether the loss compares two answers to a prompt."""
        return self.method == ONLINE_DPO

    @property
    def refers(self) -> bool:
        """Whether the reference reads the answers."""
        return self.settings.beta > 0 or self.measure_kl

    @property
    def remembers(self) -> bool:
        """Whether the probabilities of the answers are computed before the first update."""
        as_reward = self.settings.kl == "reward" and self.settings.beta > 0
        return not self.pairs and (self.updates > 1 or as_reward or self.kl_target is not None)

    @property
    def rows(self) -> int:
        """Most rows of an answer: one, and with tools as many as it may have turns."""
        return 1 if self.tools is None else self.tools.turns

    @property
    def cap(self) -> float:
        """Highest weight of a token for who drew it; 0: none is weighed."""
        if self.importance_cap is not None:
            return self.importance_cap
        return SERVED_CAP if self.rollouts.url is not None else 0.0

    @property
    def corrects(self) -> bool:
        """Whether tokens are weighed for who drew them."""
        return self.cap > 0 and not self.pairs

    def _served_misfits(self) -> Iterator[str]:
        served = self.rollouts
        if served.url is None:
            for key in ("id", "sync_every", "staleness"):
                if served.differs(key):
                    yield (
                        f"reinforce.rollouts.{key} is for reinforce.rollouts.url, which names no server. Leave it out, "
                        "or write an address."
                    )
        elif served.id is None:
            yield "reinforce.rollouts.url: write the name of the backbone there as reinforce.rollouts.id."
        elif self.corrects and self.temperature != 1:
            yield (
                "reinforce.rollouts.url: a server tells probabilities at temperature 1, with which others cannot be "
                "compared. Leave reinforce.temperature out, or write reinforce.importance_cap=0."
            )
        if served.url is None or not served.staleness:
            return
        if served.sync_every > 1:
            yield (
                "reinforce.rollouts.staleness bounds the age of the weights that write, and sync_every makes them "
                "older. Leave one of them out."
            )
        if served.staleness < self.updates:
            yield (
                f"reinforce.rollouts.staleness={served.staleness} is less than the {self.updates} updates on each "
                f"rollout, so that none could be written ahead. Write {self.updates} or more, or 0."
            )
        if not (self.corrects or self.pairs):
            yield (
                "reinforce.rollouts.staleness has answers written by older weights, and reinforce.importance_cap=0 "
                f"does not weigh them for it. Leave reinforce.importance_cap out (it is {SERVED_CAP:g} then), or write "
                "reinforce.rollouts.staleness=0."
            )

    def _tool_misfits(self) -> Iterator[str]:
        tools = self.tools
        if tools is None:
            return
        yield from tools.misfits()
        if self.pairs:
            yield (
                "reinforce.method=online_dpo compares two whole answers, and episodes with tools have turns. Write "
                "reinforce.method=grpo, or leave reinforce.tools out."
            )
        credit = f"reinforce.tools.credit={tools.credit}"
        if tools.credit != "gigpo":
            for key in ("discount", "state_weight"):
                if tools.differs(key):
                    yield f"reinforce.tools.{key} is for reinforce.tools.credit=gigpo. Leave it out, or write that."
        if tools.credit != "episode" and not self.pairs:
            settings = self.settings
            if not settings.baseline.startswith("group"):
                yield (
                    f"{credit} compares turns within a group, and reinforce.baseline is "
                    f"{settings.baseline}. Write reinforce.baseline=group, or leave credit out."
                )
            if settings.normalise in ("whole", "mean_ratio"):
                yield (
                    f"{credit} gives each turn an advantage, and reinforce.normalise={settings.normalise} takes an "
                    "answer as one action. Write reinforce.normalise=token, or leave credit out."
                )
            if settings.kl == "reward" and settings.beta:
                yield (
                    "reinforce.kl=reward takes the divergence off the reward of a whole answer, and "
                    f"{credit} has one for each turn. Write reinforce.kl=loss, or leave credit out."
                )
        if tools.failed != "score" and tools.environment is None:
            yield "reinforce.tools.failed is for an environment, and there is none. Leave it out, or name a class."

    def _target_misfits(self, prompts: int) -> Iterator[str]:
        if self.kl_target is None:
            if self.differs("kl_horizon"):
                yield "reinforce.kl_horizon is for reinforce.kl_target, and there is none. Leave it out, or write one."
        elif self.settings.beta == 0 and not self.pairs:
            yield "reinforce.kl_target multiplies reinforce.beta, which is 0 and stays so. Write reinforce.beta=0.04."
        elif self.kl_horizon < (answers := prompts * self.answers):
            yield (
                f"reinforce.kl_horizon={self.kl_horizon} is less than the {answers} answers of one rollout (batch.size "
                f"times reinforce.answers). Write {answers} or more."
            )

    def misfits(self, *, noise: bool, prompts: int) -> Iterator[str]:
        """Contradictions within the section and with the rest of the run, one sentence for each.

        Args:
            noise: Whether the model that trains drops something out.
            prompts: Prompts of a step.
        """
        if self.pairs:
            if given := [f"reinforce.{key}" for key in _OF_RATIOS if self.differs(key)]:
                yield f"reinforce.method=online_dpo compares two whole answers: leave {', '.join(given)} out."
            if self.beta == 0:
                yield "reinforce.method=online_dpo needs beta above 0, which scales its log-ratios. Write 0.1."
        elif self.kl is not None and self.settings.beta == 0:
            yield f"reinforce.kl={self.kl} adds nothing where reinforce.beta is 0. Leave it out, or write beta: 0.04."
        if self.overlong_buffer is not None and self.overlong_buffer >= self.max_new_tokens:
            yield (
                f"reinforce.overlong_buffer={self.overlong_buffer} would punish every answer: max_new_tokens is "
                f"{self.max_new_tokens}. Write less, such as {max(1, self.max_new_tokens // 5)}."
            )
        if self.warm_up is not None and self.start is not None:
            yield "reinforce.warm_up begins with a fresh adapter, and reinforce.start with another. Leave one out."
        yield from self._target_misfits(prompts)
        yield from self._served_misfits()
        yield from self._tool_misfits()
        if self.trust and self.start is None:
            yield "reinforce.trust is for the code that reinforce.start names, and there is no start. Leave it out."
        for key in ("warm_up_steps", "warm_up_rate"):
            if self.differs(key) and self.warm_up is None:
                yield f"reinforce.{key} is for reinforce.warm_up, which names no rows. Leave it out, or name a file."
        if noise and (self.remembers or self.corrects):
            yield (
                "reinforce compares probabilities with those before the first update, and noise changes them in each "
                "pass. Write reinforce.updates=1, reinforce.kl=loss and reinforce.importance_cap=0, and leave "
                "reinforce.kl_target out; or leave dropout out and take a method without noise of its own."
            )
