"""How good answers are: functions of a user's, verifiers, reward models, and sums of them."""

from workbench.data.text.generated_answers import Answer, answer_to
from workbench.evaluation.rewards.reward_sum import SPREAD, Reward, RewardSum, build, digests, require_columns

__all__ = ["SPREAD", "Answer", "Reward", "RewardSum", "answer_to", "build", "digests", "require_columns"]
