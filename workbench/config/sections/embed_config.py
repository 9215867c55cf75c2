"""The sections `embed` and `rerank`: loss, pooling and prefixes of sentence embeddings and of rerankers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from workbench.schema import MayExecute, Section, Unit

Loss = Literal["contrastive", "triplet", "cosent", "cosine"]
Form = Literal["pairs", "scored", "labelled"]
"""Kind of rows: texts that belong together, two texts with a score of their similarity, or texts with a class."""

LOSSES: dict[Form, tuple[Loss, ...]] = {
    "pairs": ("contrastive", "triplet"),
    "labelled": ("contrastive",),
    "scored": ("cosent", "cosine"),
}
"""Losses that rows of each form allow, the usual one first."""
COLUMNS: dict[Form, tuple[str, ...]] = {
    "pairs": ("anchor", "positive"),
    "scored": ("sentence1", "sentence2", "score"),
    "labelled": ("text", "label"),
}
"""Columns by which a form is known, before data.columns renames them; pairs may have `negative` or `negatives`, too."""
NEGATIVE, NEGATIVES = "negative", "negatives"


class EmbedConfig(Section):
    """Sentence embeddings: loss, pooling, negatives."""

    loss: Literal["auto", "contrastive", "triplet", "cosent", "cosine"] = "auto"
    """`contrastive`: the positive among all others of the global batch and given negatives (InfoNCE, multiple
    negatives ranking); `triplet`: nearer than the given negatives by a margin; `cosent`, `cosine`: similarities ordered
    as, or equal to, the scores. `auto`: contrastive, of scored pairs cosent."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """The mean of a text's tokens, its first one (BERT's CLS) or its last one (for a causal backbone)."""
    normalise: bool = True
    """Embeddings have length 1, so that similarity is the cosine; false: it is the dot product."""
    query_prefix: str = ""
    """Instruction before each anchor, and before each first sentence, such as "query: "; classes have queries alone."""
    passage_prefix: str = ""
    """Instruction before each positive and negative, and before each second sentence."""
    temperature: PositiveFloat = 0.05
    """Similarities are divided by it, in losses contrastive and cosent."""
    symmetric: bool = False
    """Loss contrastive: mean with the loss of finding the anchor of each positive among all anchors."""
    margin: Annotated[float, Field(gt=0, le=2), Unit("cosine distance")] = 0.2
    """Loss triplet: by how much nearer the positive is to be, in cosine distance."""
    sizes: Annotated[tuple[PositiveInt, ...], Unit("numbers of an embedding")] = ()
    """Matryoshka: the first so many numbers of an embedding are embeddings too, all with the same loss (Kusupati et al.
    2022). The whole is always one of them."""
    mine: Annotated[NonNegativeInt, Unit("passages")] = 0
    """Loss contrastive or triplet: add so many passages of other rows to each row as negatives, the most similar ones
    to its anchor, as the backbone sees them before it trains."""
    mine_below: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Only passages less similar than so much of the positive's similarity: those above it are often unlabelled
    positives (Moreira et al. 2024)."""

    @model_validator(mode="after")
    def _consistent(self) -> EmbedConfig:
        loss = self.loss
        if self.symmetric and loss not in ("auto", "contrastive"):
            raise ValueError(f"symmetric is for loss contrastive; loss is {loss}. Leave it out.")
        if self.differs("margin") and loss != "triplet":
            raise ValueError(f"margin is for loss triplet; loss is {loss}. Leave it out, or write loss: triplet.")
        if self.differs("temperature") and loss in ("triplet", "cosine"):
            raise ValueError(f"temperature is for losses contrastive and cosent; loss is {loss}. Leave it out.")
        if self.mine and loss in ("cosent", "cosine"):
            raise ValueError(f"mine adds negatives, and loss {loss} compares scored pairs. Leave it out.")
        if self.differs("mine_below") and not self.mine:
            raise ValueError("mine_below is for mined negatives, and mine is 0. Write mine: 3, or leave it out.")
        if twice := sorted({size for size in self.sizes if self.sizes.count(size) > 1}):
            raise ValueError(f"sizes names {twice[0]} twice. Name each size once.")
        if not self.normalise and loss in ("triplet", "cosine"):
            raise ValueError(f"loss {loss} compares cosines, and normalise is false. Write normalise: true.")
        return self

    def loss_of(self, form: Form) -> Loss:
        """The loss for rows of a form."""
        return LOSSES[form][0] if self.loss == "auto" else self.loss


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
    trust: MayExecute = False
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
