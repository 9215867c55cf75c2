"""Title of each score of a run, and which direction is better, by what its task reports."""

from __future__ import annotations

from typing import Literal, TypeAlias

from workbench.config.sections import metrics

Better: TypeAlias = Literal["low", "high"]
Titles: TypeAlias = dict[str, tuple[str, Better | None]]
"""Title, and the better direction, if any is."""

TEXT: Titles = {
    "loss_of_other_pictures": ("Loss with the pictures of other rows", None),
    "perplexity": ("Perplexity", "low"),
    "token_accuracy": ("Token accuracy", "high"),
    "f1": ("Answer F1", "high"),
    "f1_of_other_pictures": ("Answer F1 with the pictures of other rows", None),
    "rouge_l": ("Answer ROUGE-L", "high"),
    "wer": ("Word error rate", "low"),
    "cer": ("Character error rate", "low"),
}
CLASSES: Titles = {
    "accuracy": ("Accuracy", "high"),
    "exact_match": ("All classes right", "high"),
    "brier": ("Brier score", "low"),
    "calibration_error": ("Expected calibration error", "low"),
    **{name: (metric.title, "high" if metric.higher else "low") for name, metric in metrics.METRICS.items()},
}
TAGS: Titles = {
    "f1": ("F1 of entities", "high"),
    "accuracy": ("Accuracy of words", "high"),
    "precision": ("Precision: entities that are right of those found", "high"),
    "recall": ("Recall: entities found of those there are", "high"),
    "macro_f1": ("F1, mean over types", "high"),
    "macro_precision": ("Precision, mean over types", "high"),
    "macro_recall": ("Recall, mean over types", "high"),
    "row_accuracy": ("Rows without a wrong word", "high"),
}
RETRIEVAL: Titles = {
    "accuracy": ("Accuracy of the nearest neighbour", "high"),
    "ndcg@10": ("nDCG at 10", "high"),
    "recall@1": ("Recall at 1", "high"),
    "recall@10": ("Recall at 10", "high"),
    "mrr": ("Mean reciprocal rank", "high"),
    "spearman": ("Rank correlation with the scores (Spearman)", "high"),
    "pearson": ("Linear correlation with the scores (Pearson)", "high"),
}
PREFERENCES: Titles = {
    **TEXT,
    "accuracy": ("Preference accuracy", "high"),
    "likelier": ("Chosen answers with likelier tokens", "high"),
    "margin": ("Reward of chosen over rejected", "high"),
    "reward_chosen": ("Reward, chosen", "high"),
    "reward_rejected": ("Reward, rejected", "low"),
    "log_p_chosen": ("Log-probability of a chosen token, nats", "high"),
    "log_p_rejected": ("Log-probability of a rejected token, nats", "low"),
    "reward_good": ("Reward, good answers", "high"),
    "reward_bad": ("Reward, bad answers", "low"),
    "log_p_good": ("Log-probability of a token of good answers, nats", "high"),
    "log_p_bad": ("Log-probability of a token of bad answers, nats", "low"),
    "answer_tokens": ("Tokens of written answers", "low"),
    "repetition": ("Runs of four words that written answers repeat", "low"),
}
REWARDS: Titles = {
    "accuracy": ("Accuracy: the better answer has the higher reward", "high"),
    "log_loss": ("Log-loss of the judgements, nats", "low"),
    "brier": ("Brier score", "low"),
    "calibration_error": ("Calibration error", "low"),
}
STEP_REWARDS: Titles = {
    "accuracy": ("Accuracy over steps", "high"),
    "error_found": ("Answers with an error of which the first wrong step is found", "high"),
    "all_right": ("Answers without an error in which none is found", "high"),
    "f1": ("F1: harmonic mean of these two", "high"),
    "auc_min": ("AUC of answers without an error: lowest step", "high"),
    "auc_product": ("AUC: product of the steps", "high"),
    "auc_mean": ("AUC: mean of the steps", "high"),
    "auc_last": ("AUC: last step", "high"),
    "brier": ("Brier score of a step", "low"),
    "calibration_error": ("Calibration error", "low"),
}
"""Of a reward model that rates steps."""
REINFORCEMENT: Titles = {
    "reward": ("Reward", "high"),
    "answer_tokens": ("Tokens of an answer", "low"),
    "repetition": ("Repeated runs of four words", "low"),
    "success": ("Episodes with a reward of 1 or more", "high"),
    "turns": ("Turns of an episode", None),
    "calls": ("Calls of tools in an episode", None),
    "errors": ("Tool errors of an episode", "low"),
}
OF_REPORTS: dict[str, Titles] = {
    "text": TEXT,
    "classes": CLASSES,
    "tags": TAGS,
    "retrieval": RETRIEVAL,
    "preferences": PREFERENCES,
    "rewards": REWARDS,
    "reinforcement": REINFORCEMENT,
}
"""By `report` of a task's facts; the first that a run has decides."""


def of(report: str, *, judge: metrics.Choice | None = None, steps: bool = False) -> Titles:
    """Titles of a run's scores, the loss left out.

    Args:
        report: Kind of its pages, as a task's facts have it.
        judge: What `evaluate.metric` names.
        steps: Whether a reward model rates steps.
    """
    known = STEP_REWARDS if steps else OF_REPORTS[report]
    return known if judge is None else {**known, judge.name: (judge.title, "high" if judge.higher else "low")}
