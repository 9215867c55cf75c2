"""The section `rerank`: loss, negatives and candidates of a cross-encoder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from workbench.config.sections.embed_config import Form
from workbench.schema import Section, Unit

RerankLoss = Literal["softmax", "bce", "mse"]

RERANK_LOSSES: dict[Form, tuple[RerankLoss, ...]] = {"pairs": ("softmax", "bce"), "scored": ("bce", "mse")}
"""Losses that rows of each form allow, the usual one first."""


class RerankConfig(Section):
    """A reranker (cross-encoder): query and passage in one row, one score for the two."""

    loss: Literal["auto", "softmax", "bce", "mse"] = "auto"
    """`softmax`: the positive among the candidates of its query (listwise, as ListNet with one relevant passage; Cao et
    al. 2007); `bce`: binary cross-entropy of each candidate, or of scores from 0 to 1; `mse`: squared distance from
    scores. `auto`: softmax, of scored pairs bce."""
    negatives: Annotated[PositiveInt, Unit("passages")] = 4
    """Negatives of each row in a step, drawn anew in each pass: those given with the row and mined ones first, then
    passages of other rows at random, none of which is known to belong to the query."""
    temperature: PositiveFloat = 1.0
    """Scores are divided by it in loss softmax."""
    candidates: Annotated[int, Field(ge=2), Unit("passages")] = 20
    """Passages that are ranked for each held-out query: all that belong to it or are given with it, then others of the
    set at random, up to so many."""
    query_prefix: str = ""
    """Instruction before each query."""
    passage_prefix: str = ""
    """Instruction before each passage, such as " Document: ", for a causal backbone whose tokenizer parts no texts."""
    mine: Annotated[NonNegativeInt, Unit("passages")] = 0
    """Add so many passages of other rows to each row as negatives, the most similar ones to its query, as `embedder`
    sees them before the training."""
    mine_below: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Only passages less similar than so much of the positive's similarity (Moreira et al. 2024)."""
    embedder: str | None = Field(default=None, min_length=1)
    """Run directory of recipe embed by whose embeddings negatives are mined; null: means of what the backbone makes of
    a text as it came."""
    trust: bool = False
    """Execute the Python code that the embedder's run directory names. Only of those whom you trust."""

    @model_validator(mode="after")
    def _consistent(self) -> RerankConfig:
        fields = type(self).model_fields
        if self.temperature != fields["temperature"].default and self.loss in ("bce", "mse"):
            raise ValueError(f"temperature is for loss softmax; loss is {self.loss}. Leave it out.")
        if self.loss == "mse" and (self.mine or self.negatives != fields["negatives"].default):
            raise ValueError("negatives and mine are for rows with a positive; loss mse reads scores. Leave them out.")
        for key in ("mine_below", "embedder"):
            if getattr(self, key) != fields[key].default and not self.mine:
                raise ValueError(f"{key} is for mined negatives, and mine is 0. Write mine: 3, or leave it out.")
        if self.trust and self.embedder is None:
            raise ValueError("trust is for the code of embedder, and none is named. Leave it out.")
        return self

    def loss_of(self, form: Form) -> RerankLoss:
        """The loss for rows of a form."""
        return RERANK_LOSSES[form][0] if self.loss == "auto" else self.loss
